"""The schedulers that drive the engine's optimizer, as a part of its state."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from thinwire.strategy.dependents import schedulers_of
from thinwire.strategy.extra import plain

__all__ = ["Matched", "matched", "restored", "saved"]


class Matched(NamedTuple):
    """Which of the schedulers here goes on with which of the states that were saved."""

    pairs: list[tuple[LRScheduler, Mapping[str, Any]]]
    unsaved: list[str]
    """Kinds of schedulers here for which there is no state."""
    missing: list[str]
    """Kinds of states for which there is no scheduler here, those aside that their owner keeps in
    `extra`."""


def saved(optimizer: torch.optim.Optimizer, extra: Any = None) -> list[dict[str, Any]]:
    """The states of the living schedulers of `optimizer`, those inside others left to these.

    Args:
        optimizer: Read only.
        extra: What the user saves beside: a scheduler that is in it may be restored by hand.

    Raises:
        TypeError: A state is nothing that a file can hold; names the scheduler.
    """
    kept = set(map(id, _objects(extra)))
    return [
        {"kind": type(one).__name__, "state": _state(one), "in_extra": id(one) in kept}
        for one in _outermost(optimizer)
    ]


def matched(states: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> Matched:
    """Find the scheduler of every state: by kind, and among several of a kind by their settings."""
    here, pairs, missing = _outermost(optimizer), [], []
    for saved_one in states:
        alike = [one for one in here if type(one).__name__ == saved_one["kind"]]
        if not alike:
            missing += [] if saved_one["in_extra"] else [saved_one["kind"]]
            continue
        best = max(alike, key=lambda one: _likeness(saved_one["state"], one))
        pairs.append((best, saved_one["state"]))
        here = [one for one in here if one is not best]
    return Matched(pairs, [type(one).__name__ for one in here], missing)


def restored(pairs: Iterable[tuple[LRScheduler, Mapping[str, Any]]]) -> Callable[[], None]:
    """Let schedulers go on with their states; returns what undoes it."""
    before: list[tuple[LRScheduler, dict[str, Any]]] = []

    def undo() -> None:
        for scheduler, attributes in before:
            vars(scheduler).clear()
            vars(scheduler).update(attributes)

    try:
        for scheduler, state in pairs:
            inner = [scheduler, *_inside(scheduler)]
            before.extend((one, dict(vars(one))) for one in inner)
            scheduler.load_state_dict(copy.deepcopy(dict(state)))
            for one, attributes in before[-len(inner) :]:
                _keep_kinds(one, attributes)
    except BaseException:
        undo()
        raise
    return undo


def _keep_kinds(scheduler: LRScheduler, before: Mapping[str, Any]) -> None:
    """Files know no Counter, which a scheduler may count its milestones with."""
    for key, value in vars(scheduler).items():
        if isinstance(before.get(key), Counter) and not isinstance(value, Counter):
            vars(scheduler)[key] = Counter(value)


def _outermost(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    found = schedulers_of(optimizer)
    inner = {id(one) for scheduler in found for one in _inside(scheduler)}
    # torch keeps no list of them, so that their order means nothing
    return sorted(
        (one for one in found if id(one) not in inner), key=lambda one: type(one).__name__
    )


def _inside(scheduler: LRScheduler) -> list[LRScheduler]:
    """Those that a sequence or a chain of schedulers holds, at every depth."""
    parts = [one for one in getattr(scheduler, "_schedulers", ()) if isinstance(one, LRScheduler)]
    return [*parts, *(deeper for part in parts for deeper in _inside(part))]


def _state(scheduler: LRScheduler) -> Any:
    name = type(scheduler).__name__
    try:
        return plain(scheduler.state_dict(), f"{name}.state_dict()")
    except TypeError as error:
        raise TypeError(
            f"the scheduler {name} cannot be saved: {error}. Give it a state_dict of plain values, "
            "or let go of it before saving"
        ) from error


def _likeness(state: Mapping[str, Any], scheduler: LRScheduler) -> int:
    """How many settings are the same."""
    now = scheduler.state_dict()
    return sum(key in now and _equal(value, now[key]) for key, value in state.items())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


def _objects(extra: Any) -> list[Any]:
    """Whatever is in the tree and is no container."""
    if isinstance(extra, Mapping):
        return [leaf for value in extra.values() for leaf in _objects(value)]
    if isinstance(extra, list | tuple):
        return [leaf for value in extra for leaf in _objects(value)]
    return [extra]
