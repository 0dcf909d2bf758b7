"""Measurements beside the training: a step without any exchange, and the kernel's counters."""

import copy
import time
from typing import final

import torch.distributed as dist

from thinwire.tools.network.namespaces import interface_bytes
from thinwire.tools.run.task import Work, untouched
from thinwire.tools.run.trainers import Setup, bare_step

__all__ = ["BareStep", "kernel_bytes"]

_LR = 1e-4


def kernel_bytes(interface: str | None) -> tuple[int, int]:
    """Bytes (sent, received) by an interface of this process's own network namespace; (0, 0)
    without interface.
    """
    if interface is None:
        return 0, 0
    return interface_bytes(interface)


@final
class BareStep:
    """Times of the same step without any exchange, on a copy of the model that is thrown away.

    Args:
        setup: Of the run.
        work: Whose model is copied.
    """

    def __init__(self, setup: Setup, work: Work) -> None:
        self.setup, self.work, self.model = setup, work, copy.deepcopy(work.model)
        self.optimizer = setup.optimizer_of(self.model, lr=_LR)
        self.batch = work.some_batch(seed=0)
        self.seconds: list[float] = []

    def measure(self, steps: int) -> None:
        """Take `steps` steps on every rank at once, since the ranks share the cores during
        training too.
        """
        dist.barrier()
        with untouched(self.work.model):
            for _ in range(steps):
                begin_s = time.perf_counter()
                bare_step(self.setup, self.model, self.optimizer, *self.batch)
                self.seconds.append(time.perf_counter() - begin_s)
