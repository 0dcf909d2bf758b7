"""FTRL-Proximal: sparse solutions by an exact treatment of the L1 penalty."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.clip import Clip
from thinwire.core.decay import Regularizer
from thinwire.optim.groups import Exclusion
from thinwire.optim.rowwise import RowwiseOptimizer

__all__ = ["Ftrl"]


def ftrl_(
    param: Tensor,
    grad: Tensor,
    accumulator: Tensor,
    linear: Tensor,
    *,
    lr: float,
    lr_power: float,
    l1: float,
    l2: float,
) -> None:
    """Changes `param`, `accumulator` and `linear`: one update, per element.

    With q = lr_power: a' = a + g^2; z <- z + g - p (a'^-q - a^-q)/lr; a <- a';
    p <- 0 if |z| <= l1, else (sign(z) l1 - z)/(a^-q/lr + 2 l2).

    Args:
        param: Any shape.
        grad: Same shape and type, read only.
        accumulator: a.
        linear: z.
        lr: > 0.
        lr_power: <= 0.
        l1: >= 0.
        l2: >= 0.
    """
    before = accumulator.pow(-lr_power)
    accumulator.addcmul_(grad, grad)
    after = accumulator.pow(-lr_power)
    linear.add_(grad).addcmul_((after - before).div_(lr), param, value=-1)
    denominator = after.div_(lr).add_(2 * l2)
    moved = (linear.sign() * l1 - linear) / denominator
    moved = torch.where(denominator == 0, param, moved)  # g^2 is 0 where g is too small for it
    param.copy_(torch.where(linear.abs() <= l1, torch.zeros_like(param), moved))


class Ftrl(RowwiseOptimizer):
    """Follow the regularized leader, per coordinate; for sparse linear parts of a model.

    Per element, with q = lr_power, accumulator a (from initial_accumulator) and linear term z (from
    0)::

        a' = a + g^2
        s = (a'^-q - a^-q)/lr
        z <- z + g - s p
        a <- a'
        p = 0 if |z| <= l1, else (sign(z) l1 - z)/(a^-q/lr + 2 l2)

    An element whose gradient has been 0 since the start becomes 0 in its first dense update: that
    is the method, whose solution does not know where p started. Row-sparse gradients touch only
    their rows and so avoid it.

    **State** per parameter: `step`, `accumulator` a and `linear` z, float32 (float64 for float64
    parameters). **Communication**: none. **Failure**: an error in the arguments of an update comes
    before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number > 0, a schedule, or a list with one number for each update.
        lr_power: Exponent of the accumulator, <= 0.
        l1: >= 0.
        l2: >= 0.
        initial_accumulator: >= 0.
        weight_decay: Coupled, >= 0.
        grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`.
        regularizer: `L1Decay` or `L2Decay`, through the gradient; not the l1 and l2 of the method.
        exclude_from_weight_decay: Glob patterns over names, or a predicate (name, parameter) ->
            bool.
        maximize: Go up instead of down.
        foreach: Accepted; there is one path.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; in an update, a rate of 0.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: McMahan et al., KDD 2013, algorithm 1. Differs from MindSpore's: schedules and group
    rates are accepted.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        *,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator: float = 0.1,
        weight_decay: float = 0.0,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: Exclusion = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            {
                "lr_power": lr_power,
                "l1": l1,
                "l2": l2,
                "initial_accumulator": initial_accumulator,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "foreach": foreach,
            },
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check.real("lr_power", values["lr_power"], at_most=0)
        for key in ("l1", "l2", "initial_accumulator"):
            check.real(key, values[key], at_least=0)

    def _check_rate(self, rate: float, where: str) -> None:
        if rate == 0:
            raise ValueError(
                f"{where} must be > 0 for Ftrl, which divides by it, got {rate}; begin the "
                "schedule above 0"
            )

    def _buffers(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {
            "accumulator": self._buffer(param, "accumulator", group["initial_accumulator"]),
            "linear": self._buffer(param, "linear"),
        }

    def _apply(
        self,
        param: Tensor,
        grad: Tensor,
        buffers: dict[str, Tensor],
        group: dict[str, Any],
        rate: float,
        step: int,
    ) -> None:
        ftrl_(
            param,
            grad,
            **buffers,
            lr=rate,
            lr_power=group["lr_power"],
            l1=group["l1"],
            l2=group["l2"],
        )
