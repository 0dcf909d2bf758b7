"""Sparse changes: the largest entries travel with their positions, and the rest is kept."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import _validate as check
from thinwire.compress.entries import ArrivedEntries, Proposed, send_entries
from thinwire.compress.protocol import (
    ERRORS,
    Context,
    Entries,
    ErrorsOnly,
    Kept,
    MeanChange,
    Sending,
)
from thinwire.compress.split import senders
from thinwire.core.feedback import Proposal, sum_sparse, top_k
from thinwire.kernels.reference import divided_
from thinwire.layout.message import VALUE_BITS, count_sent
from thinwire.layout.traffic import EXCHANGES, GATHER


@dataclass(frozen=True)
class Sparse(ErrorsOnly):
    """Only the largest entries of each parameter's change are sent; the rest is kept.

    Attributes:
        sparsity: Fraction that is **not** sent, in [0, 1).
        value_bits: Bits per sent value: 1, 2, 4, 8, 16 or 32. The rounding error is kept.
        decay: Factor of the kept rest at the next averaging, in [0, 1]; 1 loses nothing, 0 keeps
            nothing.
        mean_over: "senders": an entry's mean is over the ranks that sent it; "all": over all ranks.
            An entry that no rank sent stays unchanged.
        clip_sources: Largest norm of all that one rank sends at an averaging, as a multiple of the
            median of all ranks' norms, >= 1. A larger one is scaled down to it before the mean. The
            difference is dropped: if it were kept, all of it would be applied later. Ranks that
            sent only zeros do not count; of two ranks the smaller norm is the median. None: no
            limit.
        exchange: "gather": all messages go to all ranks. "split": each rank adds up a part of the
            index space, sends all others the means of the largest sums, and keeps the rest. The
            bytes that a rank sends and receives then do not grow with the number of ranks. "auto":
            split if a rank then moves at most half of the bytes. `clip_sources` needs all messages,
            so with it they are gathered.

    Raises:
        TypeError, ValueError: A wrong value.

    Example::

        local = tw.LocalSGD(k_steps=16, compression=tw.Sparse(sparsity=0.98))
        strategy = tw.DistributedStrategy(localsgd=local)

    Source: SparseLoCo, 2025, arXiv 2508.15706. Its formula takes the mean over all ranks; its code
    (templar), like CCLoco's, the mean over the senders. templar limits the norm of what each rank
    sends of a tensor to the median. Differs: selection per tensor instead of per chunk; one norm
    for all tensors.
    """

    sparsity: float
    value_bits: int = 2
    decay: float = 0.95
    mean_over: Literal["senders", "all"] = "senders"
    _: KW_ONLY
    clip_sources: float | None = None
    exchange: Literal["auto", "gather", "split"] = "auto"

    def __post_init__(self) -> None:
        named = "sparsity, the fraction that is not sent,"
        sparsity = check.real(named, self.sparsity, at_least=0, below=1)
        object.__setattr__(self, "sparsity", sparsity)
        check.set_fields(self, check.integer, "value_bits")
        check.one_of("value_bits", self.value_bits, VALUE_BITS)
        check.set_fields(self, check.real, "decay", at_least=0, at_most=1)
        check.one_of("mean_over", self.mean_over, ("senders", "all"))
        check.one_of("exchange", self.exchange, EXCHANGES)
        if self.clip_sources is not None and self.exchange == "split":
            raise ValueError(
                "clip_sources compares the messages of all ranks, but with exchange='split' no "
                "rank receives them all: leave clip_sources out, or use exchange='gather'"
            )
        if self.clip_sources is not None:
            check.set_fields(self, check.real, "clip_sources", at_least=1)

    def compresses(self, param: Tensor) -> bool:
        """Return True for parameters of any size."""
        return True

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """Send by an all-gather, perhaps after an all-to-all; see `ChangeCompression`."""
        return send_largest(
            context,
            folded,
            lambda numel: count_sent(numel, self.sparsity),
            self.value_bits,
            self.exchange if self.clip_sources is None else GATHER,
            over_senders=self.mean_over == "senders",
            clip_sources=self.clip_sources,
        )


def send_largest(
    context: Context,
    folded: Mapping[str, Tensor],
    count: Callable[[int], int],
    value_bits: int,
    exchange: str,
    *,
    over_senders: bool,
    clip_sources: float | None = None,
) -> Sending:
    """Send the largest entries of each tensor, gathered or by shares; see `ChangeCompression.send`.

    `count` maps a tensor's number of entries to the number that is sent. The other arguments are as
    in `Sparse`.
    """
    proposed = {}
    for name, tensor in folded.items():
        flat, k = tensor.view(-1), count(tensor.numel())
        indices = top_k(flat, k)
        proposed[name] = Proposed(Proposal(indices, flat[indices], finite=True), flat.numel(), k)
    made = _Largest(context, list(folded))
    made.rooms = {name: item.k for name, item in proposed.items()}
    made.over_senders, made.clip_sources = over_senders, clip_sources
    return (
        yield from send_entries(
            context,
            proposed,
            value_bits=value_bits,
            exchange=exchange,
            arrived=made,
            over_senders=over_senders,
        )
    )


class _Largest(ArrivedEntries, MeanChange):
    """Entries that all ranks sent of each tensor, or the means that owners made of them."""

    given_word, sums_word = "changes", "means of changes"
    rooms: Mapping[str, int]
    """Number of entries of each tensor that a message can hold."""
    over_senders: bool
    clip_sources: float | None

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        indices, values = self.given[name]
        error = kept[ERRORS][name].copy_(folded)
        error.view(-1)[indices] -= values.to(error.dtype)
        self.add_kept_(name, error.view(-1), key=0)
        change = torch.zeros_like(folded)
        positions, mean = self._mean(name, folded.dtype)
        change.view(-1)[positions] = mean
        return change

    def _mean(self, name: str, dtype: torch.dtype) -> Entries:
        """Return positions, and the mean there over all ranks or over the senders."""
        if name in self.rows:
            return self._mean_on_device(name, dtype)
        parts = self.parts.get(name, [])
        if not parts:  # owners sent no entry
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            return none, none.to(dtype)
        if self._factors is not None:
            parts = [(i, v * f) for (i, v), f in zip(parts, self._factors, strict=True)]
        positions, total = sum_sparse(parts, dtype)
        if self.over_senders:
            return positions, total if self.owned else total.div_(senders(parts, dtype))
        return positions, divided_(total, self.context.sources)

    def _mean_on_device(self, name: str, dtype: torch.dtype) -> Entries:
        from thinwire.wire import device_message  # needs Triton

        received, numel = self.rows[name]
        if self._factors is not None:
            received = received._replace(values=received.values * self._factors.unsqueeze(1))
        positions, total = device_message.sum_rows(received, numel, dtype)
        if not self.over_senders:
            return positions, divided_(total, self.context.sources)
        ones = received._replace(values=torch.ones_like(received.values))
        counts = device_message.sum_rows(ones, numel, dtype)[1]
        return positions, total.div_(counts.clamp_(min=1))  # 0 where no entry was sent

    @cached_property
    def _factors(self) -> Tensor | None:
        if self.clip_sources is None:
            return None
        found = []
        for name, room in self.rooms.items():
            if name in self.rows:
                values = self.rows[name][0].values
            else:
                padded = [pad(v, (0, room - v.numel())) for _, v in self.parts[name]]
                values = torch.stack(padded)
            found.append(squared_norms(values))
        return source_factors(sum(found[1:], found[0]), self.clip_sources)


def squared_norms(rows: Tensor) -> Tensor:
    """Return the sum of squares of each row, float64.

    The order of additions depends on the shape alone.
    """
    squares = rows.double().square()
    while squares.shape[1] > 1:  # elementwise sums: a reduction's order depends on the threads
        squares = torch.nn.functional.pad(squares, (0, squares.shape[1] % 2))
        low, high = squares.chunk(2, dim=1)
        squares = low + high
    return squares[:, 0]


def source_factors(squares: Tensor, times: float) -> Tensor:
    """Return the factors that limit each source's norm to `times` the median.

    `squares` are squared norms, shape (sources,), float64; no host synchronization. The median is
    over the sources whose norm is not 0. For an even number of them it is the lower of the two in
    the middle: with the mean of the two, neither of two sources could ever be limited at `times` >=
    2.

    >>> source_factors(torch.tensor([1.0, 1.0, 16.0], dtype=torch.float64), 2.0).tolist()
    [1.0, 1.0, 0.5]
    """
    norms = squares.sqrt()
    ordered = norms.sort().values  # norms of 0 come first
    some = (norms > 0).sum()
    median = norms.numel() - some + torch.div((some - 1).clamp(min=0), 2, rounding_mode="floor")
    limit = times * ordered.gather(0, median.clamp(max=norms.numel() - 1).view(1))
    return torch.where(norms > limit, limit / norms, 1.0).float()
