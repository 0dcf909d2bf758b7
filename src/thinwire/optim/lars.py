"""LARS: SGD with momentum whose rate is scaled per tensor by the ratio of parameter to gradient."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor

from thinwire import _validate as check
from thinwire.core.lars import lars_, lars_list_
from thinwire.core.tensors import TensorList
from thinwire.kernels.rules import LarsRule, TrustRule
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.layerwise import Run, smallest, trust_ratios, update_runs_
from thinwire.optim.own import buffer_of, check_nesterov
from thinwire.optim.pairs import ParamGrad


class Lars(CommonOptimizer):
    """LARS, for training with large batches.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Lars(model.named_parameters(), lr=0.1, exclude_from_weight_decay=["*bias"])

    Per tensor::

        L = lr trust_coefficient ||p|| / (||g|| + weight_decay ||p|| + eps),
            or lr where weight_decay or one of the norms is 0
        d = L (g + weight_decay p)
        b <- momentum b + d
        p <- p - b, or p <- p - (d + momentum b) with Nesterov

    **State** per parameter: `momentum_buffer` b, where there is momentum, float32 (float64 for
    float64 parameters). The rate is inside b: a change of lr acts on new terms only.
    **Communication**: none, except one small reduction per update where parameters are sharded.
    **Failure**: an error in the arguments of an update comes before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        momentum: >= 0.
        trust_coefficient: > 0, larger takes longer steps.
        weight_decay: Inside the method's own formula, >= 0; 0 also switches the trust ratio off.
        eps: Added to the denominator, >= 0.
        nesterov: True for Nesterov momentum; needs momentum.
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`, where
            excluded parameters have neither decay nor trust ratio: plain momentum at lr; `maximize`
            to maximize the objective; `foreach`, False to take one tensor after the other, with the
            same numbers.

    Raises:
        TypeError, ValueError: As in `SGD`; a complex parameter.
        RuntimeError: In an update: a sparse gradient.

    Source: You, Gitman and Ginsburg, 2017, arXiv 1708.03888. Differs: Nesterov is new; MindSpore's
    `LARS` wraps another optimizer, whose momentum does not contain the rate.
    """

    _takes_complex = False
    _decay_inside = True
    trust_ratios = trust_ratios

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
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {
            "momentum": momentum,
            "trust_coefficient": trust_coefficient,
            "weight_decay": weight_decay,
            "eps": eps,
            "nesterov": nesterov,
        }
        self._construct(params, lr, values, common)

    def compile_loops(self) -> None:
        """Compile the loop of an update."""
        for p, grad, velocity, _ in smallest(self):
            lars_list_([p], [grad], [velocity], LarsRule(0.0, 0.0, False, TrustRule()))

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check.real("momentum", values["momentum"], at_least=0)
        check.real("trust_coefficient", values["trust_coefficient"], above=0)
        check.real("eps", values["eps"], at_least=0)
        check_nesterov(values)

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        momentum = group["momentum"]

        def update_(run: Run, params: list[Tensor]) -> TensorList:
            trust = TrustRule(group["trust_coefficient"], run.weight_decay, group["eps"])
            rule = LarsRule(rate, momentum, group["nesterov"], trust)
            velocities = [buffer_of(self, p, "momentum_buffer") for p in run.params if momentum]
            if run.contiguous:
                return lars_list_(params, run.grads, velocities or None, rule)
            buffers: Sequence[Tensor | None] = velocities or [None] * len(params)
            tensors = zip(params, run.grads, buffers, strict=True)
            return [lars_(p, grad, velocity, rule) for p, grad, velocity in tensors]

        update_runs_(self, group, pairs, update_, count=False)
