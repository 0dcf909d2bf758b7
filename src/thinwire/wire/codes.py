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

This is NumPy's way; where numba is installed, `kernels.compiled_codes` makes the same bits.
"""  # noqa: E501 (a table row)

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.layout.message import SCALE_COUNT
from thinwire.wire.whole import WholeReader, encode_whole

Array = NDArray[Any]
_bytes_of = partial(np.packbits, bitorder="little")
_bits_of = partial(np.unpackbits, bitorder="little")
_LARGEST = float(np.finfo(np.float32).max)


def encode_slots(
    table: Array, parts: Sequence[tuple[Tensor, Tensor]], bits: int, over: Array, code: Array
) -> tuple[list[Tensor], int]:
    """Write the entries of each slot, but zeros, into a zeroed message; `table`: `slot_table`.

    At 1 bit the mean of a slot is over `over` entries; if that is 0, over those that are written.
    Returns what receivers decode, and the number of entries written.
    """
    all_sent, carried = [], 0
    for t, (_, k, low, _, high_bytes, _, at) in enumerate(table.tolist()):
        every = parts[t][1].detach().double().numpy()
        kept, sent = every != 0, np.zeros(len(every), np.float32)
        count, positions, high = kept.sum(), np.zeros(k, np.int64), np.zeros(8 * high_bytes, bool)
        positions[:count] = parts[t][0].numpy()[kept]
        high[(positions[:count] >> low) + np.arange(count)] = True
        values = _value_code(every[kept], bits, over[t] or count)
        sent[kept] = _decoded(values, count, bits)
        its_code = np.concatenate([_packed(positions, low), _bytes_of(high), values])
        code[at : at + len(its_code)] = its_code
        all_sent.append(torch.from_numpy(sent))
        carried += int(count)
    return all_sent, carried


def decode_slots(table: Array, code: Array, bits: int) -> list[tuple[Tensor, Tensor]]:
    """Return the entries of each slot; an invalid code raises `PayloadCorrupt`."""
    parts = []
    for numel, k, low, low_bytes, high_bytes, _, at in table.tolist():
        lows, high, values = np.split(code[at:], [low_bytes, low_bytes + high_bytes])
        low_ones, high_ones = _bits_of(lows), np.flatnonzero(_bits_of(high))
        if (count := len(high_ones)) > k:
            raise PayloadCorrupt(f"{count} positions came, expected at most k = {k}")
        low_parts = low_ones[: count * low].reshape(count, low) @ (1 << np.arange(low))
        indices = ((high_ones - np.arange(count)) << low) | low_parts
        if (np.diff(indices) <= 0).any():
            raise PayloadCorrupt("the positions are not strictly ascending")
        if count and indices[-1] >= numel:
            raise PayloadCorrupt(f"position {indices[-1]} came, expected less than {numel}")
        if low_ones[count * low :].any():
            raise PayloadCorrupt(f"low bits came for more than the {count} positions of the bitmap")
        parts.append((torch.from_numpy(indices), torch.from_numpy(_decoded(values, count, bits))))
    return parts


def _packed(fields: Array, width: int) -> Array:
    """Return fields of `width` bits, int64, as bytes, the least significant bit first."""
    return _bytes_of(_bits_of(fields.view(np.uint8).reshape(-1, 8), axis=1, count=width))


def _value_code(values: Array, bits: int, over: int) -> Array:
    if bits == 32:
        return values.clip(-_LARGEST, _LARGEST).astype(np.float32).view(np.uint8)
    if bits > 4:
        values = values if len(values) else np.zeros(1)
        return encode_whole([torch.from_numpy(values)], bits).numpy()
    x, part, means = np.minimum(np.abs(values), _LARGEST), np.zeros(len(values), int), np.zeros(1)
    for _ in range(bits):
        total, count = np.bincount(part, x, len(means)), np.bincount(part, None, len(means))
        count = count if bits > 1 else np.array([over])
        # an empty part keeps the mean of the part that it was cut from
        means = np.where(count > 0, total / np.maximum(count, 1), means)
        scales = means.astype(np.float32)
        part, means = 2 * part + (x > means[part]), means.repeat(2)
    middles = (scales[1:].astype(np.float64) + scales[:-1]) / 2
    fields = (x[:, None] > middles).sum(axis=1) + (values < 0) * (1 << (bits - 1))
    return np.concatenate([scales.view(np.uint8), _packed(fields, bits)])


def _decoded(code: Array, count: int, bits: int) -> Array:
    # finite scales give finite values; without scales the values themselves are checked
    floats = np.frombuffer(code, np.float32, SCALE_COUNT[bits] or count)
    if not np.isfinite(floats).all():
        raise PayloadCorrupt("values came that are not finite")
    if bits == 32:
        return floats.copy()
    if bits == 1:
        return np.where(_bits_of(code[4:], count=count), -floats, floats)
    used = torch.tensor(code[: floats.nbytes + (count * bits + 7) // 8])
    return WholeReader(used, bits).part(0, count).numpy()
