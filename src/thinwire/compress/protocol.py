"""What a method of compression is: a generator of collectives, and what it does once all ranks have
voted.

A method speaks to nobody and changes nothing before the vote. `send` yields the collectives that
it needs and is given their results; the driver launches what several methods yielded
together, waits for all of it, and goes on. `commit_` follows the vote.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.kernels.needs import Need

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Arrived",
    "Bucket",
    "Collective",
    "Compression",
    "Compressor",
    "Context",
    "Entries",
    "Flags",
    "Limit",
    "OtherRanks",
    "Sending",
    "place_for",
    "together",
    "zeros_for",
]

BUCKET_BYTES = 25 * 2**20
"""Gradient bytes of a bucket whose message is compressed: the fewer messages, the less each costs
in latency."""
FIRST_BUCKET_BYTES = 2**20
"""Of the bucket that is ready first: small, so that the link does not idle while the backward pass
begins."""
Entries = tuple[Tensor, Tensor]
"""Indices (j,), int64, ascending, and values (j,)."""
Flags = Mapping[str, bool | Tensor]
"""By name whether a gradient is as it should be; a tensor has shape () and dtype bool."""
Limit = Callable[[int, Mapping[str, Tensor]], dict[str, Tensor]]
"""What becomes of a rank's gradients by a local clip, in an update from 0."""


class AllGather(NamedTuple):
    """Answered by what all sources gave, shape (sources, B): row i is from source i."""

    message: Tensor
    """Shape (B,), uint8, as long on every source."""
    purpose: str
    within_node: bool = False
    """Over the ranks of this node instead of over the nodes."""


class AllToAll(NamedTuple):
    """Answered by what all sources gave to this one, shape (sources, lengths[source])."""

    messages: Tensor
    """What each source gets, end to end, uint8."""
    lengths: Sequence[int]
    """Bytes for each source, the same list on all of them."""
    purpose: str


class AllReduce(NamedTuple):
    """Answered by the sum over the sources, the same bits on all of them."""

    buffer: Tensor
    """Of any floating-point type; may be overwritten."""
    purpose: str
    within_node: bool = False
    """Over the ranks of this node instead of over the nodes."""


Collective = AllGather | AllToAll | AllReduce


@dataclass(frozen=True, slots=True)
class Context:
    """To what a message belongs, and who exchanges."""

    step: int
    """Completed updates, from 0."""
    bucket: int
    source: int
    """Which of the sources this rank is, or belongs to."""
    sources: int
    """W, at least 1: ranks, or nodes of ranks."""
    node_size: int = 1
    """Ranks to a source."""
    read_sums: bool = False
    """Whether the bits of sums are to be compared over the ranks."""


class Arrived:
    """What one sending brought, by name. Nothing of it may be applied before all ranks have voted.

    Attributes:
        context: Of the sending.
        names: What travelled.
        finite: Whether this rank's own gradients are finite, as far as the method knows.
        sums_finite: Whether the sums over the sources are, as far as the host knows.
        sums: What `checked_mean_` found in each of the sums that are the same bits on all ranks
            unless a message was damaged: int64, shape (2,), or (1,) without bits to compare, where
            the host has not looked yet.
        checks: What is wrong with each message, 0 for nothing, int64 (sources,), where the host
            has not looked yet.
        node_means: The gradients that were folded in, where they are means over a node.
        sender: Whose it is.
    """

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        self.context = context
        self.names = tuple(names)
        self.finite: Flags = {}
        self.sums_finite = True
        self.sums: Sequence[Tensor] = ()
        self.checks: Tensor | None = None
        self.node_means: Mapping[str, Tensor] = {}
        self.sender: Compressor | None = None

    def refuse(self, checks: Sequence[int]) -> None:
        """Raise `PayloadCorrupt` for the first of `checks`, as the host has read them, that is not
        0.
        """

    def first_bad_sum(self) -> str | None:
        """The first tensor whose sum is not finite, where one may be."""
        return None

    def entries(self, name: str, dtype: torch.dtype) -> list[Entries] | None:
        """Indices and values of each source, or of their sum, in `dtype`; None where all have one.

        On CUDA an index may be there several times, each time with the same value: assign, do not
        accumulate.
        """
        return None

    def mean(self, name: str, param: Tensor, into: Tensor | None = None) -> Tensor:
        """The mean over the sources.

        Args:
            name: Of the tensor.
            param: In whose shape it is given, and in float32, float64 for float64; what is not
                floating-point in its own type.
            into: Overwritten with it where it fits: a gradient that nobody needs any more.
        """
        raise NotImplementedError(f"{type(self).__name__} must define mean")


def place_for(param: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """A tensor in the shape of `param`, of any content: `into`, where that is contiguous and of
    this type.
    """
    if into is not None and into.is_contiguous() and into.dtype == dtype:
        return into.detach()
    return torch.empty(param.shape, dtype=dtype, device=param.device)


def zeros_for(param: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """As `place_for`, with zeros."""
    return place_for(param, dtype, into).zero_()


OtherRanks = Literal["first", "mean_zero"]
"""The state of the first rank, or the mean, to which ranks that lack it add zero."""
Sending = Generator[Sequence[Collective], Sequence[Tensor], Arrived]
"""Yields collectives that are launched together, and is sent their results in the same order.

All sources yield the same kinds, in the same order, with equally long messages. A method that
cannot use what came goes on to its end, with a message that says so, and raises `PayloadCorrupt`
after its last result: no source waits for another one.
"""
Bucket = Generator[Sequence[Collective], Sequence[Tensor], list[Arrived]]


class Compressor(Protocol):
    """What of a rank's gradients travels, and what stays.

    Attributes:
        bucket_bytes: How much gradient should travel together, at least, where it leaves early.
        first_bytes: The same for the bucket that is ready first: small, so that the link does not
            idle while the backward pass begins, unless messages are so short that each costs more
            than it hides.
        other_ranks: What its state becomes on another number of ranks, by kind, in the words of
            `thinwire.checkpoint.combine`.
    """

    bucket_bytes: int
    first_bytes: int
    other_ranks: Mapping[str, OtherRanks]

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        """Whether it sends this gradient, which is dense on all ranks; the same on all of them."""

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        """Send what it takes of one bucket. Reads gradients and state, and changes neither."""

    def commit_(self, grads: Mapping[str, Tensor], arrived: Arrived) -> None:
        """Change the state after a vote that found nothing wrong.

        Args:
            grads: Those that were sent, unchanged since.
            arrived: What `send` returned.
        """

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What only this rank, or its node, holds: the live tensors, by kind and parameter."""

    def forget(self) -> None:
        """A step is over, applied or not."""


class Compression(Protocol):
    """A config of compression, such as `LowRank`: a dataclass.

    Attributes:
        field: Of a strategy, which says it.
        may_change: Settings that another run may go on with, from a checkpoint of this one.
        in_groups: Settings that an optimizer which exchanges by it keeps in its groups.
        why_no_shards: Why tensors must be whole, in words; empty where a shard is as good.
        node_size: Consecutive ranks that count as one source; None for as many as a machine has.
        bucket_bytes: See `Compressor`, and so is the next one.
        first_bytes: See there.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    field: ClassVar[str]
    may_change: ClassVar[tuple[str, ...]]
    in_groups: ClassVar[tuple[str, ...]]
    why_no_shards: ClassVar[str]
    bucket_bytes: ClassVar[int]
    first_bytes: ClassVar[int]

    @property
    def node_size(self) -> int | None:
        """See above."""

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> Compressor:
        """What does it, for an optimizer that has its momentum and clipping to itself.

        Args:
            params: The trainable parameters by name, in the same order on all ranks.
            num_trainers: By what a local clip is scaled; None: the sources.
        """

    def needs(self, params: Iterable[Tensor]) -> frozenset[Need]:
        """The compiled loops that it calls."""

    def explanation(self) -> str:
        """What becomes of a gradient, in words."""

    def why_dense(self, param: Tensor) -> str | None:
        """Why this tensor is never compressed, in words; None where it is."""

    def message_text(self, params: Iterable[Tensor]) -> str:
        """What one source sends of these tensors, in words."""

    def sparsity_in_force(self, step: int) -> float:
        """Fraction of a compressed tensor that update `step` (from 0) does not send."""

    @property
    def settled_step(self) -> int:
        """The update, from 1, from which on messages have their last length."""

    def limit(self, who: str) -> str:
        """The local clip of one of `who`, in words; empty without."""

    def limiting(
        self,
        params: Mapping[str, Tensor],
        *,
        sources: int,
        gather: Callable[[bytes, str], list[bytes]] | None = None,
    ) -> Limit | None:
        """The local clip for whom it comes before the compressor; None without.

        Args:
            params: This rank's trainable parameters, or its shards of them, by name.
            sources: Those whose shares are summed.
            gather: Over the shards of a tensor; see `core.norms.norms_over_shards`. None where
                tensors are whole.
        """

    def without_limit(self) -> Self:
        """The same without a local clip."""

    def advice(self, *, local: bool, replaced: bool, peers: str, here: str) -> Iterator[str]:
        """What one may want to know beforehand.

        Args:
            local: Whether it compresses changes of local updates.
            replaced: Whether a method of the strategy takes the place of the given optimizer.
            peers: Who exchanges, in words.
            here: Which sources there are in this job, in words; may be empty.
        """


def together(sendings: Sequence[Sending]) -> Bucket:
    """Several sendings as one, whose collectives are launched together.

    Raises:
        PayloadCorrupt: The first that any of them raises, after all of them have ended.
    """
    arrived: list[Arrived | None] = [None] * len(sendings)
    waiting: dict[int, Sequence[Collective]] = {}
    refusal: PayloadCorrupt | None = None
    answers: dict[int, Sequence[Tensor] | None] = dict.fromkeys(range(len(sendings)))
    while answers:
        waiting = {}
        for place, answer in answers.items():
            try:
                sending = sendings[place]
                waiting[place] = next(sending) if answer is None else sending.send(answer)
            except StopIteration as end:
                arrived[place] = end.value
            except PayloadCorrupt as found:
                refusal = refusal or found
        if not waiting:
            break
        results = yield [collective for each in waiting.values() for collective in each]
        answers, at = {}, 0
        for place, collectives in waiting.items():
            answers[place] = results[at : at + len(collectives)]
            at += len(collectives)
    if refusal is not None:
        raise refusal
    return [each for each in arrived if each is not None]
