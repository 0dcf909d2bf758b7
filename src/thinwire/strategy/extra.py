"""What a user gives a checkpoint beside the engine's own state, as plain values and tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["plain"]


def plain(value: Any, path: str = "extra", *, objects: bool = True) -> Any:
    """The same tree with the `state_dict()` of whatever has one in its place.

    Args:
        value: Nested dicts, lists and tuples of None, bool, int, float, str, bytes, tensors,
            NumPy's bool, int and float, which become Python's, and objects with a `state_dict`.
            Read only.
        path: Where it stands, for errors.
        objects: Whether the latter may be in it.

    Raises:
        TypeError: Something else is in it; names its place and what to do.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        number = value.item()
        if isinstance(number, bool | int | float):  # a long double has more digits than Python's
            return number
    if value is None or isinstance(value, bool | int | float | str | bytes | Tensor):
        return value
    if isinstance(value, Mapping):
        return {
            _key(key, path): plain(entry, f"{path}[{key!r}]", objects=objects)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        entries = [plain(entry, f"{path}[{i}]", objects=objects) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    if objects and not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return plain(value.state_dict(), f"{path}.state_dict()")
    advice = "give what a later run needs of it"
    if isinstance(value, torch.Generator):
        advice = "give its get_state()"
    elif isinstance(value, np.ndarray):
        advice = "give torch.from_numpy(array)"
    raise TypeError(
        f"{path} is of type {type(value).__name__}; a checkpoint holds None, bool, int, float, "
        "str, bytes, tensors, dicts, lists and tuples of these"
        f"{', and whatever has a state_dict' if objects else ''}: {advice}"
    )


def _key(key: object, path: str) -> int | str:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(
            f"{path} has the key {key!r} of type {type(key).__name__}; keys are str or int"
        )
    return key
