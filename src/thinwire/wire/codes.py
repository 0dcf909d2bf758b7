"""Codes of the positions and values that are sent of a tensor.

**Positions**: Elias-Fano, of a size that is known from (n, k) alone, about 2 + log2(n/k) bits each.

The code of k ascending positions out of n, with l = max(0, floor(log2(n / k))), has two parts.
First the k * l low bits, packed one position after the other, least significant bit first. Then a
bitmap of k + ((n - 1) >> l) + 1 bits, in which the i-th position p sets bit (p >> l) + i. Each part
is padded with zeros to whole bytes. Fewer than k positions are allowed: the bitmap gives their
number, and the unused low bits are zero.

Source: Elias, JACM 1974; Fano, MIT memorandum 61, 1971. Differs: the length is that of k positions,
however many were sent.

**Values**: 1, 2, 4, 8, 16 or 32 bits each, with scales of this tensor only.

| bits | scales, float32 | one value |
|---|---|---|
| 1 | mean magnitude over all k | sign |
| 2, 4 | 2, 8 levels: the magnitudes are split at their mean, each part at its own, 1 or 3 times; means of the parts | sign, level |
| 8, 16 | smallest and largest magnitude | sign, one of 128, 32768 equidistant levels |
| 32 | none | float32 |

The code is the scales, then k fields, least significant bit first, the sign (1: negative) in a
field's highest bit. A value takes the nearest level, the lower of two equally near. Magnitudes
beyond float32 saturate. Scales are computed by the sender alone, in float64.

This is NumPy's way; where numba is installed, `kernels.compiled_codes` makes the same bits.

All slots of a message are coded together: 160 calls would cost more than the work. `table` is
`Layout.slot_table`, `counts` the number of entries of each slot. Entries of all slots stand in one
array, slot after slot. Buffers of codes have SPARE bytes behind the message.
"""  # noqa: E501 (a table row)

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.layout.message import SCALE_COUNT

Ints = NDArray[np.int64]
Code = NDArray[np.uint8]
Floats = NDArray[np.float32]

SPARE = 8
_CHUNK = 1 << 13
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def encode_slots(
    table: Ints, parts: Sequence[tuple[Tensor, Tensor]], bits: int, over: Ints, code: Code
) -> tuple[list[Tensor], int]:
    """Write the entries of each slot, but zeros, into the zeroed bytes `code`.

    Args:
        table: Of the message.
        parts: Per slot (indices, values), on the CPU.
        bits: Per value.
        over: At 1 bit, what the mean of each slot is taken over; 0: the entries written.
        code: Of the message, with SPARE bytes behind it.

    Returns:
        Per slot the values that receivers decode, and the number of entries written.
    """
    sizes = [values.numel() for _, values in parts]
    indices, entries = (torch.cat(column) for column in zip(*parts, strict=True))
    wide = entries if entries.dtype == torch.float64 else entries.float()
    values = wide.detach().numpy()
    kept = values != 0
    counts = np.bincount(np.repeat(np.arange(len(table)), sizes)[kept], minlength=len(table))
    encode_positions(code, table, counts, indices.numpy()[kept])
    sent = np.zeros(len(values), np.float32)
    over = np.where(over > 0, over, counts)
    sent[kept] = encode_values(code, table, counts, values[kept], bits, over)
    return list(torch.split(torch.from_numpy(sent), sizes)), int(counts.sum())


def decode_slots(table: Ints, code: Code, bits: int) -> list[tuple[Tensor, Tensor]]:
    """Return the entries of each slot; errors as in `decode_positions` and `decode_values`."""
    padded = np.concatenate([code, np.zeros(SPARE, np.uint8)])
    indices, counts = decode_positions(padded, table)
    values = decode_values(padded, table, counts, bits)
    columns = (
        torch.split(torch.from_numpy(column), counts.tolist()) for column in (indices, values)
    )
    return list(zip(*columns, strict=True))


def encode_positions(code: Code, table: Ints, counts: Ints, indices: Ints) -> None:
    """Write positions, strictly ascending within a slot, into the zeroed bytes `code`."""
    _, _, low, low_bytes, _, _, at = table.T
    widths = np.repeat(low, counts)
    _write(code, _bits(8 * at, low, counts), indices & ((1 << widths) - 1), int(low.max()))
    ones = _bits(8 * (at + low_bytes), 1, counts) + (indices >> widths)
    _write(code, ones, np.ones(len(ones), np.uint8), 1)


def decode_positions(code: Code, table: Ints) -> tuple[Ints, Ints]:
    """Return the positions in the code, strictly ascending in each slot, and the counts.

    Arbitrary bytes never cause an access out of bounds.

    Raises:
        PayloadCorrupt: The code is invalid: too many positions, order, range, padding.
    """
    numel, k, low, low_bytes, high_bytes, _, at = table.T
    ones = np.flatnonzero(np.unpackbits(code, bitorder="little").view(bool))
    high_at = 8 * (at + low_bytes)
    begin = np.searchsorted(ones, high_at)
    counts = np.searchsorted(ones, high_at + 8 * high_bytes) - begin
    if (counts > k).any():
        t = int(np.argmax(counts > k))
        raise PayloadCorrupt(f"{counts[t]} positions came, expected at most k = {k[t]}")
    high = ones[_bits(begin, 1, counts)] - _bits(high_at, 1, counts)
    widths = np.repeat(low, counts)
    indices = (high << widths) | _read(code, _bits(8 * at, low, counts), widths)
    starts = np.cumsum(counts) - counts
    falls = np.diff(indices, prepend=-1) <= 0
    falls[starts[counts > 0]] = False
    if falls.any():
        raise PayloadCorrupt("the positions are not strictly ascending")
    last, bound = indices[starts[counts > 0] + counts[counts > 0] - 1], numel[counts > 0]
    if (last >= bound).any():
        t = int(np.argmax(last >= bound))
        raise PayloadCorrupt(f"position {last[t]} came, expected less than {bound[t]}")
    extra = np.searchsorted(ones, high_at) - np.searchsorted(ones, 8 * at + counts * low)
    if extra.any():
        count = counts[np.argmax(extra > 0)]
        raise PayloadCorrupt(f"low bits came for more than the {count} positions of the bitmap")
    return indices, counts


def encode_values(
    code: Code, table: Ints, counts: Ints, values: NDArray[np.floating], bits: int, over: Ints
) -> Floats:
    """Write values into the zeroed bytes `code`; return those that receivers will decode.

    Args:
        code: Of the message.
        table: Of the message.
        counts: Entries of each slot.
        values: Finite; at 1 bit none may be 0, since one bit is a sign.
        bits: One of 1, 2, 4, 8, 16, 32.
        over: At 1 bit, what the mean of each slot is taken over; missing values count as 0.

    Source: arXiv 1802.04434 (signs with one scale), 1901.09847 (error feedback). Differs: levels
    from means of parts.
    """
    slot, at = _slots(counts), table[:, 6] + table[:, 3] + table[:, 4]
    starts = _bits(8 * (at + 4 * SCALE_COUNT[bits]), bits, counts)
    if bits == 32:
        sent = values.clip(-_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
        _write(code, starts, sent.view(np.uint32), 32)
        return sent
    magnitudes = np.minimum(np.abs(values.astype(np.float64)), _FLOAT32_MAX)
    scales = _scales(magnitudes, slot, bits, over).astype(np.float32)
    code[at[:, None] + np.arange(4 * SCALE_COUNT[bits])] = scales.view(np.uint8)
    levels, negative = _nearest(magnitudes, slot, scales, bits), values < 0
    fields = levels | (negative.astype(np.int64) << (bits - 1))
    _write(code, starts, fields, bits)
    return _decoded(fields, slot, scales, bits)


def decode_values(code: Code, table: Ints, counts: Ints, bits: int) -> Floats:
    """Return the values in the code, finite and bit-identical on every rank.

    Raises:
        PayloadCorrupt: Scales or values are not finite.
    """
    at = table[:, 6] + table[:, 3] + table[:, 4]
    scales = code[at[:, None] + np.arange(4 * SCALE_COUNT[bits])].view(np.float32)
    starts = _bits(8 * (at + 4 * SCALE_COUNT[bits]), bits, counts)
    fields = _read(code, starts, np.int64(bits))
    plain = bits == 32
    values = fields.astype(np.uint32).view(np.float32) if plain else None
    if not np.isfinite(scales if values is None else values).all():
        raise PayloadCorrupt("values came that are not finite")
    return _decoded(fields, _slots(counts), scales, bits) if values is None else values


def _slots(counts: Ints) -> Ints:
    """Return the slot of each entry."""
    return np.repeat(np.arange(len(counts)), counts)


def _bits(first: Ints, width: Ints | int, counts: Ints) -> Ints:
    """Return where each entry's field begins, from the first of its slot and the width there."""
    starts = np.cumsum(counts) - counts
    at = np.arange(int(counts.sum()))
    at *= width if isinstance(width, int) else np.repeat(width, counts)
    at += np.repeat(first - starts * width, counts)
    return at


def _write(code: Code, at: Ints, fields: NDArray[np.integer], width: int) -> None:
    """Add fields of up to `width` bits at the bits `at`, where the code is zero."""
    for some in _chunks(at):
        shifted = fields[some].astype("<u8") << (at[some] & 7).astype(np.uint64)
        spread = shifted.view(np.uint8).reshape(-1, 8)
        for byte in range((width + 14) // 8):
            np.add.at(code, (at[some] >> 3) + byte, spread[:, byte])


def _read(code: Code, at: Ints, width: Ints | np.int64) -> Ints:
    """Return the fields of `width` bits each that begin at the bits `at`."""
    words = np.ndarray(len(code) - 7, "<u8", code, strides=(1,))
    fields = np.empty_like(at)
    for some in _chunks(at):
        fields[some] = words[at[some] >> 3] >> (at[some] & 7).astype(np.uint64)
    fields &= (np.int64(1) << width) - 1
    return fields


def _chunks(at: Ints) -> Iterator[slice]:
    """Yield entries whose temporary arrays stay in the cache."""
    return (slice(first, first + _CHUNK) for first in range(0, len(at), _CHUNK))


def _scales(
    magnitudes: NDArray[np.float64], slot: Ints, bits: int, over: Ints
) -> NDArray[np.float64]:
    """Return the scales of each slot: mean, code book, or smallest and largest magnitude."""
    if bits == 1:
        total = np.bincount(slot, weights=magnitudes, minlength=len(over))
        return (total / np.maximum(over, 1))[:, None]
    if bits > 4:
        low, high = np.full(len(over), np.inf), np.zeros(len(over))
        np.minimum.at(low, slot, magnitudes)
        np.maximum.at(high, slot, magnitudes)
        return np.stack([np.where(low < np.inf, low, 0), high], axis=1)
    part, means = np.zeros_like(slot), np.zeros((len(over), 1))
    for depth in range(bits):
        if depth:
            part = 2 * part + (magnitudes > means[slot, part])
            means = np.repeat(means, 2, axis=1)
        own = slot * means.shape[1] + part
        count = np.bincount(own, minlength=means.size)
        total = np.bincount(own, weights=magnitudes, minlength=means.size)
        # an empty part keeps the mean of the part that it was cut from
        mean = np.where(count > 0, total / np.maximum(count, 1), means.ravel())
        means = mean.reshape(means.shape)
    return means


def _nearest(magnitudes: NDArray[np.float64], slot: Ints, scales: Floats, bits: int) -> Ints:
    """Return the number of the nearest level of each magnitude, the lower of two."""
    wide = scales.astype(np.float64)
    if bits <= 4:
        middles, levels = (wide[:, 1:] + wide[:, :-1]) / 2, np.zeros_like(slot)
        for middle in middles.T:
            levels += magnitudes > middle[slot]
        return levels
    top, (low, high) = (1 << (bits - 1)) - 1, wide.T
    span = np.where(high > low, high - low, np.inf)[slot]
    found = np.ceil((magnitudes - low[slot]) * top / span - 0.5).clip(0, top)
    return np.asarray(found, np.int64)


def _decoded(fields: Ints, slot: Ints, scales: Floats, bits: int) -> Floats:
    levels, negative = fields & ((1 << (bits - 1)) - 1), fields >> (bits - 1) != 0
    if bits <= 4:
        magnitudes = scales[slot, levels]
    else:
        low, high = scales.astype(np.float64).T
        step = (high - low) / ((1 << (bits - 1)) - 1)
        magnitudes = (levels * step[slot] + low[slot]).astype(np.float32)
    return np.asarray(np.where(negative, -magnitudes, magnitudes), np.float32)
