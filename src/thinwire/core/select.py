"""Which entries of a tensor are sent: how many, and which are the largest."""

from torch import Tensor

from thinwire.kernels import for_device

__all__ = ["top_k"]


def top_k(values: Tensor, k: int) -> Tensor:
    """Positions of the `k` entries of largest magnitude, exactly; of equal magnitudes the lowest
    positions.

    Args:
        values: Shape (n,), floating-point, finite, contiguous; read only.
        k: Between 1 and n.

    Returns:
        Shape (k,), int64, ascending, on `values.device`.

    Raises:
        ValueError: `values` has another shape, or `k` is out of its range.

    Source: arXiv 1712.01887, algorithm 1. Differs: exact, where the paper estimates a threshold
    from a sample.
    """
    if values.dim() != 1:
        raise ValueError(
            f"values has shape {tuple(values.shape)}; one dimension is needed, so flatten it"
        )
    if not 1 <= k <= values.numel():
        raise ValueError(
            f"k is {k}; it must be between 1 and the {values.numel()} entries of values"
        )
    return for_device(values.device).top_k(values, k)
