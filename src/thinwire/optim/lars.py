"""LARS: SGD with momentum whose rate is scaled per tensor by the ratio of parameter to gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire import _validate as check
from thinwire.core.clip import Clip
from thinwire.core.decay import Regularizer
from thinwire.core.lars import LarsRule, lars_, lars_list_
from thinwire.core.lists import TensorList
from thinwire.core.trust_ratio import TrustRule
from thinwire.optim.base import ParamFacts
from thinwire.optim.groups import Exclusion
from thinwire.optim.layerwise import LayerwiseOptimizer
from thinwire.optim.own import widened
from thinwire.optim.two_phase import ParamGrad

__all__ = ["Lars"]


class Lars(LayerwiseOptimizer):
    """LARS, for training with large batches.

    Per tensor::

        L = lr trust_coefficient ||p|| / (||g|| + weight_decay ||p|| + eps),
            or lr where weight_decay or one of the norms is 0
        d = L (g + weight_decay p)
        b <- momentum b + d
        p <- p - b, or p <- p - (d + momentum b) with Nesterov

    **State** per parameter: `momentum_buffer` b, where there is momentum, float32 (float64 for
    float64 parameters). The rate is inside b: a change of lr acts on new terms only.
    **Communication**: none, but for one small reduction per update where parameters are sharded.
    **Failure**: an error in the arguments of an update comes before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        momentum: >= 0.
        trust_coefficient: > 0, larger takes longer steps.
        weight_decay: Inside the method's own formula, >= 0; 0 also switches the trust ratio off.
        eps: Added to the denominator, >= 0.
        nesterov: Look one step ahead; needs momentum.
        exclude_from_weight_decay: Glob patterns over names, or a predicate (name, parameter) ->
            bool. Excluded parameters have neither decay nor trust ratio: plain momentum at lr.
        grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`.
        regularizer: `L1Decay` or `L2Decay`, added to g before, on top of weight_decay.
        maximize: Go up instead of down.
        foreach: Work on lists of tensors (the default), or on one after the other if False; the
            numbers are the same.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.
        RuntimeError: In an update: a sparse gradient.

    Source: You, Gitman and Ginsburg, 2017, arXiv 1708.03888. Differs: Nesterov is new; MindSpore's
    `LARS` wraps another optimizer, whose momentum does not contain the rate.
    """

    _loops = "lars"

    def __init__(
        self,
        params: Any,
        lr: Any,
        momentum: float = 0.9,
        *,
        trust_coefficient: float = 1e-3,
        weight_decay: float = 5e-4,
        eps: float = 0.0,
        nesterov: bool = False,
        exclude_from_weight_decay: Exclusion = None,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            {
                "momentum": momentum,
                "trust_coefficient": trust_coefficient,
                "weight_decay": weight_decay,
                "eps": eps,
                "nesterov": nesterov,
                "maximize": maximize,
                "foreach": foreach,
            },
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        momentum = check.real("momentum", values["momentum"], at_least=0)
        check.real("trust_coefficient", values["trust_coefficient"], above=0)
        check.real("eps", values["eps"], at_least=0)
        if check.boolean("nesterov", values["nesterov"]) and momentum == 0:
            raise ValueError(
                "nesterov needs momentum > 0, got momentum=0; set nesterov=False or give a momentum"
            )

    def _coupled_decay(self, facts: ParamFacts) -> float:
        return 0.0

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        momentum = group["momentum"]
        for run in self._runs(group, pairs):
            trust = TrustRule(group["trust_coefficient"], run.weight_decay, group["eps"])
            rule = LarsRule(rate, momentum, group["nesterov"], trust)
            velocities = (
                [self._buffer(p, "momentum_buffer") for p in run.params] if momentum else None
            )
            with widened(run.params) as work:
                if run.contiguous:
                    ratios: TensorList = lars_list_(work, run.grads, velocities, rule)
                else:
                    each = velocities if velocities is not None else [None] * len(work)
                    ratios = [
                        lars_(p, g, b, rule) for p, g, b in zip(work, run.grads, each, strict=True)
                    ]
            self._remember(run.params, ratios)
