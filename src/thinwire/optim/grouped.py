"""Parameter groups of an optimizer: how parameters come in, what holds for each, and in which order
they stand.
"""

import dataclasses
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._names import plain_name
from thinwire.core.clip import Clip, ClipByGlobalNorm, ClipByNorm, ClipByValue
from thinwire.core.decay import L1Decay, L2Decay, Regularizer
from thinwire.optim import groups as grouping
from thinwire.optim.groups import Exclusion, OptimizerSettings, ParamPlace
from thinwire.optim.rates import parse_rate
from thinwire.schedules import Schedule, rate_at

__all__ = ["GroupedOptimizer", "ParamFacts", "restrict_", "settings_of"]


@dataclass(slots=True)
class ParamFacts:
    """The settings of one parameter in the update at hand."""

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
    """The state of the common part beside torch's attributes; copied and pickled as a whole."""

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


class GroupedOptimizer(torch.optim.Optimizer):
    """The lowest part of `CommonOptimizer`: construction, groups and the facts about each
    parameter.
    """

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
        """Check the common arguments; returns what torch's constructor takes as `params`
        and `lr`.
        """
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
            param_group: `params` and, where they differ from the constructor's, `lr`,
                `weight_decay`, `grad_centralization`, `regularizer` and the optimizer's own
                hyper-parameters. It is not changed.

        Raises:
            TypeError: A value of the wrong kind.
            ValueError: An unknown key, a value out of range, a parameter that is already there.
        """
        check.instance("param_group", param_group, dict)
        grouping.check_keys(param_group, self.defaults)
        if "params" not in param_group:
            raise ValueError(
                f"a parameter group must have the key 'params', got {list(param_group)}"
            )
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
        """Materialize the group's parameters; wrong kinds of entries are left for torch to
        refuse.
        """
        if isinstance(group["params"], set):
            return []
        entries = grouping.named_params(group["params"])
        group["params"] = [param if name is None else (name, param) for name, param in entries]
        if not all(isinstance(param, Tensor) for _, param in entries):
            return []
        if "param_names" in group and all(name is None for name, _ in entries):
            entries = [
                (name, param)
                for name, (_, param) in zip(group["param_names"], entries, strict=True)
            ]
        if len({param for _, param in entries}) != len(entries):
            raise ValueError(
                "some parameters appear more than once in a parameter group; list every parameter "
                "once"
            )
        for i, (name, param) in enumerate(entries):
            self._check_param(name if name is not None else f"params[{i}]", param)
        return entries

    def _place(self, entries: Sequence[tuple[str | None, Tensor]], flags: Sequence[bool]) -> None:
        common = self._common
        first = len(common.places)
        for i, ((name, param), excluded) in enumerate(zip(entries, flags, strict=True)):
            plain = None if name is None else plain_name(name)
            group = len(self.param_groups) - 1
            common.places[param] = ParamPlace(first + i, group, plain, excluded)
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

    def replace_grad_clip(self, clip: Clip | None) -> Clip | None:
        """Clip by another config, or not at all where somebody else does it; returns what
        it was.
        """
        before, self._common.grad_clip = self._common.grad_clip, clip
        return before

    def call_params(self, names: Mapping[Tensor, str]) -> None:
        """Give names to parameters that came without, for messages and for arguments that take
        names; groups and `state_dict` stay as they are.

        Args:
            names: Such as those in the model.
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
            "schedule": [_without_addresses(repr(schedule)) for schedule in schedules],
            "values of the schedule (CRC-32)": [_checksum(schedule) for schedule in schedules],
            "excluded from weight decay": " ".join(
                p.name or str(p.index) for p in places if p.excluded
            ),
        }

    def _ordered_params(self) -> list[Tensor]:
        """All parameters, in the order in which gradients are listed, exchanged and applied."""
        return list(self._common.places) if self._common.order is None else self._common.order

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        return self.param_groups[self._common.places[param].group_index]

    def _label(self, param: Tensor) -> str:
        """What messages call a parameter."""
        return self._common.places[param].label

    def _facts(self, param: Tensor) -> ParamFacts:
        """Name, group and what its group and the exclusion say about decay, in the update
        at hand.
        """
        place = self._common.places[param]
        group = self.param_groups[place.group_index]
        decay = 0.0 if place.excluded else group["weight_decay"]
        regularizer, centralization = group["regularizer"], group["grad_centralization"]
        return ParamFacts(
            place.name, place.index, place.group_index, group, decay, regularizer, centralization
        )

    def _settings(self) -> OptimizerSettings:
        """The settings of this optimizer, for the constructor of another one; nothing is shared
        that changes.
        """
        common = self._common
        rates = [
            group["lr"] if schedule is None else schedule
            for group, schedule in self._driven_groups()
        ]
        followed = [rate for rate, own in zip(rates, common.own_lr, strict=True) if not own]
        lr = (
            common.lr
            if isinstance(common.lr, Schedule) or not followed
            else parse_rate("lr", followed[0])
        )
        own_lr = [own or rate != lr for rate, own in zip(rates, common.own_lr, strict=True)]
        return OptimizerSettings(
            lr=lr,
            groups=_spelled_out(self.param_groups, rates, own_lr),
            order=None if common.order is None else list(common.order),
            excluded={param: place.excluded for param, place in common.places.items()},
            exclude=common.exclude,
            grad_clip=common.grad_clip,
            regularizer=common.regularizer,
            position=common.position,
        )

    def _restrict_(self, keep: Callable[[Tensor], bool]) -> Callable[[], None]:
        """The part of `restrict_` that torch's optimizers do not have."""
        common = self._common
        before = (common.places, common.order)
        kept = [(param, place) for param, place in common.places.items() if keep(param)]
        common.places = {
            p: ParamPlace(i, place.group_index, place.name, place.excluded)
            for i, (p, place) in enumerate(kept)
        }
        common.order = (
            None if common.order is None else [param for param in common.order if keep(param)]
        )

        def undo() -> None:
            common.places, common.order = before

        return undo

    def _driven_groups(self) -> list[tuple[dict[str, Any], Schedule | None]]:
        return list(zip(self.param_groups, self._common.schedules, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_common": self._common}


def settings_of(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    """The settings of `optimizer`, one of ours or of torch, for the constructor of another one.

    Raises:
        TypeError, ValueError: A learning rate that ours do not take.
    """
    if isinstance(optimizer, GroupedOptimizer):
        return optimizer._settings()
    rates = [parse_rate("lr of a parameter group", group["lr"]) for group in optimizer.param_groups]
    default = parse_rate("lr", optimizer.defaults["lr"])
    lr = default if default in rates else rates[0]
    return OptimizerSettings(
        lr=lr,
        groups=_spelled_out(optimizer.param_groups, rates, [rate != lr for rate in rates]),
        order=None,
        excluded={param: False for group in optimizer.param_groups for param in group["params"]},
        exclude=None,
        grad_clip=None,
        regularizer=None,
        position=0,
    )


def restrict_(
    optimizer: torch.optim.Optimizer, keep: Callable[[Tensor], bool]
) -> Callable[[], None]:
    """Changes `optimizer`: it drops all parameters but those that `keep` says, and their state.

    Groups stay where they are, empty ones too, so that a scheduler of their rates finds them.

    Returns:
        What undoes it, as long as the optimizer has not been used.
    """
    undo_own = optimizer._restrict_(keep) if isinstance(optimizer, GroupedOptimizer) else None
    before = [
        (group, group["params"], group.get("param_names")) for group in optimizer.param_groups
    ]
    for group, params, names in before:
        group["params"] = [param for param in params if keep(param)]
        if names is not None:
            group["param_names"] = [
                name for name, param in zip(names, params, strict=True) if keep(param)
            ]
    dropped = {
        param: optimizer.state.pop(param) for param in list(optimizer.state) if not keep(param)
    }

    def undo() -> None:
        for group, params, names in before:
            group["params"] = params
            if names is not None:
                group["param_names"] = names
        optimizer.state.update(dropped)
        if undo_own is not None:
            undo_own()

    return undo


def _spelled_out(
    groups: Sequence[dict[str, Any]], rates: Sequence[float | Schedule], own_lr: Sequence[bool]
) -> list[dict[str, Any]]:
    """Copies of the groups with names beside the parameters, and with `lr` where it is the group's
    own.
    """
    new = []
    for group, rate, own in zip(groups, rates, own_lr, strict=True):
        names = group.get("param_names", [None] * len(group["params"]))
        other = {
            key: value for key, value in group.items() if key not in ("params", "param_names", "lr")
        }
        pairs = list(zip(names, group["params"], strict=True))
        new.append({"params": pairs, **({"lr": rate} if own else {}), **other})
    return new


def _without_addresses(text: str) -> str:
    """The text without what differs between processes, for schedules without text of their own."""
    return re.sub(" at 0x[0-9a-f]+", "", text)


def _checksum(schedule: Schedule | None) -> int:
    """Of all values, of which the text shows the first few."""
    values = dataclasses.astuple(schedule) if dataclasses.is_dataclass(schedule) else schedule
    return zlib.crc32(_without_addresses(repr(values)).encode())


def _check_regularizer(regularizer: object) -> None:
    if regularizer is not None:
        check.instance("regularizer", regularizer, (L1Decay, L2Decay))


def _check_common_values(values: dict[str, Any]) -> None:
    """Check the common keys of a group or of the defaults; tensors of one element become
    numbers.
    """
    _check_regularizer(values.get("regularizer"))
    check.boolean("grad_centralization", values.get("grad_centralization", False))
    check.boolean("maximize", values.get("maximize", False))
    if values.get("foreach") is not None:
        check.boolean("foreach", values["foreach"])
    if "weight_decay" in values:
        decay = values["weight_decay"] = check.scalar(
            "weight_decay", values["weight_decay"], at_least=0
        )
        if decay >= 1:
            warnings.warn(
                f"weight_decay is usually below 1, got {decay}",
                UserWarning,
                stacklevel=_users_level(),
            )


def _users_level() -> int:
    """The `stacklevel` with which a warning of the caller names the line of the user's code."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("thinwire.", "torch.")
    ):
        frame, level = frame.f_back, level + 1
    return level
