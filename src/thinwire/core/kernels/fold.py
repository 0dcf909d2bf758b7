"""What a call over many tensors takes for each of them."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Fold"]


class Fold(NamedTuple):
    """One tensor's gradient, and what it is folded into; see `thinwire.core.feedback` for shapes
    and types.
    """

    grad: Tensor
    residual: Tensor
    momentum_buffer: Tensor | None
    momentum: float
    nesterov: bool
