"""Deep gradient compression: a rank sends the few largest of what it has accumulated.

Algorithm 4 of the paper, top to bottom, per tensor of n entries and update t (from 0):

    s       the fraction that is kept back in update t          `DGC.unsent_share`  (3.3)
    k       n (1 - s), at least 1                               `layout.message.count_sent`
    g       the rank's own gradient, limited to its share       `locally_clipped`        (3.2)
    u, v    u <- m u + g,  v <- v + u                           `core.feedback.propose_list`  (3.1)
    S       the k entries of largest |v|                        the same
    sent    v[S], in a few bits each                            `compress.entries`
    v[S] <- v[S] - sent,  u[S] <- 0                             `core.feedback.commit_list_`  (3.1)

Nothing but the message leaves a rank, and u and v change only once all ranks have voted; until
then the fold is computed and forgotten, and made again for the commit, so that no update holds a
second set of gradients.

Source: Lin et al., 2018, arXiv 1712.01887. Differs: exact selection, positions by Elias-Fano,
values in `value_bits` with the rounding error kept in v, the limit on a source's share; updates of
the ramp are counted in integers, where Paddle's operators/dgc_op.h counts in float32, which stops
at 2^24.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.protocol import (
    RESIDUAL,
    Compression,
    Computed,
    Context,
    Kept,
    OtherRanks,
    Sending,
    Shapes,
    check_messages,
)
from thinwire.compress.sparse_change import send_largest
from thinwire.core.feedback import compile_loops
from thinwire.core.gradients import ClipByNorm, clipped
from thinwire.core.norms import norms_over_shards
from thinwire.core.tensors import named_dtype, state_dtype, stored_dtype
from thinwire.layout.message import VALUE_BITS, Layout
from thinwire.layout.traffic import first_split
from thinwire.schedules import sparsity_at

_CHANGE = (
    "no gradient is exchanged: the change since the last averaging is sent sparse, at dgc's "
    "sparsity of that step, with its value_bits and min_numel, and the rest is kept; dense before "
    "rampup_begin_step; momentum stays in the local optimizer, and local_grad_clip_norm limits "
    "each local gradient"
)
_COMPRESSIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@check.by_name
@dataclass(frozen=True)
class DGC(Compression):
    """Each rank sends only the largest accumulated entries of every gradient.

    That is about 2,000 times fewer bytes with the usual settings.

    Attributes:
        rampup_begin_step: Updates before compression begins, >= 0.
        rampup_step: Updates over which the levels of `sparsity` are spread, >= 1.
        sparsity: Fractions that are **not** sent, each in [0, 1); the last is final.
        local_grad_clip_norm: C > 0: a source's share g / N of a compressed tensor is limited to the
            norm C / sqrt(N).
        min_numel: Smaller tensors are exchanged densely, >= 1.
        value_bits: Bits per sent value: 1, 2, 4, 8, 16 or 32. The rounding error is kept.
        state_dtype: "float32" or "bfloat16": the type in which momentum and residual of compressed
            tensors are stored. bfloat16 is rounded stochastically and takes half the memory. None:
            float32, or float64 for float64 parameters.
        node_size: Consecutive ranks per node, >= 1; it must divide the number of ranks. Ranks of a
            node average densely among themselves and count as one source. 1 is off. None:
            torchrun's LOCAL_WORLD_SIZE if ranks fill two nodes or more.
        exchange: "gather" sends all messages to every source. "split" sends sums of shares, whose
            size does not grow with the sources. "auto" counts bytes and splits if that moves at
            most half of them.

    Raises:
        TypeError, ValueError: A wrong value.

    Example::

        dgc = tw.DGC(rampup_begin_step=500, rampup_step=100, sparsity=(0.99, 0.999))
        strategy = tw.DistributedStrategy(dgc=dgc)

    Source: Lin et al., 2018, arXiv 1712.01887.
    """

    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: tuple[float, ...] = (0.999,)
    local_grad_clip_norm: float | None = None
    min_numel: int = 16384
    value_bits: int = 1
    state_dtype: str | torch.dtype | None = None
    node_size: int | None = None
    exchange: str = "auto"

    free: ClassVar[Sequence[str]] = (
        "rampup_begin_step",
        "rampup_step",
        "sparsity",
        "local_grad_clip_norm",
        "value_bits",
        "node_size",
        "exchange",
    )
    accumulates: ClassVar[bool] = True
    has_checksums: ClassVar[bool] = True
    reports_finite: ClassVar[bool] = True
    passes = 10
    meanings: ClassVar[Mapping[str, str]] = {
        **Compression.meanings,
        "localsgd": _CHANGE,
        "adaptive_localsgd": f"{_CHANGE}; at the current interval",
    }
    kinds: ClassVar[Mapping[str, OtherRanks]] = dict.fromkeys(
        (RESIDUAL, "momentum_buffer"), "mean_zero"
    )

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "rampup_begin_step", at_least=0)
        check.set_fields(self, check.integer, "rampup_step", "min_numel", at_least=1)
        if self.node_size is not None:
            check.set_fields(self, check.integer, "node_size", at_least=1)
        advice = "write a single fraction as (0.999,)"
        levels = check.sequence(
            check.real, "sparsity", self.sparsity, advice=advice, at_least=0, below=1
        )
        if not levels:
            raise ValueError(
                "sparsity must hold at least one fraction in [0, 1), got an empty sequence"
            )
        object.__setattr__(self, "sparsity", levels)
        if self.local_grad_clip_norm is not None:
            check.set_fields(self, check.real, "local_grad_clip_norm", above=0)
        object.__setattr__(self, "state_dtype", named_dtype("state_dtype", self.state_dtype))
        check.instance("exchange", self.exchange, str)
        check_messages(self, VALUE_BITS)

    def compresses(self, param: Tensor) -> bool:
        """Return True if this tensor is ever compressed; others always travel densely."""
        return param.dtype in _COMPRESSIBLE and param.numel() >= self.min_numel

    def stored_dtype(self, param: Tensor) -> torch.dtype:
        """Return the type in which the residual of this tensor is stored."""
        return stored_dtype(param, named_dtype("state_dtype", self.state_dtype))

    def unsent_share(self, step: int) -> float:
        """Return the fraction of a tensor that update `step`, from 0, does not send.

        >>> config = DGC(rampup_begin_step=10, rampup_step=2, sparsity=(0.75, 0.999))
        >>> [config.unsent_share(step) for step in (9, 10, 11, 12)]
        [0.0, 0.75, 0.999, 0.999]
        """
        if step < self.rampup_begin_step:
            return 0.0
        return sparsity_at(step, self.rampup_begin_step, self.rampup_step, self.sparsity)

    def loops(self, params: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: compile_loops(filter(self.compresses, params), self.state_dtype)

    @property
    def last_dense_step(self) -> int:
        """Return `rampup_begin_step`."""
        return self.rampup_begin_step

    @property
    def settled_step(self) -> int:
        """Return the update that the last level of `sparsity` begins with."""
        levels = len(self.sparsity)
        return 1 + self.rampup_begin_step - (-self.rampup_step * (levels - 1) // levels)

    def layout(self, step: int, numels: Sequence[int]) -> Layout:
        """See `Compression`; the ramp counts from 0."""
        return Layout.of(numels, self.unsent_share(step - 1), self.value_bits)

    def message_text(self, step: int, shapes: Shapes) -> str:
        """Describe a full message, and when sources split their entries."""
        layout = self.layout(step, [shape.numel() for shape in shapes])
        entries = sum(slot.k for slot in layout.slots)
        text = f"a full message has {entries:,} entries in {layout.nbytes:,} bytes"
        if self.exchange != "auto":
            return text
        begin = first_split(layout)
        few = "for any number of sources" if begin is None else f"below {begin}, else they split"
        return f"{text}; sources gather {few}"

    def send(self, context: Context, folded: Computed, kept: Kept) -> Sending:
        """Send the largest entries, by the ramp; see `Compression`."""
        # the mean is over all sources, and the residual does not decay: everything is sent in time
        sparsity = self.unsent_share(context.update)
        return send_largest(
            context, folded, kept, sparsity, self.value_bits, self.exchange, over_senders=False
        )


def limited(grad: Tensor, limit: float, sources: int, dtype: torch.dtype) -> Tensor:
    """Return one rank's gradient g <- g * min(1, C * sqrt(N) / ||g||), a new tensor of `dtype`.

    Its share g / N of the mean gets at most the norm C / sqrt(N). No host synchronization.

    >>> limited(torch.tensor([3.0, 4.0]), 1.0, 1, torch.float32)
    tensor([0.6000, 0.8000])

    Source: section 3.2. Differs: the limit applies to the share, not to the undivided gradient.
    """
    return clipped(ClipByNorm(limit * math.sqrt(sources)), [grad.to(dtype)])[0]


def locally_clipped(
    grads: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    config: Callable[[str], DGC],
    *,
    step: int,
    sources: int,
    gather: Callable[[bytes, str], list[bytes]] | None = None,
) -> dict[str, Tensor]:
    """Return gradients that are `limited` where they are compressed, by norms over all shards."""
    within = dict(grads)
    if all(config(name).local_grad_clip_norm is None for name in grads):
        return within
    norms = None if gather is None else norms_over_shards(grads, gather)
    for name, grad in grads.items():
        dgc = config(name)
        param = params[name]
        limit = dgc.local_grad_clip_norm
        if limit is None or step < dgc.rampup_begin_step or not dgc.compresses(param):
            continue
        if norms is not None:
            bound = limit * math.sqrt(sources)
            wide = grad.to(state_dtype(param))
            within[name] = wide * (bound / norms[name]) if norms[name] > bound else wide
        elif not grad.is_sparse:
            within[name] = limited(grad, limit, sources, state_dtype(param))
    return within
