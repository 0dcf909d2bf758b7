"""Train neural networks over ordinary networks."""

import importlib
from typing import TYPE_CHECKING, Any

from thinwire._version import __version__

if TYPE_CHECKING:
    from thinwire import amp, checkpoint, errors, integrations, optim, schedules
    from thinwire.comm.waiting import busy
    from thinwire.compress.dgc import DGC
    from thinwire.compress.low_rank import LowRank
    from thinwire.compress.quantized_change import Quantized
    from thinwire.compress.sparse_change import Sparse
    from thinwire.core.gradients import ClipByGlobalNorm, ClipByNorm, ClipByValue, L1Decay, L2Decay
    from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale
    from thinwire.errors import Diverged, StrategyError
    from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
    from thinwire.local.updates import LocalUpdates, local_sgd
    from thinwire.logs import log_stats
    from thinwire.members.joining import join
    from thinwire.members.members import Members
    from thinwire.optim.dgc_momentum import Attached
    from thinwire.optim.layerwise import LAMB, LARS
    from thinwire.pipeline.split import Pipeline
    from thinwire.sampler import ShardedSampler
    from thinwire.step.config import AMP, GradientMerge, Recompute
    from thinwire.strategy.distributed_strategy import DistributedStrategy
    from thinwire.strategy.engine import Engine
    from thinwire.stream.follower import Follower, Version, follow
    from thinwire.stream.publisher import Publisher, publish
    from thinwire.task import Task
    from thinwire.tools.planning.plan import Plan, plan


__all__ = [
    "AMP",
    "DGC",
    "LAMB",
    "LARS",
    "AdaptiveLocalSGD",
    "Attached",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "DistributedStrategy",
    "Diverged",
    "DynamicLossScale",
    "Engine",
    "FixedLossScale",
    "Follower",
    "GradientMerge",
    "L1Decay",
    "L2Decay",
    "LocalSGD",
    "LocalUpdates",
    "LowRank",
    "Members",
    "Pipeline",
    "Plan",
    "Publisher",
    "Quantized",
    "Recompute",
    "ShardedSampler",
    "Sparse",
    "StrategyError",
    "Task",
    "Version",
    "__version__",
    "amp",
    "busy",
    "checkpoint",
    "errors",
    "follow",
    "integrations",
    "join",
    "local_sgd",
    "log_stats",
    "optim",
    "plan",
    "publish",
    "schedules",
]

_MODULES = {"amp", "checkpoint", "errors", "integrations", "optim", "schedules"}
_NAMES = {
    "comm.waiting": "busy",
    "compress.dgc": "DGC",
    "compress.low_rank": "LowRank",
    "compress.quantized_change": "Quantized",
    "compress.sparse_change": "Sparse",
    "core.gradients": "ClipByGlobalNorm ClipByNorm ClipByValue L1Decay L2Decay",
    "core.loss_scale": "DynamicLossScale FixedLossScale",
    "errors": "Diverged StrategyError",
    "local.config": "AdaptiveLocalSGD LocalSGD",
    "local.updates": "LocalUpdates local_sgd",
    "logs": "log_stats",
    "members.joining": "join",
    "members.members": "Members",
    "optim.layerwise": "LAMB LARS",
    "optim.dgc_momentum": "Attached",
    "pipeline.split": "Pipeline",
    "sampler": "ShardedSampler",
    "step.config": "AMP GradientMerge Recompute",
    "strategy.distributed_strategy": "DistributedStrategy",
    "strategy.engine": "Engine",
    "stream.follower": "Follower Version follow",
    "stream.publisher": "Publisher publish",
    "task": "Task",
    "tools.planning.plan": "Plan plan",
}
"""Public names by their modules."""
_HOMES = {name: f"thinwire.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562): the command answers bad input before it has loaded torch."""
    if name in _MODULES:
        return importlib.import_module(f"thinwire.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    known = __all__
    if name[:1].isupper():
        optim = importlib.import_module("thinwire.optim")
        known = [*known, *(f"optim.{other}" for other in optim.__all__)]
    words = importlib.import_module("thinwire._wording").near(name, known)
    hint = f"; did you mean {' or '.join(words)}?" if words else ""
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
