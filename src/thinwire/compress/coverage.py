"""How much of a model is compressed at all, why the rest is not, and what to set then."""

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor

__all__ = ["tell_coverage", "why_dense"]

_log = logging.getLogger("thinwire")
_FEW = 1024
"""Numbers of a model for which nothing is said: dense, they are a message of 4 kB."""


def why_dense(config: Any, param: Tensor) -> str | None:
    """Why this tensor is never compressed, in words; None where it is."""
    if config.compresses(param):
        return None
    if hasattr(config, "rank") and param.dim() < 2:
        return "of fewer than two dimensions"
    if param.numel() < config.min_numel:
        return f"below min_numel={config.min_numel}"
    if not param.is_floating_point() or not hasattr(config, "rank"):
        return f"because of {param.dtype}"
    return f"because rank={config.rank} is not below its smaller side"


def tell_coverage(
    config: Any, params: Iterable[Tensor], compresses: Callable[[Tensor], bool] | None = None
) -> None:
    """Log which part of the numbers is compressed; warn where that is less than half.

    Args:
        config: `DGC`, `LowRank`, or a compression of changes.
        params: The trainable parameters, or this rank's shards of them.
        compresses: Whether one of them is ever compressed; None: as `config` says.
    """
    params = list(params)
    total = sum(p.numel() for p in params)
    mine = sum(p.numel() for p in params if (compresses or config.compresses)(p))
    share = f"{100 * mine / max(1, total):.3g} %"
    said = f"{type(config).__name__} compresses {mine:,} of {total:,} trainable numbers ({share})"
    if 2 * mine >= total or total < _FEW:
        _log.info("%s", said)
        return
    finer = replace(config, min_numel=1) if hasattr(config, "min_numel") else config
    able = sorted((p.numel() for p in params if finer.compresses(p)), reverse=True)
    if 2 * sum(able) >= total:
        reached = list(accumulate(able))
        least = able[bisect_left(reached, 0.9 * reached[-1])]
        more = sum(numel for numel in able if numel >= least)
        said += f", all others travel whole: with min_numel={least} it would compress {more:,}"
    else:
        other = max((p for p in params if not finer.compresses(p)), key=Tensor.numel)
        said += f", all others travel whole, the largest {why_dense(finer, other)}"
    warnings.warn(said, UserWarning, stacklevel=2)
