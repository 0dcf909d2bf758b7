"""In what this library computes and keeps state, whatever type the parameters have."""

import torch
from torch import Tensor

from thinwire import _validate as check

__all__ = ["named_dtype", "narrowed", "state_dtype", "stored_dtype"]

_CHOICES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def state_dtype(param: Tensor) -> torch.dtype:
    """In what a method of this library keeps its state and computes: float32, float64 for float64
    parameters.
    """
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def named_dtype(argument: str, choice: object) -> str | None:
    """The name of a type that a user gave.

    Args:
        argument: What the user knows it by.
        choice: "float32", "bfloat16", the torch dtype of one of these names, or None.

    Returns:
        "float32", "bfloat16" or None.

    Raises:
        TypeError: Neither a string nor a torch dtype.
        ValueError: Another type.
    """
    if choice is None:
        return None
    name = str(choice).removeprefix("torch.") if isinstance(choice, torch.dtype) else choice
    advice = "write 'float32' or 'bfloat16', or leave it out"
    check.instance(argument, name, str, advice=advice)
    check.one_of(argument, name, _CHOICES)
    return str(name)


def stored_dtype(param: Tensor, choice: str | None) -> torch.dtype:
    """In what momentum buffer and residual of a compressed tensor are stored: as chosen; None:
    `state_dtype`.
    """
    return state_dtype(param) if choice is None else _CHOICES[choice]


def narrowed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in another type, rounded to nearest, and finite where it was finite: for what is
    converted once only.
    """
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(value.dtype).max:
        value = torch.where(value.isfinite(), value.clamp(-limit, limit), value)
    return value.to(dtype)
