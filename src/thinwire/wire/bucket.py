"""A bucket: tensors that are computed together, small ones in one buffer and large ones in parts.

A call for each of a hundred small tensors costs more than their entries do, above all on a GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from thinwire._devices import uploaded

CHUNK = 1 << 17
"""Entries that stay in a core's cache between two passes; whole bytes at any number of bits."""
_PART = 1 << 22  # on other devices, which hold some tensors of this size at a time
_ALIGNED = 8
"""Entries of which each tensor in a buffer has a multiple: whole bytes in any code."""


def spans(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield starts and ends of the parts in which a tensor is best read and written."""
    step = CHUNK if device.type == "cpu" else _PART
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


Span = tuple[str, int, int]
"""Entries [start, end) of one tensor, by name."""
Part = Sequence[Span]
"""What one call computes: several whole tensors, or a part of one."""


def runs(
    numels: Mapping[str, int], device: torch.device, kinds: Mapping[str, object]
) -> list[list[Part]]:
    """Return the parts in which tensors are best read, those of one large tensor in one list.

    Small tensors of one kind that follow each other are one part. A tensor of the kind None is a
    part of its own.
    """
    found: list[list[Part]] = []
    most = CHUNK if device.type == "cpu" else _PART
    room = 0
    kind = None
    together: list[Span] = []
    for name, numel in numels.items():
        if kinds[name] is None or numel >= most:
            cuts = [(0, numel)] if kinds[name] is None else spans(numel, device)
            found.append([[(name, *cut)] for cut in cuts])
            room = 0
            continue
        if numel > room or kinds[name] != kind:
            together = []
            room = most
            kind = kinds[name]
            found.append([together])
        together.append((name, 0, numel))
        room -= numel
    return found


def side_by_side(tensors: Sequence[Tensor], multiple: int = _ALIGNED) -> Tensor:
    """Return tensors of one dimension in one buffer, each with zeros up to a `multiple` of entries;
    a single one as it is.
    """
    if len(tensors) == 1:
        return tensors[0]
    pieces = []
    for tensor in tensors:
        pieces.append(tensor)
        if rest := -tensor.numel() % multiple:
            pieces.append(tensor.new_zeros(rest))
    return torch.cat(pieces)


def apart(flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """Return the tensors that `side_by_side` has joined, as views."""
    if len(numels) == 1:
        return [flat]
    parts = torch.split(flat, [padded(numel) for numel in numels])
    return [part[:numel] for part, numel in zip(parts, numels, strict=True)]


def padded(numel: int) -> int:
    """Return the entries of a buffer that a tensor takes."""
    return numel + -numel % _ALIGNED


class Several:
    """Several tensors that are `side_by_side`: sums of each, and a value for each entry."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.numel, self._ends, self._room, self.between = _offsets(tuple(numels), device)
        self._numels = numels

    @cached_property
    def _which(self) -> Tensor:
        """Number of the tensor of each entry."""
        entries = torch.arange(sum(map(padded, self._numels)), device=self._ends.device)
        return torch.bucketize(entries, self._ends, right=True, out_int32=True)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums: float64, shape (tensors,)."""
        if values.is_cpu:
            parts = apart(values, self._numels)
            return torch.stack([part.sum(dtype=torch.float64) for part in parts])
        # "unsafe" leaves out a check that would wait for the device
        return torch.segment_reduce(values.double(), "sum", lengths=self._room, unsafe=True)

    def spread(self, values: Tensor) -> Tensor:
        """Return for each entry the value of its tensor."""
        return values.index_select(0, self._which)


@lru_cache(maxsize=64)
def _offsets(numels: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Return the entries of each tensor, float64; its end and its room; all positions between."""
    own = torch.tensor(numels, device="cpu")
    room = own + -own % _ALIGNED
    ends = room.cumsum(0)
    between = [
        torch.arange(*cut, device="cpu") for cut in zip(ends - room + own, ends, strict=True)
    ]
    return [uploaded(found, device) for found in (own, ends, room, torch.cat(between))]
