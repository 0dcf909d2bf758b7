"""Sparse gradients as their entries: the few operations that the stages of an update need on both
layouts.

A sparse gradient is a COO tensor here; row-sparse means sparse_dim 1, so that its values are whole
rows of the parameter. Everything expects it coalesced: duplicates are summed.
"""

import torch
from torch import Tensor

__all__ = ["coalesced", "entries_of", "values_of", "with_values"]


def coalesced(grad: Tensor) -> Tensor:
    """`grad` with duplicate entries summed; a dense tensor is returned as it is."""
    return grad.coalesce() if grad.layout is torch.sparse_coo else grad


def values_of(grad: Tensor) -> Tensor:
    """What is stored of `grad`: the tensor itself, or the values of a coalesced sparse one; shares
    memory.
    """
    return grad.values() if grad.layout is torch.sparse_coo else grad


def with_values(grad: Tensor, values: Tensor) -> Tensor:
    """A tensor with the layout and the positions of `grad` and other values."""
    if grad.layout is not torch.sparse_coo:
        return values
    return torch.sparse_coo_tensor(
        grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
    )


def entries_of(param: Tensor, grad: Tensor) -> Tensor:
    """The part of `param` that `grad` stores values for: all of it, or the rows present."""
    return param[tuple(grad.indices())] if grad.layout is torch.sparse_coo else param
