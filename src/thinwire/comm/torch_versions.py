"""Differences between versions of torch; 2.9 is the oldest that works."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_single(output: Tensor, message: Tensor, **options: Any) -> dist.Work:
    """Call torch's function of this name, which had another one before torch 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(output, message, **options)
    return work


def add_adagrad_state(optimizer: torch.optim.Adagrad) -> None:
    """Make the state of parameters in groups added later, as torch 2.13 does in `step`."""
    for group in optimizer.param_groups:
        late = [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        if late:
            initial = optimizer.defaults["initial_accumulator_value"]
            made = torch.optim.Adagrad(
                late, initial_accumulator_value=initial, fused=group["fused"]
            )
            optimizer.state.update(made.state)
