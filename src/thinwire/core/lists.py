"""Lists of tensors for torch's list operations."""

from collections.abc import Iterator

from torch import Tensor

__all__ = ["TensorList", "cache_sized"]

TensorList = list[Tensor] | tuple[Tensor, ...]
"""What torch's list operations take."""

_CACHED_BYTES = 1 << 21
"""Of tensors that are worked on together on a CPU: what stays in its cache from one operation to
the next."""


def cache_sized(tensors: TensorList) -> Iterator[slice]:
    """Slices of the list that are small enough for the cache on a CPU; elsewhere the whole list."""
    start, size = 0, 0
    for i, tensor in enumerate(tensors):
        size += tensor.numel() * tensor.element_size()
        if (size >= _CACHED_BYTES and tensor.device.type == "cpu") or i == len(tensors) - 1:
            yield slice(start, i + 1)
            start, size = i + 1, 0
