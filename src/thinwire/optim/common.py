"""The one base of all optimizers: parameter groups, one update from its rates to its end, the two
phases, and what is saved.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Signature, signature
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

# torch.compiler.disable imports the compiler at once, for a second
from torch._compile import _disable_dynamo

from thinwire import _validate as check
from thinwire._names import plain_name
from thinwire.core.gradients import (
    Clip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    Regularizer,
    centralized,
    clipped,
    decayed,
)
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.core.tensors import coalesced, state_dtype
from thinwire.kernels.rules import Need, Work, needs_of
from thinwire.kernels.warm import warm_up
from thinwire.optim import groups as grouping
from thinwire.optim.arguments import CommonOwn, require_known, spelled_out
from thinwire.optim.groups import Exclusion, ParamFacts, ParamPlace
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

__all__ = ["CommonOptimizer"]


@dataclasses.dataclass(slots=True)
class _Common:
    """The state of the common part beside torch's attributes; copied and pickled as a whole."""

    lr: float | Schedule
    grad_clip: Clip | None
    regularizer: Regularizer | None
    exclude: Exclusion
    asked_order: list[Tensor] | None
    order: list[Tensor] | None = None
    position: int = 0
    schedules: list[Schedule | None] = dataclasses.field(default_factory=list)
    own_lr: list[bool] = dataclasses.field(default_factory=list)
    places: dict[Tensor, ParamPlace] = dataclasses.field(default_factory=dict)


class CommonOptimizer(torch.optim.Optimizer):
    """Base of every optimizer here, beside torch's own class or `torch.optim.Optimizer` itself.

    A method's constructor calls `_construct`. One that has a constructor of torch's to call makes
    three calls: `groups, rate = self._open(params, lr, ...)`, then torch's constructor with
    `groups` and the number `rate`, then `self._close()`.

    One update: rates (errors come before anything changes), the (param, grad) pairs in order,
    negated under `maximize`, and `_update`. Only if that returns True the position moves on.

    A subclass defines `_update_group`, or `_update` as a whole, and where it needs them
    `_check_hyperparameters`, `_check_rate` and the class attributes below.

    **State**: torch's `state` and `param_groups`, and `position`. Schedules, `grad_clip`,
    exclusions and the order are arguments: they are copied and pickled with the optimizer, but are
    not in the state_dict.
    """

    _wide_state = True
    """Whether loaded floating-point state keeps float32 for narrower parameters."""
    _takes_complex = True
    _takes_rows = False
    """Whether row-sparse gradients are allowed."""
    _decay_inside = False
    """Whether weight decay is in the method's own formula, not in the gradient."""
    _common: _Common
    _given: list[ParamGrad] | None = None
    """The pairs of the update that `apply_gradients` is making; None where they come from `p.grad`.
    """
    _loops: ClassVar[Work | None] = None
    """The compiled loops of the method, if it has some."""
    _ratios: dict[Tensor, Tensor] | None = None
    """The trust ratios of the last update, of the methods that have them."""
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
        """Make a method of this library; `values` are its hyper-parameters."""
        require_known(type(self), common, CommonOwn.__annotations__)
        shared: dict[str, Any] = {"maximize": False, "foreach": None, **common}
        own = {key: shared.pop(key) for key in ("maximize", "foreach")}
        groups, rate = self._open(params, lr, **shared)
        torch.optim.Optimizer.__init__(self, groups, {"lr": rate, **values, **own})
        self._close()

    def _open(
        self,
        params: object,
        lr: object,
        *,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: object = None,
    ) -> tuple[Any, float]:
        """Check the common arguments; returns `params` and `lr` for torch's constructor."""
        rate = parse_rate("lr", lr)
        if grad_clip is not None:
            check.instance("grad_clip", grad_clip, (ClipByGlobalNorm, ClipByNorm, ClipByValue))
        grouping.check_regularizer(regularizer)
        exclude = grouping.parse_exclusion(exclude_from_weight_decay)
        groups, order = grouping.split_order(params)
        self._common = _Common(rate, grad_clip, regularizer, exclude, order)
        return groups, rate_at(rate, 0) if isinstance(rate, Schedule) else rate

    def _close(self) -> None:
        """Check what can be seen only with all groups at hand."""
        common = self._common
        grouping.check_common_values(self.defaults)
        self._check_hyperparameters(self.defaults)
        grouping.require_matches(common.exclude, (place.name for place in common.places.values()))
        if common.asked_order is not None:
            common.order = grouping.ordered(common.asked_order, common.places)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Raise for a value that the method does not allow, of the constructor or of a group."""

    def _check_rate(self, rate: float, where: str) -> None:
        """Raise ValueError for a rate that the method does not allow; asked ahead of an update."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; patterns and predicate are asked about the new parameters only.

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
        group["lr"] = rate_at(rate, common.position) if isinstance(rate, Schedule) else rate
        if schedule is None:
            self._check_rate(group["lr"], "lr")
        grouping.check_common_values(group)
        self._check_hyperparameters({**self.defaults, **group})
        entries = grouping.listed(group)
        if not self._takes_complex:
            grouping.require_real(entries, type(self).__name__)
        flags = grouping.excluded_flags(common.exclude, entries)
        super().add_param_group(group)
        last = len(self.param_groups) - 1
        for (name, param), excluded in zip(entries, flags, strict=True):
            plain = None if name is None else plain_name(name)
            common.places[param] = ParamPlace(len(common.places), last, plain, excluded)
        if common.order is not None:
            common.order.extend(param for _, param in entries)
        common.schedules.append(schedule)
        common.own_lr.append(own_lr)

    @property
    def position(self) -> int:
        """The updates completed so far, which is the step of schedules in the next one."""
        return self._common.position

    @property
    def grad_clip(self) -> Clip | None:
        """The clipping that was asked for at construction."""
        return self._common.grad_clip

    def replace_grad_clip(self, clip: Clip | None) -> Clip | None:
        """Clip by another config, or not at all; returns the one before."""
        before, self._common.grad_clip = self._common.grad_clip, clip
        return before

    def call_params(self, names: Mapping[Tensor, str]) -> None:
        """Give names to parameters that came without, for messages and for arguments that take
        names; groups and `state_dict` stay as they are.
        """
        places = self._common.places
        for param, place in places.items():
            if place.name is None and param in names:
                places[param] = dataclasses.replace(place, name=names[param])

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule or a list drives the rate of any group."""
        return any(schedule is not None for schedule in self._common.schedules)

    def shared_settings(self) -> dict[str, Any]:
        """The values that ranks which train together must have in common beside `param_groups`."""
        places, schedules = self._common.places.values(), self._common.schedules
        return {
            "grad_clip": repr(self.grad_clip),
            "schedule": [text_of(schedule) for schedule in schedules],
            "values of the schedule (CRC-32)": [checksum_of(schedule) for schedule in schedules],
            "excluded from weight decay": " ".join(
                p.name or str(p.index) for p in places if p.excluded
            ),
        }

    def begin_at(self, position: int) -> None:
        """Go on as after so many updates: the step at which schedules are read. For a member that
        comes to a run which has made them.
        """
        self._common.position = position
        self._show_rates()

    def _ordered_params(self) -> list[Tensor]:
        """All parameters, in the order in which gradients are listed, exchanged and applied."""
        return list(self._common.places) if self._common.order is None else self._common.order

    def _label(self, param: Tensor) -> str:
        """What messages call a parameter."""
        return self._common.places[param].label

    def _facts(self, param: Tensor) -> ParamFacts:
        """The settings of a parameter in the update at hand."""
        place = self._common.places[param]
        group = self.param_groups[place.group_index]
        decay = 0.0 if place.excluded else group["weight_decay"]
        regularizer, centralization = group["regularizer"], group["grad_centralization"]
        return ParamFacts(place.name, place.group_index, group, decay, regularizer, centralization)

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
            self._step_untraced()
        return loss

    # a trace would freeze the counters and rates that change from update to update
    @_disable_dynamo
    def _step_untraced(self) -> None:
        """Make one update, or one that moves nothing where somebody has set all rates to 0, as
        torch's `get_optimizer_state_dict` does to have the state made.
        """
        if not any(group["lr"] for group in self.param_groups) and any(
            s and rate_ahead(s, self.position, 0.0) for s in self._common.schedules
        ):
            self._check_rate(0.0, "the learning rate, which somebody has set to 0,")
            self._run_update([0.0] * len(self.param_groups))
        elif self._run_update(self._rates()):
            self.begin_at(self.position + 1)

    def _rates(self) -> list[float]:
        return rates_of_(self.param_groups, self._common.schedules, self.position, self._check_rate)

    def _show_rates(self) -> None:
        """Let driven groups show the rate of the next update."""
        for group, schedule in zip(self.param_groups, self._common.schedules, strict=True):
            if schedule is not None:
                group["lr"] = rate_ahead(schedule, self.position, group["lr"])

    def _run_update(self, rates: list[float]) -> bool:
        return self._update(self._collected(), rates)

    def _collected(self) -> list[ParamGrad]:
        """The pairs of this update, in order; gradients negated where the group maximizes."""
        pairs = self._given
        if pairs is None:
            pairs = [
                (p, p.grad)
                for p in self._ordered_params()
                if p.grad is not None and p.requires_grad
            ]
        return [(p, -g if self._facts(p).group.get("maximize") else g) for p, g in pairs]

    @property
    def needs(self) -> frozenset[Need]:
        """The compiled loops that an update calls."""
        if self._loops is None:
            return frozenset()
        return needs_of(self._loops, (p for group in self.param_groups for p in group["params"]))

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        """Update the parameters of `pairs`, if any; False if it was dropped and nothing changed."""
        if self._ratios is None:
            warm_up(self.needs)
        self._ratios = {}
        for param, grad in pairs:
            grouping.require_layout(
                grad, type(self).__name__, self._label(param), rows=self._takes_rows
            )
        wide = [(p, g.to(state_dtype(p))) for p, g in pairs]
        members: dict[int, list[ParamGrad]] = {}
        for param, grad in self._processed(wide):
            members.setdefault(self._common.places[param].group_index, []).append((param, grad))
        for i in sorted(members):
            self._update_group(self.param_groups[i], members[i], rates[i])
        return True

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        """Update the parameters of one group from gradients in `state_dtype`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _update_group(group, pairs, rate)"
        )

    def _processed(self, pairs: Sequence[ParamGrad]) -> list[ParamGrad]:
        """Clip over all pairs, then `_with_decay`; copies, where there is something to do."""
        grads = [coalesced(g) for _, g in pairs]
        if self.grad_clip is not None:
            # the global norm is summed in the order of the groups, so that order_params changes no
            # bit
            places = [self._common.places[p].index for p, _ in pairs]
            ranking = sorted(range(len(places)), key=places.__getitem__)
            new = clipped(self.grad_clip, [grads[i] for i in ranking])
            for i, grad in zip(ranking, new, strict=True):
                grads[i] = grad
        return [(p, self._with_decay(p, g)) for (p, _), g in zip(pairs, grads, strict=True)]

    def _with_decay(self, param: Tensor, grad: Tensor) -> Tensor:
        """Coupled decay, regularizer and centralization, on a copy; `grad` itself where there is
        nothing to do.
        """
        facts = self._facts(param)
        here = param if is_sharded(grad) else shard_of(param)
        grad = decayed(
            grad, here, weight_decay=self._coupled_decay(facts), regularizer=facts.regularizer
        )
        return centralized(grad) if facts.grad_centralization else grad

    def _coupled_decay(self, facts: ParamFacts) -> float:
        """The weight decay that goes through the gradient."""
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
            ValueError: An unknown name, a name without named parameters, a parameter of somebody
                else.
        """
        calls = checked_callbacks(callbacks)
        order = self._ordered_params()
        wanted = selected(order, self._common.places, parameters, no_grad_set)
        differentiate(loss, wanted, order)
        pairs = [(p, p.grad) for p in wanted if p.grad is not None]
        for call in calls:
            for param, grad in pairs:
                call(param, grad)
        return pairs

    def apply_gradients(self, params_grads: Iterable[tuple[Tensor, Tensor | None]]) -> list[Any]:
        """Make one whole update from the given pairs; the second half of `minimize`.

        `step()` runs with these pairs instead of `p.grad`, hooks included. Neither they nor
        `p.grad` are changed.

        Args:
            params_grads: (parameter, gradient) pairs; a parameter that is not listed, or with None,
                is not updated.

        Returns:
            An empty list: there is no graph of operators.

        Raises:
            TypeError: No iterable of pairs.
            ValueError: A parameter that is foreign or repeated, or a gradient of another shape.
        """
        self._given = checked_pairs(params_grads, self._ordered_params(), self._common.places)
        try:
            self.step()
        finally:
            self._given = None
        return []

    def apply_optimize(
        self, loss: Tensor, params_grads: Iterable[tuple[Tensor, Tensor | None]]
    ) -> list[Any]:
        """`apply_gradients(params_grads)`; `loss` is there for the signature and not used."""
        return self.apply_gradients(params_grads)

    def minimize(
        self,
        loss: Tensor,
        parameters: Iterable[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
    ) -> tuple[list[Any], list[ParamGrad]]:
        """`backward`, then `apply_gradients`. Do not call `loss.backward()` before; gradients are
        not cleared.

        Returns:
            An empty list, and the pairs that `backward` gave.
        """
        pairs = self.backward(loss, parameters, no_grad_set)
        return self.apply_gradients(pairs), pairs

    def clear_grad(self) -> None:
        """Set all gradients to None."""
        self.zero_grad(set_to_none=True)

    def get_lr(self) -> float:
        """The rate that the next update will use, of the first group without an `lr` of its own
        (else of the first).
        """
        return float(self.param_groups[self._groups_of_constructor()[0]]["lr"])

    def set_lr(self, value: float) -> None:
        """Set the rate of all groups without an `lr` of their own; of all groups if every one has
        its own.

        Args:
            value: >= 0.

        Raises:
            TypeError: No number.
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
        """Groups that follow the constructor's rate, or all if there is none."""
        following = [i for i, own in enumerate(self._common.own_lr) if not own]
        return following or list(range(len(self.param_groups)))

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        """Floating-point state that was loaded, in the type and layout that it has here."""
        return laid_out(param, value)

    def state_dict(self) -> dict[str, Any]:
        """Torch's dictionary of plain values and tensors, and `position`, the completed updates."""
        return {**packed(super().state_dict()), "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; one of torch's class of the same name is taken too.

        Floating-point state of this library's own methods keeps float32 (float64 for float64
        parameters). Where named parameters were given, then and now, names decide whose state it
        is, in any order of groups and parameters.

        Raises:
            ValueError: The groups do not fit, or the position is missing while a schedule drives
                the rate.
        """
        as_loaded = self._as_loaded if self._wide_state else None
        with restoring(self, self.has_schedule, self.begin_at, as_loaded, self._label):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_common": self._common}
