"""Which entries of a tensor are sent: how many, and which are the largest."""

from torch import Tensor

from thinwire.kernels import for_device

__all__ = ["count_sent", "top_k"]


def count_sent(numel: int, sparsity: float) -> int:
    """Number of entries that are sent: max(1, round(numel * (1 - sparsity))).

    Args:
        numel: Entries of the tensor, at least 1.
        sparsity: Fraction that is not sent, in [0, 1).

    Returns:
        Between 1 and `numel`; float64 arithmetic and Python's `round` (halves to even).

    Raises:
        ValueError: An argument is out of its range.

    Source: arXiv 1712.01887. Differs: rounded instead of truncated, at least one.
    """
    if numel < 1:
        raise ValueError(f"numel is {numel}; it must be at least 1")
    if not 0 <= sparsity < 1:
        raise ValueError(
            f"sparsity is {sparsity}; it must be in [0, 1), the fraction that is not sent"
        )
    return max(1, round(numel * (1 - sparsity)))


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
