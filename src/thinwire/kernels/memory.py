"""Where the entries of tensors are, for loops that read and write addresses."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["bump_versions", "has_address", "is_plain", "share_memory"]

_PLAIN_CLASSES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def has_address(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether its entries of `dtype` stand in the CPU's memory one after the other, where compiled
    loops find them.
    """
    return tensor.is_cpu and is_plain(tensor, dtype)


def is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is a tensor of torch's own classes, contiguous, that owns memory."""
    plain = type(tensor) in _PLAIN_CLASSES and tensor.dtype == dtype
    strided = (
        plain and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
    )
    # a storage that was freed has address 0
    return strided and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def bump_versions(*lists: Sequence[Tensor]) -> None:
    """Tell autograd that loops have written to the addresses of these tensors, so that a graph that
    still needs the old values complains.
    """
    torch.autograd.graph.increment_version([tensor for tensors in lists for tensor in tensors])


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether two of these contiguous tensors overlap."""
    ends = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in tensors
        if tensor.numel()
    )
    return any(following[0] < one[1] for one, following in pairwise(ends))
