"""The local clip of deep gradient compression: each rank limits its own share before it accumulates."""

import math

import torch
from torch import Tensor

from thinwire.core.clip import ClipByNorm, clipped
from thinwire.core.precision import state_dtype
from thinwire.sync.dgc_config import DGC

__all__ = ["limited", "locally_clipped"]


def limited(grad: Tensor, limit: float, trainers: int, dtype: torch.dtype) -> Tensor:
    """One rank's gradient such that its share of the mean, grad / N, has at most the norm C / sqrt(N).

    g <- g * min(1, C * sqrt(N) / ||g||).

    Args:
        grad: Any shape, dense, not divided by N; read only.
        limit: C > 0, in the gradient's unit.
        trainers: N >= 1, the ranks whose shares are summed.
        dtype: In what the norm and the result are computed.

    Returns:
        A new tensor of `dtype` in the same shape; no host synchronization.

    Source: arXiv 1712.01887, section 3.2. Differs: the limit is put on the share, not on the undivided gradient.
    """
    return clipped(ClipByNorm(limit * math.sqrt(trainers)), [grad.to(dtype)])[0]


def locally_clipped(dgc: DGC, step: int, trainers: int, param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as `dgc` lets it into the accumulation of this rank: limited where it is compressed at `step`.

    Args:
        dgc: The config.
        step: Completed updates, from 0.
        trainers: N of the limit, >= 1.
        param: The parameter, which decides whether the gradient is compressed.
        grad: Its gradient on this rank; read only.

    Returns:
        `limited` in float32 (float64 for float64 parameters), or `grad` itself: without `local_grad_clip_norm`, before
        `rampup_begin_step`, and for whatever is always exchanged densely.
    """
    if dgc.local_grad_clip_norm is None or grad.is_sparse:
        return grad
    if step < dgc.rampup_begin_step or not dgc.compresses(param):
        return grad
    return limited(grad, dgc.local_grad_clip_norm, trainers, state_dtype(param))
