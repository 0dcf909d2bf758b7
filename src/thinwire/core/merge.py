"""The sum of what several ranks sent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels import for_device

__all__ = ["sum_sparse"]


def sum_sparse(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sum of sparse vectors, added in the order of `parts` starting from zero; the same bits on every rank.

    Args:
        parts: At least one (indices, values): shape (j,) each, indices int64 and strictly ascending, values float32.
        dtype: float32 or float64, of the sum.

    Returns:
        Positions, int64, strictly ascending, that occur in any part; and their sums in `dtype`.

    Raises:
        ValueError: No parts.
    """
    if not parts:
        raise ValueError("parts is empty; at least one (indices, values) is needed")
    indices, values = map(list, zip(*parts, strict=True))
    return for_device(indices[0].device).sum_sparse(indices, values, dtype)
