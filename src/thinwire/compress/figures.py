"""Properties that follow from the numbers of a config.

They are: the tensors that it compresses, the fraction that it leaves out, and the length of its
messages. A field that a config lacks has no effect: without
`sparsity` nothing is left out, without `decay` nothing decays.
"""

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.protocol import Config
from thinwire.layout.message import Layout, WholeLayout, factor_numels
from thinwire.layout.traffic import messages


def unsent_share(config: Any, step: int) -> float:
    """Return the fraction of a compressed tensor that update `step`, from 0, does not send.

    For changes, `step` is the local step of the averaging, from 1.

    >>> from thinwire.compress import DGC, LowRank
    >>> unsent_share(DGC(rampup_begin_step=0, sparsity=(0.999,)), 0), unsent_share(LowRank(), 0)
    (0.999, 0.0)
    """
    if hasattr(config, "sparsity_in_force"):
        return float(config.sparsity_in_force(step))
    return float(getattr(config, "sparsity", 0.0))


def decay_of(config: Config) -> float:
    """Return the factor of a kept error at the next averaging, in [0, 1]."""
    return float(getattr(config, "decay", 1.0))


def conserves(config: Config) -> bool:
    """Return True if every change is applied in time: none lost, none counted twice."""
    over_all = getattr(config, "mean_over", "all") == "all"
    return decay_of(config) == 1 and over_all


def steady_share(config: Config) -> float | None:
    """Estimate the least share of a steady change that is applied.

    A steady change repeats itself at every averaging. The outer rate is 1 and there is no outer
    momentum. None if the share depends on the values that are sent.

    For a mean over all ranks the share is p / (p + (1 - decay) (1 - p)), with p = 1 - sparsity.
    That is the share of an entry that is sent at random, with probability p at each averaging. If
    all entries are of one size a little more is applied. If a few entries are much larger than the
    others, the applied share of the norm is larger still.
    """
    if conserves(config):
        return 1.0
    kept: float | None = getattr(config, "sparsity", None)
    if kept is None or getattr(config, "mean_over", "all") == "senders":
        return None
    sent = 1 - kept
    return sent / (sent + (1 - decay_of(config)) * kept)


def sent_bytes(
    config: Any, step: int, shapes: Sequence[torch.Size], sources: int = 2, source: int = 0
) -> int:
    """Return the bytes that rank `source` sends in one averaging, with headers.

    Changes are float32.

    >>> from thinwire.compress import Quantized
    >>> sent_bytes(Quantized(1), 1, [torch.Size([1000])])
    165
    """
    if hasattr(config, "rank"):
        return sum(4 * sum(factor_numels(shape, config.rank)) for shape in shapes)
    numels, bits = tuple(shape.numel() for shape in shapes), config.value_bits
    layout: Layout | WholeLayout = WholeLayout(numels, bits)
    if hasattr(config, "sparsity"):
        layout = Layout.of(numels, unsent_share(config, step - 1), bits)
    return messages(layout, config.exchange, sources).sent(source)


_log = logging.getLogger("thinwire")
_FEW = 1024
"""Number of dense entries below which a model gets no remark: they are a message of 4 kB."""


def why_dense(config: Any, param: Tensor) -> str | None:
    """Return the reason for which this tensor is never compressed, or None if it is.

    >>> from thinwire.compress import LowRank
    >>> why_dense(LowRank(), torch.zeros(512, 512)) is None
    True
    """
    if config.compresses(param):
        return None
    if hasattr(config, "rank") and param.dim() < 2:
        return "of fewer than two dimensions"
    if param.numel() < config.min_numel:
        return f"below min_numel={config.min_numel}"
    if not param.is_floating_point() or not hasattr(config, "rank"):
        return f"because of {param.dtype}"
    return f"because rank={config.rank} is not below its smaller side"


def report_coverage(
    config: Any, params: Iterable[Tensor], compresses: Callable[[Tensor], bool] | None = None
) -> None:
    """Log the compressed share of the numbers; warn if it is less than half.

    Args:
        config: `DGC`, `LowRank`, or a compression of changes.
        params: The trainable parameters, or this rank's shards of them.
        compresses: Returns True for a tensor that is ever compressed; None: by `config`.
    """
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
    finer = replace(config, min_numel=1) if hasattr(config, "min_numel") else config
    able = sorted((p.numel() for p in params if finer.compresses(p)), reverse=True)
    if 2 * sum(able) >= total:
        reached = list(accumulate(able))
        least = able[bisect_left(reached, 0.9 * reached[-1])]
        more = sum(numel for numel in able if numel >= least)
        message += f", all others travel whole: with min_numel={least} it would compress {more:,}"
    else:
        other = max((p for p in params if not finer.compresses(p)), key=Tensor.numel)
        message += f", all others travel whole, the largest {why_dense(finer, other)}"
    warnings.warn(message, UserWarning, stacklevel=2)
