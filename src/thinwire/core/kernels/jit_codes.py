"""Compiled loops of the codes for positions and values, and of the sparse sum. All arrays are flat."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels.jit import jit

Array = NDArray[Any]

_LOWEST_BIT = np.array([(byte & -byte).bit_length() - 1 for byte in range(256)], np.int64)


@jit
def pack_fields(fields: Array, width_bits: int, code: Array) -> None:
    """Write fields of `width_bits` each into the zeroed bytes `code`, least significant bit first."""
    pending = np.uint64(0)
    pending_bits = 0
    at = 0
    for i in range(len(fields)):
        left = width_bits
        field = np.uint64(fields[i])
        while left > 0:  # at most 32 bits at a time, so that 7 pending ones always fit beside them
            taken = min(left, 32)
            pending |= (field & np.uint64((1 << taken) - 1)) << np.uint64(pending_bits)
            pending_bits += taken
            field >>= np.uint64(taken)
            left -= taken
            while pending_bits >= 8:
                code[at] = pending & np.uint64(255)
                pending >>= np.uint64(8)
                pending_bits -= 8
                at += 1
    if pending_bits:
        code[at] = pending


@jit
def field_at(code: Array, i: int, width_bits: int) -> Any:
    """The i-th field of `width_bits` in the bytes `code`."""
    bit = i * width_bits
    value = np.uint64(0)
    shift = 0
    while shift < width_bits:
        rest = bit & 7
        taken = min(8 - rest, width_bits - shift)
        part = (np.uint64(code[bit >> 3]) >> np.uint64(rest)) & np.uint64((1 << taken) - 1)
        value |= part << np.uint64(shift)
        shift += taken
        bit += taken
    return np.int64(value)


@jit
def set_high_parts(indices: Array, low_bits: int, bitmap: Array) -> None:
    """Unary high parts of ascending positions into the zeroed bytes `bitmap`."""
    for i in range(len(indices)):
        bit = (indices[i] >> low_bits) + i
        bitmap[bit >> 3] |= np.uint8(1 << (bit & 7))


@jit
def find_high_parts(bitmap: Array, low_bits: int, indices: Array) -> int:
    """High parts, in their place, into `indices` as far as there is room; returns how many bits are set."""
    count = 0
    for byte in range(len(bitmap)):
        bits = np.int64(bitmap[byte])
        while bits:
            if count < len(indices):
                indices[count] = (8 * byte + _LOWEST_BIT[bits] - count) << low_bits
            count += 1
            bits &= bits - 1
    return count


@jit
def low_fields(indices: Array, low_bits: int, start: int, stop: int, code: Array) -> None:
    """Low bits of the positions [start, stop), start a multiple of 8, into the zeroed bytes `code` of all."""
    low_mask = (np.int64(1) << low_bits) - 1
    pack_fields(indices[start:stop] & low_mask, low_bits, code[start * low_bits // 8 :])


@jit
def add_low_fields(code: Array, low_bits: int, start: int, stop: int, indices: Array) -> None:
    """Complete the positions [start, stop) with their low bits."""
    for i in range(start, stop):
        indices[i] |= field_at(code, i, low_bits)


@jit
def halving_sum(values: Array) -> Any:
    """Sum by adding the upper half to the lower until one is left; overwrites `values`."""
    n = len(values)
    while n > 1:
        half = (n + 1) // 2
        for i in range(n - half):
            values[i] += values[half + i]
        n = half
    return values[0] if n else 0.0


@jit
def split_at_means(magnitudes: Array, depth: int, means: Array) -> None:
    """Means of the 2^depth parts that splitting at the mean gives, ascending; reorders `magnitudes`."""
    count = len(magnitudes)
    scratch = np.empty(count, np.float64)
    edges = np.zeros((1 << depth) + 1, np.int64)
    edges[1] = count
    means[0] = 0.0
    for level in range(depth + 1):
        parts = 1 << level
        for part in range(parts):  # an empty part keeps the mean of the part it was cut from
            first, last = edges[part], edges[part + 1]
            if last > first:
                scratch[first:last] = magnitudes[first:last]
                means[part] = halving_sum(scratch[first:last]) / (last - first)
        if level == depth:
            break
        for part in range(parts - 1, -1, -1):
            first, last, mean = edges[part], edges[part + 1], means[part]
            lower, upper = first, 0
            for i in range(first, last):
                x = magnitudes[i]
                if x <= mean:
                    magnitudes[lower] = x
                    lower += 1
                else:
                    scratch[upper] = x
                    upper += 1
            magnitudes[lower:last] = scratch[:upper]
            edges[2 * part + 2], edges[2 * part + 1], edges[2 * part] = last, lower, first
            means[2 * part + 1] = means[2 * part] = mean


@jit
def capped_magnitudes(values: Array, cap: float) -> Array:
    """Magnitudes in float64, at most `cap`."""
    magnitudes = np.empty(len(values), np.float64)
    for i in range(len(values)):
        magnitudes[i] = min(abs(np.float64(values[i])), cap)
    return magnitudes


@jit
def book_fields(values: Array, cap: float, book: Array, sign_shift: int, fields: Array, sent: Array) -> None:
    """Sign and number of the nearest level of the ascending `book` into `fields`, what that stands for into `sent`."""
    for i in range(len(values)):
        magnitude = min(abs(np.float64(values[i])), cap)
        level = 0
        for j in range(len(book) - 1):
            if magnitude > (np.float64(book[j]) + np.float64(book[j + 1])) / 2:
                level += 1
        negative = values[i] < 0
        fields[i] = level | (negative << sign_shift)
        sent[i] = -book[level] if negative else book[level]


@jit
def grid_fields(
    values: Array, cap: float, low: float, high: float, sign_shift: int, fields: Array, sent: Array
) -> None:
    """As `book_fields` for equidistant levels from `low` to `high`."""
    top = np.float64((1 << sign_shift) - 1)
    level_width = (high - low) / top
    for i in range(len(values)):
        magnitude = min(abs(np.float64(values[i])), cap)
        level = 0.0
        if high > low:
            level = float(min(max(np.ceil((magnitude - low) * top / (high - low) - 0.5), 0.0), top))
        negative = values[i] < 0
        fields[i] = np.int64(level) | (negative << sign_shift)
        decoded = np.float32(level * level_width + low)
        sent[i] = -decoded if negative else decoded


@jit
def decode_book(code: Array, bits: int, book: Array, start: int, stop: int, values: Array) -> None:
    """Values [start, stop) of the fields in `code` by look-up in `book`."""
    sign_shift = bits - 1
    for i in range(start, stop):
        field = field_at(code, i, bits)
        magnitude = book[field & ((1 << sign_shift) - 1)]
        values[i] = -magnitude if field >> sign_shift else magnitude


@jit
def decode_grid(code: Array, bits: int, low: float, high: float, start: int, stop: int, values: Array) -> None:
    """Values [start, stop) of the fields in `code` on equidistant levels from `low` to `high`."""
    sign_shift = bits - 1
    level_width = (high - low) / ((1 << sign_shift) - 1)
    for i in range(start, stop):
        field = field_at(code, i, bits)
        magnitude = np.float32(np.float64(field & ((1 << sign_shift) - 1)) * level_width + low)
        values[i] = -magnitude if field >> sign_shift else magnitude


@jit
def merge(
    left_indices: Array, left_sums: Array, right_indices: Array, right_values: Array, indices: Array, sums: Array
) -> int:
    """Sum of two sparse vectors, both ascending, into `indices` and `sums`; returns the length."""
    left = right = count = 0
    while left < len(left_indices) or right < len(right_indices):
        take_left = left < len(left_indices)
        take_right = right < len(right_indices)
        if take_left and take_right:
            difference = left_indices[left] - right_indices[right]
            take_left, take_right = difference <= 0, difference >= 0
        x = sums.dtype.type(0)
        if take_left:
            indices[count] = left_indices[left]
            x = left_sums[left]
            left += 1
        if take_right:
            indices[count] = right_indices[right]
            x += sums.dtype.type(right_values[right])
            right += 1
        sums[count] = x
        count += 1
    return count
