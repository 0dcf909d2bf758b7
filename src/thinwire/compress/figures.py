"""What follows from the numbers of a config: what it leaves out, how long its
messages are, which compiled loops it calls.

A field that a config lacks has no effect: without `sparsity` nothing is left out, without `decay`
nothing decays.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.protocol import Config
from thinwire.kernels.needs import Need, Work, needs_of
from thinwire.layout.message import Layout, WholeLayout, factor_numels
from thinwire.layout.traffic import GATHER, messages

__all__ = [
    "conserves",
    "decay_of",
    "left_out",
    "loops_of",
    "sent_bytes",
    "steady_share",
]


def left_out(config: Any, step: int) -> float:
    """Fraction of a compressed tensor that update `step`, from 0, does not send; of a change, the
    averaging after local step `step` of those from 1.
    """
    if hasattr(config, "sparsity_in_force"):
        return float(config.sparsity_in_force(step))
    return float(getattr(config, "sparsity", 0.0))


def decay_of(config: Config) -> float:
    """What of a kept error counts at the next averaging, in [0, 1]."""
    return float(getattr(config, "decay", 1.0))


def conserves(config: Config) -> bool:
    """Whether the mean over the ranks of all that was changed is applied in time: none lost, none
    counted twice.
    """
    over_all = getattr(config, "mean_over", "all") == "all"
    return decay_of(config) == 1 and over_all and getattr(config, "clip_sources", None) is None


def steady_share(config: Config) -> float | None:
    """About which part of a change that repeats itself at every averaging is applied at least, with
    an outer rate of 1 and no outer momentum; None where that depends on what is sent.

    It is p / (p + (1 - decay) (1 - p)), with p = 1 - sparsity, of a mean over all ranks: the share
    of an entry that is sent at random, with probability p at each averaging. Of entries of one size
    a little more is applied, and more still of the norm where a few are much larger than the
    others.
    """
    if conserves(config):
        return 1.0
    kept: float | None = getattr(config, "sparsity", None)
    if kept is None or getattr(config, "mean_over", "all") == "senders":
        return None
    if getattr(config, "clip_sources", None) is not None:
        return None
    sent = 1 - kept
    return sent / (sent + (1 - decay_of(config)) * kept)


def sent_bytes(
    config: Any, step: int, shapes: Sequence[torch.Size], sources: int = 2, source: int = 0
) -> int:
    """What rank `source` of `sources` gives to the collectives of one averaging for float32
    changes, exactly, headers included.
    """
    if hasattr(config, "rank"):
        return sum(4 * sum(factor_numels(shape, config.rank)) for shape in shapes)
    numels, bits = tuple(shape.numel() for shape in shapes), config.value_bits
    layout: Layout | WholeLayout = WholeLayout(numels, bits)
    if hasattr(config, "sparsity"):
        layout = Layout.of(numels, left_out(config, step - 1), bits)
    asked = config.exchange if getattr(config, "clip_sources", None) is None else GATHER
    return messages(layout, asked, sources).sent(source)


def loops_of(config: Any, params: Iterable[Tensor], *, of_gradients: bool) -> frozenset[Need]:
    """The compiled loops that it calls for these parameters."""
    if not hasattr(config, "value_bits"):
        return frozenset()
    bits, mine = config.value_bits, [param for param in params if config.compresses(param)]
    if of_gradients:
        state = torch.bfloat16 if config.state_dtype == "bfloat16" else None
        return needs_of("sparse", mine, state_dtype=state, value_bits=bits)
    work: Work = "changes" if hasattr(config, "sparsity") else "codes"
    return needs_of(work, mine, value_bits=bits)
