"""Adapter that runs the step of a class of torch on gradients which went through the common
stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.precision import state_dtype
from thinwire.optim.base import CommonOptimizer, ParamFacts
from thinwire.optim.own import check_betas
from thinwire.optim.two_phase import ParamGrad

__all__ = ["TorchOptimizer", "unhooked_step"]


class TorchOptimizer(CommonOptimizer):
    """Base that runs the step of a class of torch on gradients that went through the common stages.

    torch's step reads `p.grad` and `param_groups`; for its duration both hold what the stages made,
    and both are as before when it returns or raises.
    """

    _torch_class: type[torch.optim.Optimizer]
    _wide_state = False
    _numbers = (
        "weight_decay",
        "momentum",
        "dampening",
        "alpha",
        "eps",
        "lr_decay",
        "initial_accumulator_value",
    )

    def __init__(self, *given: Any, **named: Any) -> None:
        # before torch compares them, whose errors name neither argument nor value
        values = signature(self._torch_class).bind(*given, **named).arguments
        self._check_hyperparameters(values.get("defaults", values))
        super().__init__(*given, **named)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        for key in filter(values.__contains__, self._numbers):
            number = check.scalar(key, values[key], at_least=0 if key != "dampening" else None)
            check.real(key, number, below=1 if key == "alpha" else None)
        betas = values.get("betas")
        if "betas" in values and not (
            isinstance(betas, tuple | list) and any(isinstance(beta, Tensor) for beta in betas)
        ):
            check_betas(values)
        if "nesterov" in values and check.boolean("nesterov", values["nesterov"]):
            momentum, dampening = values.get("momentum", 1), values.get("dampening", 0)
            if momentum == 0 or dampening != 0:
                raise ValueError(
                    "nesterov needs a momentum above 0 and no dampening, got "
                    f"momentum={momentum} and dampening={dampening}"
                )

    def _coupled_decay(self, facts: ParamFacts) -> float:
        # torch adds the decay itself, before the update; only what comes between the two takes it
        # over
        takes_over = facts.regularizer is not None or facts.grad_centralization
        return (
            facts.weight_decay
            if takes_over and not facts.group.get("decoupled_weight_decay", False)
            else 0.0
        )

    def _run_update(self, rates: list[float]) -> bool:
        # a GradScaler sets it for fused kernels only
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False
        if self._is_plain():
            unhooked_step(self._torch_class)(self)
            return True
        return bool(super()._run_update(rates))

    def _is_plain(self) -> bool:
        """Whether torch's step on what is there does all that was asked for."""
        places = self._common.places
        return (
            self._given is None
            and self.grad_clip is None
            and all(
                g["regularizer"] is None and not g["grad_centralization"] for g in self.param_groups
            )
            and not any(place.excluded for place in places.values())
            and all(p.requires_grad or p.grad is None for p in places)
        )

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        with (
            self._unscaled(pairs) as unscaled,
            self._as_torch_reads_them(self._processed(unscaled), rates),
        ):
            unhooked_step(self._torch_class)(self)
        return True

    @contextmanager
    def _unscaled(self, pairs: list[ParamGrad]) -> Iterator[list[ParamGrad]]:
        """Divide by the scale of a `GradScaler` that left that to a fused kernel, which is told
        that it is done.
        """
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None:
            yield pairs
            return
        self.grad_scale = None
        try:
            # the scale that a GradScaler begins with, 65,536, is no number of float16
            wide = [(p, g.to(state_dtype(g))) for p, g in pairs]
            yield [(p, g / scale.to(g.device, g.dtype)) for p, g in wide]
        finally:
            self.grad_scale = scale

    @contextmanager
    def _as_torch_reads_them(
        self, pairs: Sequence[ParamGrad], rates: Sequence[float]
    ) -> Iterator[None]:
        groups = self.param_groups
        own_grads = [(p, p.grad) for p, _ in pairs]
        self.param_groups = self._groups_for(pairs, rates)
        try:
            for param, grad in pairs:
                param.grad = grad.to(param.device, param.dtype)
            yield
        finally:
            self.param_groups = groups
            for param, own_grad in own_grads:
                param.grad = own_grad

    def _groups_for(
        self, pairs: Sequence[ParamGrad], rates: Sequence[float]
    ) -> list[dict[str, Any]]:
        """The groups of this update: gradients are negated already, and excluded parameters are
        apart.
        """
        members: dict[tuple[int, float], list[Tensor]] = {}
        for param, _ in pairs:
            facts = self._facts(param)
            left_to_torch = 0.0 if self._coupled_decay(facts) else facts.weight_decay
            members.setdefault((facts.group_index, left_to_torch), []).append(param)
        return [
            {
                **self.param_groups[i],
                "params": params,
                "weight_decay": decay,
                "lr": rates[i],
                "maximize": False,
            }
            for (i, decay), params in members.items()
        ]


def unhooked_step(torch_class: type[torch.optim.Optimizer]) -> Any:
    """The step of a class of torch, without the hooks of the instance that it is called with."""
    # torch wraps the step of a class at its first construction; the hooks are run by our own step
    # already
    step: Any = torch_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
