"""Shared parts of our own methods: working type, state, and row updates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.tensors import state_dtype
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.pairs import ParamGrad


def counted(optimizer: CommonOptimizer, params: Sequence[Tensor]) -> list[int]:
    """Count one more update in the state of each of `params`; return the counts."""
    states = [optimizer.state[param] for param in params]
    for state in states:
        if "step" not in state:
            # on the CPU, where reading it is free; a tensor because torch's tools expect one
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    counts = [state["step"] for state in states]
    torch._foreach_add_(counts, 1)
    # read all at once: a hundred small reads cost as much as an update of a million parameters
    return torch.stack([count.cpu() for count in counts]).int().tolist() if counts else []


def buffer_of(optimizer: CommonOptimizer, param: Tensor, key: str, fill: float = 0.0) -> Tensor:
    """Return the state tensor `key`, in the working type; a new one has the value `fill`."""
    state = optimizer.state[param]
    if key not in state:
        state[key] = torch.full_like(param, fill, dtype=state_dtype(param), requires_grad=False)
    buffer: Tensor = state[key]
    if buffer.shape != param.shape:  # compiled loops trust the shape
        raise RuntimeError(
            f"{key} of {optimizer._label(param)} has shape {tuple(buffer.shape)} and the parameter "
            f"{tuple(param.shape)}: load the state of the same model, or make a new optimizer"
        )
    return buffer


def update_rows_(
    optimizer: CommonOptimizer,
    pairs: Sequence[ParamGrad],
    starts: Mapping[str, float],
    update_: Callable[..., None],
) -> None:
    """Update the parameters of one group and their state, which begins with `starts`, in place.

    `update_` gets the parameter, the gradient, the number of this update from 1 and the state by
    name, or copies of the rows that a row-sparse gradient has, and changes them by element.
    """
    for param, grad in pairs:
        buffers = {key: buffer_of(optimizer, param, key, fill) for key, fill in starts.items()}
        step = counted(optimizer, [param])[0]
        if grad.layout is torch.strided:
            with widened([param]) as (work,):
                update_(work, grad, step, **buffers)
        elif grad._nnz():
            rows, values = grad.indices()[0], grad.values()
            part = param[rows].to(values.dtype)
            parts = {key: buffer[rows] for key, buffer in buffers.items()}
            update_(part, values, step, **parts)
            param[rows] = part.to(param.dtype)
            for key, buffer in buffers.items():
                buffer[rows] = parts[key]


@contextmanager
def widened(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in the working type; copies of narrower ones are rounded back."""
    work = [param.to(state_dtype(param)) for param in params]
    yield work
    for param, copy in zip(params, work, strict=True):
        if copy is not param:
            param.copy_(copy)


def check_nesterov(values: Mapping[str, Any]) -> None:
    """Raise unless Nesterov momentum is off, or has a momentum and no dampening."""
    momentum, dampening = values["momentum"], values.get("dampening", 0)
    if check.boolean("nesterov", values["nesterov"]) and (momentum == 0 or dampening != 0):
        raise ValueError(
            "nesterov needs a momentum above 0 and no dampening, got "
            f"momentum={momentum} and dampening={dampening}"
        )


def check_betas(values: Mapping[str, Any]) -> None:
    """Raise unless `betas` is a pair of numbers in [0, 1)."""
    betas = values["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers in [0, 1), got {betas!r}")
    check.sequence(check.real, "betas", betas, at_least=0, below=1)
