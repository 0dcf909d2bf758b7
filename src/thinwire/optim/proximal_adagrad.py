"""Adagrad with a proximal step for L1 and L2 penalties."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.own import update_rows_
from thinwire.optim.pairs import ParamGrad


def proximal_adagrad_(
    param: Tensor, grad: Tensor, accumulator: Tensor, *, lr: float, l1: float, l2: float
) -> None:
    """Update two tensors of one shape and type in place, as `ProximalAdagrad`."""
    accumulator.addcmul_(grad, grad)
    rates = lr / accumulator.sqrt()
    moved = param - rates * grad
    shrunk = moved.sign() * (moved.abs() - rates * l1).clamp_(min=0) / (1 + rates * l2)
    param.copy_(torch.where(accumulator == 0, param, shrunk))


class ProximalAdagrad(CommonOptimizer):
    """Adagrad with L1 and L2 penalties applied exactly after each step, which gives true zeros.

    >>> import torch
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 1e-4]))
    >>> p.grad = torch.zeros(2)
    >>> ProximalAdagrad([p], lr=0.1, l1=0.01).step()
    >>> p[1].item()
    0.0

    Per element, with accumulator a (from initial_accumulator)::

        a <- a + g^2
        e = lr/sqrt(a)
        w = p - e g
        p = sign(w) max(|w| - e l1, 0)/(1 + e l2)

    An element whose a is still 0 does not change.

    **State** per parameter: `step` and `accumulator` a, float32 (float64 for float64 parameters).
    **Communication**: none.
    **Failure**: an error in the arguments of an update comes before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        l1: >= 0.
        l2: >= 0.
        initial_accumulator: >= 0.
        weight_decay: Coupled, >= 0.
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`; `maximize`
            to maximize the objective; `foreach` is accepted and has no effect.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: Duchi and Singer, JMLR 2009 (forward-backward splitting). Differs: MindSpore's
    documentation multiplies l1 and l2 by lr, its kernels by lr/sqrt(a); here it is the kernels'
    form.
    """

    _takes_complex = False
    _takes_rows = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        *,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator: float = 0.1,
        weight_decay: float = 0.0,
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {"l1": l1, "l2": l2, "initial_accumulator": initial_accumulator}
        self._construct(params, lr, {**values, "weight_decay": weight_decay}, common)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        for key in ("l1", "l2", "initial_accumulator"):
            check.real(key, values[key], at_least=0)

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        l1, l2 = group["l1"], group["l2"]

        def update_(param: Tensor, grad: Tensor, _step: int, **state: Tensor) -> None:
            proximal_adagrad_(param, grad, **state, lr=rate, l1=l1, l2=l2)

        update_rows_(self, pairs, {"accumulator": group["initial_accumulator"]}, update_)
