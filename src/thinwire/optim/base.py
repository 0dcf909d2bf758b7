"""The common part of all optimizers, once: rates, groups, clipping, decay, centralization, order and what is saved."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.centralize import centralized
from thinwire.core.clip import Clip, ClipByGlobalNorm, ClipByNorm, ClipByValue, clipped
from thinwire.core.decay import L1Decay, L2Decay, Regularizer, decayed
from thinwire.core.rows import coalesced
from thinwire.optim import groups as grouping
from thinwire.optim.groups import Exclusion, ParamPlace
from thinwire.optim.rates import parse_rate, rate_ahead
from thinwire.optim.saving import packed, restoring
from thinwire.optim.two_phase import ParamGrad, TwoPhase
from thinwire.schedules import Schedule, rate_at

__all__ = ["CommonOptimizer", "ParamFacts"]


@dataclass(slots=True)
class ParamFacts:
    """What holds for one parameter in the update at hand."""

    name: str | None
    """Its name, where named parameters were given."""
    index: int
    """Position in the order of the groups, from 0."""
    group_index: int
    """Which of `param_groups` it belongs to."""
    group: dict[str, Any]
    """That group, live: hyper-parameters are read from it at every update."""
    weight_decay: float
    """The group's, or 0 where the parameter is excluded."""
    regularizer: Regularizer | None
    """The group's."""
    grad_centralization: bool
    """The group's."""


@dataclass(slots=True)
class _Common:
    """What the common part keeps beside torch's attributes; copied and pickled as a whole."""

    lr: float | Schedule
    grad_clip: Clip | None
    regularizer: Regularizer | None
    exclude: Exclusion
    asked_order: list[Tensor] | None
    order: list[Tensor] | None = None
    position: int = 0
    schedules: list[Schedule | None] = field(default_factory=list)
    own_lr: list[bool] = field(default_factory=list)
    places: dict[Tensor, ParamPlace] = field(default_factory=dict)


class CommonOptimizer(TwoPhase):
    """Base of every optimizer here, beside torch's own class or `torch.optim.Optimizer` itself.

    A constructor makes three calls: `groups, rate = self._open(params, lr, ...)`, then torch's constructor with
    `groups` and the number `rate`, then `self._close()`.

    One update runs in `step`: rates of this update (errors come before anything changes), collection of the
    (param, grad) pairs in order, negated under `maximize`, `_update`, and only if that returns True one more completed
    update.

    A subclass defines:
        `_update(pairs, rates) -> bool`: the update. `pairs` is the ordered list of (param, grad), possibly empty (it is
        called all the same); gradients are read only. `rates[i]` is the rate of `param_groups[i]`. False: the update
        was dropped and nothing changed; the position stays.
        `_check_hyperparameters(values)`: called with the constructor's values and with every group's.
        `_check_param(name, param)`: called for every parameter.
        `_check_rate(rate, where)`: called for every rate ahead of an update.

    and finds:
        `_ordered_params()`: all parameters, in the order of `order_params` or of the groups.
        `_facts(param)`: name, group, effective weight decay, regularizer, centralization, as `ParamFacts`.
        `_with_decay(param, grad)`: weight decay (where it is coupled), regularizer and centralization, on a copy; the
        very `grad` if there is nothing to do.
        `_processed(pairs)`: clip, then `_with_decay`, for all pairs at once: the order of the other optimizers.
        `grad_clip`: the config; `position`: completed updates, from 0, the step of every schedule.
        `_wide_state`: whether floating-point state keeps float32 for narrower parameters when it is loaded.
        `_extra_state()`, `_read_extra_state(saved)`, `_set_extra_state(values)`: further plain values of the
        state_dict; extend all three with super().
        `_step_supports_amp_scaling`: torch's; a subclass that sets it finds `grad_scale` and `found_inf` in `_update`.

    **State**: torch's `state` and `param_groups`, and `position`. Schedules, `grad_clip`, exclusions and the order are
    arguments: they are copied and pickled with the optimizer, but are not in the state_dict.
    """

    _wide_state = True
    _common: _Common

    def _open(
        self,
        params: object,
        lr: object,
        *,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: object = None,
    ) -> tuple[Any, float]:
        """Check the common arguments; returns what torch's constructor takes as `params` and `lr`."""
        rate = parse_rate("lr", lr)
        if grad_clip is not None:
            check.instance("grad_clip", grad_clip, (ClipByGlobalNorm, ClipByNorm, ClipByValue))
        _check_regularizer(regularizer)
        exclude = grouping.parse_exclusion(exclude_from_weight_decay)
        groups, order = grouping.split_order(params)
        self._common = _Common(rate, grad_clip, regularizer, exclude, order)
        return groups, rate_at(rate, 0) if isinstance(rate, Schedule) else rate

    def _close(self) -> None:
        """Check what can be seen only with all groups at hand."""
        common = self._common
        _check_common_values(self.defaults)
        self._check_hyperparameters(self.defaults)
        grouping.require_matches(common.exclude, (place.name for place in common.places.values()))
        if common.asked_order is not None:
            common.order = grouping.ordered(common.asked_order, common.places)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for a value that the method does not allow."""

    def _check_param(self, name: str, param: Tensor) -> None:
        """Raise TypeError for a parameter that the method cannot update."""

    def _check_rate(self, rate: float, where: str) -> None:
        """Raise ValueError for a rate that the method does not allow."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; patterns and predicate are asked about the new parameters only.

        Args:
            param_group: `params` and, where they differ from the constructor's, `lr`, `weight_decay`,
                `grad_centralization`, `regularizer` and the optimizer's own hyper-parameters. It is not changed.

        Raises:
            TypeError: A value of the wrong kind.
            ValueError: An unknown key, a value out of range, a parameter that is already there.
        """
        check.instance("param_group", param_group, dict)
        grouping.check_keys(param_group, self.defaults)
        if "params" not in param_group:
            raise ValueError(f"a parameter group must have the key 'params', got {list(param_group)}")
        common = self._common
        group = {"regularizer": common.regularizer, "grad_centralization": False, **param_group}
        own_lr = "lr" in group
        rate = parse_rate("lr of a parameter group", group["lr"]) if own_lr else common.lr
        schedule = rate if isinstance(rate, Schedule) else None
        group["lr"] = rate_at(rate, common.position) if isinstance(rate, Schedule) else rate
        if schedule is None:
            self._check_rate(group["lr"], "lr")
        _check_common_values(group)
        self._check_hyperparameters({**self.defaults, **group})
        entries = self._listed(group)
        flags = grouping.excluded_flags(common.exclude, entries)
        super().add_param_group(group)
        self._place(entries, flags)
        common.schedules.append(schedule)
        common.own_lr.append(own_lr)

    def _listed(self, group: dict[str, Any]) -> list[tuple[str | None, Tensor]]:
        """Materialize the group's parameters; wrong kinds of entries are left for torch to refuse."""
        if isinstance(group["params"], set):
            return []
        entries = grouping.named_params(group["params"])
        group["params"] = [param if name is None else (name, param) for name, param in entries]
        if not all(isinstance(param, Tensor) for _, param in entries):
            return []
        if "param_names" in group and all(name is None for name, _ in entries):
            entries = [(name, param) for name, (_, param) in zip(group["param_names"], entries, strict=True)]
        if len({param for _, param in entries}) != len(entries):
            raise ValueError("some parameters appear more than once in a parameter group; list every parameter once")
        for i, (name, param) in enumerate(entries):
            self._check_param(name if name is not None else f"params[{i}]", param)
        return entries

    def _place(self, entries: Sequence[tuple[str | None, Tensor]], flags: Sequence[bool]) -> None:
        common = self._common
        first = len(common.places)
        for i, ((name, param), excluded) in enumerate(zip(entries, flags, strict=True)):
            common.places[param] = ParamPlace(first + i, len(self.param_groups) - 1, name, excluded)
        if common.order is not None:
            common.order.extend(param for _, param in entries)

    @property
    def position(self) -> int:
        """Completed updates, from 0: the step at which schedules are read for the next update."""
        return self._common.position

    @property
    def grad_clip(self) -> Clip | None:
        """The clipping that was asked for at construction."""
        return self._common.grad_clip

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule or a list drives the rate of any group."""
        return any(schedule is not None for schedule in self._common.schedules)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update from the gradients in `p.grad`, which stay as they are.

        Args:
            closure: Computes the loss and its gradients again; called once, with gradients enabled.

        Returns:
            What `closure` returned, or None.

        Raises:
            IndexError: A list of rates has ended; nothing has changed.
            ValueError: The rate is negative or not finite; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            rates = self._rates()
            if self._run_update(rates):
                self._common.position += 1
                self._show_rates()
        return loss

    # a trace would freeze the counters and rates that change from update to update
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's decorator has no types
    def _run_update(self, rates: list[float]) -> bool:
        return self._update(self._collected(), rates)

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        """Update the parameters of `pairs`; False if the update was dropped."""
        raise NotImplementedError(f"{type(self).__name__} must define _update(pairs, rates)")

    def _rates(self) -> list[float]:
        """The rate of every group in this update; schedules write theirs into the groups."""
        position = self._common.position
        rates = []
        for i, (group, schedule) in enumerate(zip(self.param_groups, self._common.schedules, strict=True)):
            where = f"the learning rate of group {i} at step {position}"
            rate = check.scalar(where, group["lr"], at_least=0) if schedule is None else rate_at(schedule, position)
            self._check_rate(rate, where)
            rates.append(rate)
        for group, schedule, rate in zip(self.param_groups, self._common.schedules, rates, strict=True):
            if schedule is not None:
                group["lr"] = rate
        return rates

    def _show_rates(self) -> None:
        """Let driven groups show the rate of the next update."""
        for group, schedule in zip(self.param_groups, self._common.schedules, strict=True):
            if schedule is not None:
                group["lr"] = rate_ahead(schedule, self._common.position, group["lr"])

    def _ordered_params(self) -> list[Tensor]:
        """All parameters, in the order in which gradients are listed, exchanged and applied."""
        return list(self._common.places) if self._common.order is None else self._common.order

    def _collected(self) -> list[ParamGrad]:
        """The pairs of this update, in order; gradients negated where the group maximizes."""
        pairs = self._given
        if pairs is None:
            pairs = [(p, p.grad) for p in self._ordered_params() if p.grad is not None and p.requires_grad]
        return [(p, -g if self._group_of(p).get("maximize") else g) for p, g in pairs]

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        return self.param_groups[self._common.places[param].group_index]

    def _facts(self, param: Tensor) -> ParamFacts:
        """Name, group and what its group and the exclusion say about decay, in the update at hand."""
        place = self._common.places[param]
        group = self.param_groups[place.group_index]
        decay = 0.0 if place.excluded else group["weight_decay"]
        regularizer, centralization = group["regularizer"], group["grad_centralization"]
        return ParamFacts(place.name, place.index, place.group_index, group, decay, regularizer, centralization)

    def _coupled_decay(self, facts: ParamFacts) -> float:
        """The weight decay that goes through the gradient; 0 where the method has decay in its own formula."""
        return facts.weight_decay

    def _with_decay(self, param: Tensor, grad: Tensor) -> Tensor:
        """Coupled decay, regularizer and centralization, on a copy; `grad` itself where there is nothing to do."""
        facts = self._facts(param)
        grad = decayed(grad, param, weight_decay=self._coupled_decay(facts), regularizer=facts.regularizer)
        return centralized(grad) if facts.grad_centralization else grad

    def _processed(self, pairs: Sequence[ParamGrad]) -> list[ParamGrad]:
        """Clip over all pairs, then decay, regularizer and centralization; copies, where there is something to do."""
        params = [p for p, _ in pairs]
        grads = [coalesced(g) for _, g in pairs]
        if self.grad_clip is not None:
            grads = self._clipped(params, grads, self.grad_clip)
        return [(p, self._with_decay(p, g)) for p, g in zip(params, grads, strict=True)]

    def _clipped(self, params: Sequence[Tensor], grads: Sequence[Tensor], clip: Clip) -> list[Tensor]:
        # the global norm is summed in the order of the groups, so that order_params changes no bit
        ranking = sorted(range(len(params)), key=lambda i: self._common.places[params[i]].index)
        new = clipped(clip, [grads[i] for i in ranking])
        return [grad for _, grad in sorted(zip(ranking, new, strict=True), key=lambda entry: entry[0])]

    def _extra_state(self) -> dict[str, Any]:
        """Plain values that the state_dict holds beside torch's."""
        return {"position": self._common.position}

    def _read_extra_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What `_extra_state` gave, checked; nothing changes yet."""
        if "position" not in saved and self.has_schedule:
            raise ValueError(
                "the state_dict has no 'position', and a schedule drives the rate; "
                "set state_dict['position'] to the number of updates that were made"
            )
        return {"position": check.integer("state_dict['position']", saved.get("position", 0), at_least=0)}

    def _set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take over what `_read_extra_state` returned; cannot fail."""
        self._common.position = values["position"]

    def state_dict(self) -> dict[str, Any]:
        """Torch's dictionary of plain values and tensors, and `position`, the completed updates."""
        return {**packed(super().state_dict()), **self._extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; one of torch's class of the same name is taken too.

        Floating-point state of this library's own methods keeps float32 (float64 for float64 parameters).

        Raises:
            ValueError: The groups do not fit, or the position is missing while a schedule drives the rate.
        """
        with restoring(self, self._read_extra_state, self._set_extra_state, wide=self._wide_state):
            super().load_state_dict(state_dict)
        self._show_rates()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_common": self._common}


def _check_regularizer(regularizer: object) -> None:
    if regularizer is not None:
        check.instance("regularizer", regularizer, (L1Decay, L2Decay))


def _check_common_values(values: dict[str, Any]) -> None:
    """Check the common keys of a group or of the defaults; tensors of one element become numbers."""
    _check_regularizer(values.get("regularizer"))
    check.boolean("grad_centralization", values.get("grad_centralization", False))
    check.boolean("maximize", values.get("maximize", False))
    if values.get("foreach") is not None:
        check.boolean("foreach", values["foreach"])
    if "weight_decay" in values:
        decay = values["weight_decay"] = check.scalar("weight_decay", values["weight_decay"], at_least=0)
        if decay >= 1:
            warnings.warn(f"weight_decay is usually below 1, got {decay}", UserWarning, stacklevel=4)
