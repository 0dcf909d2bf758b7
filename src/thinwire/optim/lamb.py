"""LAMB: Adam's direction with decay, scaled per tensor to the norm of the parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire import _validate as check
from thinwire.core.clip import Clip
from thinwire.core.decay import Regularizer
from thinwire.core.lamb import LambRule, lamb_, lamb_list_
from thinwire.core.lists import TensorList
from thinwire.core.trust_ratio import TrustRule
from thinwire.optim.base import ParamFacts
from thinwire.optim.groups import Exclusion
from thinwire.optim.layerwise import LayerwiseOptimizer
from thinwire.optim.own import check_betas, widened
from thinwire.optim.two_phase import ParamGrad

__all__ = ["Lamb"]


class Lamb(LayerwiseOptimizer):
    """LAMB, for training with large batches.

    Per tensor, with t counted from 1::

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        m^ = m/(1 - b1^t);  v^ = v/(1 - b2^t)
        r = m^/(sqrt(v^) + eps) + weight_decay p
        T = ||p||/||r||, or 1 where one of the two is 0
        p <- p - lr T r

    **State** per parameter: `step` t, `exp_avg` m and `exp_avg_sq` v, float32 (float64 for float64
    parameters). **Communication**: none, but for one small reduction per update where parameters
    are sharded. **Failure**: an error in the arguments of an update comes before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        betas: Decay of the two moments, in [0, 1).
        eps: Added to the root of the second moment, > 0.
        weight_decay: Inside the method's own formula, >= 0.
        exclude_from_weight_decay: Glob patterns over names, or a predicate (name, parameter) ->
            bool. Excluded parameters keep their trust ratio.
        trust_clip: None, or (lo, hi) to limit ||p||/||r||; the 1 for zero norms is not limited.
        grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`; none is implied.
        regularizer: `L1Decay` or `L2Decay`, through the gradient.
        maximize: Go up instead of down.
        foreach: Work on lists of tensors (the default), or on one after the other if False; the
            numbers are the same.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.
        RuntimeError: In an update: a sparse gradient.

    Source: You et al., 2020, arXiv 1904.00962, algorithm 2. Differs: no bound on ||p|| by default
    (MindSpore: `trust_clip=(0, 10)`); the formula in Paddle's documentation divides by b^t, which
    its code does not.
    """

    _loops = "lamb"

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        exclude_from_weight_decay: Exclusion = None,
        trust_clip: tuple[float, float] | None = None,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
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
                "trust_clip": trust_clip,
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
        _check_trust_clip(values["trust_clip"])

    def _coupled_decay(self, facts: ParamFacts) -> float:
        return 0.0

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        beta1, beta2 = group["betas"]
        trust = TrustRule(1.0, 0.0, 0.0, *(group["trust_clip"] or ()))
        for run in self._runs(group, pairs, counted=True):
            rule = LambRule(rate, beta1, beta2, group["eps"], run.weight_decay, run.step, trust)
            exp_avgs = [self._buffer(p, "exp_avg") for p in run.params]
            exp_avg_sqs = [self._buffer(p, "exp_avg_sq") for p in run.params]
            with widened(run.params) as work:
                if run.contiguous:
                    ratios: TensorList = lamb_list_(work, run.grads, exp_avgs, exp_avg_sqs, rule)
                else:
                    tensors = zip(work, run.grads, exp_avgs, exp_avg_sqs, strict=True)
                    ratios = [lamb_(*each, rule) for each in tensors]
            self._remember(run.params, ratios)


def _check_trust_clip(trust_clip: Any) -> None:
    if trust_clip is None:
        return
    if not isinstance(trust_clip, tuple | list) or len(trust_clip) != 2:
        raise TypeError(f"trust_clip must be None or two numbers (lo, hi), got {trust_clip!r}")
    low = check.real("trust_clip[0]", trust_clip[0], at_least=0)
    high = check.real("trust_clip[1]", trust_clip[1], above=0, finite=False)
    if low > high:
        raise ValueError(f"trust_clip must be (lo, hi) with lo <= hi, got {trust_clip!r}")
