"""A whole model on each rank, and a stage of a pipeline: two objects with one interface."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.amp import LossScaler
from thinwire.comm import busy
from thinwire.comm.nodes import Grid
from thinwire.core.sharded import reshard_
from thinwire.core.tensors import called, require_loss
from thinwire.errors import ThinwireError
from thinwire.exchange.agreement import Check
from thinwire.pipeline.runner import PipelineRunner
from thinwire.pipeline.split import Pipeline, split_model
from thinwire.step.forwarding import Autocast
from thinwire.strategy.ownership import record_stage_split
from thinwire.strategy.updates import Steps

NEEDS_THE_LOSS = (
    "which needs the loss before its backward pass: use engine.train_step(inputs, targets)"
)


class Whole:
    """A model in one piece on each rank, or in shards on each site."""

    stage = bytes_sent = 0
    job = peers = replica_group = None
    checks: Sequence[Check] = ()
    overflows: ClassVar[Mapping[str, Any]] = {"local": True}
    """Arguments of a loss scale for the ranks that drop a local step together."""
    refusals: ClassVar[Mapping[str, str]] = {}
    """Calls of the engine that do not work, with the reasons."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def cut(self, model: nn.Module) -> list[nn.Module]:
        """Return the stages of a model."""
        return [model]

    def open(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        dtype: torch.dtype | None,
        scaler: LossScaler | None,
        undo: ExitStack,
    ) -> None:
        """Prepare forward and backward passes. Changes the model; `undo` undoes it."""
        self._loss_fn = loss_fn
        self._autocast: Callable[[], Any] = nullcontext
        if dtype is not None:
            device = next(model.parameters()).device.type
            self._autocast = partial(torch.autocast, device, dtype=dtype)
            undo.callback(Autocast(model, dtype).remove)

    def train(self, steps: Steps, inputs: Any, targets: Any, tokens: int | None) -> Tensor:
        """Run a whole microstep; see `Engine.train_step`."""
        steps.begin(tokens, early=True)
        loss = steps.minimize(lambda: self._loss(steps, inputs, targets, "train_step"))
        return loss.detach().reshape(())

    def evaluate(self, steps: Steps, inputs: Any, targets: Any) -> Tensor:
        """See `Engine.evaluate`."""
        with busy(steps.group.timeout_s):
            loss = self._loss(steps, inputs, targets, "evaluate")
            require_loss(loss, trains=False)
        if steps.sharded:  # the root module has kept whole parameters
            reshard_(steps.model)
        return loss.detach().reshape(())

    def _loss(self, steps: Steps, inputs: Any, targets: Any, caller: str) -> Tensor:
        if self._loss_fn is None:
            raise RuntimeError(
                f"{caller} needs a loss function, but prepare got none: call prepare(model, "
                "optimizer, loss_fn), or compute the loss yourself and call engine.minimize(loss)"
            )
        outputs = called(steps.model, inputs)
        with self._autocast():
            loss: Tensor = self._loss_fn(outputs, targets)
            return loss


class Stages:
    """A model in stages on several ranks, of which this rank has one."""

    refusals: ClassVar[Mapping[str, str]] = {
        "minimize": "under pipeline, since only the last stage has the loss: use "
        "engine.train_step(inputs, targets)",
        **dict.fromkeys(("apply_gradients", "follow_steps"), f"under pipeline, {NEEDS_THE_LOSS}"),
        "join()": "under pipeline, since all stages need the same batches: give all replicas "
        "equally many, for example with DistributedSampler",
        "publish": "under pipeline, where each rank has a stage of the model: save checkpoints, "
        "and export them",
    }

    def __init__(self, config: Pipeline, timeout: float | datetime.timedelta | None) -> None:
        self._config = config
        self._grid = grid = Grid(config.stages, timeout)
        self.stage = grid.stage
        self.replicas = grid.replicas
        self.job = grid.job
        self.peers = grid.peers if grid.stages > 1 else None
        self.replica_group = grid.replica_group
        self.overflows = {"process_group": grid.stage_group}
        self.checks: Sequence[Check] = ()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to other stages so far."""
        return self._runner.bytes_sent

    def cut(self, model: nn.Module) -> list[nn.Module]:
        """See `Whole`."""
        return split_model(model, self._config)

    def open(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        dtype: torch.dtype | None,
        scaler: LossScaler | None,
        undo: ExitStack,
    ) -> None:
        """See `Whole`."""
        stages = self.cut(model)
        record_stage_split(model, stages)
        scale = (lambda: 1.0) if scaler is None else (lambda: scaler.scale)
        self._runner = PipelineRunner(
            stages[self.stage], self._config, self._grid, loss_fn, dtype=dtype, scale=scale
        )
        self.checks = [self._runner]

    def train(self, steps: Steps, inputs: Any, targets: Any, tokens: int | None) -> Tensor:
        """See `Whole`."""
        problem: Exception | None = None
        try:
            steps.begin(tokens, early=True)
            steps.clear_grads()
        except ThinwireError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # reported to other stages
            problem = error
        with steps.group.one_deadline():
            loss = self._runner.step(inputs, targets, problem, concludes=steps.concludes)
            steps.add_or_update(*steps.gathered(loss))
            loss = self._runner.conclude() if loss is None else loss
        steps.after_step()
        return loss

    def evaluate(self, steps: Steps, inputs: Any, targets: Any) -> Tensor:
        """See `Whole`."""
        with steps.group.one_deadline():
            return self._runner.evaluate(inputs, targets)
