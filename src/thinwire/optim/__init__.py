"""Optimizers: torch's classes with this library's common options, and methods for large batches and
sparse rows. `strategy` and `integrations` import them.
"""

from thinwire.core.gradients import ClipByGlobalNorm, ClipByNorm, ClipByValue, L1Decay, L2Decay
from thinwire.optim.dgc_momentum import DGCMomentum
from thinwire.optim.layerwise import Lamb, Lars
from thinwire.optim.muon import Muon, muon_groups
from thinwire.optim.rows import Ftrl, LazyAdam, ProximalAdagrad
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
