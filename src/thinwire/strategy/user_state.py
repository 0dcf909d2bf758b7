"""State of the user: `extra`, extra states of modules, and schedulers of the optimizer."""

import contextlib
import copy
import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire._names import plain_names
from thinwire.checkpoint.tree import plain_key
from thinwire.core.several import all_of
from thinwire.core.tree import equal, leaves


def plain(value: Any, path: str = "extra", *, objects: bool = True) -> Any:
    """Return the same tree with `state_dict()` in place of each object that has one, if `objects`
    are allowed, and with Python's numbers in place of NumPy's.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        number = value.item()
        if isinstance(number, bool | int | float):  # a long double has more digits than Python's
            return number
    if value is None or isinstance(value, bool | int | float | str | bytes | Tensor):
        return value
    if isinstance(value, Mapping):
        return {
            plain_key(key, path): plain(entry, f"{path}[{key!r}]", objects=objects)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        entries = [plain(entry, f"{path}[{i}]", objects=objects) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    if objects and not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return plain(value.state_dict(), f"{path}.state_dict()")
    advice = "pass the values that a later run needs"
    if isinstance(value, torch.Generator):
        advice = "pass its get_state()"
    elif isinstance(value, np.ndarray):
        advice = "pass torch.from_numpy(array)"
    raise TypeError(
        f"{path} is of type {type(value).__name__}; a checkpoint holds None, bool, int, float, "
        "str, bytes, tensors, dicts, lists and tuples of "
        f"these{', and objects with a state_dict' if objects else ''}: {advice}"
    )


def saved_modules(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of each module that has both methods, by its key in `state_dict`."""
    states = {}
    for key, module in _modules(model).items():
        try:
            states[key] = plain(module.get_extra_state(), key, objects=False)
        except TypeError as error:
            raise TypeError(
                f"the extra state of a {type(module).__name__} cannot be saved: {error}. Let its "
                "get_extra_state return such values, and set_extra_state accept them"
            ) from error.__cause__
    return states


def unmatched_modules(model: nn.Module, states: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the keys of states without a module here, and those of modules without a state."""
    here = _modules(model)
    return [key for key in states if key not in here], [key for key in here if key not in states]


def restore_modules_(model: nn.Module, states: Mapping[str, Any], undo: ExitStack) -> None:
    """Restore the extra states of modules, on the device of the present state."""
    for key, module in _modules(model).items():
        if key not in states:
            continue
        now = module.get_extra_state()
        undo.callback(_put_back, module, copy.deepcopy(now))
        try:
            module.set_extra_state(_placed(copy.deepcopy(states[key]), now))
        except Exception as error:
            kind = type(module).__name__
            raise ValueError(
                f"{key}: set_extra_state of {kind} failed with {type(error).__name__}: {error}"
            ) from error


def _put_back(module: nn.Module, state: Any) -> None:
    with contextlib.suppress(Exception):  # one failure must not stop the others
        module.set_extra_state(state)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    both = ("get_extra_state", "set_extra_state")
    found = {
        f"{name}._extra_state".removeprefix("."): module
        for name, module in model.named_modules()
        if all(getattr(type(module), own) is not getattr(nn.Module, own) for own in both)
    }
    return dict(zip(plain_names(found), found.values(), strict=True))


def _placed(value: Any, like: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(like.device) if isinstance(like, Tensor) else value
    if isinstance(value, Mapping):
        current = like if isinstance(like, Mapping) else {}
        return {key: _placed(entry, current.get(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        alike = isinstance(like, list | tuple) and len(like) == len(value)
        return type(value)(map(_placed, value, like if alike else value))
    return value


class Matched(NamedTuple):
    """Assignment of saved states to the schedulers here."""

    pairs: list[tuple[LRScheduler, Mapping[str, Any]]]
    unsaved: list[str]
    """Kinds of schedulers here that have no saved state."""
    missing: list[str]
    """Kinds of saved states that have no scheduler here, without those whose owner saves them in
    `extra`.
    """


def saved_schedulers(optimizer: torch.optim.Optimizer, extra: Any = None) -> list[dict[str, Any]]:
    """Return the states of the living schedulers of `optimizer`, without those inside others."""
    kept = set(map(id, leaves(extra, object)))
    return [
        {"kind": type(one).__name__, "of": of, "state": _state(one), "in_extra": id(one) in kept}
        for of, single in enumerate(all_of(optimizer))
        for one in _outermost(single)
    ]


def matched_schedulers(
    states: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer
) -> Matched:
    """Find the scheduler of every state, among several of one kind by their settings."""
    every = [_outermost(single) for single in all_of(optimizer)]
    owners = {id(one): of for of, schedulers in enumerate(every) for one in schedulers}
    here = [one for schedulers in every for one in schedulers]
    pairs = []
    missing = []
    for saved_one in states:
        wanted = saved_one["kind"], saved_one["of"]
        alike = [one for one in here if (type(one).__name__, owners[id(one)]) == wanted]
        if not alike:
            missing += [] if saved_one["in_extra"] else [saved_one["kind"]]
            continue
        best = max(alike, key=lambda one: _equal_settings(saved_one["state"], one))
        pairs.append((best, saved_one["state"]))
        here = [one for one in here if one is not best]
    return Matched(pairs, [type(one).__name__ for one in here], missing)


def restore_schedulers_(
    pairs: Iterable[tuple[LRScheduler, Mapping[str, Any]]], undo: ExitStack
) -> None:
    """Restore schedulers. `undo` gets the functions that undo it."""
    for scheduler, state in pairs:
        before = [(one, dict(vars(one))) for one in (scheduler, *_inside(scheduler))]
        for one, attributes in before:
            undo.callback(vars(one).update, attributes)
            undo.callback(vars(one).clear)
        scheduler.load_state_dict(copy.deepcopy(dict(state)))
        for one, attributes in before:
            for key, value in vars(one).items():  # milestones; a file has no Counter
                if isinstance(attributes.get(key), Counter):
                    vars(one)[key] = Counter(value)


def _outermost(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    # torch keeps no list of schedulers and not all leave a mark: they are found among the objects
    # that refer to the optimizer
    if not _living(optimizer):
        return []
    gc.collect()  # unreachable schedulers may not be collected yet, and none is held here
    found = _living(optimizer)
    inner = {id(one) for scheduler in found for one in _inside(scheduler)}
    # their order means nothing
    return sorted(
        (one for one in found if id(one) not in inner), key=lambda one: type(one).__name__
    )


def _inside(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return the schedulers inside a sequence or a chain of schedulers, at every depth."""
    parts = [one for one in getattr(scheduler, "_schedulers", ()) if isinstance(one, LRScheduler)]
    return [*parts, *(deeper for part in parts for deeper in _inside(part))]


def _state(scheduler: LRScheduler) -> Any:
    name = type(scheduler).__name__
    try:
        return plain(scheduler.state_dict(), f"{name}.state_dict()")
    except TypeError as error:
        raise TypeError(
            f"the scheduler {name} cannot be saved: {error}. Give it a state_dict of plain "
            "values, or delete it before saving"
        ) from error.__cause__


def _equal_settings(state: Mapping[str, Any], scheduler: LRScheduler) -> int:
    """Return the number of equal settings."""
    now = scheduler.state_dict()
    return sum(key in now and equal(value, now[key]) for key, value in state.items())


def _living(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    holders = gc.get_referrers(optimizer)
    # an object whose attributes were read keeps them in a dictionary, which is the referrer then
    holders += gc.get_referrers(*(holder for holder in holders if type(holder) is dict))
    # type() and not isinstance, which would ask proxies of others for their class
    found = {id(holder): holder for holder in holders if issubclass(type(holder), LRScheduler)}
    return [holder for holder in found.values() if getattr(holder, "optimizer", None) is optimizer]
