"""FTRL-Proximal: sparse solutions by an exact treatment of the L1 penalty."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.own import update_rows_
from thinwire.optim.pairs import ParamGrad


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
    """Update three tensors of one shape and type in place, by the formula of `Ftrl`."""
    before = accumulator.pow(-lr_power)
    accumulator.addcmul_(grad, grad)
    after = accumulator.pow(-lr_power)
    linear.add_(grad).addcmul_((after - before).div_(lr), param, value=-1)
    denominator = after.div_(lr).add_(2 * l2)
    moved = (linear.sign() * l1 - linear) / denominator
    moved = torch.where(denominator == 0, param, moved)  # g^2 is 0 where g is too small for it
    param.copy_(torch.where(linear.abs() <= l1, torch.zeros_like(param), moved))


class Ftrl(CommonOptimizer):
    """Follow the regularized leader, per coordinate; for sparse linear parts of a model.

    >>> import torch
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([1.0, 1e-3])
    >>> Ftrl([p], lr=0.1, l1=0.5).step()
    >>> p[1].item()  # |z| <= l1
    0.0

    Per element, with q = lr_power, accumulator a (from initial_accumulator) and linear term z (from
    0)::

        a' = a + g^2
        s = (a'^-q - a^-q)/lr
        z <- z + g - s p
        a <- a'
        p = 0 if |z| <= l1, else (sign(z) l1 - z)/(a^-q/lr + 2 l2)

    An element whose gradient has always been 0 becomes 0 in its first dense update, since the
    solution does not depend on the initial p. Row-sparse gradients avoid this: they update only
    their rows.

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
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`; `maximize`
            to maximize the objective; `foreach` is accepted and has no effect.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; in an update, a rate of 0.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: McMahan et al., KDD 2013, algorithm 1. Differs from MindSpore's: schedules and group
    rates are accepted.
    """

    _takes_complex = False
    _takes_rows = True

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
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {"lr_power": lr_power, "l1": l1, "l2": l2}
        start = {"initial_accumulator": initial_accumulator, "weight_decay": weight_decay}
        self._construct(params, lr, {**values, **start}, common)

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

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        q, l1, l2 = group["lr_power"], group["l1"], group["l2"]

        def update_(param: Tensor, grad: Tensor, _step: int, **state: Tensor) -> None:
            ftrl_(param, grad, **state, lr=rate, lr_power=q, l1=l1, l2=l2)

        starts = {"accumulator": group["initial_accumulator"], "linear": 0.0}
        update_rows_(self, pairs, starts, update_)
