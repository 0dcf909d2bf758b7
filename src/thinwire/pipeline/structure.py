"""Nested values with tensors in them: taken apart into tensors and a layout, and cut into
micro-batches.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["content", "describe", "mapped", "micro_batches", "pack", "tensors_of", "unpack"]

_PLAIN = (type(None), bool, int, float, str)
_SAMPLE = 256


def pack(value: Any, *, what: str) -> tuple[Any, list[Tensor]]:
    """Take a value apart into a layout that JSON can hold and its tensors.

    Args:
        value: A tensor, a number, string or None, or a tuple, list or dict with string keys of
            these.
        what: The value in plain words, for errors.

    Returns:
        (layout, tensors), for `unpack`; the layout says nothing about shapes.

    Raises:
        TypeError: Another type; its name, and what to return instead.
    """
    tensors: list[Tensor] = []

    def layout(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return {"tensor": len(tensors) - 1}
        if type(part) in {tuple, list, torch.Size}:
            return {"list" if type(part) is list else "tuple": [layout(entry) for entry in part]}
        if type(part) is dict and all(isinstance(key, str) for key in part):
            return {"dict": {key: layout(entry) for key, entry in part.items()}}
        if type(part) in _PLAIN:
            return {"plain": part}
        raise TypeError(
            f"{what} has a part of type {type(part).__name__}, which cannot travel between stages: "
            "let the module return a tensor, or a tuple, list or dict (with string keys) of "
            "tensors and plain values"
        )

    return layout(value), tensors


def unpack(layout: Any, tensors: list[Tensor]) -> Any:
    """The value that `pack` took apart, with other tensors in place of its own."""
    ((kind, content),) = layout.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: unpack(entry, tensors) for key, entry in content.items()}
    entries = [unpack(entry, tensors) for entry in content]
    return entries if kind == "list" else tuple(entries)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors inside tuples, lists and mappings, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(note, value)
    return found


def describe(value: Any) -> Any:
    """Shapes and types of a value, as JSON can hold them; equal for values that one schedule can
    run.
    """
    if isinstance(value, Tensor):
        return [str(value.dtype), *value.shape]
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [describe(entry) for entry in value]
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def content(value: Any) -> str:
    """A digest of the ends of every tensor, which tells one mini-batch from another and costs next
    to nothing.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors_of(value):
        flat = tensor.detach().reshape(-1)
        for end in (flat[:_SAMPLE], flat[-_SAMPLE:]):
            digest.update(end.resolve_conj().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def micro_batches(inputs: Any, targets: Any, count: int) -> list[tuple[Any, Any]]:
    """Cut a mini-batch along the first dimension of its tensors.

    Args:
        inputs: A tensor, or tuples, lists and mappings of tensors with the same first dimension (B,
            ...); tensors without dimensions and other values go to every part.
        targets: The same kinds; a first dimension may be a multiple of B (one entry per token).
        count: Number of equal parts.

    Returns:
        `count` pairs (inputs, targets) of views.

    Raises:
        ValueError: No tensor, an empty batch, different first dimensions, or B is no multiple of
            `count`.
    """
    sizes = sorted({tensor.shape[0] for tensor in tensors_of(inputs) if tensor.ndim})
    if len(sizes) != 1:
        found = (
            f"of first dimensions {sizes}"
            if sizes
            else "without a tensor that has a first dimension"
        )
        raise ValueError(
            f"inputs must be tensors with one first dimension, the mini-batch, got inputs {found}"
        )
    (batch,) = sizes
    if batch == 0 or batch % count:
        raise ValueError(
            f"a mini-batch of {batch} cannot be cut into micro_batches={count} equal parts: make "
            "the batch size a multiple of it and drop a last batch that is smaller "
            "(drop_last=True), or change micro_batches"
        )
    for tensor in tensors_of(targets):
        if tensor.ndim and tensor.shape[0] % batch:
            raise ValueError(
                f"targets have a first dimension of {tensor.shape[0]}, which is no multiple of the "
                f"{batch} of inputs"
            )
    return [(_part(inputs, i, count), _part(targets, i, count)) for i in range(count)]


def _part(value: Any, index: int, count: int) -> Any:
    def part(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        size = tensor.shape[0] // count
        return tensor[index * size : (index + 1) * size]

    return mapped(part, value)


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with every tensor changed; mappings become dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(change, entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, entry) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(change, entry) for entry in value)
    return value
