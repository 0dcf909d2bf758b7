"""What a training is going to ask of the compiled loops."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["Need", "Work", "needs_of"]

Work: TypeAlias = Literal["sparse", "changes", "codes", "lamb", "lars", "outer"]
"""A sparse exchange of gradients, one of changes of parameters, codes of whole changes, or a
compiled step."""


@dataclass(frozen=True, slots=True)
class Need:
    """One kind of work on tensors of one type on the CPU."""

    work: Work
    """Of which kind."""
    dtype: torch.dtype
    """Of the state that is worked on: float32 or float64; bfloat16 too for sparse exchange."""
    grad_dtype: torch.dtype = torch.float32
    """Of the gradients as the loops read them."""
    param_dtype: torch.dtype = torch.float32
    """Of the parameters that a sparse exchange moves."""
    value_bits: int = 1
    """What a sent value costs."""


def needs_of(
    work: Work,
    params: Iterable[Tensor],
    *,
    state_dtype: torch.dtype | None = None,
    value_bits: int = 1,
) -> frozenset[Need]:
    """What work of this kind on these parameters will call.

    Args:
        work: See `Need`.
        params: The parameters; those on other devices, or of other types than float32, float64 and
            (for a sparse exchange) bfloat16 and float16, need nothing.
        state_dtype: In which a sparse exchange keeps its state; None: float64 for float64
            parameters, else float32.
        value_bits: What a sent value costs.
    """
    needs = set()
    for device, dtype in {(param.device.type, param.dtype) for param in params}:
        if device != "cpu" or not dtype.is_floating_point:
            continue
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if work not in ("sparse", "changes", "codes"):
            needs.add(Need(work, wide))
            continue
        state = wide if wide == torch.float64 else state_dtype or wide
        narrow = dtype == torch.bfloat16 and work == "sparse"
        needs.add(Need(work, state, torch.bfloat16 if narrow else wide, wide, value_bits))
    return frozenset(needs)
