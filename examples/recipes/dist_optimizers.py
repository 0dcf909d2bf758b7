"""Optimizers that average gradients over the ranks themselves, in nanochat's manner."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average_(params: list[Tensor]) -> None:
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class DistAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        average_([p for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def zeropower(G: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.mT if G.size(0) > G.size(1) else G
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.size(0) > G.size(1) else X


class DistMuon(torch.optim.Optimizer):
    def __init__(self, params: list[Tensor], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            average_(group["params"])
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = zeropower(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)
