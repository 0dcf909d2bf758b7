"""Gradient centralization, a pure function."""

import torch
from torch import Tensor

from thinwire.core.rows import values_of, with_values

__all__ = ["centralized"]


def centralized(grad: Tensor) -> Tensor:
    """The gradient minus its mean over all axes but the first.

    Args:
        grad: Dense, or coalesced and row-sparse, where the rows present are centred; read only.

    Returns:
        A new tensor like `grad`; `grad` itself if it has fewer than two dimensions.

    Raises:
        RuntimeError: A sparse gradient with more than one sparse dimension.

    Source: Yong et al., 2020, arXiv 2004.01461, equation 1. Differs: MindSpore's acts only where
    shape[1] is a multiple of 16; there is no such rule here.
    """
    if grad.ndim < 2:
        return grad
    if grad.layout is torch.sparse_coo and grad.sparse_dim() != 1:
        raise RuntimeError(
            "grad_centralization needs a dense gradient or one with sparse_dim 1, got sparse_dim "
            f"{grad.sparse_dim()}; set grad_centralization to False for this group"
        )
    values = values_of(grad)
    return with_values(grad, values - values.mean(dim=tuple(range(1, values.ndim)), keepdim=True))
