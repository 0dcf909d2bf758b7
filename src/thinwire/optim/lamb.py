"""LAMB: Adam's direction with decay, scaled per tensor to the norm of the parameter."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor

from thinwire import _validate as check
from thinwire.core.lamb import lamb_, lamb_list_
from thinwire.core.tensors import TensorList
from thinwire.kernels.rules import LambRule, TrustRule
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.layerwise import Run, smallest, trust_ratios, update_runs_
from thinwire.optim.own import buffer_of, check_betas
from thinwire.optim.pairs import ParamGrad


class Lamb(CommonOptimizer):
    """LAMB, for training with large batches.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Lamb(model.named_parameters(), lr=1e-3, exclude_from_weight_decay=["*bias"])

    Per tensor, with t counted from 1::

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        m^ = m/(1 - b1^t);  v^ = v/(1 - b2^t)
        r = m^/(sqrt(v^) + eps) + weight_decay p
        T = ||p||/||r||, or 1 where one of the two is 0
        p <- p - lr T r

    **State** per parameter: `step` t, `exp_avg` m and `exp_avg_sq` v, float32 (float64 for float64
    parameters). **Communication**: none, except one small reduction per update where parameters are
    sharded. **Failure**: an error in the arguments of an update comes before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        betas: Decay of the two moments, in [0, 1).
        eps: Added to the root of the second moment, > 0.
        weight_decay: Inside the method's own formula, >= 0.
        trust_clip: None, or (lo, hi) to limit ||p||/||r||; the 1 for zero norms is not limited.
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`, where
            excluded parameters keep their trust ratio; `maximize` to maximize the objective;
            `foreach`, False to take one tensor after the other, with the same numbers.

    Raises:
        TypeError, ValueError: As in `SGD`; a complex parameter.
        RuntimeError: In an update: a sparse gradient.

    Source: You et al., 2020, arXiv 1904.00962, algorithm 2. Differs: no bound on ||p|| by default
    (MindSpore: `trust_clip=(0, 10)`); the formula in Paddle's documentation divides by b^t, which
    its code does not.
    """

    _takes_complex = False
    _decay_inside = True
    trust_ratios = trust_ratios

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        trust_clip: tuple[float, float] | None = None,
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._construct(params, lr, {**values, "trust_clip": trust_clip}, common)

    def compile_loops(self) -> None:
        """Compile the loop of an update."""
        rule = LambRule(0.0, 0.0, 0.0, 1.0, 0.0, 1, TrustRule())
        for p, grad, exp_avg, exp_avg_sq in smallest(self):
            lamb_list_([p], [grad], [exp_avg], [exp_avg_sq], rule)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check_betas(values)
        check.real("eps", values["eps"], above=0)
        _check_trust_clip(values["trust_clip"])

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        beta1, beta2 = group["betas"]
        trust = TrustRule(1.0, 0.0, 0.0, *(group["trust_clip"] or ()))

        def update_(run: Run, params: list[Tensor]) -> TensorList:
            rule = LambRule(rate, beta1, beta2, group["eps"], run.weight_decay, run.step, trust)
            exp_avgs = [buffer_of(self, p, "exp_avg") for p in run.params]
            exp_avg_sqs = [buffer_of(self, p, "exp_avg_sq") for p in run.params]
            if run.contiguous:
                return lamb_list_(params, run.grads, exp_avgs, exp_avg_sqs, rule)
            tensors = zip(params, run.grads, exp_avgs, exp_avg_sqs, strict=True)
            return [lamb_(*row, rule) for row in tensors]

        update_runs_(self, group, pairs, update_, count=True)


def _check_trust_clip(trust_clip: Any) -> None:
    if trust_clip is None:
        return
    if not isinstance(trust_clip, tuple | list) or len(trust_clip) != 2:
        raise TypeError(f"trust_clip must be None or two numbers (lo, hi), got {trust_clip!r}")
    low = check.real("trust_clip[0]", trust_clip[0], at_least=0)
    high = check.real("trust_clip[1]", trust_clip[1], above=0, finite=False)
    if low > high:
        raise ValueError(f"trust_clip must be (lo, hi) with lo <= hi, got {trust_clip!r}")
