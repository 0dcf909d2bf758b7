"""Records of `prepare`: its arguments, its plan, and the parts of an engine."""

import datetime
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from thinwire.amp import LossScaler
from thinwire.comm import Group
from thinwire.comm.nodes import Grid
from thinwire.comm.stats import Planned
from thinwire.compress.protocol import Compression, Limit
from thinwire.core.gradients import Clip
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.overlap import Overlap
from thinwire.exchange.replica import Replica
from thinwire.exchange.synchronizer import Ranks
from thinwire.local import saving
from thinwire.local.averager import Averager
from thinwire.local.updates import LocalUpdates, open_averager
from thinwire.members.members import Member, Members
from thinwire.optim.folded import FoldedSGD
from thinwire.pipeline.runner import PipelineRunner
from thinwire.step.merge import GradientSum
from thinwire.strategy.clipping import Clipping
from thinwire.strategy.engine_checks import Batches, MovingBuffers
from thinwire.strategy.fields import Fields

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(slots=True, kw_only=True)
class Setup:
    """Arguments of `prepare`, and the position of this rank among stages and replicas."""

    strategy: Fields
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction | None
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
    grid: Grid | None = None
    """The stages and replicas. None without a pipeline: one stage, and every rank is a replica."""
    sites: Group | None = None
    """All ranks, which exchange shards; None if every rank has a whole model."""
    replicas: int = 0

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.ranks.group

    @property
    def shards(self) -> Group | None:
        """The ranks of this site; None if every rank has a whole model."""
        return None if self.sites is None else self.sites.shards

    @property
    def part(self) -> int:
        """Index of this rank's pipeline stage or shard."""
        if self.shards is not None:
            return self.shards.rank
        return 0 if self.grid is None else self.grid.stage

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange with this one; None for all."""
        return None if self.grid is None else self.grid.replica_group

    def replica_ranks(self) -> Group:
        """Return a new group of these ranks, which counts by itself."""
        return Group(self.replica_group, self.timeout, self.streams)


@dataclass(slots=True, kw_only=True)
class Parts:
    """Parts of an engine. Those from `runner` on are made after ranks have agreed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction | None
    params: dict[str, Parameter]
    """Trained parameters of this rank, by the name in the whole model."""
    group: Group
    """All ranks."""
    part: int
    """Index of this rank's pipeline stage or shard; else 0."""
    names_of_stages: list[list[str]] = field(default_factory=list)
    """Names of the trained parameters of each pipeline stage; empty without a pipeline."""
    compression: Compression | None
    """Compression of gradients; None if the exchange compresses no tensor."""
    folds: bool = False
    """True if the compression keeps the optimizer's momentum."""
    local: LocalUpdates | None
    averager: Averager | None = None
    """Averager of `local`, once its block is entered."""
    member: Member | None
    scaler: LossScaler | None
    merge: GradientSum = field(default_factory=GradientSum)
    merge_steps: int
    """Microsteps of an update, as the strategy says."""
    merge_avg: bool
    find_unused: bool
    """True if gradients that this rank lacks count as zero in every update."""
    undo: ExitStack = field(default_factory=ExitStack)
    """Undoes changes to model and optimizer."""
    runner: PipelineRunner | None = None
    autocast: Callable[[], torch.autocast] | None = None
    clip: Clipping = field(default_factory=Clipping)
    limit: Limit | None = None
    """Clips this rank's gradients before they are compressed."""
    batches: Batches = field(default_factory=Batches)
    """Reports which ranks still have a batch, if every update is exchanged."""
    buffers: MovingBuffers = field(init=False)
    replica: Replica = field(init=False)
    gradients: GradientExchange | None = None
    """The exchange of every update; None if ranks train locally."""
    momentum: FoldedSGD | None = None
    """Momentum of an SGD that the compression keeps, if it does."""
    overlap: Overlap | None = None
    """Begins the exchange during the backward pass; None if the exchange follows it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that a checkpoint must share with the engine that loads it."""

    @property
    def exchange(self) -> Averager | GradientExchange:
        """The one of the two exchanges that this engine uses."""
        exchange = self.averager or self.gradients
        assert exchange is not None, "one of the two"
        return exchange

    def votes(self) -> list[Group]:
        """Return the groups of what agrees over the ranks beside the exchange."""
        scaler = None if self.scaler is None else self.scaler._group
        return [self.buffers.group, *([] if scaler is None else [scaler])]

    def saved_exchange(self) -> dict[str, Any]:
        """Return this rank's state that later updates depend on, without the optimizer's: live."""
        exchange = self.exchange
        if isinstance(exchange, Averager):
            return saving.saved(exchange, copy=False)
        return exchange.state_dict()

    def load_exchange(self, state: Mapping[str, Any]) -> None:
        """Continue from `saved_exchange`. Everything is checked before anything changes."""
        if self.local is not None:
            saving.load(state, open_averager(self.local))
        if self.gradients is not None:
            self.gradients.load_state_dict(state)

    def ramp_step(self, step: int) -> int:
        """Return the updates that a ramp of the compression counts, after `step` of the engine."""
        return step if self.momentum is None else self.momentum.position()

    def unsent_share(self, step: int) -> float:
        """Return the fraction of a gradient that the exchange of a step leaves out."""
        if self.compression is None:
            return 0.0
        return self.compression.unsent_share(self.ramp_step(step))

    @property
    def savers(self) -> Group:
        """The ranks that write one checkpoint: all; with members a member alone, or its site."""
        if self.group.static_membership:
            return self.group
        return self.group.shards or self.group.node
