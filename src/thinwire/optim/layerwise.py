"""Shared parts of LARS and LAMB: lists of tensors in runs, and readable trust ratios."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.core.tensors import TensorList, state_dtype
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.own import counted, widened
from thinwire.optim.pairs import ParamGrad


class Run(NamedTuple):
    """Tensors that one call can update together."""

    params: list[Tensor]
    grads: list[Tensor]
    weight_decay: float
    step: int
    """Number of this update for these parameters, from 1; 0 where the method does not count."""
    contiguous: bool
    """True if torch's list operations and fused kernels take these tensors."""


def smallest(optimizer: CommonOptimizer) -> list[list[Tensor]]:
    """Return small tensors on the CPU for each type of the parameters there.

    An update of them compiles the loops of the method.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    types = {state_dtype(param) for param in params if param.is_cpu}
    return [list(torch.ones(4, 1, dtype=dtype, device="cpu").unbind()) for dtype in types]


def trust_ratios(optimizer: CommonOptimizer) -> dict[str | Tensor, float]:
    """Return the trust ratio of every parameter in the last update; 1 where none is applied.

    Returns:
        By name, or by parameter where there are no names; empty before the first update. This call
        waits for the device; the update does not.
    """
    ratios, records = optimizer._ratios or {}, optimizer._common.records
    return {records[param].name or param: float(ratio) for param, ratio in ratios.items()}


def update_runs_(
    optimizer: CommonOptimizer,
    group: dict[str, Any],
    pairs: Sequence[ParamGrad],
    update_: Callable[[Run, list[Tensor]], TensorList],
    *,
    count: bool,
) -> None:
    """Update the parameters of `pairs` in place, in runs of one device, type, decay and count."""
    kinds: dict[tuple[Any, ...], Run] = {}
    steps = counted(optimizer, [param for param, _ in pairs]) if count else [0] * len(pairs)
    for i, ((param, grad), step) in enumerate(zip(pairs, steps, strict=True)):
        if grad.shape != param.shape:  # compiled loops trust the shape
            raise RuntimeError(
                f"the gradient of {optimizer._label(param)} has shape "
                f"{tuple(grad.shape)} and the parameter {tuple(param.shape)}: run the backward "
                "pass again"
            )
        decay = optimizer._facts(param).weight_decay
        fast = (param.is_cpu or param.is_cuda) and param.is_contiguous() and grad.is_contiguous()
        alone = i if group["foreach"] is False else None
        key = (param.device, param.dtype, type(param), decay, step, fast, alone)
        run = kinds.setdefault(key, Run([], [], decay, step, fast))
        run.params.append(param)
        run.grads.append(grad)
    assert optimizer._ratios is not None, "ratios come from updates"
    for run in kinds.values():
        with widened(run.params) as wide:
            ratios = update_(run, wide)
        optimizer._ratios.update(zip(run.params, ratios, strict=True))
