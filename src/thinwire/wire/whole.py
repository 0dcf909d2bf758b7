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

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire._devices import has_float64, uploaded, with_float64
from thinwire.kernels.reference import divided_
from thinwire.layout.message import SCALE_BYTES, SCALE_COUNT
from thinwire.wire.bucket import (
    CHUNK,
    Part,
    Several,
    apart,
    padded,
    side_by_side,
)

_CPU = torch.device("cpu")
_LARGEST = torch.finfo(torch.float32).max


def encode_whole(chunks: Iterable[Tensor], bits: int, numels: Sequence[int] = ()) -> Tensor:
    """Return the code of a tensor of n entries, uint8, shape (whole_bytes(n, bits),).

    `chunks` are its entries by `spans`, at least one: float32 or float64, finite, one dimension.
    With the `numels` of several tensors the only chunk has them `side_by_side`, and their codes are
    returned end to end.

    >>> code = encode_whole([torch.tensor([1.0, 3.0, -2.0, -4.0])], 1)
    >>> WholeReader(code, 1).part(0, 4)
    tensor([ 2.,  2., -3., -3.])
    """
    chunks = map(with_float64, chunks)
    if len(numels) > 1:
        (flat,) = chunks
        return _encoded_together(flat, bits, numels)
    if bits > 4:
        return _on_grid(list(chunks), bits)
    scales, fields = _signs(chunks) if bits == 1 else _nearest_levels(chunks, bits)
    return torch.cat([scales.view(torch.uint8), *fields])


def _encoded_together(flat: Tensor, bits: int, numels: Sequence[int]) -> Tensor:
    if bits > 4:
        return torch.cat([_on_grid([part], bits) for part in apart(flat, numels)])
    its = Several(numels, flat.device)
    scales, (fields,) = _signs([flat], its) if bits == 1 else _nearest_levels([flat], bits, its)
    found = []
    at = 0
    for numel, its_scales in zip(numels, scales.view(torch.uint8), strict=True):
        found += [its_scales, fields[at : at + (numel * bits + 7) // 8]]
        at += padded(numel) * bits // 8
    return torch.cat(found)


class WholeReader:
    """Decodes entries of a code on the CPU: the same bits everywhere, finite if the scales are."""

    def __init__(self, code: Tensor, bits: int) -> None:
        begin = scale_bytes(bits)
        self.bits = bits
        self.scales = code[:begin]
        self.fields = code[begin:]

    @cached_property
    def _levels(self) -> Tensor:
        return _known(self.scales.clone(), self.bits)[0]  # a view must be aligned

    @cached_property
    def _table(self) -> NDArray[np.float32]:
        entries: NDArray[np.float32] = self._levels[_fields_of_bytes(self.bits)].numpy()
        return entries

    def part(self, start: int, end: int, device: torch.device = _CPU) -> Tensor:
        """Return the entries [start, end): float32; `start` is at the beginning of a byte."""
        bits = self.bits
        numel = end - start
        fields = self.fields[start * bits // 8 : (end * bits + 7) // 8]
        if bits > 4:
            computes = device if has_float64(device) else _CPU
            scales, fields = (uploaded(x, computes) for x in (self.scales, fields))
            return uploaded(_from_grid(scales, fields, bits), device)
        if device.type != "cpu":
            found = _unpacked(uploaded(fields, device), bits).view(-1)[:numel]
            return uploaded(self._levels, device)[found.int()]
        entries = np.empty((fields.numel(), 8 // bits), np.float32)
        # without "clip" NumPy copies the result once more
        np.take(self._table, fields.numpy(), 0, out=entries, mode="clip")
        return torch.from_numpy(entries).view(-1)[:numel]


def read_part(codes: Sequence[WholeReader], part: Part, device: torch.device) -> Tensor:
    """Return a part from the codes of its tensors."""
    if len(part) == 1:
        return codes[0].part(*part[0][1:], device)
    bits = codes[0].bits
    numels = [numel for _, _, numel in part]
    if bits > 4 or device.type == "cpu":
        pairs = zip(codes, numels, strict=True)
        return side_by_side([code.part(0, numel, device) for code, numel in pairs])
    fields = side_by_side([code.fields for code in codes], bits)
    levels = uploaded(_known(torch.cat([code.scales for code in codes]), bits), device)
    several = Several(numels, device)
    index = several.spread(torch.arange(len(codes), device=device) * levels.shape[1])
    index += _unpacked(uploaded(fields, device), bits).view(-1)
    found = levels.view(-1)[index]
    return found.index_fill_(0, several.between, 0) if several.between.numel() else found


def _known(scales: Tensor, bits: int) -> Tensor:
    """Return the value of each field, one row a tensor."""
    levels = scales.view(torch.float32).view(-1, scale_bytes(bits) // SCALE_BYTES)
    return torch.cat((levels[:, :1], -levels[:, 1:]) if bits == 1 else (levels, -levels), 1)


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


def _count(mask: Tensor, several: Several | None) -> Tensor:
    """Return how many flags are set: float64, shape () or (tensors,)."""
    if several is not None:
        return several.sum(mask)
    if mask.is_cpu:
        count = float(np.count_nonzero(mask.numpy()))
        return torch.tensor(count, dtype=torch.float64, device="cpu")
    return mask.sum().double()


def _sum(values: Tensor, several: Several | None, *, exact: bool = True) -> Tensor:
    """Return the sum of a chunk: float64, shape () or (tensors,)."""
    if several is not None:
        return several.sum(values)
    # a sum in float32 takes a third of the time on a CPU; elsewhere a look at it would wait
    if not exact and values.is_cpu and values.numel() == CHUNK:
        total = values.sum()
        if total.isfinite():
            return total.double()
    return values.sum(dtype=torch.float64)


def _signs(chunks: Iterable[Tensor], several: Several | None = None) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of the entries of each sign, and the packed signs."""
    packed = []
    sums = []
    numel = 0
    for chunk in chunks:
        negative = _negative(chunk)
        packed.append(_packed(negative, 1))
        halves = chunk.clamp_min(0), chunk.clamp_max(0)
        totals = [_sum(half, several, exact=False) for half in halves]
        sums.append(torch.stack([_count(negative, several), *totals]))
        numel += chunk.numel()
    below, upper, lower = torch.stack(sums).sum(0)
    every = numel if several is None else several.numel
    means = [upper / (every - below).clamp(min=1), lower / below.clamp(min=1)]
    return torch.stack(means, -1).abs().clamp(max=_LARGEST).float(), packed


def _nearest_levels(
    chunks: Iterable[Tensor], bits: int, several: Several | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the levels, and the packed signs and numbers of levels."""
    pairs = [(chunk.abs(), _negative(chunk)) for chunk in chunks]
    levels = _levels([magnitudes for magnitudes, _ in pairs], bits - 1, several)
    return levels, [_packed(_fields(*pair, levels, bits, several), bits) for pair in pairs]


def _levels(magnitudes: Sequence[Tensor], depth: int, several: Several | None) -> Tensor:
    """Return the 2^depth means of the parts of the magnitudes, ascending."""
    total = torch.stack([_sum(chunk, several) for chunk in magnitudes]).sum(0)
    zero = torch.zeros_like(total)
    numel = zero + sum(chunk.numel() for chunk in magnitudes)
    numel = numel if several is None else several.numel

    def not_above(edge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the edge, how many entries are not above it, and their sum."""
        # a mean comes from the difference of two sums: an entry that is alone must not be above it
        bound = _rounded_down(edge * (1 + 2.0**-40), magnitudes[0].dtype)
        limit = bound if several is None else several.spread(bound)
        above = torch.stack([_count(_above(chunk, limit), several) for chunk in magnitudes]).sum(0)
        limited = [_sum(chunk.clamp(max=limit), several) for chunk in magnitudes]
        return edge, numel - above, torch.stack(limited).sum(0) - bound.double() * above

    # by edge how many entries are not above it, and their sum
    edges = [(zero, zero, zero), (zero + _LARGEST, numel, total)]
    means = _means_between(edges)
    for _ in range(depth):
        # an edge, the mean of the part after it, the next edge, ...
        inside = map(not_above, means)
        edges = [*chain.from_iterable(zip(edges[:-1], inside, strict=True)), edges[-1]]
        means = _means_between(edges)
    return torch.stack(means, -1).float()


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


def _fields(
    magnitudes: Tensor, negative: Tensor, levels: Tensor, bits: int, several: Several | None
) -> Tensor:
    """Return sign and nearest level of each entry, uint8; the lower of two equally near."""
    middles = (levels[..., 1:].double() + levels[..., :-1].double()) / 2
    found = negative.view(torch.uint8) << (bits - 1)
    for middle in _rounded_down(middles, magnitudes.dtype).unbind(-1):
        found += _above(magnitudes, middle if several is None else several.spread(middle))
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
