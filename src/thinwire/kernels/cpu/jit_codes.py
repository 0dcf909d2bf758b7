"""Compiled loops of the codes for positions and values, and of the sparse sum. All arrays are flat.

A code begins at the byte `at` of the bytes `code`, which must be zero before it is written.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu.intrinsics import trailing_zeros
from thinwire.kernels.cpu.jit_cache import Int, i64, jit, u64

Array = NDArray[Any]

FLOAT32_MAX = np.float64(np.finfo(np.float32).max)


@jit
def pack_fields(
    fields: Array, width_bits: Int, start: Int, stop: Int, code: Array, at: Int
) -> None:
    """Write the low `width_bits` of the fields [start, stop), least significant bit first.

    `start` is a multiple of 8.
    """
    pending, pending_bits = u64(0), i64(0)
    code_byte = u64(at + start * width_bits // 8)
    for i in range(u64(start), u64(stop)):
        left, field = width_bits, u64(fields[i])
        while left > 0:  # at most 32 bits at a time, so that 7 pending ones always fit beside them
            taken = left if left < 32 else i64(32)
            pending |= (field & u64((i64(1) << taken) - 1)) << u64(pending_bits)
            pending_bits += taken
            field >>= u64(taken)
            left -= taken
            while pending_bits >= 8:
                code[code_byte] = np.uint8(pending & u64(255))
                pending >>= u64(8)
                pending_bits -= 8
                code_byte += u64(1)
    if pending_bits:
        code[code_byte] = np.uint8(pending)


@jit
def field_at(code: Array, at: Int, i: Any, width_bits: Int) -> Any:
    """Return the i-th field of `width_bits`."""
    bit = u64(i) * u64(width_bits)
    value, shift = u64(0), u64(0)
    while shift < u64(width_bits):
        rest = bit & u64(7)
        taken = min(u64(8) - rest, u64(width_bits) - shift)
        part = u64(code[u64(at) + (bit >> u64(3))]) >> rest
        value |= (part & ((u64(1) << taken) - u64(1))) << shift
        shift += taken
        bit += taken
    return i64(value)


@jit
def set_high_parts(indices: Array, low_bits: Int, code: Array, at: Int) -> None:
    """Set the unary high parts of ascending positions."""
    for i in range(u64(len(indices))):
        bit = u64(indices[i] >> low_bits) + i
        code[u64(at) + (bit >> u64(3))] |= np.uint8(u64(1) << (bit & u64(7)))


@jit
def find_high_parts(code: Array, at: Int, nbytes: Int, low_bits: Int, indices: Array) -> Int:
    """Write high parts into `indices` as long as they fit; return the number of set bits."""
    count, room = u64(0), u64(len(indices))
    for byte in range(u64(nbytes)):
        bits = u64(code[u64(at) + byte])
        while bits:
            if count < room:
                high = u64(8) * byte + trailing_zeros(bits) - count
                indices[count] = i64(high) << low_bits
            count += u64(1)
            bits &= bits - u64(1)
    return i64(count)


@jit
def add_low_fields(
    code: Array, at: Int, low_bits: Int, start: Int, stop: Int, indices: Array
) -> None:
    """Add the low bits to the positions [start, stop), start a multiple of 8."""
    pending, pending_bits = u64(0), i64(0)
    code_byte = u64(at + start * low_bits // 8)
    for i in range(u64(start), u64(stop)):
        shift = i64(0)
        while shift < low_bits:  # at most 32 bits at a time, so that they fit beside 7 pending ones
            taken = low_bits - shift if low_bits - shift < 32 else i64(32)
            while pending_bits < taken:
                pending |= u64(code[code_byte]) << u64(pending_bits)
                pending_bits += 8
                code_byte += u64(1)
            field = pending & u64((i64(1) << taken) - 1)
            indices[i] |= i64(field) << shift
            pending >>= u64(taken)
            pending_bits -= taken
            shift += taken


@jit
def capped_magnitudes(values: Array, magnitudes: Array) -> None:
    """Write magnitudes in float64, limited to the largest float32."""
    for i in range(u64(len(values))):
        magnitude = abs(np.float64(values[i]))
        magnitudes[i] = magnitude if magnitude < FLOAT32_MAX else FLOAT32_MAX


@jit
def halving_sum(values: Array, start: Int, count: Int) -> Any:
    """Sum `count` values from `start` on, by halves; overwrites them."""
    n, first = u64(count), u64(start)
    while n > u64(1):
        half = (n + u64(1)) >> u64(1)
        for i in range(n - half):
            values[first + i] += values[first + half + i]
        n = half
    return values[first] if n else 0.0


@jit
def sign_fields(values: Array, scale: Any, code: Array, at: Int, sent: Array) -> None:
    """Write one bit per value, set if it is negative; the scale with that sign goes into `sent`."""
    whole = u64(len(values)) >> u64(3)
    for byte in range(whole):
        bits = u64(0)
        for j in range(u64(8)):
            i = (byte << u64(3)) + j
            negative = values[i] < 0
            sent[i] = -scale if negative else scale
            bits |= u64(negative) << j
        code[u64(at) + byte] = np.uint8(bits)
    for i in range(whole << u64(3), u64(len(values))):
        negative = values[i] < 0
        sent[i] = -scale if negative else scale
        code[u64(at) + whole] |= np.uint8(u64(negative) << (i & u64(7)))


@jit
def decode_signs(code: Array, at: Int, scale: Any, start: Int, stop: Int, values: Array) -> None:
    """Decode the values [start, stop) of one bit each."""
    for i in range(u64(start), u64(stop)):
        byte = u64(code[u64(at) + (i >> u64(3))])
        values[i] = -scale if (byte >> (i & u64(7))) & u64(1) else scale


@jit
def split_at_means(
    magnitudes: Array, depth: Int, scratch: Array, edges: Array, means: Array
) -> None:
    """Write the means of the 2^depth parts from splitting at the mean, ascending.

    Reorders `magnitudes`. `scratch` is as long as `magnitudes`, `edges` has 2^depth + 1 numbers,
    `means` 2^depth.
    """
    edges[0] = 0
    edges[1] = len(magnitudes)
    means[0] = 0.0
    for level in range(depth + 1):
        parts = i64(1) << level
        for part in range(parts):  # an empty part keeps the mean of the part it was cut from
            first, last = edges[part], edges[part + 1]
            if last > first:
                for i in range(first, last):
                    scratch[i] = magnitudes[i]
                means[part] = halving_sum(scratch, first, last - first) / (last - first)
        if level == depth:
            break
        for back in range(parts):
            part = parts - 1 - back
            first, last, mean = edges[part], edges[part + 1], means[part]
            lower, upper = first, i64(0)
            for i in range(first, last):
                x = magnitudes[i]
                if x <= mean:
                    magnitudes[lower] = x
                    lower += 1
                else:
                    scratch[upper] = x
                    upper += 1
            for i in range(upper):
                magnitudes[lower + i] = scratch[i]
            edges[2 * part + 2] = last
            edges[2 * part + 1] = lower
            edges[2 * part] = first
            means[2 * part + 1] = mean
            means[2 * part] = mean


@jit
def book_fields(values: Array, book: Array, sign_shift: Int, fields: Array, sent: Array) -> None:
    """Write sign and number of the nearest level of the ascending `book` into `fields`.

    The decoded value goes into `sent`.
    """
    for i in range(u64(len(values))):
        magnitude = abs(np.float64(values[i]))
        magnitude = magnitude if magnitude < FLOAT32_MAX else FLOAT32_MAX
        level = i64(0)
        for j in range(len(book) - 1):
            if magnitude > (np.float64(book[j]) + np.float64(book[j + 1])) / 2:
                level += 1
        negative = values[i] < 0
        fields[i] = level | (i64(negative) << sign_shift)
        sent[i] = -book[level] if negative else book[level]


@jit
def grid_fields(
    values: Array, low: float, high: float, sign_shift: Int, fields: Array, sent: Array
) -> None:
    """Write fields as `book_fields` does, for equidistant levels from `low` to `high`."""
    top = np.float64((i64(1) << sign_shift) - 1)
    level_width = (high - low) / top
    for i in range(u64(len(values))):
        magnitude = abs(np.float64(values[i]))
        magnitude = magnitude if magnitude < FLOAT32_MAX else FLOAT32_MAX
        level = 0.0
        if high > low:
            level = min(max(np.ceil((magnitude - low) * top / (high - low) - 0.5), 0.0), top)
        negative = values[i] < 0
        fields[i] = i64(level) | (i64(negative) << sign_shift)
        decoded = np.float32(level * level_width + low)
        sent[i] = -decoded if negative else decoded


@jit
def decode_book(
    code: Array, at: Int, bits: Int, book: Array, start: Int, stop: Int, values: Array
) -> None:
    """Decode the values [start, stop) by look-up in `book`."""
    sign_shift = bits - 1
    for i in range(u64(start), u64(stop)):
        field = field_at(code, at, i, bits)
        magnitude = book[u64(field & ((i64(1) << sign_shift) - 1))]
        values[i] = -magnitude if field >> sign_shift else magnitude


@jit
def decode_grid(
    code: Array, at: Int, bits: Int, low: float, high: float, start: Int, stop: Int, values: Array
) -> None:
    """Decode the values [start, stop) on equidistant levels from `low` to `high`."""
    sign_shift = bits - 1
    level_width = (high - low) / np.float64((i64(1) << sign_shift) - 1)
    for i in range(u64(start), u64(stop)):
        field = field_at(code, at, i, bits)
        magnitude = np.float32(np.float64(field & ((i64(1) << sign_shift) - 1)) * level_width + low)
        values[i] = -magnitude if field >> sign_shift else magnitude


@jit
def merge(
    left_indices: Array,
    left_sums: Array,
    left_count: Int,
    right_indices: Array,
    right_values: Array,
    indices: Array,
    sums: Array,
) -> Int:
    """Add two sparse vectors, both ascending, into `indices` and `sums`; return the length.

    Only the first `left_count` entries of the left one count, and all of the right one.
    """
    left, right, count = u64(0), u64(0), u64(0)
    lefts, rights = u64(left_count), u64(len(right_indices))
    while left < lefts or right < rights:
        take_left, take_right = left < lefts, right < rights
        if take_left and take_right:
            difference = left_indices[left] - right_indices[right]
            take_left, take_right = difference <= 0, difference >= 0
        x = sums.dtype.type(0)
        if take_left:
            indices[count] = left_indices[left]
            x = left_sums[left]
            left += u64(1)
        if take_right:
            indices[count] = right_indices[right]
            x += sums.dtype.type(right_values[right])
            right += u64(1)
        sums[count] = x
        count += u64(1)
    return i64(count)
