"""Shared parts of our own methods: working type, and state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.tensors import state_dtype
from thinwire.optim.common import CommonOptimizer


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
