"""Strategies that go wrong at their third step, in the workers of a real comparison."""

import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor

from tests.api import DDPTrainer


class _Bad(DDPTrainer):
    def sent_bytes(self) -> float:
        return 0.0

    def train_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().train_step(inputs, targets)
        if self.steps == 3:
            self.go_wrong()
        return loss


class Raises(_Bad):
    def go_wrong(self) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("of the tests")


class Diverges(_Bad):
    def go_wrong(self) -> None:
        with torch.no_grad():
            next(self.module.parameters()).fill_(float("nan"))


class Dies(_Bad):
    def go_wrong(self) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
