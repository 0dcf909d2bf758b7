"""The sum of what several ranks sent, and the step along their mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.checksum import bit_sums
from thinwire.kernels import for_device
from thinwire.kernels.memory import has_address
from thinwire.kernels.reference import divided_, step_along_, summed

__all__ = ["checked_mean_", "divided_", "step_along_list_", "sum_sparse"]

_CACHED = 1 << 19
"""Bytes that stay in a core's own cache while they are read again."""


def sum_sparse(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sum of sparse vectors, added in the order of `parts` starting from zero; the same bits on
    every rank.

    Args:
        parts: At least one (indices, values): shape (j,) each, indices int64 and strictly
            ascending, values float32.
        dtype: float32 or float64, of the sum.

    Returns:
        Positions, int64, strictly ascending, that occur in any part; and their sums in `dtype`.

    Raises:
        ValueError: No parts.
    """
    if not parts:
        raise ValueError("parts is empty; at least one (indices, values) is needed")
    return summed(parts, dtype, for_device(parts[0][0].device).sum_sparse)


def step_along_list_(
    params: Sequence[Tensor],
    parts: Sequence[Sequence[tuple[Tensor, Tensor]]],
    rates: Sequence[float],
    sources: int,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Changes `params`: p <- p - rate * mean, of what the sources sent; in one call where the loops
    are compiled.

    Args:
        params: Any shapes and layouts, on one device.
        parts: Per tensor as for `sum_sparse`, positions in the flat tensor.
        rates: Per tensor.
        sources: What a sum is divided by.
        dtypes: Per tensor in what is computed, float32 or float64.

    Raises:
        ValueError: As in `sum_sparse`.
    """
    alike: dict[tuple[torch.dtype, int], list[int]] = {}
    for place, (param, own, dtype) in enumerate(zip(params, parts, dtypes, strict=True)):
        if param.dtype == dtype and own and has_address(param, dtype) and _have_addresses(own):
            alike.setdefault((dtype, len(own)), []).append(place)
        else:
            step_along_(param, *sum_sparse(own, dtype), rates[place], sources)
    for places in alike.values():
        chosen = [params[i] for i in places], [parts[i] for i in places], [rates[i] for i in places]
        for_device(params[0].device).step_along_list_(*chosen, sources)


def checked_mean_(total: Tensor, count: int, *, bits: bool) -> Tensor:
    """Divides a sum in place, and looks at what comes out while it is still in the cache.

    Args:
        total: Floating-point or complex, one dimension, contiguous.
        count: What it is divided by.
        bits: Whether to read its bits too.

    Returns:
        int64, shape (2,), where `total` is: 1 if the entries add up to a finite number, else 0; and
        a number for the bits of what comes out, which a change of any 64-bit word changes, 0
        without `bits`. No host synchronization.
    """
    length = (
        _CACHED // total.element_size() if total.device.type == "cpu" else max(1, total.numel())
    )
    sums, words = [], []
    for piece in torch.split(total, length) if total.numel() > length else [total]:
        sums.append((piece if count == 1 else piece.div_(count)).sum())
        words += bit_sums([piece]) if bits else []
    finite = (sums[0] if len(sums) == 1 else torch.stack(sums).sum()).isfinite().long()
    if len(words) > 1:
        # odd weights: none loses a bit of a change
        weights = torch.arange(len(words), device=total.device).mul_(2).add_(1)
        words = [(torch.stack(words) * weights).sum()]
    return torch.stack([finite, *(words or [torch.zeros_like(finite)])])


def _have_addresses(parts: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return all(has_address(i, torch.int64) and has_address(x, torch.float32) for i, x in parts)
