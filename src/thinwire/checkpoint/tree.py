"""Converts a nested state to plain JSON with a table of tensors, and back.

None, bool, int, finite float, str and list stand for themselves. Everything else is an object with
one key that names its kind: `dict` (str keys), `items` (other keys, as pairs), `tuple`, `float`
(inf, -inf, nan), `bytes` (base64) and `tensor` (its name in the table). Subclasses come back as the
plain type.
"""

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading JSON that was not written here."""
_UNFIT = re.compile(r"[^A-Za-z0-9._/-]")
_ODD_FLOATS = ("inf", "-inf", "nan")
_KINDS = "None, bool, int, float, str, bytes, tensors, and dicts, lists and tuples of these"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Reference to a tensor of a checkpoint: its file's rank, its name there, its properties."""

    rank: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


STORED = Tensor | TensorRef
"""Leaves that are tensors, or stand for one of a file."""


def table_entry(tensor: Tensor, rank: int, name: str) -> list[Any]:
    """Return a tensor's entry in the table of a rank's file, for `parsed_table`."""
    return [rank, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def parsed_table(raw: Mapping[str, Any], ranks: int) -> dict[str, TensorRef]:
    """Return the table of a rank's file, from the entries of `table_entry`."""
    table = {}
    for name, entry in raw.items():
        match entry:
            case [int(rank), str(stored), str(kind), list(shape)] if 0 <= rank < ranks:
                dtype = getattr(torch, kind, None)
                if isinstance(dtype, torch.dtype) and all(type(n) is int and n >= 0 for n in shape):
                    table[name] = TensorRef(rank, stored, dtype, tuple(shape))
                    continue
        raise ValueError(f"the tensor {name!r} is described by {entry!r}")
    return table


def encoded(tree: Any, tensors: dict[str, Tensor] | None, path: str = "") -> Any:
    """Return a tree of plain values and tensors as values that JSON holds exactly."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return _scalar(tree)
    if isinstance(tree, bytes):
        return {"bytes": base64.b64encode(tree).decode()}
    if isinstance(tree, Tensor):
        return {"tensor": _registered(tree, tensors, path)}
    if isinstance(tree, Mapping):
        items = [
            (plain_key(k, f"state{path}"), encoded(v, tensors, f"{path}/{k}"))
            for k, v in tree.items()
        ]
        if all(isinstance(key, str) for key, _ in items):
            return {"dict": dict(items)}
        return {"items": [list(item) for item in items]}
    if isinstance(tree, list | tuple):
        entries = [encoded(entry, tensors, f"{path}/{i}") for i, entry in enumerate(tree)]
        return entries if isinstance(tree, list) else {"tuple": entries}
    raise TypeError(f"state{path} is of type {type(tree).__name__}; a checkpoint holds {_KINDS}")


def _registered(tensor: Tensor, tensors: dict[str, Tensor] | None, path: str) -> str:
    """Add a tensor under a name made from its path, and return the name."""
    if tensors is None:
        raise TypeError(
            f"facts{path} is a tensor, but facts are plain values: put tensors in the state"
        )
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    if not dense or tensor.is_meta or hasattr(tensor, "full_tensor"):
        kind = tensor.device.type if tensor.layout == torch.strided else str(tensor.layout)
        raise TypeError(
            f"state{path} is a {kind} tensor of type {type(tensor).__name__} and "
            f"{tensor.dtype}; a checkpoint holds dense tensors (of a DTensor, save to_local())"
        )
    base = _UNFIT.sub("_", path.removeprefix("/")) or "state"
    names = (base if i == 0 else f"{base}~{i}" for i in range(len(tensors) + 2))
    name = next(name for name in names if name not in tensors and name != "__metadata__")
    tensors[name] = tensor
    return name


def decoded(node: Any, leaf: Callable[[str], Any]) -> Any:  # noqa: PLR0911 - one for each kind
    """Return the tree that was encoded, with `leaf(name)` in place of each tensor."""
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [decoded(entry, leaf) for entry in node]
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(
            f"an object of a tree has the keys {sorted(node)}, but it must have one key, its kind"
        )
    [(kind, content)] = node.items()
    match kind, content:
        case "dict", dict():
            return {key: decoded(entry, leaf) for key, entry in content.items()}
        case "items", list():
            return dict(_pairs(content, leaf))
        case "tuple", list():
            return tuple(decoded(entry, leaf) for entry in content)
        case "float", str() if content in _ODD_FLOATS:
            return float(content)
        case "bytes", str():
            return base64.b64decode(content, validate=True)
        case "tensor", str():
            return leaf(content)
    raise ValueError(
        f"a tree has {kind!r} with a {type(content).__name__}, which this format does not have"
    )


def _scalar(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)  # an enumeration's or a subclass's plain value
    if isinstance(value, str):
        return str.__str__(value)  # `str` itself gives the name of an enumeration's member
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    return value


def _pairs(content: list[Any], leaf: Callable[[str], Any]) -> Iterator[tuple[int | str, Any]]:
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int | str):
            raise ValueError("a tree has 'items' that are not pairs of a key and a value")
        yield pair[0], decoded(pair[1], leaf)


def plain_key(key: object, path: str) -> int | str:
    """Return a key as a plain str or int; raise `TypeError` that names the path of its dict."""
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(
            f"{path} has the key {key!r} of type {type(key).__name__}; keys are str or int"
        )
    return int(key) if isinstance(key, int) else str.__str__(key)
