"""How far what one rank sent may be larger than what the others sent: the same bits on all ranks,
whatever their number of threads.
"""

import torch
from torch import Tensor

__all__ = ["source_factors", "squared_norms"]


def squared_norms(rows: Tensor) -> Tensor:
    """Sum of the squares in each row, in an order that depends on the shape alone.

    Args:
        rows: Shape (sources, k), k >= 1, float32; read only.

    Returns:
        Shape (sources,), float64, on `rows.device`; no host synchronization.
    """
    squares = rows.double().square()
    while squares.shape[1] > 1:  # elementwise sums: a reduction's order depends on the threads
        squares = torch.nn.functional.pad(squares, (0, squares.shape[1] % 2))
        low, high = squares.chunk(2, dim=1)
        squares = low + high
    return squares[:, 0]


def source_factors(squares: Tensor, times: float) -> Tensor:
    """What each source's values are multiplied by, so that no norm is above `times` the median.

    The median is over the sources whose norm is not 0; of an even number of them it is the lower
    one of the two in the middle. With the mean of the two, no one of two sources could be limited
    at `times` >= 2.

    Args:
        squares: Shape (sources,), float64: squared norms; read only.
        times: >= 1.

    Returns:
        Shape (sources,), float32, in [0, 1], 1 where nothing changes; no host synchronization.
    """
    norms = squares.sqrt()
    ordered = norms.sort().values  # those that sent nothing come first
    some = (norms > 0).sum()
    place = norms.numel() - some + torch.div((some - 1).clamp(min=0), 2, rounding_mode="floor")
    limit = times * ordered.gather(0, place.clamp(max=norms.numel() - 1).view(1))
    return torch.where(norms > limit, limit / norms, 1.0).float()
