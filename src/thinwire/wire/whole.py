"""Codes of whole tensors: every entry in 1, 2, 4, 8 or 16 bits, without positions.

A code is some float32 scales, then a field of so many bits per entry, the least significant bit
first. The highest bit of a field is the sign (1: negative), the rest a level.

| bits | scales | magnitude of an entry |
|---|---|---|
| 1 | the mean of the entries that are not negative, the mean magnitude of the others | that of its sign |
| 2, 4 | 2, 8 levels: magnitudes are split at their mean, each part at its own, 1 or 3 times; means of the parts | the nearest level |
| 8, 16 | as in `wire.codes` | one of 128, 32768 equidistant levels |

At 1 bit each sign has a mean of its own, so the error never has a larger norm than the input,
however asymmetric the entries are. Magnitudes beyond float32 saturate. Scales are computed by the
sender alone, so the order of a sum matters to nobody else. Nothing waits for a device.
"""  # noqa: E501 (a table row)

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from thinwire.layout.message import SCALE_BYTES, SCALE_COUNT

_CHUNK = 1 << 16
"""Entries that stay in a core's cache between two passes; whole bytes at any number of bits."""
_LARGEST = torch.finfo(torch.float32).max


def encode_whole(values: Tensor, bits: int) -> Tensor:
    """Return the code of a tensor, uint8, shape (whole_bytes(n, bits),), on its device.

    `values` has shape (n,), floating-point, finite.

    >>> decode_whole(encode_whole(torch.tensor([1.0, 3.0, -2.0, -4.0]), 1), 4, 1)
    tensor([ 2.,  2., -3., -3.])
    """
    if bits > 4:
        return _on_grid(values, bits)
    chunks = _chunks(values)
    negative = [chunk < 0 for chunk in chunks]
    if bits == 1:
        scales, fields = _means_of_signs(chunks, negative), negative
    else:
        magnitudes = [chunk.abs() for chunk in chunks]
        scales = _levels(magnitudes, bits - 1)
        pairs = zip(magnitudes, negative, strict=True)
        fields = [_fields(its, signs, scales, bits) for its, signs in pairs]
    return torch.cat([scales.view(torch.uint8), *(_packed(part, bits) for part in fields)])


def decode_whole(code: Tensor, numel: int, bits: int) -> Tensor:
    """Return the entries of a code: shape (numel,), float32, on its device.

    The same bits on every rank and device; finite if the scales are.
    """
    if bits > 4:
        return _from_grid(code, bits)
    begin = scale_bytes(bits)
    scales = code[:begin].clone().view(torch.float32)  # a view must be aligned
    levels = scales * _ONE_BIT_SIGNS.to(code.device) if bits == 1 else torch.cat([scales, -scales])
    table, fields = levels[_fields_of_bytes(bits).to(code.device)], code[begin:]
    entries = torch.empty(fields.numel(), 8 // bits, dtype=torch.float32, device=code.device)
    step = _CHUNK if code.is_cpu else max(1, fields.numel())
    for chunk, out in zip(torch.split(fields, step), torch.split(entries, step), strict=True):
        torch.index_select(table, 0, chunk.int(), out=out)
    return entries.view(-1)[:numel]


def scale_bytes(bits: int) -> int:
    """Return the length of the scales in a code."""
    return 2 * SCALE_BYTES if bits == 1 else SCALE_BYTES * SCALE_COUNT[bits]


_ONE_BIT_SIGNS = torch.tensor([1.0, -1.0], device="cpu")


@lru_cache(maxsize=4)
def _fields_of_bytes(bits: int) -> Tensor:
    """Return the fields in each byte, shape (256, 8 // bits)."""
    shifts = torch.arange(0, 8, bits, device="cpu")
    return (torch.arange(256, device="cpu").unsqueeze(1) >> shifts) & ((1 << bits) - 1)


def _chunks(values: Tensor) -> tuple[Tensor, ...]:
    return torch.split(values, _CHUNK) if values.is_cpu else (values,)


def _sum(chunks: Sequence[Tensor], of: Callable[[Tensor], Tensor], *, exact: bool) -> Tensor:
    """Return the sum of a function of all entries: float64, shape (), on their device.

    A sum in float32 takes a third of the time on a CPU; `exact` where another is subtracted.
    """
    if not exact and len(chunks) > 1:
        total = torch.stack([of(chunk).sum() for chunk in chunks]).double().sum()
        if total.isfinite():
            return total
    return torch.stack([of(chunk).sum(dtype=torch.float64) for chunk in chunks]).sum()


def _count(masks: Iterable[Tensor]) -> Tensor:
    """Return how many flags are set: float64, shape (). NumPy counts ten times as fast."""
    found = [
        torch.tensor(np.count_nonzero(mask.numpy()), device="cpu") if mask.is_cpu else mask.sum()
        for mask in masks
    ]
    return torch.stack(found).sum().double()


def _means_of_signs(chunks: Sequence[Tensor], negative: Sequence[Tensor]) -> Tensor:
    below = _count(negative)
    above = sum(chunk.numel() for chunk in chunks) - below
    upper = _sum(chunks, lambda chunk: chunk.clamp_min(0), exact=False) / above.clamp(min=1)
    lower = _sum(chunks, lambda chunk: chunk.clamp_max(0), exact=False) / below.clamp(min=1)
    return torch.stack([upper, lower]).abs().clamp(max=_LARGEST).float()


def _levels(magnitudes: Sequence[Tensor], depth: int) -> Tensor:
    """Return the 2^depth means of the parts of the magnitudes, ascending."""
    numel = sum(chunk.numel() for chunk in magnitudes)
    total = _sum(magnitudes, lambda chunk: chunk, exact=True)
    zero = torch.zeros_like(total)
    # by edge how many entries are not above it, and their sum
    edges = [(zero, zero, zero), (zero + _LARGEST, zero + numel, total)]
    means = _means_between(edges)
    for _ in range(depth):
        inside = [(mean, *_not_above(magnitudes, mean, numel)) for mean in means]
        # an edge, the mean of the part after it, the next edge, ...
        edges = [*chain.from_iterable(zip(edges[:-1], inside, strict=True)), edges[-1]]
        means = _means_between(edges)
    return torch.stack(means).float()


_Edge = tuple[Tensor, Tensor, Tensor]


def _means_between(edges: Sequence[_Edge]) -> list[Tensor]:
    """Return the mean of each part, the edge below it if it is empty."""
    means = []
    for (low, count, total), (high, its_count, its_total) in pairwise(edges):
        numel = its_count - count
        mean = torch.where(numel > 0, (its_total - total) / numel.clamp(min=1), low)
        # the difference of two sums may be off by their rounding
        means.append(torch.minimum(torch.maximum(mean, low), high))
    return means


def _not_above(magnitudes: Sequence[Tensor], edge: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return how many entries are not above the edge, and their sum."""
    # a mean comes from the difference of two sums: an entry that is alone must not be above it
    edge = _rounded_down(edge * (1 + 2.0**-40), magnitudes[0].dtype)
    count = _count(chunk <= edge for chunk in magnitudes)
    limited = _sum(magnitudes, lambda chunk: chunk.clamp(max=edge), exact=True)
    return count, limited - edge.double() * (numel - count)


def _fields(magnitudes: Tensor, negative: Tensor, levels: Tensor, bits: int) -> Tensor:
    """Return sign and nearest level of each entry, uint8; the lower of two equally near."""
    middles = (levels[1:].double() + levels[:-1].double()) / 2
    found = negative.view(torch.uint8) << (bits - 1)
    for middle in _rounded_down(middles, magnitudes.dtype).unbind():
        found += magnitudes > middle
    return found


def _on_grid(values: Tensor, bits: int) -> Tensor:
    """Return the code on equidistant levels; at 8 and 16 bits a field is one or two bytes."""
    magnitudes = values.double().abs().clamp_(max=_LARGEST)
    scales = torch.stack(magnitudes.aminmax()).float()
    low, high = scales.double().unbind()
    top = (1 << (bits - 1)) - 1
    span = torch.where(high > low, high - low, torch.inf)
    levels = magnitudes.sub_(low).mul_(top).div_(span).sub_(0.5).ceil_().clamp_(0, top)
    fields = levels.to(torch.int32) | ((values < 0).to(torch.int32) << (bits - 1))
    narrow = fields.to(torch.uint8 if bits == 8 else torch.uint16)
    return torch.cat([scales.view(torch.uint8), narrow.view(torch.uint8)])


def _from_grid(code: Tensor, bits: int) -> Tensor:
    begin, top = scale_bytes(bits), (1 << (bits - 1)) - 1
    low, high = code[:begin].clone().view(torch.float32).double().unbind()
    fields = code[begin:].clone().view(torch.uint8 if bits == 8 else torch.uint16).to(torch.int32)
    magnitudes = ((fields & top).double().mul_((high - low) / top).add_(low)).float()
    return torch.where(fields > top, -magnitudes, magnitudes)


def _rounded_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest numbers of a type that are not above these: comparisons stay exact."""
    near = values.to(dtype)
    return torch.where(near.double() > values, near.nextafter(near.new_tensor(-torch.inf)), near)


def _packed(fields: Tensor, bits: int) -> Tensor:
    """Return fields as bytes, the first in the lowest bits; the last byte is filled with zeros."""
    if bits == 1 and fields.is_cpu:
        return torch.from_numpy(np.packbits(fields.numpy(), bitorder="little"))
    whole = torch.nn.functional.pad(fields, (0, -fields.numel() % (8 // bits)))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device)
    return (whole.view(-1, 8 // bits).view(torch.uint8) << shifts).sum(1, dtype=torch.uint8)
