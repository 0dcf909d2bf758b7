"""What a config compresses of a model."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from thinwire._wording import warn_user
from thinwire.compress.protocol import Config

_log = logging.getLogger("thinwire")
_FEW = 1024
"""Number of dense entries below which a model gets no remark: they are a message of 4 kB."""


def report_coverage(
    config: Config, params: Iterable[Tensor], compresses: Callable[[Tensor], bool] | None = None
) -> None:
    """Log the compressed share of the numbers; warn if it is less than half."""
    params = list(params)
    total = sum(p.numel() for p in params)
    compressed = sum(p.numel() for p in params if (compresses or config.compresses)(p))
    share = f"{100 * compressed / max(1, total):.3g} %"
    message = (
        f"{type(config).__name__} compresses {compressed:,} of {total:,} trainable numbers "
        f"({share})"
    )
    if 2 * compressed >= total or total < _FEW:
        _log.info("%s", message)
        return
    finer = config if config.min_numel == 1 else replace(config, min_numel=1)
    able = sorted((p.numel() for p in params if finer.compresses(p)), reverse=True)
    if 2 * sum(able) >= total:
        reached = list(accumulate(able))
        least = able[bisect_left(reached, 0.9 * reached[-1])]
        more = sum(numel for numel in able if numel >= least)
        message += f", all others travel whole: with min_numel={least} it would compress {more:,}"
    else:
        other = max((p for p in params if not finer.compresses(p)), key=Tensor.numel)
        message += f", all others travel whole, the largest {finer.why_dense(other)}"
    warn_user(message)
