"""Adam that updates only the rows present in a row-sparse gradient."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from torch import Tensor

from thinwire import _validate as check
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.own import check_betas, update_rows_
from thinwire.optim.pairs import ParamGrad


def adam_(
    param: Tensor,
    grad: Tensor,
    step: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update `param`, `exp_avg` m and `exp_avg_sq` v in place, of one shape and type, by one step
    of Adam.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, p <- p - lr m^/(sqrt(v^) + eps) with m^ = m/(1
    - b1^t) and v^ = v/(1 - b2^t), where t is `step`, from 1.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))


class LazyAdam(CommonOptimizer):
    """Adam for large embeddings. Rows without a gradient keep parameter and moments bit for bit.

    >>> import torch
    >>> table = torch.nn.Embedding(1000, 8, sparse=True)
    >>> optimizer = LazyAdam(table.parameters(), lr=1e-3)
    >>> table(torch.tensor([3, 7])).sum().backward()
    >>> optimizer.step()  # rows 3 and 7 change

    With a dense gradient this is Adam in torch's form, m^/(sqrt(v^) + eps) with bias correction and
    coupled decay. With a row-sparse one (COO, sparse_dim 1; duplicates are summed first) only the
    rows present change; decay, regularizer and centralization act on these rows. t is one counter
    per parameter, not per row. It grows in every update in which the parameter has a gradient, even
    an empty one.

    **State** per parameter: `step` t, `exp_avg` and `exp_avg_sq`, float32 (float64 for float64
    parameters). **Communication**: none. **Failure**: an error in the arguments of an update comes
    before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        betas: Decay of the two moments, in [0, 1).
        eps: Added to the root of the corrected second moment, > 0.
        weight_decay: Coupled, >= 0.
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`; `maximize`
            to maximize the objective; `foreach` is accepted and has no effect.

    Raises:
        TypeError, ValueError: As in `SGD`; a complex parameter.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: Kingma and Ba, 2015, arXiv 1412.6980, algorithm 1. Differs: MindSpore's adds eps to the
    root of the uncorrected moment.
    """

    _takes_complex = False
    _takes_rows = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._construct(params, lr, values, common)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check_betas(values)
        check.real("eps", values["eps"], above=0)

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        update_ = partial(adam_, lr=rate, betas=group["betas"], eps=group["eps"])
        update_rows_(self, pairs, {"exp_avg": 0.0, "exp_avg_sq": 0.0}, update_)
