"""A whole model on each rank, and a stage of a pipeline: two objects with one interface."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from thinwire.amp import LossScaler
from thinwire.comm import Group, busy
from thinwire.comm.nodes import Grid
from thinwire.comm.stats import Planned
from thinwire.core.gradients import Clip
from thinwire.core.sharded import reshard_
from thinwire.core.tensors import called, require_loss
from thinwire.errors import ThinwireError
from thinwire.exchange.agreement import Check
from thinwire.exchange.synchronizer import Ranks
from thinwire.local.updates import LocalUpdates
from thinwire.members.members import Member, Members
from thinwire.pipeline.runner import PipelineRunner
from thinwire.pipeline.split import Pipeline, split_model
from thinwire.step.forwarding import Autocast
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import record_stage_split
from thinwire.strategy.updates import Steps

NEEDS_THE_LOSS = (
    "which needs the loss before its backward pass: use engine.train_step(inputs, targets)"
)


@dataclass(slots=True, kw_only=True)
class Setup:
    """Arguments of `prepare`, the position of this rank, and what is made before ranks agree."""

    strategy: Fields
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[..., Tensor] | None
    grad_clip: Clip | None
    digest_every: int
    timeout: float | datetime.timedelta | None
    find_unused_parameters: bool
    plan: Any
    members: Members | None
    mesh: DeviceMesh | None
    streams: int | None
    verify: str
    member: Member | None = field(init=False)
    planned: Planned | None = field(init=False)
    ranks: Ranks = field(init=False)
    division: "Whole | Stages" = field(init=False)
    stage: nn.Module = field(init=False)
    """This rank's stage, or the whole model."""
    params: dict[str, Parameter] = field(init=False)
    """Its trained parameters."""
    names_of_stages: Sequence[Sequence[str]] = ()
    """Names of the trained parameters of each pipeline stage; empty without a pipeline."""
    folds: bool = False
    """True if the compression keeps the optimizer's momentum."""
    scaler: LossScaler | None = None
    local: LocalUpdates | None = None
    sites: Group | None = None
    """All ranks, which exchange shards; None if every rank has a whole model."""

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.ranks.group

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of autocast."""
        amp = self.strategy.amp
        return None if amp is None else getattr(torch, str(amp.dtype))

    def replica_ranks(self) -> Group:
        """Return a new group of the ranks that exchange with this one, which counts by itself."""
        return Group(self.division.replica_group, self.timeout, self.streams)


class Whole:
    """A model in one piece on each rank, or in shards on each site."""

    stage = bytes_sent = 0
    job = peers = replica_group = None
    checks: Sequence[Check] = ()

    def __init__(self, group: Group, mesh: DeviceMesh | None) -> None:
        self.replicas = group.replica_count
        self.shards = group.shards
        """The ranks of this site; None if every rank has a whole model."""
        self.is_whole = mesh is None
        self.overflow_group = None if mesh is None else mesh.get_group("shard")
        """The ranks that drop a local step together; None if each drops its own."""
        self.refusals: Mapping[str, str] = {}
        """Calls of the engine that do not work, with the reasons."""
        if mesh is not None:
            self.refusals = {
                "join()": "with mesh=: the ranks of a site gather their shards in every forward "
                "pass. Give them equally many batches, for example with DistributedSampler"
            }

    def cut(self, model: nn.Module) -> list[nn.Module]:
        """Return the stages of a model."""
        return [model]

    def open(self, setup: Setup, undo: ExitStack) -> None:
        """Prepare forward and backward passes. Changes the model; `undo` undoes it."""
        self._loss_fn = setup.loss_fn
        self._precision: Callable[[], Any] = nullcontext
        if setup.dtype is not None:
            device = next(setup.model.parameters()).device.type
            self._precision = partial(torch.autocast, device, dtype=setup.dtype)
            undo.callback(Autocast(setup.model, setup.dtype).remove)

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
        with self._precision():
            return self._loss_fn(outputs, targets)


class Stages:
    """A model in stages on several ranks, of which this rank has one."""

    is_whole = False
    shards = None
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
        self.overflow_group = grid.stage_group

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to other stages so far."""
        return self._runner.bytes_sent

    def cut(self, model: nn.Module) -> list[nn.Module]:
        """See `Whole`."""
        return split_model(model, self._config)

    def open(self, setup: Setup, undo: ExitStack) -> None:
        """See `Whole`."""
        record_stage_split(setup.model, self.cut(setup.model))
        scaler = setup.scaler
        self._runner = PipelineRunner(
            setup.stage,
            self._config,
            self._grid,
            setup.loss_fn,
            dtype=setup.dtype,
            scale=(lambda: 1.0) if scaler is None else (lambda: scaler.scale),
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
            # an exchange at the end tells the stages of errors
            loss = self._runner.step(
                inputs, targets, problem, concludes=steps.merging or steps.local is not None
            )
            steps.add_or_update(*steps.gathered(loss))
            loss = self._runner.conclude() if loss is None else loss
        steps.after_step()
        return loss

    def evaluate(self, steps: Steps, inputs: Any, targets: Any) -> Tensor:
        """See `Whole`."""
        with steps.group.one_deadline():
            return self._runner.evaluate(inputs, targets)
