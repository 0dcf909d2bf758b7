"""What is measured beside the training: the held-out loss, a step without any exchange, and the
kernel's counters.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.lab.trainers import bare_step, loss_of

__all__ = ["BareStep", "kernel_bytes", "mean_loss"]


def kernel_bytes(interface: str | None) -> tuple[int, int]:
    """Bytes (sent, received) by an interface of this process's own network namespace; (0, 0)
    without interface.
    """
    if interface is None:
        return 0, 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"the interface {interface!r} is not in this network namespace")


def mean_loss(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Mean held-out loss per byte over all ranks, in nats."""
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for inputs, targets in batches:
            total += torch.tensor(
                [loss_of(model, inputs, targets).item() * targets.numel(), targets.numel()]
            )
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


@final
class BareStep:
    """Times the same step without any exchange, on a copy of the model that is thrown away."""

    def __init__(self, model: nn.Module, momentum: float) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=momentum)
        self.seconds: list[float] = []

    def measure(self, steps: int, batch: int, context: int) -> None:
        """Runs `steps` on every rank at once, since the ranks share the cores during
        training too.
        """
        inputs, targets = torch.randint(
            256, (2, batch, context), generator=torch.Generator().manual_seed(0)
        )
        dist.barrier()
        for _ in range(steps):
            begin_s = time.perf_counter()
            bare_step(self.model, self.optimizer, inputs, targets)
            self.seconds.append(time.perf_counter() - begin_s)
