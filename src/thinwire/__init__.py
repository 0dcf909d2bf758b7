"""Train neural networks over ordinary networks."""

from thinwire import errors, optim, schedules
from thinwire._version import __version__
from thinwire.optim import ClipByGlobalNorm, ClipByNorm, ClipByValue, L1Decay, L2Decay

__all__ = [
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "L1Decay",
    "L2Decay",
    "__version__",
    "errors",
    "optim",
    "schedules",
]
