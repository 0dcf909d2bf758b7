"""What modules keep beside parameters and buffers, as a part of an engine's state: torch's
`get_extra_state` and `set_extra_state`.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from thinwire._names import plain_names
from thinwire.strategy.extra import plain

__all__ = ["restored", "saved", "unmatched"]


def saved(model: nn.Module) -> dict[str, Any]:
    """The extra state of each module that has both methods, under its key in the model's
    `state_dict`.

    Raises:
        TypeError: One holds what a file cannot; names the module.
    """
    return {key: _state(key, module) for key, module in _modules(model).items()}


def unmatched(model: nn.Module, states: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The keys of states without a module here, and those of modules without a state."""
    here = _modules(model)
    return [key for key in states if key not in here], [key for key in here if key not in states]


def restored(model: nn.Module, states: Mapping[str, Any]) -> Callable[[], None]:
    """Let modules go on with their states; returns what undoes it.

    Tensors go to the device of those that the module has there now.

    Raises:
        ValueError: A module does not take its state; nothing has changed.
    """
    before: list[tuple[nn.Module, Any]] = []

    def undo() -> None:
        for module, state in before:
            with contextlib.suppress(Exception):  # one that refuses must not keep the rest changed
                module.set_extra_state(state)

    try:
        for key, module in _modules(model).items():
            if key not in states:
                continue
            now = module.get_extra_state()
            before.append((module, copy.deepcopy(now)))
            try:
                module.set_extra_state(_placed(copy.deepcopy(states[key]), now))
            except Exception as error:
                kind = type(module).__name__
                raise ValueError(
                    f"{key}: set_extra_state of {kind} failed with {type(error).__name__}: {error}"
                ) from error
    except BaseException:
        undo()
        raise
    return undo


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    found = [
        (f"{name}._extra_state".removeprefix("."), module)
        for name, module in model.named_modules()
        if _overrides(module, "get_extra_state") and _overrides(module, "set_extra_state")
    ]
    keys = plain_names(key for key, _ in found)
    return dict(zip(keys, (module for _, module in found), strict=True))


def _overrides(module: nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(nn.Module, method)


def _state(key: str, module: nn.Module) -> Any:
    try:
        return plain(module.get_extra_state(), key, objects=False)
    except TypeError as error:
        raise TypeError(
            f"the extra state of a {type(module).__name__} cannot be saved: {error}. Let its "
            "get_extra_state return that, and set_extra_state take it"
        ) from error


def _placed(value: Any, like: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(like.device) if isinstance(like, Tensor) else value
    if isinstance(value, Mapping):
        places = like if isinstance(like, Mapping) else {}
        return {key: _placed(entry, places.get(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        alike = isinstance(like, list | tuple) and len(like) == len(value)
        return type(value)(map(_placed, value, like if alike else value))
    return value
