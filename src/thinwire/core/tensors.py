"""Helpers for tensors: stored entries, types, memory and cache sizes; for modules and objects.

A sparse gradient is a COO tensor here; row-sparse means sparse_dim 1, so that its values are whole
rows of the parameter. All functions expect it coalesced, with duplicates summed.
"""

import gc
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, strided

from thinwire import _validate as check


def coalesced(grad: Tensor) -> Tensor:
    """Return `grad` with duplicate entries summed; a dense tensor is returned unchanged."""
    return grad.coalesce() if grad.layout is torch.sparse_coo else grad


def values_of(grad: Tensor) -> Tensor:
    """Return `grad` itself, or the values of a coalesced sparse one; shares memory.

    >>> values_of(torch.tensor([0.0, 2.0]).to_sparse().coalesce())
    tensor([2.])
    """
    return grad.values() if grad.layout is torch.sparse_coo else grad


def with_values(grad: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with the layout and the positions of `grad` and other values."""
    if grad.layout is not torch.sparse_coo:
        return values
    return sparse_rows(grad.indices(), values, grad.shape)


def sparse_rows(positions: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a coalesced sparse tensor, without checks of its parts."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(positions, values, shape, is_coalesced=True)


def entries_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the part of `param` that `grad` stores values for: all of it, or the rows present.

    >>> rows = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).to_sparse(1).coalesce()
    >>> entries_of(torch.arange(4.0).view(2, 2), rows)
    tensor([[2., 3.]])
    """
    return param[tuple(grad.indices())] if grad.layout is torch.sparse_coo else param


_Key = TypeVar("_Key")
_T = TypeVar("_T")


def with_own_storage(tensors: Mapping[_Key, Tensor]) -> set[_Key]:
    """Return the keys of dense tensors that share no storage with another one of the mapping.

    These may be written to independently. Autograd gives two parameters views of one gradient if
    both enter a sum through views.

    >>> both = torch.zeros(4)
    >>> with_own_storage({"a": both[:2], "b": both[2:], "c": torch.zeros(1)})
    {'c'}
    """
    storages = {
        key: x.untyped_storage().data_ptr() for key, x in tensors.items() if x.layout is strided
    }
    count = Counter(storages.values())
    return {key for key, storage in storages.items() if count[storage] == 1}


_CHOICES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def state_dtype(param: Tensor) -> torch.dtype:
    """Return the type of state and computation: that of complex and float64 parameters, or float32.

    >>> state_dtype(torch.zeros(1, dtype=torch.float16))
    torch.float32
    """
    wide = param.is_complex() or param.dtype == torch.float64
    return param.dtype if wide else torch.float32


@contextmanager
def widened(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in the working type; copies of narrower ones are rounded back."""
    work = [param.to(state_dtype(param)) for param in params]
    yield work
    for param, copy in zip(params, work, strict=True):
        if copy is not param:
            param.copy_(copy)


def named_dtype(
    argument: str, choice: object, allowed: Collection[str] = tuple(_CHOICES)
) -> str | None:
    """Return the name of the type that a user gave as `argument`, a name or torch dtype, or None.

    >>> named_dtype("state_dtype", torch.bfloat16)
    'bfloat16'
    """
    if choice is None:
        return None
    name = str(choice).removeprefix("torch.") if isinstance(choice, torch.dtype) else choice
    advice = f"write {' or '.join(map(repr, allowed))}, or leave it out"
    check.instance(argument, name, str, advice=advice)
    full = re.sub(r"^(b?)fp?(?=\d)", r"\1float", str(name))
    meant = str(getattr(torch, full, None)).removeprefix("torch.")
    if name not in allowed and meant in allowed:
        raise ValueError(f"{argument} must be one of {[*allowed]}, got {name!r}: write {meant!r}")
    check.one_of(argument, name, allowed)
    return str(name)


def stored_dtype(param: Tensor, choice: str | None) -> torch.dtype:
    """Return the type of a compressed tensor's momentum and residual; None: `state_dtype`."""
    return state_dtype(param) if choice is None else _CHOICES[choice]


def narrowed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` in another type, rounded to nearest; a finite value stays finite.

    >>> narrowed(torch.tensor([1e6]), torch.float16)
    tensor([65504.], dtype=torch.float16)
    """
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(value.dtype).max:
        value = torch.where(value.isfinite(), value.clamp(-limit, limit), value)
    return value.to(dtype)


TensorList = list[Tensor] | tuple[Tensor, ...]
"""Type accepted by torch's list operations."""

_CACHED_BYTES = 1 << 21
"""Total bytes of tensors that are processed together on a CPU, so that they stay in its cache from
one operation to the next.
"""


def cache_sized(tensors: TensorList) -> Iterator[slice]:
    """Yield slices of the list that fit a CPU's cache; on other devices the whole list."""
    start, size = 0, 0
    for i, tensor in enumerate(tensors):
        size += tensor.numel() * tensor.element_size()
        if (size >= _CACHED_BYTES and tensor.is_cpu) or i == len(tensors) - 1:
            yield slice(start, i + 1)
            start = i + 1
            size = 0


def require_loss(loss: object, *, trains: bool) -> None:
    """Raise unless the loss has one element and, if it `trains`, depends on a parameter."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor of one element, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must be a scalar, got shape {tuple(loss.shape)}: take its mean over the "
            "batch"
        )
    if trains and not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that requires a gradient, so there is nothing to "
            "train"
        )


def called(module: nn.Module, inputs: Any) -> Any:
    """Return the result for one argument, a tuple of arguments, or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def living(kind: type[_T]) -> list[_T]:
    """Return all objects of a type in this process; visits every object, which takes a moment."""
    # type() and not isinstance, which would resolve the class of proxies
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]
