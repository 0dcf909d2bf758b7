"""Euclidean norms of whole tensors, on the device, accumulated in float32 or wider.

A parameter sharded over ranks (a DTensor) counts with its whole norm: the shards agree by one
reduction per placement. Such tensors are recognised by their methods, so that nothing here needs to
know ranks.
"""

import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.rows import values_of
from thinwire.core.sharded import is_sharded

__all__ = ["global_norm", "norm", "norms", "norms_over_shards", "whole_norms"]

_HALVES = (torch.float16, torch.bfloat16)


def norm(tensor: Tensor) -> Tensor:
    """Euclidean norm over all entries; a sparse tensor has to be coalesced.

    Returns:
        Shape (), float32 (float64 for double precision), on the tensor's device; no host
        synchronization.
    """
    values = values_of(tensor)
    size: Tensor = torch.linalg.vector_norm(
        values, dtype=torch.float32 if values.dtype in _HALVES else None
    )
    return size


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`norm` of each, with one reduction for all sharded tensors of one mesh and placement."""
    found: list[Tensor] = [norm(tensor) for tensor in tensors]
    if not any(is_sharded(value) for value in found):
        return found
    shards: dict[object, list[int]] = {}
    for i, value in enumerate(found):
        if is_sharded(value):
            key = (getattr(value, "device_mesh"), tuple(getattr(value, "placements")), value.dtype)  # noqa: B009
            shards.setdefault(key, []).append(i)
    for places in shards.values():
        # a DTensor
        whole = torch.stack([found[i] for i in places]).full_tensor()  # type: ignore[attr-defined]
        for i, value in zip(places, whole.unbind(), strict=True):
            found[i] = value
    return found


def whole_norms(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """`norms` of dense tensors that are all sharded or all whole, stacked, by one list operation
    for whole ones.
    """
    sharded = is_sharded(tensors[0])
    return torch.stack(norms(tensors) if sharded else torch._foreach_norm(tensors))


def norms_over_shards(
    tensors: Mapping[str, Tensor], gather: Callable[[bytes, str], list[bytes]]
) -> dict[str, float]:
    """The norm of each tensor of which every rank has a part.

    Args:
        tensors: This rank's parts by name; the same names on all ranks, parts may be empty.
        gather: Gives every rank's bytes in the order of the ranks; takes bytes and an occasion.

    Returns:
        By name, in float64, the same on all ranks.

    Communication: 8 bytes a tensor and rank.
    """
    if not tensors:
        return {}
    found = [norm(tensor) for tensor in tensors.values()]
    squares = torch.stack([each.double().cpu().square() for each in found]).tolist()
    form = struct.Struct(f"<{len(squares)}d")
    answers = [form.unpack(answer) for answer in gather(form.pack(*squares), "norms over shards")]
    totals = (sum(parts) ** 0.5 for parts in zip(*answers, strict=True))
    return dict(zip(tensors, totals, strict=True))


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all entries of all tensors together.

    Args:
        tensors: At least one; any shapes, dtypes and devices.

    Returns:
        Shape (), float32 or wider, on the first tensor's device; no host synchronization.
    """
    parts = norms(tensors)
    return norm(torch.stack([part.to(parts[0].device, _widest(parts)) for part in parts]))


def _widest(parts: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
