"""An optimizer that becomes one of another method and stays the same object, for all that
hold it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.strategy.dependents import HOOKS

__all__ = ["became", "become_"]

_KEPT = frozenset({"state", "param_groups", "defaults", *HOOKS})
"""Objects that others may hold: their contents change, not they."""
_OF_THE_CLASS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""What torch's constructors set for themselves; another method has its own."""

_asked: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]" = weakref.WeakKeyDictionary()


def became(optimizer: torch.optim.Optimizer) -> Any:
    """What it was asked to become; None where it is what it was made as."""
    return _asked.get(optimizer)


def become_(
    optimizer: torch.optim.Optimizer, new: torch.optim.Optimizer, asked: Any
) -> Callable[[], None]:
    """Changes `optimizer`: it becomes what `new` is, in class and contents; `new` must not be used
    any more.

    Groups, state, hooks and the list of groups stay the same objects, so that schedulers and
    handles made before go on.

    Args:
        optimizer: Has as many groups as `new`.
        new: An optimizer of the other method, with what is taken over.
        asked: What `became` will say.

    Returns:
        What undoes it, as long as no update was made.
    """
    undo = _remembered(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    own = vars(optimizer)
    for key in _OF_THE_CLASS:
        own.pop(key, None)
    optimizer.__class__ = type(new)
    own.update({key: value for key, value in vars(new).items() if key not in _KEPT})
    for group, other, rate in zip(optimizer.param_groups, new.param_groups, rates, strict=True):
        _refill_(group, other)
        if isinstance(rate, Tensor):  # somebody may write to it
            group["lr"] = rate
    _refill_(optimizer.defaults, new.defaults)
    _refill_(optimizer.state, new.state)
    if "step" in own:  # a scheduler's, around the step of the class before
        _track_step_(optimizer)
    _asked[optimizer] = asked
    return undo


def _remembered(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    kind, attributes, before = type(optimizer), dict(vars(optimizer)), _asked.get(optimizer)
    groups = list(optimizer.param_groups)
    places: list[dict[Any, Any]] = [*groups, optimizer.defaults, optimizer.state]
    contents = [(place, dict(place)) for place in places]

    def undo() -> None:
        optimizer.__class__ = kind
        _refill_(vars(optimizer), attributes)
        optimizer.param_groups[:] = groups
        for place, content in contents:
            _refill_(place, content)
        if before is None:
            _asked.pop(optimizer, None)
        else:
            _asked[optimizer] = before

    return undo


def _refill_(place: dict[Any, Any], content: Any) -> None:
    values = dict(content)
    place.clear()
    place.update(values)


def _track_step_(optimizer: torch.optim.Optimizer) -> None:
    """Mark calls of `step` for torch's schedulers, as they do themselves when they are made."""
    step, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None, "its own attribute"
        vars(target)["_opt_called"] = True
        return step(target, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # by this torch knows its own
    vars(optimizer)["step"] = tracked
