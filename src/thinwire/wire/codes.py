"""Codes of the positions and values that are sent of a tensor.

**Positions**: Elias-Fano, of a size that is known from (n, k) alone, about 2 + log2(n/k) bits each.
The code of k ascending positions out of n, with l = max(0, floor(log2(n / k))), has two parts.
First the k * l low bits, packed one position after the other, least significant bit first. Then a
bitmap of k + ((n - 1) >> l) + 1 bits, in which the i-th position p sets bit (p >> l) + i. Each part
is padded with zeros to whole bytes. Fewer than k positions are allowed: the bitmap gives their
number, and the unused low bits are zero. Source: Elias, JACM 1974; Fano, MIT memorandum 61, 1971.
Differs: the length is that of k positions, however many were sent.

**Values**: 1, 2, 4, 8, 16 or 32 bits each, with scales of this tensor only.

| bits | scales, float32 | one value |
|---|---|---|
| 1 | mean magnitude over all k | sign |
| 2, 4 | 2, 8 levels: the magnitudes are split at their mean, each part at its own, 1 or 3 times; means of the parts | sign, level |
| 8, 16 | smallest and largest magnitude | sign, one of 128, 32768 equidistant levels |
| 32 | none | float32 |

The code is the scales, then k fields, least significant bit first, the sign (1: negative) in a
field's highest bit. A value takes the nearest level, the lower of two equally near. Magnitudes
beyond float32 saturate. The sender alone computes scales, in float64. Source: arXiv 1802.04434
(signs with one scale), 1901.09847 (error feedback). Differs: levels from means of parts.
"""  # noqa: E501 (a table row)

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.kernels.reference import fields_at, numbers_of, ones_of, put_fields
from thinwire.layout.message import SCALE_BYTES, SCALE_COUNT

Array = NDArray[Any]
_LARGEST = float(np.finfo(np.float32).max)


def encode_slots(
    table: Array, parts: Sequence[tuple[Tensor, Tensor]], bits: int, over: Array, code: Array
) -> tuple[list[Tensor], int]:
    """Write the entries of each slot, but zeros, into a zeroed message; `table`: `slot_table`.

    At 1 bit the mean of a slot is over `over` entries; if that is 0, over those that are written.
    Returns what receivers decode, and the number of entries written.
    """
    sizes = [values.numel() for _, values in parts]
    if (sizes > table[:, 1]).any() or sizes != [indices.numel() for indices, _ in parts]:
        raise ValueError("a part has more entries than its slot, or not as many values as indices")
    every = torch.cat([values.detach().double() for _, values in parts]).numpy()
    kept = every != 0
    slot = np.arange(len(parts)).repeat(sizes)[kept]
    values = every[kept]
    positions = torch.cat([indices for indices, _ in parts]).numpy()[kept]
    counts = np.bincount(slot, minlength=len(parts))
    low = table[slot, 2]
    levels, scales = _levels(np.minimum(np.abs(values), _LARGEST), slot, counts, bits, over)
    fields = levels | (values < 0).astype(np.int64) << (bits - 1)
    number = numbers_of(slot, counts)
    low_at, high_at, scales_at, values_at = _begins(table, bits)
    lows = positions & ((1 << low) - 1)
    put_fields(code, 8 * low_at[slot] + low * number, lows, table[:, 2].max())
    put_fields(code, 8 * high_at[slot] + (positions >> low) + number, np.ones_like(number), 1)
    put_fields(code, 8 * values_at[slot] + bits * number, fields, bits)
    code[scales_at[:, None] + np.arange(scales[0].nbytes)] = scales.view(np.uint8)
    sent = np.zeros(len(every), np.float32)
    sent[kept] = np.copysign(_magnitudes(levels, slot, scales, bits), values)
    return list(torch.split(torch.from_numpy(sent), sizes)), len(values)


def decode_slots(table: Array, code: Array, bits: int) -> list[tuple[Tensor, Tensor]]:
    """Return the entries of each slot; an invalid code raises `PayloadCorrupt`."""
    if not len(table):
        return []
    low_at, high_at, scales_at, values_at = _begins(table, bits)
    ones, slot = ones_of(code, high_at, scales_at)
    counts = np.bincount(slot, minlength=len(table))
    ks = table[:, 1]
    for count, k in zip(counts[counts > ks], ks[counts > ks], strict=True):
        raise PayloadCorrupt(f"{count} positions came, expected at most k = {k}")
    low = table[slot, 2]
    number = numbers_of(slot, counts)
    lows = fields_at(code, 8 * low_at[slot] + low * number, low, table[:, 2].max())
    indices = ((ones - number) << low) | lows
    if ((np.diff(indices) <= 0) & (np.diff(slot) == 0)).any():
        raise PayloadCorrupt("the positions are not strictly ascending")
    for at in np.flatnonzero(indices >= (numels := table[slot, 0])):
        raise PayloadCorrupt(f"position {indices[at]} came, expected less than {numels[at]}")
    unused = 8 * low_at + counts * table[:, 2]
    for count, bit, end in zip(*map(np.ndarray.tolist, (counts, unused, high_at)), strict=True):
        if np.unpackbits(code[bit >> 3 : end], bitorder="little")[bit & 7 :].any():
            raise PayloadCorrupt(f"low bits came for more than the {count} positions of the bitmap")
    scales = code[scales_at[:, None] + np.arange(SCALE_BYTES * SCALE_COUNT[bits])].view(np.float32)
    fields = fields_at(code, 8 * values_at[slot] + bits * number, bits, bits)
    top = (1 << (bits - 1)) - 1
    # finite scales give finite values; without scales the values themselves are checked
    fine = np.isfinite(scales).all()
    values = _magnitudes(fields & top, slot, scales, bits) if fine else scales
    if not (fine and np.isfinite(values).all()):
        raise PayloadCorrupt("values came that are not finite")
    columns = map(torch.from_numpy, (indices, np.where(fields > top, -values, values)))
    return list(zip(*(torch.split(x, counts.tolist()) for x in columns), strict=True))


def _begins(table: Array, bits: int) -> tuple[Array, Array, Array, Array]:
    """Return the first bytes of each slot's low bits, bitmap, scales and fields of values."""
    _, _, _, low_bytes, high_bytes, _, at = table.T
    scales_at = at + low_bytes + high_bytes
    return at, at + low_bytes, scales_at, scales_at + SCALE_BYTES * SCALE_COUNT[bits]


def _levels(x: Array, slot: Array, counts: Array, bits: int, over: Array) -> tuple[Array, Array]:
    """Return the level of each magnitude, and the scales of each slot."""
    if bits == 32:
        return x.astype(np.float32).view(np.int32).astype(np.int64), np.empty((len(counts), 0))
    if bits > 4:
        extremes = np.zeros((len(counts), 2))
        some = counts > 0
        begins = (np.cumsum(counts) - counts)[some]
        for column, reduced in enumerate((np.minimum, np.maximum)):
            extremes[some, column] = reduced.reduceat(x, begins)
        scales = extremes.astype(np.float32)
        low, high = scales.astype(np.float64).T
        top = (1 << (bits - 1)) - 1
        span = np.where(high > low, high - low, np.inf)
        near = np.ceil((x - low[slot]) * top / span[slot] - 0.5)
        return near.clip(0, top).astype(np.int64), scales
    part = slot
    means = np.zeros(len(counts))
    for _ in range(bits):
        total, numbers = np.bincount(part, x, len(means)), np.bincount(part, None, len(means))
        numbers = numbers if bits > 1 else np.where(over, over, numbers)
        # an empty part keeps the mean of the part that it was cut from
        means = np.where(numbers > 0, total / np.maximum(numbers, 1), means)
        scales = means.astype(np.float32).reshape(len(counts), -1)
        part = 2 * part + (x > means[part])
        means = means.repeat(2)
    middles = (scales[:, 1:].astype(np.float64) + scales[:, :-1]) / 2
    return sum((x > middle[slot] for middle in middles.T), np.zeros(len(x), np.int64)), scales


def _magnitudes(levels: Array, slot: Array, scales: Array, bits: int) -> Any:
    """Return what levels stand for, float32."""
    if bits == 32:
        return levels.astype(np.int32).view(np.float32)
    if bits <= 4:
        return scales[slot, levels]
    low, high = scales.astype(np.float64).T
    return (levels * ((high - low) / ((1 << (bits - 1)) - 1))[slot] + low[slot]).astype(np.float32)
