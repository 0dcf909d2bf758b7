"""What `prepare` puts together for an engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire.amp import LossScaler
from thinwire.comm import Group
from thinwire.core.stats import Planned
from thinwire.exchange.overlap import Overlap
from thinwire.pipeline.runner import PipelineRunner
from thinwire.step.merge import GradientSum
from thinwire.strategy.exchanges import Exchange
from thinwire.strategy.joining import Batches
from thinwire.strategy.moving_buffers import MovingBuffers

__all__ = ["LossFunction", "Parts"]


LossFunction = Callable[[Any, Any], Tensor]


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
