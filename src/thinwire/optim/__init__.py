"""Optimizers: torch's classes with this library's common options, and methods for large batches and
sparse rows. `strategy` and `integrations` import them.
"""

from thinwire.core.gradients import ClipByGlobalNorm, ClipByNorm, ClipByValue, L1Decay, L2Decay
from thinwire.optim.dgc_momentum import DGCMomentum
from thinwire.optim.ftrl import Ftrl
from thinwire.optim.lamb import Lamb
from thinwire.optim.lars import Lars
from thinwire.optim.lazy_adam import LazyAdam
from thinwire.optim.muon import Muon, muon_groups
from thinwire.optim.proximal_adagrad import ProximalAdagrad
from thinwire.optim.torch_classes import SGD, Adagrad, Adam, AdamW, RMSprop

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "DGCMomentum",
    "Ftrl",
    "L1Decay",
    "L2Decay",
    "Lamb",
    "Lars",
    "LazyAdam",
    "Muon",
    "ProximalAdagrad",
    "RMSprop",
    "muon_groups",
]
