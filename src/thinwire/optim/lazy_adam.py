"""Adam whose row-sparse gradients touch only their rows."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinwire import _validate as check
from thinwire.core.clip import Clip
from thinwire.core.decay import Regularizer
from thinwire.optim.groups import Exclusion
from thinwire.optim.own import check_betas
from thinwire.optim.rowwise import RowwiseOptimizer

__all__ = ["LazyAdam"]


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Changes `param`, `exp_avg` and `exp_avg_sq`: one update of Adam.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, p <- p - lr m^/(sqrt(v^) + eps) with m^ = m/(1
    - b1^t) and v^ = v/(1 - b2^t).

    Args:
        param: Any shape.
        grad: Same shape and type, read only.
        exp_avg: m.
        exp_avg_sq: v.
        step: t, from 1.
        lr: Learning rate.
        betas: b1 and b2, in [0, 1).
        eps: > 0.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))


class LazyAdam(RowwiseOptimizer):
    """Adam for large embeddings: rows without a gradient keep parameter and moments bit for bit.

    With a dense gradient this is Adam in torch's form, m^/(sqrt(v^) + eps) with bias correction and
    coupled decay. With a row-sparse one (COO, sparse_dim 1; duplicates are summed first) only the
    rows present change; decay, regularizer and centralization act on these rows. t is one counter
    per parameter, not per row: it grows in every update in which the parameter has a gradient, an
    empty one too.

    **State** per parameter: `step` t, `exp_avg` and `exp_avg_sq`, float32 (float64 for float64
    parameters). **Communication**: none. **Failure**: an error in the arguments of an update comes
    before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        betas: Decay of the two moments, in [0, 1).
        eps: Added to the root of the corrected second moment, > 0.
        weight_decay: Coupled, >= 0.
        grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`.
        regularizer: `L1Decay` or `L2Decay`, through the gradient.
        exclude_from_weight_decay: Glob patterns over names, or a predicate (name, parameter) ->
            bool.
        maximize: Go up instead of down.
        foreach: Accepted; there is one path.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: Kingma and Ba, 2015, arXiv 1412.6980, algorithm 1. Differs: MindSpore's adds eps to the
    root of the uncorrected moment.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
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
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "foreach": foreach,
            },
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check_betas(values)
        check.real("eps", values["eps"], above=0)

    def _buffers(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {key: self._buffer(param, key) for key in ("exp_avg", "exp_avg_sq")}

    def _apply(
        self,
        param: Tensor,
        grad: Tensor,
        buffers: dict[str, Tensor],
        group: dict[str, Any],
        rate: float,
        step: int,
    ) -> None:
        adam_(param, grad, **buffers, step=step, lr=rate, betas=group["betas"], eps=group["eps"])
