"""Settings of an optimizer for a replacement, and restriction to fewer parameters."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from thinwire.core.gradients import Clip, Regularizer
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.groups import Exclusion
from thinwire.optim.rates import parse_rate
from thinwire.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Settings and parameters of an optimizer, in a form from which another one can be built."""

    lr: float | Schedule
    """Rate passed to the constructor."""
    groups: list[dict[str, Any]]
    """All keys of each group. `params` are (name or None, parameter) pairs. `lr` is present only if
    it differs from the constructor's: a number or the group's schedule.
    """
    excluded: dict[Tensor, bool]
    """True for every parameter without weight decay."""
    order: list[Tensor] | None = None
    """Order of parameters passed to the constructor."""
    exclude: Exclusion = None
    """Rule that decided `excluded`."""
    grad_clip: Clip | None = None
    """Clipping config, if any."""
    regularizer: Regularizer | None = None
    """Regularizer passed to the constructor."""
    position: int = 0
    """Completed updates."""


def settings_of(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    """Return the settings of `optimizer`, ours or torch's, for the constructor of another one.
    Mutable objects are not shared.

    Raises:
        TypeError, ValueError: A learning rate that our optimizers do not accept.
    """
    if isinstance(optimizer, CommonOptimizer):
        return _settings_of_ours(optimizer)
    rates = [parse_rate("lr of a parameter group", group["lr"]) for group in optimizer.param_groups]
    default = parse_rate("lr", optimizer.defaults["lr"])
    lr = default if default in rates else rates[0]
    return OptimizerSettings(
        lr=lr,
        groups=_spelled_out(optimizer.param_groups, rates, [rate != lr for rate in rates]),
        excluded={param: False for group in optimizer.param_groups for param in group["params"]},
    )


def _settings_of_ours(optimizer: CommonOptimizer) -> OptimizerSettings:
    common, groups = optimizer._common, optimizer.param_groups
    rates = [
        group["lr"] if schedule is None else schedule
        for group, schedule in zip(groups, common.schedules, strict=True)
    ]
    followed = [rate for rate, own in zip(rates, common.own_lr, strict=True) if not own]
    lr = common.lr
    if followed and not isinstance(lr, Schedule):
        lr = parse_rate("lr", followed[0])
    own_lr = [own or rate != lr for rate, own in zip(rates, common.own_lr, strict=True)]
    return OptimizerSettings(
        lr=lr,
        groups=_spelled_out(groups, rates, own_lr),
        order=list(common.order),
        excluded={param: record.excluded for param, record in common.records.items()},
        exclude=common.exclude,
        grad_clip=common.grad_clip,
        regularizer=common.regularizer,
        position=common.position,
    )


def restrict_(
    optimizer: torch.optim.Optimizer, keep: Callable[[Tensor], bool]
) -> Callable[[], None]:
    """Drop from `optimizer` all parameters for which `keep` is false, and their state. Return a
    function that undoes it, as long as the optimizer has not been used.

    Groups keep their index, empty ones too, so that a learning-rate scheduler finds them.
    """
    undo = ExitStack()
    if isinstance(optimizer, CommonOptimizer):
        common = optimizer._common
        undo.callback(setattr, common, "records", common.records)
        undo.callback(setattr, common, "order", common.order)
        kept = [(param, record) for param, record in common.records.items() if keep(param)]
        common.records = {p: replace(record, index=i) for i, (p, record) in enumerate(kept)}
        common.order = [param for param in common.order if keep(param)]
    for group in optimizer.param_groups:
        named = ("params", "param_names")
        before: dict[str, Any] = {key: group[key] for key in named if key in group}
        undo.callback(group.update, before)
        kept_here = [keep(param) for param in before["params"]]
        group.update({key: [*compress(values, kept_here)] for key, values in before.items()})
    dropped = {
        param: optimizer.state.pop(param) for param in list(optimizer.state) if not keep(param)
    }
    undo.callback(optimizer.state.update, dropped)
    return undo.close


def _spelled_out(
    groups: Sequence[dict[str, Any]], rates: Sequence[float | Schedule], own_lr: Sequence[bool]
) -> list[dict[str, Any]]:
    """Return copies of the groups with named parameters, and with `lr` if it is their own."""
    new = []
    for group, rate, own in zip(groups, rates, own_lr, strict=True):
        names = group.get("param_names", [None] * len(group["params"]))
        other = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr")}
        pairs = list(zip(names, group["params"], strict=True))
        new.append({"params": pairs, **({"lr": rate} if own else {}), **other})
    return new
