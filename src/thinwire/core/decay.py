"""Weight decay and regularizers that act through the gradient: two configs and one pure function.

Source: Paddle, regularizer.py (names).
"""

from dataclasses import dataclass

from torch import Tensor

from thinwire import _validate as check
from thinwire.core.rows import entries_of, values_of, with_values

__all__ = ["L1Decay", "L2Decay", "Regularizer", "decayed"]


@dataclass(frozen=True)
class L1Decay:
    """Adds c * sign(p) to the gradient, with sign(0) = 0.

    Attributes:
        c: Coefficient, >= 0, in the gradient's unit.
    """

    c: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "c", check.real("c", self.c, at_least=0))


@dataclass(frozen=True)
class L2Decay:
    """Adds c * p to the gradient.

    Attributes:
        c: Coefficient, >= 0, in the gradient's unit per unit of the parameter.
    """

    c: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "c", check.real("c", self.c, at_least=0))


Regularizer = L1Decay | L2Decay


def decayed(
    grad: Tensor,
    param: Tensor,
    *,
    weight_decay: float = 0.0,
    regularizer: Regularizer | None = None,
) -> Tensor:
    """The gradient with decay and regularizer: g + wd * p, then + c * p or + c * sign(p).

    Args:
        grad: Any shape, dense or coalesced sparse; read only.
        param: Same shape, read only; converted to the gradient's dtype. Where the gradient is
            sparse, only the entries that it stores take part.
        weight_decay: wd, >= 0; 0 is off.
        regularizer: Added on top of wd; None is off.

    Returns:
        A new tensor like `grad`, or `grad` itself where there is nothing to add.
    """
    strength = regularizer.c if regularizer is not None else 0.0
    if weight_decay == 0 and strength == 0:
        return grad
    present = entries_of(param, grad).to(grad.dtype)
    values = values_of(grad)
    if weight_decay != 0:
        values = values.add(present, alpha=weight_decay)
    if strength != 0:
        values = values.add(
            present.sgn() if isinstance(regularizer, L1Decay) else present, alpha=strength
        )
    return with_values(grad, values)
