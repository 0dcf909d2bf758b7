"""Adagrad with a proximal step for L1 and L2 penalties."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.clip import Clip
from thinwire.core.decay import Regularizer
from thinwire.optim.groups import Exclusion
from thinwire.optim.rowwise import RowwiseOptimizer

__all__ = ["ProximalAdagrad"]


def proximal_adagrad_(
    param: Tensor, grad: Tensor, accumulator: Tensor, *, lr: float, l1: float, l2: float
) -> None:
    """Changes `param` and `accumulator`: one update, per element.

    a <- a + g^2; e = lr/sqrt(a); w = p - e g; p <- sign(w) max(|w| - e l1, 0)/(1 + e l2). Where a
    is 0, p stays.

    Args:
        param: Any shape.
        grad: Same shape and type, read only.
        accumulator: a.
        lr: >= 0.
        l1: >= 0.
        l2: >= 0.
    """
    accumulator.addcmul_(grad, grad)
    rates = lr / accumulator.sqrt()
    moved = param - rates * grad
    shrunk = moved.sign() * (moved.abs() - rates * l1).clamp_(min=0) / (1 + rates * l2)
    param.copy_(torch.where(accumulator == 0, param, shrunk))


class ProximalAdagrad(RowwiseOptimizer):
    """Adagrad whose L1 and L2 penalties are applied exactly after each step, which gives true
    zeros.

    Per element, with accumulator a (from initial_accumulator)::

        a <- a + g^2
        e = lr/sqrt(a)
        w = p - e g
        p = sign(w) max(|w| - e l1, 0)/(1 + e l2)

    Where a is still 0 the element stays as it is.

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
        grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`.
        regularizer: `L1Decay` or `L2Decay`, through the gradient; not the l1 and l2 of the method.
        exclude_from_weight_decay: Glob patterns over names, or a predicate (name, parameter) ->
            bool.
        maximize: Go up instead of down.
        foreach: Accepted; there is one path.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: Duchi and Singer, JMLR 2009 (forward-backward splitting). Differs: MindSpore's
    documentation multiplies l1 and l2 by lr, its kernels by lr/sqrt(a); here it is the kernels'
    form.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        *,
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
        for key in ("l1", "l2", "initial_accumulator"):
            check.real(key, values[key], at_least=0)

    def _buffers(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"accumulator": self._buffer(param, "accumulator", group["initial_accumulator"])}

    def _apply(
        self,
        param: Tensor,
        grad: Tensor,
        buffers: dict[str, Tensor],
        group: dict[str, Any],
        rate: float,
        step: int,
    ) -> None:
        proximal_adagrad_(param, grad, **buffers, lr=rate, l1=group["l1"], l2=group["l2"])
