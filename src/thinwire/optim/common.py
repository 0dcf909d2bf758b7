"""Base class of all optimizers: groups, the update, the two phases and the saved state."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Any, ClassVar, TypedDict, Unpack, get_args

import torch
from torch import Tensor

# torch.compiler.disable would import the compiler here, which takes a second
from torch._compile import _disable_dynamo

from thinwire import _validate as check
from thinwire._names import plain_name
from thinwire.comm import is_alone
from thinwire.core.gradients import Clip, Regularizer, centralized, clipped, decayed
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.core.tensors import coalesced, state_dtype
from thinwire.optim import groups as grouping
from thinwire.optim.groups import Exclusion, ParamFacts, ParamRecord
from thinwire.optim.pairs import (
    ParamGrad,
    checked_callbacks,
    checked_pairs,
    differentiate,
    selected,
)
from thinwire.optim.rates import checksum_of, parse_rate, rate_ahead, rates_of_, text_of
from thinwire.optim.saving import laid_out, packed, restoring
from thinwire.schedules import Schedule, is_scheduled, rate_at


@dataclasses.dataclass(slots=True)
class CommonSettings:
    """State of the common part beside torch's attributes; copied and pickled as a whole."""

    lr: float | Schedule
    grad_clip: Clip | None
    regularizer: Regularizer | None
    exclude: Exclusion
    asked_order: list[Tensor] | None
    order: list[Tensor] = dataclasses.field(default_factory=list)
    """All parameters, in the order in which gradients are exchanged and applied."""
    position: int = 0
    schedules: list[Schedule | None] = dataclasses.field(default_factory=list)
    own_lr: list[bool] = dataclasses.field(default_factory=list)
    records: dict[Tensor, ParamRecord] = dataclasses.field(default_factory=dict)


class Common(TypedDict, total=False):
    """Keywords of all optimizers; each is None if it is not given."""

    grad_clip: Clip | None
    regularizer: Regularizer | None
    exclude_from_weight_decay: Exclusion


class CommonOwn(Common, total=False):
    """Keywords of all methods that are not torch's."""

    maximize: bool
    foreach: bool | None


_DEFAULTS = {"maximize": False, "foreach": None}
"""Defaults of hyper-parameters that all methods have which are not torch's."""


def spelled_out(constructor: Signature, common: type) -> Signature:
    """Return the signature with the common arguments by name in place of `**common`, for `help`."""
    own = [p for p in constructor.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
    shared = [
        Parameter(key, Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(key), annotation=kind)
        for key, kind in common.__annotations__.items()
    ]
    return constructor.replace(parameters=[*own, *shared])


class CommonOptimizer(torch.optim.Optimizer):
    """Base of every optimizer here, beside a class of torch or `torch.optim.Optimizer` itself.

    A method's constructor calls `_construct`; on top of a class of torch, `_open`, torch's
    constructor with what that returns, and `_close`. It defines `_update_group`, or `_update`.

    **State**: torch's `state` and `param_groups`, and `position`. What the constructor was given is
    copied and pickled with the optimizer, and not in the state_dict.
    """

    _wide_state = True
    """True if loaded floating-point state keeps float32 for narrower parameters."""
    _takes_complex = True
    _takes_rows = False
    """True if row-sparse gradients are allowed."""
    _decay_inside = False
    """True if weight decay is part of the method's own formula, not of the gradient."""
    _common: CommonSettings
    _given: list[ParamGrad] | None = None
    """Pairs passed to `apply_gradients`; None if they come from `p.grad`."""
    _ratios: dict[Tensor, Tensor] | None = None
    """Trust ratios of the last update, for methods that have them."""
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        written = signature(cls.__init__)
        written = written.replace(parameters=[*written.parameters.values()][1:])
        named = any(p.annotation == Unpack[CommonOwn] for p in written.parameters.values())
        cls.__signature__ = spelled_out(written, CommonOwn) if named else written

    def _construct(
        self, params: object, lr: object, values: Mapping[str, Any], common: CommonOwn
    ) -> None:
        """Construct a method of this library; `values` are its hyper-parameters."""
        shared: dict[str, Any] = {**_DEFAULTS, **common}
        if unknown := shared.keys() - CommonOwn.__annotations__.keys():
            name = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{name} got an unexpected keyword argument {min(unknown)!r}")
        own = {key: shared.pop(key) for key in _DEFAULTS}
        groups, rate = self._open(params, lr, **shared)
        torch.optim.Optimizer.__init__(self, groups, {"lr": rate, **values, **own})
        self._close()

    def _open(self, params: object, lr: object, **common: Unpack[Common]) -> tuple[Any, float]:
        """Check the common arguments; return `params` and `lr` for torch's constructor."""
        rate = parse_rate("lr", lr)
        clip = common.get("grad_clip")
        check.instance("grad_clip", clip, (*get_args(Clip), NoneType))
        regularizer = common.get("regularizer")
        check.instance("regularizer", regularizer, (*get_args(Regularizer), NoneType))
        exclude = grouping.parse_exclusion(common.get("exclude_from_weight_decay"))
        groups, order = grouping.split_order(params)
        self._common = CommonSettings(rate, clip, regularizer, exclude, order)
        return groups, rate_at(rate, 0) if isinstance(rate, Schedule) else rate

    def _close(self) -> None:
        """Check what depends on all groups together."""
        common = self._common
        grouping.check_common_values(self.defaults)
        self._check_hyperparameters(self.defaults)
        grouping.require_matches(
            common.exclude, (record.name for record in common.records.values())
        )
        if common.asked_order is not None:
            common.order = grouping.ordered(common.asked_order, common.records)
        if is_alone():  # else the first step, or `prepare`, does so while the others wait
            self.compile_loops()

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Raise for a value that the method does not allow, in the constructor or in a group."""

    def _check_rate(self, rate: float, where: str) -> None:
        """Raise ValueError for a rate that the method does not allow; called before an update."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Exclusion patterns are applied to the new parameters only.

        Example::

            optimizer.add_param_group({"params": head.parameters(), "lr": 1e-2})

        Args:
            param_group: `params` and, where they differ from the constructor's, `lr`,
                `weight_decay`, `grad_centralization`, `regularizer` and the optimizer's own
                hyper-parameters. It is not changed.

        Raises:
            TypeError: A value of the wrong kind.
            ValueError: An unknown key, a value out of range, a parameter that is already there.
        """
        check.instance("param_group", param_group, dict)
        grouping.check_keys(param_group, self.defaults)
        common = self._common
        group = {"regularizer": common.regularizer, "grad_centralization": False, **param_group}
        own_lr = "lr" in group
        rate = parse_rate("lr of a parameter group", group["lr"]) if own_lr else common.lr
        schedule = rate if isinstance(rate, Schedule) else None
        group["lr"] = rate if schedule is None else rate_at(schedule, common.position)
        if schedule is None:
            self._check_rate(group["lr"], "lr")
        grouping.check_common_values(group)
        self._check_hyperparameters({**self.defaults, **group})
        entries = grouping.listed(group)
        named = [record.name for record in common.records.values() if record.name is not None]
        if named and "param_names" in self.param_groups[0] and None in dict(entries):
            raise ValueError(
                f"{type(self).__name__} has names for its parameters ({named[0]!r}; a strategy "
                "takes those of the model): write {'params': module.named_parameters()}"
            )
        if not self._takes_complex:
            for i, (name, param) in enumerate(entries):
                if not param.is_floating_point():
                    raise TypeError(
                        f"{type(self).__name__} needs floating-point parameters, but "
                        f"{f'params[{i}]' if name is None else name} is {param.dtype}; view a "
                        "complex parameter as real, or give it to torch's own optimizers"
                    )
        flags = grouping.excluded_flags(common.exclude, entries)
        super().add_param_group(group)
        last = len(self.param_groups) - 1
        for (name, param), excluded in zip(entries, flags, strict=True):
            plain = None if name is None else plain_name(name)
            common.records[param] = ParamRecord(len(common.records), last, plain, excluded)
        common.order.extend(param for _, param in entries)
        common.schedules.append(schedule)
        common.own_lr.append(own_lr)

    @property
    def position(self) -> int:
        """Updates completed so far; schedules are evaluated at this step in the next update."""
        return self._common.position

    @property
    def grad_clip(self) -> Clip | None:
        """Clipping config passed to the constructor."""
        return self._common.grad_clip

    def call_params(self, names: Mapping[Tensor, str]) -> None:
        """Name parameters that came without names, for messages and arguments only."""
        records = self._common.records
        for param, record in records.items():
            if record.name is None and param in names:
                records[param] = dataclasses.replace(record, name=names[param])

    @property
    def has_schedule(self) -> bool:
        """True if a schedule or a list drives the rate of any group."""
        return any(self._common.schedules)

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings, beside `param_groups`, that must be equal on all ranks of a run."""
        records = self._common.records.values()
        schedules = self._common.schedules
        return {
            "grad_clip": repr(self.grad_clip),
            "schedule": [text_of(schedule) for schedule in schedules],
            "values of the schedule (CRC-32)": [checksum_of(schedule) for schedule in schedules],
            "excluded from weight decay": " ".join(
                p.name or str(p.index) for p in records if p.excluded
            ),
        }

    def begin_at(self, position: int) -> None:
        """Continue as after `position` updates; for a member that joins a run."""
        self._common.position = position
        # a group shows the rate of the next update
        for group, schedule in zip(self.param_groups, self._common.schedules, strict=True):
            if schedule is not None:
                group["lr"] = rate_ahead(schedule, position, group["lr"])

    def _label(self, param: Tensor) -> str:
        """Return the name of a parameter in messages."""
        return self._common.records[param].label

    def _facts(self, param: Tensor) -> ParamFacts:
        """Return the settings of a parameter in the current update."""
        record = self._common.records[param]
        group = self.param_groups[record.group_index]
        decay = 0.0 if record.excluded else group["weight_decay"]
        return ParamFacts(record.group_index, group, decay)

    def _counted(self, params: Sequence[Tensor]) -> list[int]:
        """Count one more update in the state of each of `params`; return the counts."""
        states = [self.state[param] for param in params]
        for state in states:
            if "step" not in state:
                # on the CPU, where reading it is free; a tensor because torch's tools expect one
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1)
        # read all at once: a hundred small reads cost as much as an update of a million parameters
        return torch.stack([count.cpu() for count in counts]).int().tolist() if counts else []

    def _buffer_of(self, param: Tensor, key: str, fill: float = 0.0) -> Tensor:
        """Return the state tensor `key`, in the working type; a new one has the value `fill`."""
        state = self.state[param]
        if key not in state:
            state[key] = torch.full_like(param, fill, dtype=state_dtype(param), requires_grad=False)
        buffer: Tensor = state[key]
        if buffer.shape != param.shape:  # compiled loops trust the shape
            raise RuntimeError(
                f"{key} of {self._label(param)} has shape {tuple(buffer.shape)} and the parameter "
                f"{tuple(param.shape)}: load the state of the same model, or make a new optimizer"
            )
        return buffer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update from the gradients in `p.grad`, which stay unchanged.

        Args:
            closure: Computes the loss and its gradients again; called once, with gradients enabled.

        Returns:
            The result of `closure`, or None.

        Raises:
            IndexError: A list of rates has ended; nothing was changed.
            ValueError: The rate is negative or not finite; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            self._step_untraced()
        return loss

    # a trace would freeze counters and rates, which change in every update
    @_disable_dynamo
    def _step_untraced(self) -> None:
        # torch's `get_optimizer_state_dict` sets all rates to 0 to have the state created
        groups = self.param_groups
        schedules = self._common.schedules
        if not any(group["lr"] for group in groups) and any(
            s and rate_ahead(s, self.position, 0.0) for s in schedules
        ):
            self._check_rate(0.0, "the learning rate, which somebody has set to 0,")
            self._run_update([0.0] * len(groups))
            return
        if self._run_update(rates_of_(groups, schedules, self.position, self._check_rate)):
            self.begin_at(self.position + 1)

    def _run_update(self, rates: list[float]) -> bool:
        pairs = self._pairs()
        signed = [(p, -g if self._facts(p).group.get("maximize") else g) for p, g in pairs]
        return self._update(signed, rates)

    def _pairs(self) -> list[ParamGrad]:
        """Return the parameters and gradients of this update, in order."""
        if self._given is not None:
            return self._given
        return [(p, p.grad) for p in self._common.order if p.grad is not None and p.requires_grad]

    def compile_loops(self) -> None:
        """Compile what an update calls, if anything."""

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        """Update the parameters of `pairs`, if any. Return False if the update was dropped."""
        self._ratios = {}
        for param, grad in pairs:
            grouping.require_layout(
                grad, type(self).__name__, self._label(param), rows=self._takes_rows
            )
        wide = [(p, g.to(state_dtype(p))) for p, g in pairs]
        members: dict[int, list[ParamGrad]] = {}
        for param, grad in self._processed(wide):
            members.setdefault(self._common.records[param].group_index, []).append((param, grad))
        for i in sorted(members):
            self._update_group(self.param_groups[i], members[i], rates[i])
        return True

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        """Update the parameters of one group from gradients in `state_dtype`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _update_group(group, pairs, rate)"
        )

    def _processed(self, pairs: Sequence[ParamGrad]) -> list[ParamGrad]:
        """Clip over all pairs, then apply `_with_decay`. Gradients that change are copied."""
        grads = [coalesced(g) for _, g in pairs]
        if self.grad_clip is not None:
            # the global norm is summed in the order of the groups, so that order_params does not
            # change its bits
            indices = [self._common.records[p].index for p, _ in pairs]
            ranking = sorted(range(len(indices)), key=indices.__getitem__)
            new = clipped(self.grad_clip, [grads[i] for i in ranking])
            for i, grad in zip(ranking, new, strict=True):
                grads[i] = grad
        return [(p, self._with_decay(p, g)) for (p, _), g in zip(pairs, grads, strict=True)]

    def _with_decay(self, param: Tensor, grad: Tensor) -> Tensor:
        """Apply coupled decay, regularizer and centralization; `grad` itself is not changed."""
        facts = self._facts(param)
        here = param if is_sharded(grad) else shard_of(param)
        grad = decayed(
            grad,
            here,
            weight_decay=self._coupled_decay(facts),
            regularizer=facts.group["regularizer"],
        )
        return centralized(grad) if facts.group["grad_centralization"] else grad

    def _coupled_decay(self, facts: ParamFacts) -> float:
        """Return the weight decay that goes through the gradient."""
        return 0.0 if self._decay_inside else facts.weight_decay

    def backward(
        self,
        loss: Tensor,
        parameters: Iterable[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
        callbacks: Iterable[Callable[[Tensor, Tensor], object]] | None = None,
    ) -> list[ParamGrad]:
        """Differentiate `loss`; the first half of `minimize`.

        Gradients accumulate in `p.grad` as in torch; those of parameters outside the selection stay
        as they were.

        Args:
            loss: Shape (), or whatever `torch.Tensor.backward` takes without arguments.
            parameters: Parameters or names to differentiate for; None for all of this optimizer.
            no_grad_set: Parameters or names to leave out; it wins over `parameters`.
            callbacks: Each is called as `callback(param, grad)` once for every listed parameter, in
                order, afterwards.

        Returns:
            The pairs (p, p.grad) in the optimizer's order, without parameters that have no
            gradient.

        Raises:
            TypeError: A callback or an entry of the wrong kind.
            ValueError: An unknown name, a name without named parameters, a parameter that is not in
                this optimizer.
        """
        calls = checked_callbacks(callbacks)
        order = self._common.order
        wanted = selected(order, self._common.records, parameters, no_grad_set)
        differentiate(loss, wanted, order)
        pairs = [(p, p.grad) for p in wanted if p.grad is not None]
        for call in calls:
            for param, grad in pairs:
                call(param, grad)
        return pairs

    def apply_gradients(self, params_grads: Iterable[tuple[Tensor, Tensor | None]]) -> list[Any]:
        """Make one update from the given pairs; the second half of `minimize`.

        `step()` runs with these pairs instead of `p.grad`, hooks included. The pairs and `p.grad`
        stay unchanged.

        Args:
            params_grads: (parameter, gradient) pairs; a parameter that is not listed, or with None,
                is not updated.

        Returns:
            An empty list, since there is no graph of operators.

        Raises:
            TypeError: Not an iterable of pairs.
            ValueError: A parameter that is foreign or repeated, or a gradient of another shape.
        """
        self._given = checked_pairs(params_grads, self._common.order, self._common.records)
        try:
            self.step()
        finally:
            self._given = None
        return []

    def apply_optimize(
        self, loss: Tensor, params_grads: Iterable[tuple[Tensor, Tensor | None]]
    ) -> list[Any]:
        """Call `apply_gradients(params_grads)`. `loss` is not used."""
        return self.apply_gradients(params_grads)

    def minimize(
        self,
        loss: Tensor,
        parameters: Iterable[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
    ) -> tuple[list[Any], list[ParamGrad]]:
        """Run `backward`, then `apply_gradients`. Do not call `loss.backward()` before. Gradients
        are not cleared.

        >>> import torch
        >>> from thinwire.optim import SGD
        >>> p = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _, pairs = SGD([p], lr=0.1).minimize((p * p).sum())
        >>> p.item(), len(pairs)
        (0.800000011920929, 1)

        Returns:
            An empty list, and the pairs from `backward`.
        """
        pairs = self.backward(loss, parameters, no_grad_set)
        return self.apply_gradients(pairs), pairs

    def clear_grad(self) -> None:
        """Set all gradients to None."""
        self.zero_grad(set_to_none=True)

    def get_lr(self) -> float:
        """Return the next rate of the first group without an `lr` of its own, or of the first."""
        return float(self.param_groups[self._groups_of_constructor()[0]]["lr"])

    def set_lr(self, value: float) -> None:
        """Set the rate of all groups without an `lr` of their own, or of all if each has its own.

        Args:
            value: >= 0.

        Raises:
            TypeError: Not a number.
            ValueError: Negative or not finite.
            RuntimeError: A schedule, a list or a `ScheduledLR` drives the rate of one of them.
        """
        rate = check.real("value", value, at_least=0)
        chosen = self._groups_of_constructor()
        if is_scheduled(self) or any(self._common.schedules[i] is not None for i in chosen):
            raise RuntimeError(
                f"set_lr({value}) is not possible while a schedule drives the learning rate"
            )
        for i in chosen:
            self.param_groups[i]["lr"] = rate

    def _groups_of_constructor(self) -> list[int]:
        """Return the groups that follow the constructor's rate, or all groups if none does."""
        following = [i for i, own in enumerate(self._common.own_lr) if not own]
        return following or list(range(len(self.param_groups)))

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        """Convert loaded floating-point state to the type and layout that it has here."""
        return laid_out(param, value)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary, with `position`, the completed updates."""
        return {**packed(super().state_dict()), "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class, or of torch's class of the same name.

        Floating-point state of this library's own methods keeps float32 (float64 for float64
        parameters). If both optimizers have named parameters, state is matched by name, in any
        order of groups and parameters.

        Raises:
            ValueError: The groups do not fit, or the position is missing while a schedule drives
                the rate.
        """
        with restoring(self):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_common": self._common}


def common_settings(optimizer: CommonOptimizer) -> CommonSettings:
    """Return the settings that all optimizers of this library share: live, for an engine."""
    return optimizer._common
