"""The state of an engine as one tree of plain values and tensors, and back; on disk and off it."""

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._names import (
    named_buffers,
    named_parameters,
    non_persistent_buffers,
)
from thinwire.checkpoint import Loaded, on_all_ranks, random_state, set_random_state
from thinwire.checkpoint import load as load_checkpoint
from thinwire.checkpoint import save as save_checkpoint
from thinwire.checkpoint.combine import Rule
from thinwire.checkpoint.random_state import derived
from thinwire.checkpoint.reader import EXPORTED
from thinwire.checkpoint.shards import Cut, words
from thinwire.comm import place_in
from thinwire.compress import KEPT, OTHER_RANKS
from thinwire.core.origin import ORIGIN, Origin, checksum_of
from thinwire.core.sharded import is_sharded, reshard_, shard_of, sharded_like
from thinwire.errors import CheckpointMismatch
from thinwire.optim.base import ExchangingOptimizer
from thinwire.optim.by_name import in_order
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.saving import remembered
from thinwire.strategy import module_state, schedulers
from thinwire.strategy.extra import plain
from thinwire.strategy.fitting import Change, changes_of, misfits, settings_in_groups
from thinwire.strategy.parts import Parts

__all__ = ["Restored", "load", "load_all", "load_parameters", "read", "save", "saved", "with_facts"]

_log = logging.getLogger("thinwire")
Restored = dict[str, Any]
"""What an engine itself goes on with: counters, and what the user had given."""

_OF_MODULES = "module_state"
"""The key of the extra state of modules, where there is any."""
_NON_PERSISTENT = "non_persistent_buffers"
"""The key of the names of buffers with persistent=False, where there are any."""
_MAY_LACK = {_OF_MODULES, _NON_PERSISTENT}
_OF_USER = ("extra", _OF_MODULES)
"""The keys of what is the user's, whose inside is not ours to understand."""
_OTHER_RANKS: dict[str, Rule] = {
    "extra": "first",
    _OF_MODULES: "first",
    _NON_PERSISTENT: "first",
    "loss_scale/scale": "min",
    "merge/overflowed": "max",
    "merge/sums/*": "mean_zero",
    **{f"exchange/*{kind}s/*": rule for kind, rule in OTHER_RANKS.items()},
    **{f"exchange/{kind}/*": rule for kind, rule in KEPT.items()},
    "optimizer/state/*/residual": "mean_zero",
    "optimizer/state/*/step": "first",
    "optimizer/state/*/momentum_buffer": "mean_zero",
}
"""On another number of ranks, what is not simply the mean of those that have it: sums (absent ranks
gave 0), counts."""
_SAME_EVERYWHERE = {kind for kind, rule in KEPT.items() if rule == "first"}
"""What compression keeps that all ranks hold alike, and that is nothing pending."""


def saved(parts: Parts, counters: Mapping[str, int], extra: Any = None) -> dict[str, Any]:
    """Everything that a later step depends on, copied where the engine would go on to change it.

    Raises:
        TypeError: A scheduler's state, the extra state of a module, or something in `extra`, is
            nothing that a file can hold; or the optimizer keeps row-sparse state.
    """
    _require_dense_state(parts)
    of_modules = _copied(module_state.saved(parts.model), sharded=True)
    names = sorted(non_persistent_buffers(parts.model))
    return {
        "counters": dict(counters),
        "parameters": _copied(_parameters(parts)),
        "buffers": _copied(dict(named_buffers(parts.model))),
        "optimizer": _copied(
            getattr(parts.optimizer, "plain_state_dict", parts.optimizer.state_dict)()
        ),
        "optimizer_names": _names(parts),
        "schedulers": _copied(schedulers.saved(parts.optimizer, extra)),
        "exchange": _copied(parts.exchange.state_dict()),
        "loss_scale": None if parts.scaler is None else parts.scaler.state_dict(),
        "merge": None if parts.merge is None else _copied(parts.merge.state_dict()),
        "random": random_state(),
        "extra": _copied(plain(extra), sharded=True),
        **({_OF_MODULES: of_modules} if of_modules else {}),
        **({_NON_PERSISTENT: names} if names else {}),
    }


def with_facts(state: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """What `saved` gave, for `load`, with what it fits and whose it is; a checkpoint has both
    beside it.
    """
    origin = Origin(*place_in(), state["counters"]["step"], checksum_of(_of_ranks(state)))
    return {**state, "facts": _copied(parts.facts), ORIGIN: origin.packed()}


def load(state: Mapping[str, Any], parts: Parts) -> Restored:
    """Put everything back and return what the engine goes on with; where that fails, nothing has
    changed.
    """
    check.instance("state", state, Mapping, advice="pass what engine.state_dict() returned")
    if "facts" not in state:
        raise ValueError(
            "state is not one of an engine: missing ['facts']. Pass what engine.state_dict() "
            "returned"
        )
    changes, problems = _compared(state["facts"], parts)
    if problems:
        raise ValueError(
            f"state does not fit: {'; '.join(problems)}. Prepare the engine as it was then"
        )
    rest = {key: value for key, value in state.items() if key not in ("facts", ORIGIN)}
    origin = Origin.read(state.get(ORIGIN))
    # an optimizer goes on in the very tensors that it is given, and a state may be loaded again
    own = {k: _copied(v, sharded=True) if k == "optimizer" else v for k, v in rest.items()}
    restored = load_all(
        own,
        parts,
        keep=settings_in_groups(changes),
        agreed=lambda problem, left: left,
    )
    _tell_of_changes("the state", changes)
    problem = None if origin is None else origin.problem(*place_in(), checksum_of(_of_ranks(rest)))
    if problem is not None:
        warnings.warn(f"thinwire: {problem}", UserWarning, stacklevel=3)
    return restored


def _of_ranks(state: Mapping[str, Any]) -> list[Any]:
    """The parts of a state that differ from rank to rank."""
    return [state["optimizer"]["state"], state["exchange"], state["merge"]]


@torch.no_grad()
def load_all(
    state: Mapping[str, Any],
    parts: Parts,
    *,
    keep: Collection[str],
    agreed: Callable[[Exception | None, frozenset[str]], frozenset[str]],
) -> Restored:
    """`load`, with what several ranks need.

    Args:
        state: What `saved` gave.
        parts: Of the engine; changed as a whole or not at all.
        keep: Keys of the optimizer's groups whose values here stay in force.
        agreed: Called before parameters change with this rank's error, or None, and the buffers
            that it has to leave; raises where any rank has an error, else gives those that any
            rank has to leave.
    """
    left: frozenset[str] = frozenset()
    of_modules = state.get(_OF_MODULES, {})
    with ExitStack() as undo:
        problem: Exception | None = None
        try:
            counters, left = _checked(state, parts)
            found = schedulers.matched(state["schedulers"], parts.optimizer)
            undo.callback(remembered(parts.optimizer))
            _load_optimizer(state, parts, keep)
            undo.callback(schedulers.restored(found.pairs))
            undo.callback(module_state.restored(parts.model, of_modules))
            if parts.scaler is not None:
                undo.callback(parts.scaler.load_state_dict, parts.scaler.state_dict())
                parts.scaler.load_state_dict(state["loss_scale"])
            if parts.merge is not None:
                undo.callback(parts.merge.load_state_dict, parts.merge.state_dict())
                if state["merge"] is None:
                    parts.merge.clear()
                else:
                    parts.merge.load_state_dict(state["merge"])
        except Exception as error:
            problem = error
        left = agreed(problem, left)
        if problem is not None:
            raise problem
        parts.exchange.load_state_dict(
            _without(left, state["exchange"], _buffers(parts))
        )  # which checks everything before it changes anything
        undo.pop_all()
    _copy(state, parts, left)
    parts.exchange.buffers_loaded()
    # those that a merge has changed on each rank are made equal by its update
    merging = parts.merge is not None and parts.merge.microsteps != 0
    parts.buffers.forget(equal=not merging, alike=not left)
    set_random_state(state["random"])
    _tell_of_schedulers(found)
    _tell_of_modules(*module_state.unmatched(parts.model, of_modules))
    return {**counters, "extra": state["extra"]}


def _checked(state: Mapping[str, Any], parts: Parts) -> tuple[dict[str, int], frozenset[str]]:
    """The counters, once it is clear that the state is one of such an engine; and the buffers that
    are `_left`.
    """
    wanted = {
        "counters",
        "parameters",
        "buffers",
        "optimizer",
        "exchange",
        "loss_scale",
        "merge",
        "random",
    }
    wanted |= {"optimizer_names", "schedulers", "extra"}
    if state.keys() - _MAY_LACK != wanted:
        raise ValueError(
            f"state is not one of an engine: missing {sorted(wanted - state.keys())}, "
            f"unknown {sorted(state.keys() - wanted - _MAY_LACK)}"
        )
    kinds = ("step", "dropped_steps", "bytes_sent")
    counters = {key: check.integer(key, state["counters"].get(key), at_least=0) for key in kinds}
    _require_same("loss_scale", state["loss_scale"], parts.scaler)
    merged = 0 if state["merge"] is None else state["merge"]["microsteps"]
    if merged and parts.merge is None:
        raise ValueError(
            f"state has {merged} merged microsteps of an unfinished update, and the engine has no "
            "gradient_merge: prepare it with one, or call engine.flush() before saving"
        )
    return counters, _require_shapes(state, parts, "Load a state of the same model")


def _require_shapes(state: Mapping[str, Any], parts: Parts, advice: str) -> frozenset[str]:
    """Refuse other parameters and buffers than those here, but for the buffers that are `_left`,
    which it returns.
    """
    check.same_shapes("parameters", state["parameters"], _parameters(parts), advice=advice)
    left = _left(state, parts)
    theirs, ours = (
        {name: buffer for name, buffer in buffers.items() if name not in left}
        for buffers in (state["buffers"], _buffers(parts))
    )
    check.same_shapes("buffers", theirs, ours, advice=advice)
    return left


def _left(state: Mapping[str, Any], parts: Parts) -> frozenset[str]:
    """The buffers with persistent=False that are only here, or only in the state, or of another
    shape there: torch's `state_dict` would not have them, so a load leaves them as they are.

    Of a buffer that is here the model says whether it is persistent, of another one the state.
    """
    theirs, ours = state["buffers"], _buffers(parts)
    elsewhere = set(state.get(_NON_PERSISTENT, ())) - ours.keys()
    return frozenset(
        name
        for name in non_persistent_buffers(parts.model) | elsewhere
        if (name in theirs) != (name in ours)
        or (name in ours and theirs[name].shape != ours[name].shape)
    )


def _without(
    left: frozenset[str], exchange: Mapping[str, Any], here: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The state of an exchange, in which the buffers that are left have the values of here: local
    updates keep buffers between averagings, and of one on its way.
    """
    fitted = dict(exchange)
    if not left:
        return fitted
    if isinstance(inner := exchange.get("inner"), Mapping):  # of a stage of a pipeline
        fitted["inner"] = _without(left, inner, here)
    names = {f"buffer {name}": name for name in left}  # as local updates call them

    def rest(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in names}

    local, pending = exchange.get("local"), exchange.get("pending")
    if isinstance(local, Mapping):
        own = {key: here[name] for key, name in names.items() if name in here}
        averaged = {key: b for key, b in own.items() if b.is_floating_point() and b.numel()}
        fitted["local"] = rest(local) | averaged
    if isinstance(pending, Mapping) and "extras" in pending:
        fitted["pending"] = {**pending, "extras": rest(pending["extras"])}
    return fitted


def _copy(state: Mapping[str, Any], parts: Parts, left: frozenset[str]) -> None:
    for kind, places in (("parameters", _parameters(parts)), ("buffers", _buffers(parts))):
        for name, place in places.items():
            if kind == "parameters" or name not in left:
                place.copy_(state[kind][name])
    told = sorted(left & {*state["buffers"], *_buffers(parts)})
    if told:
        _log.warning(
            "%s: not persistent, and only in the state or only in the model, or of two shapes: the "
            "model keeps what it has",
            ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else ""),
        )


def _load_optimizer(state: Mapping[str, Any], parts: Parts, keep: Collection[str]) -> None:
    saved_groups, groups = state["optimizer"]["param_groups"], parts.optimizer.param_groups
    kept = [{key: group[key] for key in keep if key in group} for group in groups]
    ordered = in_order(saved_groups, state["optimizer_names"], _names(parts))
    entries = state["optimizer"]["state"]
    if not isinstance(parts.optimizer, ExchangingOptimizer):  # which keeps its state as shards
        keys = (key for group in ordered for key in group["params"])
        places = (param for group in groups for param in group["params"])
        owners = dict(zip(keys, places, strict=False))
        entries = {  # a key that is no parameter's is the optimizer's own
            key: _as_sharded(values, owners[key]) if key in owners else values
            for key, values in entries.items()
        }
    parts.optimizer.load_state_dict({"state": entries, "param_groups": ordered, **_rest_of(state)})
    if not isinstance(parts.optimizer, CommonOptimizer):  # those take their state as it is
        same = all(
            state["parameters"][name].dtype == p.dtype for name, p in _parameters(parts).items()
        )
        if same:
            _put_back_types(parts.optimizer, entries, owners)
    for group, values in zip(parts.optimizer.param_groups, kept, strict=True):
        group.update(values)


def _put_back_types(
    optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any], owners: Mapping[Any, Tensor]
) -> None:
    """Undo the cast to the parameter's type that torch makes of all floating-point state."""
    for key, owner in owners.items():
        here = optimizer.state.get(owner, {})
        for name, value in saved.get(key, {}).items():
            now = here.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                here[name] = value.to(now.device, copy=True)


def _rest_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state["optimizer"].items() if k not in ("state", "param_groups")}


def _as_sharded(entries: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The state of one parameter; what lies like its shard becomes sharded as it is."""
    shape = shard_of(param).shape
    return {
        key: sharded_like(value, param)
        if isinstance(value, Tensor) and value.dim() and value.shape == shape
        else value
        for key, value in entries.items()
    }


def _tell_of_schedulers(found: schedulers.Matched) -> None:
    for kind in found.missing:
        warnings.warn(
            f"the state has a scheduler {kind}, and the optimizer of this engine has no such "
            "scheduler now: its rates would begin anew. Make it before engine.load, which then "
            "restores it, or pass it in extra= when you save and load its state yourself",
            UserWarning,
            stacklevel=4,
        )
    for kind in found.unsaved:
        warnings.warn(
            f"the optimizer of this engine has a scheduler {kind}, and there is no state for it: "
            "it starts from its beginning, or goes on from where it is. If you do not want that, "
            "let it take the steps that were made",
            UserWarning,
            stacklevel=4,
        )


def _tell_of_modules(missing: list[str], unsaved: list[str]) -> None:
    if missing:
        warnings.warn(
            f"the state has {', '.join(missing[:3])}, and the model has no such module with a "
            "set_extra_state: it is left out",
            UserWarning,
            stacklevel=4,
        )
    if unsaved:
        warnings.warn(
            f"the state has no {', '.join(unsaved[:3])}: these modules go on with the extra state "
            "that they have now",
            UserWarning,
            stacklevel=4,
        )


def save(
    directory: str | Path,
    state: Callable[[], Mapping[str, Any]],
    parts: Parts,
    step: int,
    keep: int | None,
) -> Path:
    """Write a checkpoint; see `Engine.save`."""
    content: Any
    try:
        content = state()
    except Exception as error:  # the others are about to wait for this rank
        content = error
    return save_checkpoint(
        directory,
        content,
        step=step,
        group=parts.savers,
        facts=parts.facts,
        part=parts.part,
        keep=keep,
    )


def read(
    directory: str | Path, parts: Parts, apply: Callable[..., None], step: int | None = None
) -> Path:
    """Find the newest whole checkpoint, or that of a step, see that it fits, and let
    `apply(state, keep=, agreed=)` take it over.
    """
    loaded = load_checkpoint(
        directory,
        group=parts.savers,
        part=parts.part,
        rules=_OTHER_RANKS,
        cut=partial(_cut, parts),
        step=step,
    )
    changes, problems = _compared(loaded.facts, parts)
    if problems:
        raise _misfit(loaded, "; ".join(problems))
    if loaded.cut_anew:
        fitted = partial(_complete, loaded.state, parts)
        on_all_ranks(parts.savers, "cutting a checkpoint into other shards", fitted)

    if not parts.group.stays and parts.group.rank > 0:  # all of them read that of one member
        loaded.state["random"] = derived(loaded.state["random"], parts.group.rank)

    def agreed(problem: Exception | None, left: frozenset[str]) -> frozenset[str]:
        def act() -> list[str]:
            if problem is not None:
                raise _misfit(loaded, str(problem)) from problem
            return sorted(left)

        return _of_any(on_all_ranks(parts.savers, "taking over a checkpoint", act))

    apply(loaded.state, keep=settings_in_groups(changes), agreed=agreed)
    _tell_of_changes(str(loaded.path), changes)
    return loaded.path


def _of_any(answers: list[list[str]]) -> frozenset[str]:
    return frozenset(chain.from_iterable(answers))


def _compared(facts: Mapping[str, Any], parts: Parts) -> tuple[list[Change], list[str]]:
    changes = changes_of(facts.get("strategy", {}), parts.facts["strategy"])
    return changes, misfits(facts, parts.facts, changes)


def _tell_of_changes(what: str, changes: list[Change]) -> None:
    if changes:
        told = ", ".join(
            f"{change.name} was {change.before} and is {change.now}" for change in changes
        )
        _log.warning("%s goes on with other settings: %s", what, told)


@torch.no_grad()
def load_parameters(directory: str | Path, parts: Parts) -> Path:
    """The parameters and buffers alone; see `Engine.load_parameters`."""
    fit = "Load a checkpoint of the same model"
    if parts.runner is not None:
        fit += f", cut into the same stages; else {EXPORTED}"
    loaded = load_checkpoint(
        directory,
        group=parts.savers,
        part=parts.part,
        rules=_OTHER_RANKS,
        combined=True,
        cut=partial(_cut, parts),
    )

    def fits() -> list[str]:
        theirs, ours = (_shapes(facts) for facts in (loaded.facts, parts.facts))
        if loaded.cut_anew and theirs != ours:  # rows of shards may fit by chance
            name = next(n for n in {**theirs, **ours} if theirs.get(n) != ours.get(n))
            raise CheckpointMismatch(
                f"{loaded.path}: parameter {name} has shape {theirs.get(name, 'none')} in it and "
                f"{ours.get(name, 'none')} here. Load a checkpoint of the same model"
            )
        try:
            return sorted(_require_shapes(loaded.state, parts, fit))
        except ValueError as error:
            raise CheckpointMismatch(f"{loaded.path}: {error}") from error

    what = "taking over the parameters of a checkpoint"
    left = _of_any(on_all_ranks(parts.savers, what, fits))
    _copy(loaded.state, parts, left)
    begin_anew(parts, alike=not left)
    return loaded.path


def begin_anew(parts: Parts, *, alike: bool = True) -> None:
    """Forget what was on its way for other parameters; `alike`: whether ranks have the same buffers
    now.
    """
    parts.buffers.forget(alike=alike)
    if parts.merge is not None:
        parts.merge.clear()
    parts.exchange.start_anew()


def _shapes(facts: Mapping[str, Any]) -> dict[str, str]:
    """The whole shapes of the parameters by name, from the facts of a checkpoint."""
    split = (entry.rsplit(" [", 1) for entry in facts.get("parameters", ()))
    return {named.rsplit(" ", 1)[0]: f"[{shape}" for named, shape in split}


def _misfit(loaded: Loaded, problem: str) -> CheckpointMismatch:
    alone = "engine.load_parameters(directory)"
    if (loaded.facts.get("strategy") or {}).get("pipeline") is not None:
        alone = EXPORTED
    return CheckpointMismatch(
        f"{loaded.path} does not fit: {problem}. Prepare the engine as it was then, or begin anew "
        f"with the parameters alone: {alone}"
    )


def _cut(parts: Parts, facts: Mapping[str, Any]) -> Cut | None:
    """How this engine's model is cut into shards, for a checkpoint of another cut; None where its
    parts, or those of the engine, are stages of a pipeline.
    """
    if parts.runner is not None or facts.get("strategy", {}).get("pipeline") is not None:
        return None
    params = dict(named_parameters(parts.model))
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    first = next(iter(params.values()))
    shards = first.device_mesh.size() if is_sharded(first) else 1  # type: ignore[attr-defined]

    def owner(tree: Any, path: tuple[Any, ...]) -> str | None:
        if path[:2] == ("optimizer", "state"):
            name = _owners(tree).get(path[2])
            return name if name in shapes else None
        if path[0] in _OF_USER:  # of rank 0, whatever it is
            return None
        return next((word for word in words(path) if word in shapes), None)

    return Cut(shards=shards, shard=parts.part, shapes=shapes, owner=owner, of_ranks=("random",))


def _owners(tree: Mapping[str, Any]) -> dict[Any, str]:
    """The parameters that the keys of an optimizer's saved state stand for."""
    names, groups = tree["optimizer_names"], tree["optimizer"]["param_groups"]
    if names is None:
        return {}
    return {
        key: name
        for group, told in zip(groups, names, strict=True)
        for key, name in zip(group["params"], told, strict=True)
    }


def _complete(state: Mapping[str, Any], parts: Parts) -> None:
    """After a new cut: what compression keeps of a shard that was not compressed before is zero, or
    as drawn where all ranks hold the same.

    Raises:
        CheckpointMismatch: What was kept belongs to a shard that is not compressed now.
    """
    saved, here = state["exchange"], parts.exchange.state_dict()
    for kind, places in here.items():
        if not isinstance(places, dict) or not isinstance(saved.get(kind), dict):
            continue
        for name in [name for name in saved[kind] if name not in places]:
            lost = saved[kind][name]
            if not isinstance(lost, Tensor) or kind == "pending":
                continue
            if kind not in _SAME_EVERYWHERE:
                _require_nothing_pending(f"{kind} of {name}", lost)
            del saved[kind][name]
        for name, place in places.items():
            if not isinstance(place, Tensor):
                continue
            drawn = place.detach().cpu().clone()
            new = drawn if kind in _SAME_EVERYWHERE else torch.zeros_like(drawn)
            saved[kind].setdefault(name, new)

    optimizer = parts.optimizer
    if not isinstance(optimizer, ExchangingOptimizer):
        return
    owners, params = _owners(state), dict(named_parameters(parts.model))
    for key, entries in state["optimizer"]["state"].items():
        name = owners.get(key)
        if name is not None and "residual" in entries and not optimizer.compresses(params[name]):
            _require_nothing_pending(f"residual of {name}", entries["residual"])
            del entries["residual"]


def _require_nothing_pending(what: str, tensor: Tensor) -> None:
    if tensor.any():
        raise CheckpointMismatch(
            f"{what}: the shards that it belongs to are too small to be compressed now, and what "
            "is pending would be lost: lower min_numel (of LowRank, or its rank), or load with the "
            "shards that saved"
        )


def _parameters(parts: Parts) -> dict[str, Tensor]:
    if any(map(is_sharded, parts.params.values())):
        reshard_(parts.model)
    return {name: shard_of(param) for name, param in named_parameters(parts.model)}


def _buffers(parts: Parts) -> dict[str, Tensor]:
    return dict(named_buffers(parts.model))


def _names(parts: Parts) -> list[list[str]] | None:
    """The names in the model of the optimizer's parameters, by group; None where one of them has
    none.
    """
    names: dict[Tensor, str] = {p: name for name, p in named_parameters(parts.model)}
    groups: Sequence[Any] = [group["params"] for group in parts.optimizer.param_groups]
    if any(p not in names for group in groups for p in group):
        return None
    return [[names[p] for p in group] for group in groups]


def _require_dense_state(parts: Parts) -> None:
    for name, param in parts.params.items():
        for key, value in parts.optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.layout != torch.strided:
                raise TypeError(
                    f"{key} of {name} is a {value.layout} tensor in "
                    f"{type(parts.optimizer).__name__}, since its gradients are row-sparse, and "
                    "only dense state can be saved: train by tw.optim.LazyAdam, or without "
                    "momentum, or make the embedding with sparse=False"
                )


def _copied(tree: Any, *, sharded: bool = False) -> Any:
    """The same tree, its tensors detached and cloned; of a sharded one this rank's part, unless
    they may stay `sharded`.
    """
    if isinstance(tree, Tensor):
        return (tree if sharded else shard_of(tree)).detach().clone()
    if isinstance(tree, Mapping):
        return {key: _copied(value, sharded=sharded) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value, sharded=sharded) for value in tree)
    return tree


def _require_same(kind: str, state: object, part: object) -> None:
    if (state is None) != (part is None):
        has, lacks = ("state", "the engine") if part is None else ("the engine", "state")
        raise ValueError(
            f"{has} has a {kind} and {lacks} has none: prepare the engine with the same strategy"
        )
