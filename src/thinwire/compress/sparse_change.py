"""Sparse changes: the largest entries travel with their positions, and the rest is kept."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._devices import moved
from thinwire.compress.entries import ArrivedEntries, Proposed, send_entries
from thinwire.compress.protocol import (
    RESIDUAL,
    Compression,
    Computed,
    Context,
    Kept,
    Sending,
    check_messages,
)
from thinwire.core.feedback import Proposal, compile_loops
from thinwire.layout.message import VALUE_BITS, Layout, count_sent


@check.by_name
@dataclass(frozen=True)
class Sparse(Compression):
    """Only the largest entries of each parameter's change are sent; the rest is kept.

    Attributes:
        sparsity: Fraction that is **not** sent, in [0, 1).
        value_bits: Bits per sent value: 1, 2, 4, 8, 16 or 32. The rounding error is kept.
        decay: Factor of the kept rest at the next averaging, in [0, 1]; 1 loses nothing, 0 keeps
            nothing.
        mean_over: "senders": an entry's mean is over the ranks that sent it; "all": over all ranks.
            An entry that no rank sent stays unchanged.
        exchange: "gather": all messages go to all ranks. "split": each rank adds up a part of the
            index space, sends all others the means of the largest sums, and keeps the rest. The
            bytes that a rank sends and receives then do not grow with the number of ranks. "auto":
            split if a rank then moves at most half of the bytes.

    Raises:
        TypeError, ValueError: A wrong value.

    Example::

        local = tw.LocalSGD(k_steps=16, compression=tw.Sparse(sparsity=0.98))
        strategy = tw.DistributedStrategy(localsgd=local)

    Source: SparseLoCo, 2025, arXiv 2508.15706. Its formula takes the mean over all ranks; its code
    (templar), like CCLoco's, the mean over the senders. Differs: selection per tensor instead of
    per chunk.
    """

    sparsity: float
    value_bits: int = 2
    decay: float = 0.95
    mean_over: Literal["senders", "all"] = "senders"
    _: KW_ONLY
    exchange: Literal["auto", "gather", "split"] = "auto"

    has_checksums: ClassVar[bool] = True
    passes = 14

    def __post_init__(self) -> None:
        named = "sparsity, the fraction that is not sent,"
        sparsity = check.real(named, self.sparsity, at_least=0, below=1)
        object.__setattr__(self, "sparsity", sparsity)
        check_messages(self, VALUE_BITS)
        check.set_fields(self, check.real, "decay", at_least=0, at_most=1)
        check.one_of("mean_over", self.mean_over, ("senders", "all"))

    def loops(self, params: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: compile_loops(params)

    def unsent_share(self, step: int) -> float:
        """Return `sparsity`."""
        return self.sparsity

    @property
    def conserves(self) -> bool:
        """Return False for a mean over the senders, which counts some changes more than once."""
        return self.decay == 1 and self.mean_over == "all"

    @property
    def steady_share(self) -> float | None:
        """Return p / (p + (1 - decay) (1 - p)) for a mean over all ranks, with p = 1 - sparsity.

        That is the share of an entry that is sent at random, with probability p at each averaging;
        more is applied of entries of one size, and of a norm that few entries make.
        """
        sent = 1 - self.sparsity
        over_all = self.mean_over == "all"
        return sent / (sent + (1 - self.decay) * self.sparsity) if over_all else None

    def layout(self, step: int, numels: Sequence[int]) -> Layout:
        """See `Compression`."""
        return Layout.of(numels, self.sparsity, self.value_bits)

    def send(self, context: Context, folded: Computed, kept: Kept) -> Sending:
        """Send by an all-gather, perhaps after an all-to-all; see `Compression`."""
        return send_largest(
            context,
            folded,
            kept,
            self.sparsity,
            self.value_bits,
            self.exchange,
            over_senders=self.mean_over == "senders",
        )


def send_largest(
    context: Context,
    folded: Computed,
    kept: Kept,
    sparsity: float,
    value_bits: int,
    exchange: str,
    *,
    over_senders: bool,
) -> Sending:
    """Send the largest entries of each tensor, gathered or by shares; see `Compression.send`.

    The other arguments are as in `Sparse`.
    """
    numels = {name: kept[RESIDUAL][name].numel() for name in folded}
    counts = {name: count_sent(numel, sparsity) for name, numel in numels.items()}
    indices, values, flags = zip(*folded.largest(counts, kept).values(), strict=True)
    finite = (torch.as_tensor(flag, device=values[0].device).view(1) for flag in flags)
    # one transfer, since each waits for a GPU
    here = moved([*indices, *values, *finite], torch.device("cpu"))
    proposed = {}
    for at, (name, k) in enumerate(counts.items()):
        its_indices, its_values, flag = here[at :: len(counts)]
        proposal = Proposal(its_indices, its_values, bool(flag))
        proposed[name] = Proposed(proposal, numels[name], k)
    arrived = ArrivedEntries(context, folded.words, list(folded), over_senders=over_senders)
    return (yield from send_entries(context, proposed, arrived, value_bits, exchange))
