"""Content of a state_dict: plain values and tensors only, in the types of the computation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.gradients import L1Decay, L2Decay, Regularizer
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.core.tensors import state_dtype
from thinwire.optim.by_name import in_order, names_of

_REGULARIZERS: dict[str, type[L1Decay | L2Decay]] = {"L1Decay": L1Decay, "L2Decay": L2Decay}
_LIKE_THE_PARAMETER = (
    "momentum_buffer residual exp_avg exp_avg_sq max_exp_avg_sq accumulator linear sum square_avg "
    "grad_avg"
)
"""State tensors with the shape of their parameter."""


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
        positions.append(_position(state_dict, optimizer.has_schedule))
        saved, here = state_dict["param_groups"], optimizer.param_groups
        groups, state = in_order(saved, names_of(saved), names_of(here)), state_dict["state"]
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


def _position(saved: Mapping[str, Any], has_schedule: bool) -> int:
    if "position" not in saved and has_schedule:
        raise ValueError(
            "the state_dict has no 'position', and a schedule drives the rate; set "
            "state_dict['position'] to the number of updates that were made"
        )
    return check.integer("state_dict['position']", saved.get("position", 0), at_least=0)


def _require_shapes(groups: list[dict[str, Any]], state: Mapping[Any, Any], optimizer: Any) -> None:
    """Raise if a shape does not fit, which can reveal another order where there are no names."""
    keys = (key for group in groups for key in group["params"])
    params = (param for group in optimizer.param_groups for param in group["params"])
    for key, param in zip(keys, params, strict=False):  # torch checks the lengths
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
    kind, attributes = type(optimizer), dict(vars(optimizer))
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
