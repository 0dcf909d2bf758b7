"""Compiled loops over all slots of a message: the codes of `jit_codes` for one tensor after the other in one call.

A message of 160 tensors would otherwise cost 160 times the way from Python into these loops, which is more than the
work in them. Rows of `slots` are numbers of one slot, in the order of `FIELDS`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels.intrinsics import array_at
from thinwire.core.kernels.jit import jit
from thinwire.core.kernels.jit_codes import (
    add_low_fields,
    book_fields,
    capped_magnitudes,
    decode_book,
    decode_grid,
    find_high_parts,
    grid_fields,
    halving_sum,
    low_fields,
    pack_fields,
    set_high_parts,
    split_at_means,
)

Array = NDArray[Any]

FIELDS = ("numel", "k", "low_bits", "low_bytes", "high_bytes", "value_bytes", "at")
"""What a row of `slots` holds: the code begins at byte `at`."""
_NUMEL, _K, _LOW_BITS, _LOW_BYTES, _HIGH_BYTES, _VALUE_BYTES, _AT = range(len(FIELDS))
_FLOAT32_MAX = np.float64(np.finfo(np.float32).max)


@jit
def encode(
    slots: Array,
    parts: Array,
    first: int,
    last: int,
    bits: int,
    scale_count: int,
    spare: bool,
    like: Array,
    code: Array,
    sent: Array,
    starts: Array,
) -> int:
    """Codes of the slots [first, last) into the zeroed bytes `code`; returns how many entries they carry, or -1.

    -1 where a part does not fit its slot: the checks of `thinwire.core.index_code` say what is wrong.

    `parts` holds per slot the addresses of indices and values and their number. What is decoded at all of the positions
    goes into `sent` from `starts` on, 0 where the value was 0. `spare`: at 1 bit the scale is the mean of what came,
    not over k.
    """
    carried = 0
    for t in range(first, last):
        count = parts[t, 2]
        indices, values = array_at(parts[t, 0], count, parts), array_at(parts[t, 1], count, like)
        if count > slots[t, _K] or (count and (indices[0] < 0 or indices[count - 1] >= slots[t, _NUMEL])):
            return -1
        its_sent = sent[starts[t] : starts[t] + count]
        kept = 0
        for i in range(count):
            kept += values[i] != 0
        if kept == count:
            _encode_one(slots[t], indices, values, bits, scale_count, spare, code, its_sent)
        else:
            chosen, some, decoded = np.empty(kept, np.int64), np.empty(kept, like.dtype), np.empty(kept, np.float32)
            kept = 0
            for i in range(count):
                if values[i] != 0:
                    chosen[kept], some[kept] = indices[i], values[i]
                    kept += 1
            _encode_one(slots[t], chosen, some, bits, scale_count, spare, code, decoded)
            kept = 0
            for i in range(count):
                its_sent[i] = 0
                if values[i] != 0:
                    its_sent[i] = decoded[kept]
                    kept += 1
        carried += kept
    return carried


@jit
def _encode_one(
    slot: Array, indices: Array, values: Array, bits: int, scale_count: int, spare: bool, code: Array, sent: Array
) -> None:
    at, low_bits, count = slot[_AT], slot[_LOW_BITS], len(indices)
    middle = at + slot[_LOW_BYTES]
    if low_bits:
        low_fields(indices, low_bits, 0, count, code[at:middle])
    set_high_parts(indices, low_bits, code[middle : middle + slot[_HIGH_BYTES]])
    at = middle + slot[_HIGH_BYTES]
    if bits == 32:
        for i in range(count):
            sent[i] = min(max(np.float64(values[i]), -_FLOAT32_MAX), _FLOAT32_MAX)
        code[at : at + 4 * count] = sent.view(np.uint8)
        return
    scales = _scales(values, bits, scale_count, count if spare else slot[_K])
    code[at : at + 4 * scale_count] = scales.view(np.uint8)
    fields = np.empty(count, np.uint16)
    if bits <= 4:
        book_fields(values, _FLOAT32_MAX, scales, bits - 1, fields, sent)
    else:
        low, high = np.float64(scales[0]), np.float64(scales[-1])
        grid_fields(values, _FLOAT32_MAX, low, high, bits - 1, fields, sent)
    pack_fields(fields, bits, code[at + 4 * scale_count :])


@jit
def _scales(values: Array, bits: int, scale_count: int, k: int) -> Array:
    magnitudes = capped_magnitudes(values, _FLOAT32_MAX)
    scales = np.zeros(scale_count, np.float64)
    if bits == 1:
        scales[0] = halving_sum(magnitudes) / max(1, k)
    elif bits <= 4:
        split_at_means(magnitudes, bits - 1, scales)
    elif len(values):
        scales[0], scales[1] = magnitudes.min(), magnitudes.max()
    return scales.astype(np.float32)


@jit
def decode(
    slots: Array,
    first: int,
    last: int,
    bits: int,
    scale_count: int,
    code: Array,
    starts: Array,
    indices: Array,
    values: Array,
    counts: Array,
) -> bool:
    """Entries of the slots [first, last), from `starts` on; whether every one of them is what a sender writes.

    Whatever the bytes are, nothing is read or written out of bounds. Where the answer is False, the checks of
    `thinwire.core.index_code` and `value_code` say what is wrong.
    """
    for t in range(first, last):
        slot, start = slots[t], starts[t]
        its_indices, its_values = indices[start : start + slot[_K]], values[start : start + slot[_K]]
        count = _decode_one(slot, bits, scale_count, code, its_indices, its_values)
        if count < 0:
            return False
        counts[t] = count
    return True


@jit
def _decode_one(slot: Array, bits: int, scale_count: int, code: Array, indices: Array, values: Array) -> int:
    at, low_bits = slot[_AT], slot[_LOW_BITS]
    middle = at + slot[_LOW_BYTES]
    low, high = code[at:middle], code[middle : middle + slot[_HIGH_BYTES]]
    count = find_high_parts(high, low_bits, indices)
    if count > slot[_K] or _has_bits_after(low, count * low_bits):
        return -1
    if low_bits:
        add_low_fields(low, low_bits, 0, count, indices)
    for i in range(1, count):
        if indices[i] <= indices[i - 1]:
            return -1
    if count and indices[count - 1] >= slot[_NUMEL]:
        return -1
    at = middle + slot[_HIGH_BYTES]
    fields = code[at : at + slot[_VALUE_BYTES]]
    if bits == 32:
        values[:count].view(np.uint8)[:] = fields[: 4 * count]
        return count if np.isfinite(values[:count]).all() else -1
    scales = np.empty(scale_count, np.float32)  # a copy, since the bytes may lie anywhere
    scales.view(np.uint8)[:] = fields[: 4 * scale_count]
    if not np.isfinite(scales).all():
        return -1
    if bits <= 4:
        decode_book(fields[4 * scale_count :], bits, scales, 0, count, values)
    else:
        lowest, highest = np.float64(scales[0]), np.float64(scales[-1])
        decode_grid(fields[4 * scale_count :], bits, lowest, highest, 0, count, values)
    return count


@jit
def _has_bits_after(code: Array, used_bits: int) -> bool:
    whole, rest = used_bits >> 3, used_bits & 7
    if rest and code[whole] >> rest:
        return True
    return bool(np.any(code[whole + (rest > 0) :]))
