"""Order of the forward and backward passes of one stage, and the transfers between them."""

from collections import defaultdict

import torch
from torch import Tensor
from torch.distributed import Work

from thinwire.comm.nodes import Grid
from thinwire.core.checksum import bit_sums
from thinwire.pipeline.split import Pipeline
from thinwire.pipeline.worker import StageWorker


class Schedule:
    """Runs one mini-batch through the stage of this rank."""

    # GPipe makes all forward passes first; 1F1B alternates as soon as the last stage has returned a
    # gradient, and keeps fewer activations

    def __init__(self, worker: StageWorker, config: Pipeline, grid: Grid, backward: bool) -> None:
        meta = torch.device("meta")
        self._worker, self._grid, self._backward = worker, grid, backward
        self._inputs = worker.source.blanks(meta) if worker.source else ()
        outputs = worker.result.blanks(meta) if worker.result else ()
        self._gradients = tuple(blank for blank in outputs if blank.requires_grad)
        count, ahead = config.micro_batches, config.micro_batches
        if config.schedule == "1f1b":
            ahead = min(count, config.stages - grid.stage)
        self._passes: list[tuple[int, bool]] = []
        """Micro-batch, and True for its forward pass."""
        for index in range(count + ahead - 1):
            if index < count:
                self._passes.append((index, True))
            if backward and index + 1 >= ahead:
                self._passes.append((index + 1 - ahead, False))
        self._kept: dict[int, tuple[list[Tensor], tuple[Tensor, ...]]] = {}
        """Inputs and outputs of the micro-batches whose backward pass is still to come."""
        self._bits: defaultdict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        """Sum of the bits of each tensor, by the other stage, and True if it was sent."""

    def run(self) -> None:
        """Make all passes."""
        before, after = self._grid.stage - 1, self._grid.stage + 1
        leaving: list[Tensor] = []
        in_flight: list[Work] = []
        to = after
        for index, forward in self._passes:
            blanks, end = (self._inputs, before) if forward else (self._gradients, after)
            arriving = [torch.empty_like(blank, device=self._worker.device) for blank in blanks]
            in_flight += self._grid.transfer(leaving, to, arriving, end)
            self._bits[to, True] += bit_sums(leaving)
            self._bits[end, False] += bit_sums(arriving)
            if forward:
                leaving, to = self._forward(index, arriving), after
            else:
                leaving, to = self._back(index, arriving), before
        self._bits[to, True] += bit_sums(leaving)
        for work in [*in_flight, *self._grid.transfer(leaving, to)]:
            work.wait()

    def bits(self) -> list[int]:
        """Return sums of bits: sent to and received from the previous stage, and the next one."""
        ends = self._grid.stage - 1, self._grid.stage + 1
        return [int(sum(self._bits[end, sent])) for end in ends for sent in (True, False)]

    def _forward(self, index: int, received: list[Tensor]) -> list[Tensor]:
        """Return tensors for the next stage."""
        for tensor, blank in zip(received, self._inputs, strict=True):
            tensor.requires_grad_(blank.requires_grad)
        outputs = self._worker(*received)
        if isinstance(outputs, Tensor):  # the loss
            outputs = (outputs,)
        if self._backward:
            self._kept[index] = received, outputs
        is_last = self._grid.stage == self._grid.stages - 1
        return [] if is_last else [output.detach() for output in outputs]

    def _back(self, index: int, gradients: list[Tensor]) -> list[Tensor]:
        """Return gradients for the previous stage: zeros for an unused tensor or after an error."""
        received, outputs = self._kept.pop(index)
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            self._worker.guarded(lambda: torch.autograd.backward(roots, gradients or None))
        return [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
            for tensor in received
            if tensor.requires_grad
        ]
