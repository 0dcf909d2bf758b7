"""Optimizers of torch with the common part; bit-identical to torch if no common option is set."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.tensors import state_dtype
from thinwire.optim.common import Common, CommonOptimizer, spelled_out
from thinwire.optim.groups import ParamFacts, check_betas, check_nesterov
from thinwire.optim.pairs import ParamGrad

_NUMBERS = "weight_decay momentum dampening alpha eps lr_decay initial_accumulator_value"
"""Hyper-parameters of torch's classes that are numbers."""


class TorchOptimizer(CommonOptimizer):
    """Base that runs the step of a class of torch on gradients that passed the common stages.

    torch's step reads `p.grad` and `param_groups`. While it runs, both hold the results of the
    stages; both are restored when it returns or raises. The constructor takes the arguments of
    `_torch_class` and the common arguments.
    """

    _torch_class: type[torch.optim.Optimizer] = torch.optim.Optimizer
    _wide_state = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__init__ is TorchOptimizer.__init__:
            cls.__signature__ = spelled_out(signature(cls._torch_class), Common)

    def __init__(self, *given: Any, **named: Any) -> None:
        common = {key: named.pop(key) for key in Common.__annotations__ if key in named}
        try:
            bound = signature(self._torch_class).bind(*given, **named)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        values["params"], values["lr"] = self._open(values["params"], values["lr"], **common)
        # before torch checks them: its errors name neither argument nor value
        self._check_hyperparameters(values)
        super().__init__(**values)
        self._close()

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        for key in filter(values.__contains__, _NUMBERS.split()):
            number = check.scalar(key, values[key], at_least=0 if key != "dampening" else None)
            check.real(key, number, below=1 if key == "alpha" else None)
        betas = values.get("betas")
        if "betas" in values and not (
            isinstance(betas, tuple | list) and any(isinstance(beta, Tensor) for beta in betas)
        ):
            check_betas(values)
        if "nesterov" in values:
            check_nesterov(values)

    def _coupled_decay(self, facts: ParamFacts) -> float:
        # torch adds the decay itself before the update; it is added here only if a stage must come
        # between the two
        group = facts.group
        takes_over = group["regularizer"] is not None or group["grad_centralization"]
        decoupled = group.get("decoupled_weight_decay", False)
        return facts.weight_decay if takes_over and not decoupled else 0.0

    def _run_update(self, rates: list[float]) -> bool:
        # a GradScaler sets it for fused kernels only
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False
        if self._is_plain():
            self._torch_step()
            return True
        return super()._run_update(rates)

    def _torch_step(self) -> None:
        unhooked_step(self._torch_class)(self)

    def _is_plain(self) -> bool:
        """Return True if torch's step alone does all that is configured."""
        records = self._common.records
        return (
            self._given is None
            and self.grad_clip is None
            and all(
                g["regularizer"] is None and not g["grad_centralization"] for g in self.param_groups
            )
            and not any(record.excluded for record in records.values())
            and all(p.requires_grad or p.grad is None for p in records)
        )

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        with self._unscaled(pairs) as unscaled:
            processed = self._processed(unscaled)
            groups = self.param_groups
            own_grads = [(p, p.grad) for p, _ in processed]
            # excluded parameters get groups of their own
            members: dict[tuple[int, float], list[Tensor]] = {}
            for param, _ in processed:
                facts = self._facts(param)
                left_to_torch = 0.0 if self._coupled_decay(facts) else facts.weight_decay
                members.setdefault((facts.group_index, left_to_torch), []).append(param)
            # the signs of gradients have been changed already
            self.param_groups = [
                groups[i]
                | {"params": params, "weight_decay": decay, "lr": rates[i], "maximize": False}
                for (i, decay), params in members.items()
            ]
            try:
                for param, grad in processed:
                    param.grad = grad.to(param.device, param.dtype)
                self._torch_step()
            finally:
                self.param_groups = groups
                for param, own_grad in own_grads:
                    param.grad = own_grad
        return True

    @contextmanager
    def _unscaled(self, pairs: list[ParamGrad]) -> Iterator[list[ParamGrad]]:
        """Divide by a `GradScaler`'s scale that was left to a fused kernel, and mark it as done."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None:
            yield pairs
            return
        self.grad_scale = None
        try:
            # the initial scale of a GradScaler, 65,536, does not fit in float16
            wide = [(p, g.to(state_dtype(g))) for p, g in pairs]
            yield [(p, g / scale.to(g.device, g.dtype)) for p, g in wide]
        finally:
            self.grad_scale = scale


def unhooked_step(torch_class: type[torch.optim.Optimizer]) -> Any:
    """Return the step of a class of torch, without the hooks of the instance."""
    # torch wraps the step of a class at its first construction; our own step runs the hooks already
    step: Any = torch_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class SGD(TorchOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with the common part of this library; bit-identical if none of it is used.

    >>> import torch
    >>> from thinwire.optim import ClipByGlobalNorm
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = SGD(model.parameters(), lr=0.1, grad_clip=ClipByGlobalNorm(1.0))

    Takes the arguments of `torch.optim.SGD`, with checks that name them, and three by keyword:

        `grad_clip`: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`.
        `regularizer`: `L1Decay` or `L2Decay`, beside `weight_decay`, which is coupled; a group's
        own replaces it.
        `exclude_from_weight_decay`: Glob patterns over names, or a predicate (name, parameter) ->
        bool.

    `params` are parameters, named parameters or groups, with an `order_params` entry if wanted.
    `lr` is a number >= 0, a schedule, or a list with one number for each update.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.

    Source: torch.optim.SGD. Differs from MindSpore's `Momentum`: the first buffer is the gradient
    itself.
    """

    _torch_class = torch.optim.SGD


class Adam(TorchOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with the common part of this library; see `SGD`.

    >>> import torch
    >>> optimizer = Adam(torch.nn.Linear(4, 2).parameters(), lr=1e-3)

    `weight_decay` is coupled, or decoupled with `decoupled_weight_decay`.

    Source: Kingma and Ba, 2015, arXiv 1412.6980; torch.optim.Adam. Differs from MindSpore's, where
    eps is added to the root of the uncorrected moment.
    """

    _torch_class = torch.optim.Adam


class AdamW(TorchOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` with the common part of this library; see `SGD`.

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> AdamW(model.named_parameters(), exclude_from_weight_decay=["*bias"]).get_lr()
    0.001

    `weight_decay` is decoupled: p shrinks by lr * weight_decay * p. A regularizer goes through the
    gradient.

    Source: Loshchilov and Hutter, 2019, arXiv 1711.05101; torch.optim.AdamW. Differs from
    MindSpore's `AdamWeightDecay`, which has no bias correction.
    """

    _torch_class = torch.optim.AdamW


class RMSprop(TorchOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with the common part of this library; see `SGD`.

    >>> import torch
    >>> optimizer = RMSprop(torch.nn.Linear(4, 2).parameters(), lr=1e-3)

    Source: torch.optim.RMSprop. Differs from MindSpore's: eps outside the root, mean square from 0,
    lr outside the momentum.
    """

    _torch_class = torch.optim.RMSprop


class Adagrad(TorchOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad` with the common part of this library; see `SGD`.

    >>> import torch
    >>> optimizer = Adagrad(torch.nn.Linear(4, 2).parameters(), lr=1e-2)

    Source: Duchi, Hazan and Singer, JMLR 2011; torch.optim.Adagrad. Differs from MindSpore's:
    accumulator from 0, and an eps.
    """

    _torch_class = torch.optim.Adagrad

    def _torch_step(self) -> None:
        initial = self.defaults["initial_accumulator_value"]
        for group in self.param_groups:
            # of groups that were added later, as torch 2.13 does in `step`
            late = [p for p in group["params"] if p.grad is not None and not self.state.get(p)]
            if late:
                how = {"initial_accumulator_value": initial, "fused": group["fused"]}
                self.state.update(torch.optim.Adagrad(late, **how).state)
        super()._torch_step()
