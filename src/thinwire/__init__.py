"""Train neural networks over ordinary networks."""

import importlib
from typing import TYPE_CHECKING, Any

from thinwire._version import __version__

if TYPE_CHECKING:
    from thinwire import amp, errors, optim, schedules
    from thinwire.core.clip import ClipByGlobalNorm, ClipByNorm, ClipByValue
    from thinwire.core.decay import L1Decay, L2Decay
    from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale
    from thinwire.sync.local_config import AdaptiveLocalSGD, LocalSGD, Sparse
    from thinwire.sync.local_sgd import local_sgd

__all__ = [
    "AdaptiveLocalSGD",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "DynamicLossScale",
    "FixedLossScale",
    "L1Decay",
    "L2Decay",
    "LocalSGD",
    "Sparse",
    "__version__",
    "amp",
    "errors",
    "local_sgd",
    "optim",
    "schedules",
]

_MODULES = {"amp", "errors", "optim", "schedules"}
_HOMES = {
    "AdaptiveLocalSGD": "thinwire.sync.local_config",
    "ClipByGlobalNorm": "thinwire.core.clip",
    "ClipByNorm": "thinwire.core.clip",
    "ClipByValue": "thinwire.core.clip",
    "DynamicLossScale": "thinwire.core.loss_scale",
    "FixedLossScale": "thinwire.core.loss_scale",
    "L1Decay": "thinwire.core.decay",
    "L2Decay": "thinwire.core.decay",
    "LocalSGD": "thinwire.sync.local_config",
    "Sparse": "thinwire.sync.local_config",
    "local_sgd": "thinwire.sync.local_sgd",
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
