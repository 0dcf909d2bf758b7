"""LARS and LAMB, which scale the update of each tensor by its norm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.layerwise import lamb_, lamb_list_, lars_, lars_list_
from thinwire.core.tensors import TensorList, state_dtype, widened
from thinwire.kernels.rules import LambRule, LarsRule, TrustRule
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.groups import check_betas, check_nesterov
from thinwire.optim.pairs import ParamGrad

_ADVICE = 'write a single pattern as ("*.bias",)'


@check.by_name
@dataclass(frozen=True)
class LARS:
    """Replace an SGD by `thinwire.optim.Lars`, which takes over its rate, momentum, clipping and
    groups.

    >>> import thinwire as tw
    >>> strategy = tw.DistributedStrategy(lars=tw.LARS(exclude_from_weight_decay=("*.bias",)))

    Attributes:
        lars_coeff: The trust coefficient, > 0.
        lars_weight_decay: Weight decay, >= 0.
        epsilon: Added to the denominator of the trust ratio, >= 0.
        exclude_from_weight_decay: Glob patterns over parameter names.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: You et al., 2017, arXiv 1708.03888.
    """

    lars_coeff: float = 0.001
    lars_weight_decay: float = 0.0005
    epsilon: float = 0.0
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "lars_coeff", above=0)
        check.set_fields(self, check.real, "lars_weight_decay", "epsilon", at_least=0)
        check.set_fields(self, check.words, "exclude_from_weight_decay", advice=_ADVICE)


@check.by_name
@dataclass(frozen=True)
class LAMB:
    """Replace an Adam by `thinwire.optim.Lamb`, which takes over its rate, betas, clipping and
    groups.

    >>> import thinwire as tw
    >>> strategy = tw.DistributedStrategy(lamb=tw.LAMB(lamb_weight_decay=0.01))

    Attributes:
        lamb_weight_decay: Weight decay, >= 0.
        exclude_from_weight_decay: Glob patterns over parameter names.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: You et al., 2020, arXiv 1904.00962.
    """

    lamb_weight_decay: float = 0.01
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "lamb_weight_decay", at_least=0)
        check.set_fields(self, check.words, "exclude_from_weight_decay", advice=_ADVICE)


class Run(NamedTuple):
    """Tensors that one call can update together."""

    params: list[Tensor]
    grads: list[Tensor]
    weight_decay: float
    step: int
    """Number of this update for these parameters, from 1; 0 where the method does not count."""
    contiguous: bool
    """True if torch's list operations and fused kernels take these tensors."""


def smallest(optimizer: CommonOptimizer) -> list[list[Tensor]]:
    """Return small tensors on the CPU for each type of the parameters there.

    An update of them compiles the loops of the method.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    types = {state_dtype(param) for param in params if param.is_cpu}
    return [list(torch.ones(4, 1, dtype=dtype, device="cpu").unbind()) for dtype in types]


def trust_ratios(optimizer: CommonOptimizer) -> dict[str | Tensor, float]:
    """Return the trust ratio of every parameter in the last update; 1 where none is applied.

    Returns:
        By name, or by parameter where there are no names; empty before the first update. This call
        waits for the device; the update does not.
    """
    ratios = optimizer._ratios or {}
    records = optimizer._common.records
    return {records[param].name or param: float(ratio) for param, ratio in ratios.items()}


def update_runs_(
    optimizer: CommonOptimizer,
    group: dict[str, Any],
    pairs: Sequence[ParamGrad],
    update_: Callable[[Run, list[Tensor]], TensorList],
    *,
    count: bool,
) -> None:
    """Update the parameters of `pairs` in place, in runs of one device, type, decay and count."""
    kinds: dict[tuple[Any, ...], Run] = {}
    steps = optimizer._counted([param for param, _ in pairs]) if count else [0] * len(pairs)
    for i, ((param, grad), step) in enumerate(zip(pairs, steps, strict=True)):
        if grad.shape != param.shape:  # compiled loops trust the shape
            raise RuntimeError(
                f"the gradient of {optimizer._label(param)} has shape "
                f"{tuple(grad.shape)} and the parameter {tuple(param.shape)}: run the backward "
                "pass again"
            )
        decay = optimizer._facts(param).weight_decay
        fast = (param.is_cpu or param.is_cuda) and param.is_contiguous() and grad.is_contiguous()
        alone = i if group["foreach"] is False else None
        key = (param.device, param.dtype, type(param), decay, step, fast, alone)
        run = kinds.setdefault(key, Run([], [], decay, step, fast))
        run.params.append(param)
        run.grads.append(grad)
    assert optimizer._ratios is not None, "ratios come from updates"
    for run in kinds.values():
        with widened(run.params) as wide:
            ratios = update_(run, wide)
        optimizer._ratios.update(zip(run.params, ratios, strict=True))


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
            velocities = [self._buffer_of(p, "momentum_buffer") for p in run.params if momentum]
            if run.contiguous:
                return lars_list_(params, run.grads, velocities or None, rule)
            buffers: Sequence[Tensor | None] = velocities or [None] * len(params)
            tensors = zip(params, run.grads, buffers, strict=True)
            return [lars_(p, grad, velocity, rule) for p, grad, velocity in tensors]

        update_runs_(self, group, pairs, update_, count=False)


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
        values = {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_clip": trust_clip,
        }
        self._construct(params, lr, values, common)

    def compile_loops(self) -> None:
        """Compile the loop of an update."""
        rule = LambRule(0.0, 0.0, 0.0, 1.0, 0.0, 1, TrustRule())
        for p, grad, exp_avg, exp_avg_sq in smallest(self):
            lamb_list_([p], [grad], [exp_avg], [exp_avg_sq], rule)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check_betas(values)
        check.real("eps", values["eps"], above=0)
        trust_clip = values["trust_clip"]
        if trust_clip is None:
            return
        if not isinstance(trust_clip, tuple | list) or len(trust_clip) != 2:
            raise TypeError(f"trust_clip must be None or two numbers (lo, hi), got {trust_clip!r}")
        low = check.real("trust_clip[0]", trust_clip[0], at_least=0)
        high = check.real("trust_clip[1]", trust_clip[1], above=0, finite=False)
        if low > high:
            raise ValueError(f"trust_clip must be (lo, hi) with lo <= hi, got {trust_clip!r}")

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        beta1, beta2 = group["betas"]
        trust = TrustRule(1.0, 0.0, 0.0, *(group["trust_clip"] or ()))

        def update_(run: Run, params: list[Tensor]) -> TensorList:
            rule = LambRule(rate, beta1, beta2, group["eps"], run.weight_decay, run.step, trust)
            exp_avgs = [self._buffer_of(p, "exp_avg") for p in run.params]
            exp_avg_sqs = [self._buffer_of(p, "exp_avg_sq") for p in run.params]
            if run.contiguous:
                return lamb_list_(params, run.grads, exp_avgs, exp_avg_sqs, rule)
            tensors = zip(params, run.grads, exp_avgs, exp_avg_sqs, strict=True)
            return [lamb_(*row, rule) for row in tensors]

        update_runs_(self, group, pairs, update_, count=True)
