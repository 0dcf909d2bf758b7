"""Numbers in sentences, for what `explain` prints and `prepare` says."""

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor

__all__ = ["bits_text", "dense_first", "plural", "share_text", "tell_coverage"]

_log = logging.getLogger("thinwire")
_FEW = 1024
"""Numbers of a model for which nothing is said: dense, they are a message of 4 kB."""


def share_text(sparsity: float) -> str:
    """What is sent, such as "0.1 %"."""
    return f"{100 * (1 - sparsity):.6g} %"


def bits_text(bits: int) -> str:
    """Such as "1 bit"."""
    return f"{bits} {plural('bit', bits)}"


def dense_first(begin: int) -> str:
    """What comes before compression, such as "the first 10 updates dense, then "."""
    return f"the first {begin} {plural('update', begin)} dense, then " if begin else ""


def plural(word: str, count: int) -> str:
    """The word, with an s unless there is one of them."""
    return word if count == 1 else f"{word}s"


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
    share = share_text(1 - round(mine / max(1, total), 3))
    said = f"{type(config).__name__} compresses {mine:,} of {total:,} trainable numbers ({share})"
    if 2 * mine >= total or total < _FEW:
        _log.info("%s", said)
        return
    finer = replace(config, min_numel=1) if hasattr(config, "min_numel") else config
    able = sorted((p.numel() for p in params if finer.compresses(p)), reverse=True)
    if 2 * sum(able) >= total:
        least = able[bisect_left(list(accumulate(able)), 0.9 * sum(able))]
        more = sum(numel for numel in able if numel >= least)
        said += f", all others travel whole: with min_numel={least} it would compress {more:,}"
    else:
        other = max((p for p in params if not finer.compresses(p)), key=Tensor.numel)
        said += f", all others travel whole, the largest {finer.why_dense(other)}"
    warnings.warn(said, UserWarning, stacklevel=2)
