"""Train neural networks over ordinary networks."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from thinwire._version import __version__

if TYPE_CHECKING:
    from thinwire import amp, checkpoint, errors, integrations, optim, schedules
    from thinwire.comm.waiting import busy
    from thinwire.compress.dgc import DGC
    from thinwire.compress.low_rank import LowRank
    from thinwire.compress.quantized_change import Quantized
    from thinwire.compress.sparse_change import Sparse
    from thinwire.core.gradients import ClipByGlobalNorm
    from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale
    from thinwire.errors import StrategyError
    from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
    from thinwire.local.updates import LocalUpdates, local_sgd
    from thinwire.logs import log_stats
    from thinwire.members.members import Members, join
    from thinwire.optim.attached import Attached
    from thinwire.optim.config import LAMB, LARS
    from thinwire.pipeline.config import Pipeline
    from thinwire.sampler import ShardedSampler
    from thinwire.step.config import AMP, GradientMerge, Recompute
    from thinwire.strategy.distributed_strategy import DistributedStrategy
    from thinwire.strategy.engine import Engine
    from thinwire.task import Task
    from thinwire.tools.planning.plan import plan

logging.getLogger("thinwire").addHandler(logging.NullHandler())

__all__ = [
    "AMP",
    "DGC",
    "LAMB",
    "LARS",
    "AdaptiveLocalSGD",
    "Attached",
    "ClipByGlobalNorm",
    "DistributedStrategy",
    "DynamicLossScale",
    "Engine",
    "FixedLossScale",
    "GradientMerge",
    "LocalSGD",
    "LocalUpdates",
    "LowRank",
    "Members",
    "Pipeline",
    "Quantized",
    "Recompute",
    "ShardedSampler",
    "Sparse",
    "StrategyError",
    "Task",
    "__version__",
    "amp",
    "busy",
    "checkpoint",
    "errors",
    "integrations",
    "join",
    "local_sgd",
    "log_stats",
    "optim",
    "plan",
    "schedules",
]

_MODULES = {"amp", "checkpoint", "errors", "integrations", "optim", "schedules"}
_HOMES = {
    "AMP": "thinwire.step.config",
    "AdaptiveLocalSGD": "thinwire.local.config",
    "Attached": "thinwire.optim.attached",
    "ClipByGlobalNorm": "thinwire.core.gradients",
    "DGC": "thinwire.compress.dgc",
    "DistributedStrategy": "thinwire.strategy.distributed_strategy",
    "DynamicLossScale": "thinwire.core.loss_scale",
    "Engine": "thinwire.strategy.engine",
    "FixedLossScale": "thinwire.core.loss_scale",
    "GradientMerge": "thinwire.step.config",
    "LAMB": "thinwire.optim.config",
    "LARS": "thinwire.optim.config",
    "LocalSGD": "thinwire.local.config",
    "LocalUpdates": "thinwire.local.updates",
    "LowRank": "thinwire.compress.low_rank",
    "ShardedSampler": "thinwire.sampler",
    "Members": "thinwire.members.members",
    "Pipeline": "thinwire.pipeline.config",
    "Quantized": "thinwire.compress.quantized_change",
    "Recompute": "thinwire.step.config",
    "Sparse": "thinwire.compress.sparse_change",
    "StrategyError": "thinwire.errors",
    "Task": "thinwire.task",
    "busy": "thinwire.comm.waiting",
    "join": "thinwire.members.members",
    "local_sgd": "thinwire.local.updates",
    "log_stats": "thinwire.logs",
    "plan": "thinwire.tools.planning.plan",
}


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562): the command answers bad input before it has loaded torch."""
    if name in _MODULES:
        return importlib.import_module(f"thinwire.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
