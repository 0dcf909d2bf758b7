"""Content of a state_dict: plain values and tensors, matched to parameters by name or position."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._names import plain_name
from thinwire.core.gradients import L1Decay, L2Decay, Regularizer
from thinwire.core.several import params_in
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.core.tensors import state_dtype

_REGULARIZERS: dict[str, type[L1Decay | L2Decay]] = {"L1Decay": L1Decay, "L2Decay": L2Decay}
_LIKE_THE_PARAMETER = (
    "momentum_buffer residual exp_avg exp_avg_sq max_exp_avg_sq accumulator linear sum square_avg "
    "grad_avg"
)
"""State tensors with the shape of their parameter."""
Groups = Sequence[Mapping[str, Any]]
_WRAPPER = "module"
"""Prefix that DistributedDataParallel puts before the names of the wrapped model."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Wrapper that hides a tensor from torch's cast to the parameter's dtype on load."""

    tensor: Tensor


def packed(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state_dict with regularizers as plain values, so that `weights_only` loads it."""
    groups = [
        {**group, "regularizer": decay and [type(decay).__name__, decay.c]}
        for group in state_dict["param_groups"]
        for decay in [group.get("regularizer")]
    ]
    return {**state_dict, "param_groups": groups}


@contextmanager
def restoring(optimizer: Any) -> Iterator[None]:
    """Unpack what `packed` wrote while torch loads a state_dict into a `CommonOptimizer`, and keep
    wide state out of torch's cast.
    """
    # the position is read before anything changes, and used when torch has accepted the rest. Both
    # hooks run innermost: after the user's that change the dictionary, before those that look
    wide = optimizer._wide_state
    positions: list[int] = []

    def before(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if "position" not in state_dict and optimizer.has_schedule:
            raise ValueError(
                "the state_dict has no 'position', and a schedule drives the rate; set "
                "state_dict['position'] to the number of updates that were made"
            )
        position = state_dict.get("position", 0)
        positions.append(check.integer("state_dict['position']", position, at_least=0))
        saved = state_dict["param_groups"]
        here = optimizer.param_groups
        groups = in_order(saved, names_of(saved), names_of(here))
        state = state_dict["state"]
        _require_shapes(groups, state, optimizer)
        loadable = {k: _loadable(v, hide=wide) for k, v in state.items()}
        return {**state_dict, "param_groups": _unpacked(groups, here), "state": loadable}

    def after(_: torch.optim.Optimizer) -> None:
        for param, entries in optimizer.state.items():
            if isinstance(entries, dict) and wide:
                kept = {k: v.tensor for k, v in entries.items() if isinstance(v, _Kept)}
                entries.update({k: optimizer._as_loaded(param, x) for k, x in kept.items()})
        optimizer.begin_at(positions[0])

    handles = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_shapes(groups: list[dict[str, Any]], state: Mapping[Any, Any], optimizer: Any) -> None:
    """Raise if a shape does not fit, which can reveal another order where there are no names."""
    pairs = zip(params_in(groups), params_in(optimizer.param_groups), strict=False)
    for key, param in pairs:  # torch checks the lengths
        for name in _LIKE_THE_PARAMETER.split():
            value = state.get(key, {}).get(name)
            if not isinstance(value, Tensor):
                continue
            wanted = param.shape if is_sharded(value) else shard_of(param).shape
            if value.shape != wanted:
                raise ValueError(
                    f"the state does not fit: {name} of {optimizer._label(param)} has shape "
                    f"{tuple(value.shape)}, the parameter has {tuple(wanted)}. Give the "
                    "optimizer the parameters in the same order, or named ones"
                )


def remembered(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores `optimizer`, in class and contents, before an update."""
    kind = type(optimizer)
    attributes = dict(vars(optimizer))
    position = getattr(optimizer, "position", None)
    groups = list(optimizer.param_groups)
    dictionaries: list[dict[Any, Any]] = [*groups, optimizer.defaults, optimizer.state]
    contents = [(dictionary, dict(dictionary)) for dictionary in dictionaries]

    def undo() -> None:
        optimizer.__class__ = kind
        refill_(vars(optimizer), attributes)
        optimizer.param_groups[:] = groups
        for dictionary, content in contents:
            refill_(dictionary, content)
        if position is not None and "_common" in attributes:
            attributes["_common"].position = position

    return undo


def refill_(dictionary: dict[Any, Any], content: Any) -> None:
    """Replace the entries of a dictionary."""
    values = dict(content)
    dictionary.clear()
    dictionary.update(values)


def _unpacked(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups; keys that they lack are taken from the current groups."""
    groups = []
    for i, group in enumerate(saved):
        defaults = current[i] if i < len(current) else {}
        own = {k: v for k, v in defaults.items() if k not in ("params", "param_names")}
        if "regularizer" in group:
            group = {**group, "regularizer": _regularizer(group["regularizer"])}  # noqa: PLW2901
        groups.append({**own, **group})
    return groups


def _regularizer(plain: Any) -> Regularizer | None:
    if plain is None:
        return None
    kind, coefficient = plain
    check.one_of("the regularizer of a group in the state_dict", kind, _REGULARIZERS)
    return _REGULARIZERS[kind](coefficient)


def _loadable(entries: Any, *, hide: bool) -> Any:
    if not isinstance(entries, Mapping):
        return entries
    step = entries.get("step")
    if step is not None and not isinstance(step, Tensor):
        entries = {**entries, "step": torch.tensor(float(step), device="cpu")}
    return {
        k: _Kept(v)
        if hide and k != "step" and isinstance(v, Tensor) and v.is_floating_point()
        else v
        for k, v in entries.items()
    }


def of_params(state: Mapping[Any, Any]) -> dict[Any, Mapping[str, Any]]:
    """Return the state of parameters, without plain values stored beside it."""
    return {key: entries for key, entries in state.items() if isinstance(entries, Mapping)}


def laid_out(param: Tensor, value: Tensor) -> Tensor:
    """Return loaded state in `state_dtype`, on the parameter's device and in its layout."""
    value = value.to(device=param.device, dtype=state_dtype(param))
    if value.shape != param.shape or value.stride() == param.stride() or is_sharded(value):
        return value
    # fused kernels walk parameter and state in step, so both need one layout
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)


def names_of(groups: Groups) -> list[list[str]] | None:
    """Return the parameter names by group, or None unless every group has named parameters."""
    if not all("param_names" in group for group in groups):
        return None
    return [list(group["param_names"]) for group in groups]


def in_order(
    saved: Groups,
    saved_names: Sequence[Sequence[str]] | None,
    own_names: Sequence[Sequence[str]] | None,
) -> list[dict[str, Any]]:
    """Reorder the saved groups of a state_dict to the groups and parameters of this optimizer, by
    name. Without names, given by group, they stay as they are: torch loads by position.
    """
    groups = [dict(group) for group in saved]
    if (
        saved_names is None
        or own_names is None
        or [len(names) for names in saved_names] != [len(g["params"]) for g in groups]
    ):
        return groups
    matches = _matched(saved_names, own_names)
    if matches is None:  # a wrapper may have changed the names
        known, wanted = (
            [[_plain(name) for name in names] for names in groups_of_names]
            for groups_of_names in (saved_names, own_names)
        )
        counts = [len(set(names)) for names in (*saved_names, *own_names)]
        # plain names are still unique
        if [len(set(names)) for names in (*known, *wanted)] == counts:
            matches = _matched(known, wanted)
        if matches is None:
            _refuse(known, wanted)
    result = []
    for group_index, positions in matches:
        group = groups[group_index]
        keys = [key for key in ("params", "param_names") if key in group]
        result.append(group | {key: [group[key][i] for i in positions] for key in keys})
    return result


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Pair each name with its count so far: a group may hold the parameters of several models."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def _matched(
    known_names: Sequence[Sequence[str]], wanted_names: Sequence[Sequence[str]]
) -> list[tuple[int, list[int]]] | None:
    """Return for each wanted group its known one and the index of each name there, or None."""
    known = list(map(_numbered, known_names))
    found = []
    if len(known) != len(wanted_names):
        return None
    for i, names in enumerate(map(_numbered, wanted_names)):
        # groups without parameters, such as those of other stages, are all equal: try the same
        # index first
        match = next((k for k in [i, *range(len(known))] if set(known[k]) == set(names)), None)
        if match is None:
            return None
        positions = {name: position for position, name in enumerate(known[match])}
        found.append((match, [positions[name] for name in names]))
    return found


def _refuse(known: list[list[str]], wanted: list[list[str]]) -> NoReturn:
    """Raise the error that says what differs; list all names that differ only in their prefixes."""
    advice = "Give the optimizer the same groups of parameters, in any order"
    if len(known) != len(wanted):
        raise ValueError(
            f"the state has {len(known)} parameter groups, but the optimizer has {len(wanted)}. "
            f"{advice}"
        )
    everywhere = {name for names in known for name in names}
    for i, names in enumerate(wanted):
        for name in names:
            if name not in everywhere:
                raise ValueError(
                    f"parameter group {i} has {name}, which no group of the state has. {advice}"
                )
        if all(sorted(names) != sorted(others) for others in known):
            closest = max(known, key=lambda others: len(set(others) & set(names)))
            name = min(set(names) ^ set(closest), default=names[0])
            raise ValueError(
                f"parameter group {i} is divided differently in the state: {name} is in only one "
                f"of the two. {advice}"
            )
    raise ValueError(
        "the parameter names of the state match only without their prefixes, and are then "
        "ambiguous. Load it into a model wrapped like the saved one"
    )


def _plain(name: str) -> str:
    return ".".join(part for part in plain_name(name).split(".") if part != _WRAPPER)
