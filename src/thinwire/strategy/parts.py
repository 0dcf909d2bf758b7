"""The records of `prepare`: what it was given, what it plans, and what it puts together for an
engine.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from thinwire.amp import LossScaler
from thinwire.comm import Group, Sites
from thinwire.comm.nodes import Grid
from thinwire.compress.protocol import Compression
from thinwire.core.gradients import Clip
from thinwire.core.stats import Planned
from thinwire.exchange.overlap import Overlap
from thinwire.local.updates import LocalUpdates
from thinwire.members.members import Members
from thinwire.pipeline.runner import PipelineRunner
from thinwire.step.merge import GradientSum
from thinwire.strategy.engine_checks import Batches, MovingBuffers
from thinwire.strategy.exchanges import Exchange
from thinwire.strategy.fields import Fields

__all__ = ["LossFunction", "Parts", "Plan", "Setup"]

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(slots=True, kw_only=True)
class Setup:
    """What `prepare` was given, and where this rank stands among the stages and replicas."""

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
    planned: Planned | None = field(init=False)
    group: Group = field(init=False)
    """All ranks."""
    grid: Grid | None = None
    """None without a pipeline: one stage, and every rank is a replica."""
    sites: Sites | None = None
    """None where every rank has a whole model."""
    replicas: int = 0

    @property
    def part(self) -> int:
        """Which stage of the pipeline, or which shard, this rank holds."""
        if self.sites is not None:
            return self.sites.shard
        return 0 if self.grid is None else self.grid.stage

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange with this one; None for all."""
        return None if self.grid is None else self.grid.replica_group


@dataclass(slots=True, kw_only=True)
class Plan:
    """What can be said before ranks agree; until then everything can be undone."""

    stage: nn.Module
    optimizer: torch.optim.Optimizer
    params: dict[str, Parameter]
    compressor: Compression | None
    scaler: LossScaler | None
    sync: LocalUpdates | None
    restore: Callable[[], None]
    """Undoes what making it did to the given optimizer, in class and contents."""
    names_of_stages: list[list[str]]
    """What trains in each stage of a pipeline; empty without one."""
    digest_every: int


@dataclass(slots=True, kw_only=True)
class Parts:
    """What `prepare` has put together for an engine."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction | None
    params: dict[str, Parameter]
    """What this rank trains, by the name in the whole model."""
    group: Group
    """All ranks."""
    exchange: Exchange
    buffers: MovingBuffers
    scaler: LossScaler | None
    merge: GradientSum | None
    merge_steps: int
    merge_avg: bool
    overlap: Overlap | None
    """Begins the exchange during the backward pass; None where it comes after it."""
    batches: Batches
    """Which ranks still have one, where every update is exchanged."""
    find_unused: bool
    """Whether gradients that this rank lacks count as zero in every update."""
    runner: PipelineRunner | None
    part: int
    """Of the model that this rank holds: its stage of the pipeline, or its shard; else 0."""
    autocast: Callable[[], torch.autocast] | None
    handles: list[Any]
    """Whose `remove` takes changes to the model off."""
    planned: Planned | None
    """What updates are compared with; local updates compare by themselves."""
    settled_step: int
    """The update from which on messages have their last length."""
    facts: dict[str, Any]
    """What a checkpoint must have in common with the engine that loads it."""

    @property
    def savers(self) -> Group:
        """Those who write one checkpoint: all ranks; of members, which come and go, each by
        itself, which may be the ranks of a site.
        """
        if self.group.stays:
            return self.group
        return self.group.shards or Group.alone(self.group.timeout_s)
