"""Compiled loops over all slots of a message, which apply `jit_codes` to all tensors in one call.

For a message of 160 tensors, 160 calls from Python would cost more than the work in these loops. A
row of `slots` has the numbers of one slot, in the order of `FIELDS`. Positions are coded first.
Values follow by one of three loops: signs at 1 bit, levels at 2 to 16, floats at 32.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu.intrinsics import array_at, read_float, write_float
from thinwire.kernels.cpu.jit_cache import Int, i64, jit, u64
from thinwire.kernels.cpu.jit_codes import (
    FLOAT32_MAX,
    add_low_fields,
    book_fields,
    capped_magnitudes,
    decode_book,
    decode_grid,
    find_high_parts,
    grid_fields,
    halving_sum,
    pack_fields,
    set_high_parts,
    sign_fields,
    split_at_means,
)
from thinwire.kernels.cpu.jit_codes import decode_signs as _signs_at

Array = NDArray[Any]

FIELDS = ("numel", "k", "low_bits", "low_bytes", "high_bytes", "value_bytes", "at")
"""Columns of a row of `slots`. The code begins at byte `at`."""
_NUMEL, _K, _LOW_BITS, _LOW_BYTES, _HIGH_BYTES, _VALUE_BYTES, _AT = range(len(FIELDS))


@jit
def encode_positions(
    slots: Array, parts: Array, first: Int, last: Int, like: Array, code: Array, kept: Array
) -> None:
    """Write the codes of the positions of the slots [first, last) into the zeroed bytes `code`.

    `parts` holds per slot the addresses of indices and values and their number. `kept` receives the
    number of values that are not 0. If some values are 0, nothing is written.
    """
    for t in range(first, last):
        count = parts[t, 2]
        indices, values = array_at(parts[t, 0], count, parts), array_at(parts[t, 1], count, like)
        nonzero = u64(0)
        for i in range(u64(count)):
            nonzero += u64(values[i] != 0)
        kept[t] = nonzero
        if kept[t] == count:
            at, low_bits = slots[t, _AT], slots[t, _LOW_BITS]
            if low_bits:
                pack_fields(indices, low_bits, i64(0), count, code, at)
            set_high_parts(indices, low_bits, code, at + slots[t, _LOW_BYTES])


@jit
def encode_signs(
    slots: Array,
    parts: Array,
    first: Int,
    last: Int,
    spare: bool,
    like: Array,
    code: Array,
    sent: Array,
    starts: Array,
    magnitudes: Array,
) -> None:
    """Write codes at 1 bit of values other than 0, after `encode_positions`.

    The decoded values go into `sent` from `starts` on. `spare`: the scale is the mean over the sent
    values, not over k. `magnitudes` is scratch, as long as the longest part.
    """
    for t in range(first, last):
        count = parts[t, 2]
        values, its_sent = array_at(parts[t, 1], count, like), sent[starts[t] : starts[t] + count]
        capped_magnitudes(values, magnitudes)
        whole = max(i64(1), count) if spare else slots[t, _K]
        scale = np.float32(halving_sum(magnitudes, i64(0), count) / whole)
        at = slots[t, _AT] + slots[t, _LOW_BYTES] + slots[t, _HIGH_BYTES]
        write_float(code, at, scale)
        sign_fields(values, scale, code, at + 4, its_sent)


@jit
def encode_levels(
    slots: Array,
    parts: Array,
    first: Int,
    last: Int,
    bits: Int,
    scales: Array,
    like: Array,
    code: Array,
    sent: Array,
    starts: Array,
    magnitudes: Array,
    scratch: Array,
    edges: Array,
    means: Array,
    fields: Array,
) -> None:
    """Write codes as `encode_signs` does, at 2 to 16 bits.

    `scales`, float32, and the last arguments are scratch.
    """
    for t in range(first, last):
        count = parts[t, 2]
        values, its_sent = array_at(parts[t, 1], count, like), sent[starts[t] : starts[t] + count]
        capped_magnitudes(values, magnitudes)
        at = slots[t, _AT] + slots[t, _LOW_BYTES] + slots[t, _HIGH_BYTES]
        if bits <= 4:
            split_at_means(magnitudes[:count], bits - 1, scratch, edges, means)
        else:
            _extremes(magnitudes, count, means)
        for i in range(len(scales)):
            scales[i] = np.float32(means[i])
            write_float(code, at + 4 * i, scales[i])
        if bits <= 4:
            book_fields(values, scales, bits - 1, fields, its_sent)
        else:
            grid_fields(
                values, np.float64(scales[0]), np.float64(scales[1]), bits - 1, fields, its_sent
            )
        pack_fields(fields, bits, i64(0), count, code, at + 4 * len(scales))


@jit
def _extremes(magnitudes: Array, count: Int, means: Array) -> None:
    """Return the smallest and the largest of the first `count`, 0 if there are none."""
    means[0] = magnitudes[0] if count else 0.0
    means[1] = means[0]
    for i in range(count):
        means[0] = min(means[0], magnitudes[i])
        means[1] = max(means[1], magnitudes[i])


@jit
def encode_floats(
    slots: Array,
    parts: Array,
    first: Int,
    last: Int,
    like: Array,
    code: Array,
    sent: Array,
    starts: Array,
) -> None:
    """Write codes as `encode_signs` does, at 32 bits."""
    for t in range(first, last):
        count = parts[t, 2]
        values, start = array_at(parts[t, 1], count, like), starts[t]
        at = slots[t, _AT] + slots[t, _LOW_BYTES] + slots[t, _HIGH_BYTES]
        for i in range(count):
            sent[start + i] = min(max(np.float64(values[i]), -FLOAT32_MAX), FLOAT32_MAX)
            write_float(code, at + 4 * i, sent[start + i])


@jit
def decode_positions(
    slots: Array, first: Int, last: Int, code: Array, starts: Array, indices: Array, counts: Array
) -> bool:
    """Decode the positions of the slots [first, last), from `starts` on.

    Returns False for an invalid code; the checks of `thinwire.wire.codes` then describe the
    problem. Arbitrary bytes never cause an access out of bounds.
    """
    for t in range(first, last):
        k, low_bits, at = slots[t, _K], slots[t, _LOW_BITS], slots[t, _AT]
        its_indices, middle = indices[starts[t] : starts[t] + k], at + slots[t, _LOW_BYTES]
        count = find_high_parts(code, middle, slots[t, _HIGH_BYTES], low_bits, its_indices)
        if count > k:
            return False
        code_byte, rest = at + ((count * low_bits) >> 3), (count * low_bits) & 7
        beyond = code[code_byte] >> rest if rest else np.uint8(0)
        for byte in range(code_byte + (rest > 0), middle):
            beyond |= code[byte]
        if beyond:
            return False
        if low_bits:
            add_low_fields(code, at, low_bits, i64(0), count, its_indices)
        for i in range(u64(1), u64(count)):
            if its_indices[i] <= its_indices[i - u64(1)]:
                return False
        if count and its_indices[count - 1] >= slots[t, _NUMEL]:
            return False
        counts[t] = count
    return True


@jit
def decode_signs(
    slots: Array, first: Int, last: Int, code: Array, starts: Array, values: Array, counts: Array
) -> bool:
    """Decode values at 1 bit of the positions found. Returns True if the scales are finite."""
    for t in range(first, last):
        at = slots[t, _AT] + slots[t, _LOW_BYTES] + slots[t, _HIGH_BYTES]
        scale = read_float(code, at)
        if not abs(scale) < np.inf:
            return False
        _signs_at(code, at + 4, scale, i64(0), counts[t], values[starts[t] : starts[t] + counts[t]])
    return True


@jit
def decode_levels(
    slots: Array,
    first: Int,
    last: Int,
    bits: Int,
    scales: Array,
    code: Array,
    starts: Array,
    values: Array,
    counts: Array,
) -> bool:
    """Decode values as `decode_signs` does, at 2 to 16 bits.

    `scales`, float32, is scratch for the scales of one slot.
    """
    for t in range(first, last):
        at = slots[t, _AT] + slots[t, _LOW_BYTES] + slots[t, _HIGH_BYTES]
        for i in range(len(scales)):
            scales[i] = read_float(code, at + 4 * i)
            if not abs(scales[i]) < np.inf:
                return False
        at += 4 * len(scales)
        its_values = values[starts[t] : starts[t] + counts[t]]
        if bits <= 4:
            decode_book(code, at, bits, scales, i64(0), counts[t], its_values)
        else:
            lowest, highest = np.float64(scales[0]), np.float64(scales[1])
            decode_grid(code, at, bits, lowest, highest, i64(0), counts[t], its_values)
    return True


@jit
def decode_floats(
    slots: Array, first: Int, last: Int, code: Array, starts: Array, values: Array, counts: Array
) -> bool:
    """Decode values as `decode_signs` does, at 32 bits. Returns True if the values are finite."""
    for t in range(first, last):
        at = slots[t, _AT] + slots[t, _LOW_BYTES] + slots[t, _HIGH_BYTES]
        for i in range(counts[t]):
            value = read_float(code, at + 4 * i)
            if not abs(value) < np.inf:
                return False
            values[starts[t] + i] = value
    return True
