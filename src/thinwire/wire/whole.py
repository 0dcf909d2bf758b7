"""Codes of whole tensors: every entry in 1, 2, 4, 8 or 16 bits, without positions.

A code is some float32 scales, then a field of so many bits per entry, the least significant bit
first. The highest bit of a field is the sign (1: negative), the rest a level.

| bits | scales | magnitude of an entry |
|---|---|---|
| 1 | the mean of the entries that are not negative, the mean magnitude of the others | that of its sign |
| 2, 4 | 2, 8 levels: magnitudes are split at their mean, each part at its own, 1 or 3 times; means of the parts | the nearest level |
| 8, 16 | as in `wire.codes` | one of 128, 32768 equidistant levels |

At 1 bit each sign has a mean of its own, so the error never has a larger norm than the input,
however asymmetric the entries are. Magnitudes beyond float32 saturate. The sender alone computes scales.
"""  # noqa: E501 (a table row)

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.reference import divided_
from thinwire.layout.message import SCALE_BYTES, SCALE_COUNT

_CHUNK = 1 << 17
"""Entries that stay in a core's cache between two passes; whole bytes at any number of bits."""
_PART = 1 << 22  # on other devices, which hold some tensors of this size at a time
_LARGEST = torch.finfo(torch.float32).max


def spans(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield starts and ends of the parts in which a tensor is best read and written."""
    step = _CHUNK if device.type == "cpu" else _PART
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def encode_whole(chunks: Iterable[Tensor], bits: int) -> Tensor:
    """Return the code of a tensor of n entries, uint8, shape (whole_bytes(n, bits),).

    `chunks` are its entries by `spans`, at least one: float32 or float64, finite, one dimension.

    >>> code = encode_whole([torch.tensor([1.0, 3.0, -2.0, -4.0])], 1)
    >>> WholeReader(code, 1).part(0, 4)
    tensor([ 2.,  2., -3., -3.])
    """
    if bits > 4:
        return _on_grid(list(chunks), bits)
    scales, fields = _signs(chunks) if bits == 1 else _nearest_levels(chunks, bits)
    return torch.cat([scales.view(torch.uint8), *fields])


class WholeReader:
    """Decodes entries of a code: the same bits everywhere, finite if the scales are."""

    def __init__(self, code: Tensor, bits: int) -> None:
        begin = scale_bytes(bits)
        self._bits = bits
        self._scales = code[:begin]
        self._fields = code[begin:]
        if bits <= 4:
            scales = self._scales.clone().view(torch.float32)  # a view must be aligned
            self._levels = torch.cat((scales[:1], -scales[1:]) if bits == 1 else (scales, -scales))
            if code.is_cpu:
                self._table = self._levels[_fields_of_bytes(bits)].numpy()

    def part(self, start: int, end: int, device: torch.device | None = None) -> Tensor:
        """Return the entries [start, end): float32; `start` is at the beginning of a byte."""
        bits = self._bits
        numel = end - start
        fields = self._fields[start * bits // 8 : (end * bits + 7) // 8]
        fields = fields.to(device or fields.device)
        if bits > 4:
            return _from_grid(self._scales.to(fields.device), fields, bits)
        if not fields.is_cpu:
            levels = _unpacked(fields, bits).view(-1)[:numel]
            known = self._levels.to(fields.device)
            return torch.where(levels > 0, known[1], known[0]) if bits == 1 else known[levels.int()]
        entries = np.empty((fields.numel(), 8 // bits), np.float32)
        # without "clip" NumPy copies the result once more
        np.take(self._table, fields.numpy(), 0, out=entries, mode="clip")
        return torch.from_numpy(entries).view(-1)[:numel]


def scale_bytes(bits: int) -> int:
    """Return the length of the scales in a code."""
    return 2 * SCALE_BYTES if bits == 1 else SCALE_BYTES * SCALE_COUNT[bits]


@lru_cache(maxsize=4)
def _fields_of_bytes(bits: int) -> Tensor:
    """Return the fields in each byte, shape (256, 8 // bits)."""
    return _unpacked(torch.arange(256, dtype=torch.uint8, device="cpu"), bits).long()


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the fields of each byte: uint8, shape (bytes, 8 // bits)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)


# NumPy compares in an eighth of torch's time
def _negative(chunk: Tensor) -> Tensor:
    return torch.from_numpy(np.less(chunk.numpy(), 0)) if chunk.is_cpu else chunk < 0


def _above(chunk: Tensor, bound: Tensor) -> Tensor:
    on_cpu = chunk.is_cpu
    return torch.from_numpy(np.greater(chunk.numpy(), bound.numpy())) if on_cpu else chunk > bound


def _count(mask: Tensor) -> Tensor:
    """Return how many flags are set: float64, shape ()."""
    if mask.is_cpu:
        count = float(np.count_nonzero(mask.numpy()))
        return torch.tensor(count, dtype=torch.float64, device="cpu")
    return mask.sum().double()


def _sum(values: Tensor) -> Tensor:
    """Return the sum of a chunk: float64, shape ()."""
    # a sum in float32 takes a third of the time on a CPU; elsewhere a look at it would wait
    total = values.sum() if values.is_cpu and values.numel() == _CHUNK else None
    if total is None or not total.isfinite():
        total = values.sum(dtype=torch.float64)
    return total.double()


def _signs(chunks: Iterable[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of the entries of each sign, and the packed signs."""
    packed = []
    sums = []
    numel = 0
    for chunk in chunks:
        negative = _negative(chunk)
        packed.append(_packed(negative, 1))
        positive_part = chunk.clamp_min(0)
        negative_part = chunk.clamp_max(0)
        sums.append(torch.stack([_count(negative), _sum(positive_part), _sum(negative_part)]))
        numel += chunk.numel()
    below, upper, lower = torch.stack(sums).sum(0)
    means = [upper / (numel - below).clamp(min=1), lower / below.clamp(min=1)]
    return torch.stack(means).abs().clamp(max=_LARGEST).float(), packed


def _nearest_levels(chunks: Iterable[Tensor], bits: int) -> tuple[Tensor, list[Tensor]]:
    """Return the levels, and the packed signs and numbers of levels."""
    pairs = [(chunk.abs(), _negative(chunk)) for chunk in chunks]
    levels = _levels([magnitudes for magnitudes, _ in pairs], bits - 1)
    return levels, [_packed(_fields(*pair, levels, bits), bits) for pair in pairs]


def _levels(magnitudes: Sequence[Tensor], depth: int) -> Tensor:
    """Return the 2^depth means of the parts of the magnitudes, ascending."""
    numel = sum(chunk.numel() for chunk in magnitudes)
    total = _exact_sum(magnitudes, lambda chunk: chunk)
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


def _exact_sum(chunks: Sequence[Tensor], of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of a function of all entries in float64: another one is subtracted from it."""
    return torch.stack([of(chunk).sum(dtype=torch.float64) for chunk in chunks]).sum()


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
    above = torch.stack([_count(_above(chunk, edge)) for chunk in magnitudes]).sum()
    count = numel - above
    limited = _exact_sum(magnitudes, lambda chunk: chunk.clamp(max=edge))
    return count, limited - edge.double() * (numel - count)


def _fields(magnitudes: Tensor, negative: Tensor, levels: Tensor, bits: int) -> Tensor:
    """Return sign and nearest level of each entry, uint8; the lower of two equally near."""
    middles = (levels[1:].double() + levels[:-1].double()) / 2
    found = negative.view(torch.uint8) << (bits - 1)
    for middle in _rounded_down(middles, magnitudes.dtype).unbind():
        found += _above(magnitudes, middle)
    return found


def _on_grid(chunks: Sequence[Tensor], bits: int) -> Tensor:
    """Return the code on equidistant levels; at 8 and 16 bits a field is one or two bytes."""
    extremes = torch.stack([torch.stack(_magnitudes(chunk).aminmax()) for chunk in chunks])
    scales = torch.stack([extremes[:, 0].amin(), extremes[:, 1].amax()]).float()
    low, high = scales.double().unbind()
    top = (1 << (bits - 1)) - 1
    span = torch.where(high > low, high - low, torch.inf)
    code = [scales.view(torch.uint8)]
    for chunk in chunks:
        levels = _magnitudes(chunk).sub_(low).mul_(top).div_(span).sub_(0.5).ceil_().clamp_(0, top)
        fields = levels.to(torch.int32) | (_negative(chunk).to(torch.int32) << (bits - 1))
        code.append(fields.to(torch.uint8 if bits == 8 else torch.uint16).view(torch.uint8))
    return torch.cat(code)


def _magnitudes(chunk: Tensor) -> Tensor:
    return chunk.abs().double().clamp_(max=_LARGEST)


def _from_grid(scales: Tensor, fields: Tensor, bits: int) -> Tensor:
    top = (1 << (bits - 1)) - 1
    low, high = scales.clone().view(torch.float32).double().unbind()
    found = fields.clone().view(torch.uint8 if bits == 8 else torch.uint16).to(torch.int32)
    magnitudes = ((found & top).double().mul_(divided_(high - low, top)).add_(low)).float()
    return torch.where(found > top, -magnitudes, magnitudes)


def _rounded_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest numbers of a type that are not above these: comparisons stay exact."""
    near = values.to(dtype)
    below = near.nextafter(torch.full_like(near, -torch.inf))
    return torch.where(near.double() > values, below, near)


def _packed(fields: Tensor, bits: int) -> Tensor:
    """Return fields as bytes, the first in the lowest bits; the last byte is filled with zeros."""
    if bits == 1 and fields.is_cpu:
        return torch.from_numpy(np.packbits(fields.numpy(), bitorder="little"))
    whole = torch.nn.functional.pad(fields, (0, -fields.numel() % (8 // bits)))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device)
    return (whole.view(-1, 8 // bits).view(torch.uint8) << shifts).sum(1, dtype=torch.uint8)
