"""What a method of compression is: a generator of collectives, and what it does once all ranks have
voted.

A method speaks to nobody and changes nothing before the vote. `send` yields the collectives that
it needs and is given their results; the driver launches what several methods yielded
together, waits for all of it, and goes on. `commit_` follows the vote.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire.errors import PayloadCorrupt

__all__ = [
    "ERRORS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Arrived",
    "Bucket",
    "ChangeCompression",
    "Collective",
    "Compression",
    "Compressor",
    "Config",
    "Context",
    "Entries",
    "ErrorsOnly",
    "Flags",
    "Kept",
    "Limit",
    "MeanChange",
    "OtherRanks",
    "Sending",
    "place_for",
    "together",
    "zeros_for",
]

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
        """Raise `PayloadCorrupt` for the first of `checks`, read by the host, that is not 0."""

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
    """A tensor in the shape of `param`, of any content: `into`, where that fits."""
    if into is not None and into.is_contiguous() and into.dtype == dtype:
        return into.detach()
    return torch.empty(param.shape, dtype=dtype, device=param.device)


def zeros_for(param: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """As `place_for`, with zeros."""
    return place_for(param, dtype, into).zero_()


OtherRanks: TypeAlias = Literal["mean_zero", "first"]
"""What state becomes on another number of ranks, in the words of `checkpoint.combine`: the mean, to
which ranks that lack it add zero, or the state of the first rank."""
Sending = Generator[Sequence[Collective], Sequence[Tensor], Arrived]
"""Yields collectives that are launched together, and is sent their results in the same order.

All sources yield the same kinds, in the same order, with equally long messages. A method that
cannot use what came goes on to its end, with a message that says so, and raises `PayloadCorrupt`
after its last result: no source waits for another one.
"""
Bucket = Generator[Sequence[Collective], Sequence[Tensor], list[Arrived]]


Kept: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""What a compression of changes keeps, by kind and name of the parameter."""
ERRORS = "errors"
"""The kind that there is always: what of a change was not sent, of this rank alone."""


class Config(Protocol):
    """Numbers of a method, such as `LowRank`: a frozen dataclass.

    What follows from the numbers is in `compress.figures`, what is said of them in
    `strategy.explain.texts`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def compresses(self, param: Tensor) -> bool:
        """Whether this tensor, or its change, is ever compressed."""


class Compression(Config, Protocol):
    """A config of a compression of gradients, entered in `compress.COMPRESSIONS`."""

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> "Compressor":
        """Make what does it, for an optimizer that has its momentum and clipping to itself.

        Args:
            params: The trainable parameters by name, in the same order on all ranks.
            num_trainers: By what a local clip is scaled; None: the sources.
        """


class Compressor(Protocol):
    """Chooses what a rank sends of its gradients, and keeps the rest."""

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
        """What only this rank, or its node, holds: the live tensors, by kind and parameter.

        `compress.OTHER_RANKS` has each kind.
        """


class ChangeCompression(Config, Protocol):
    """A config of a compression of changes of local updates, entered in
    `compress.CHANGE_COMPRESSIONS`.

    What is folded is e <- decay * e + change, with an error e per parameter; what of it is not sent
    becomes e. Steps are local steps, from 1.
    """

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """The state of a parameter at the start, by kind; an error is zeros like the anchor."""

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """The collectives of one averaging, which return a `MeanChange`.

        Args:
            context: Its step is a local step, from 1, for the headers of messages.
            folded: By name what this rank has to send, contiguous, float32 or float64, finite; read
                only. All names are compressed at this step, at least one, in the same order on all
                ranks.
            kept: The state; read only.
        """


class MeanChange(Arrived):
    """What has arrived of the changes and is in order, before anything is applied."""

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        """The mean change of one parameter; changes `kept`: what this rank did not send is its
        error.

        Args:
            name: Of the parameter.
            folded: What this rank had to send; read only.
            kept: The state; an error has shape and dtype of `folded`, contiguous, and becomes
                `folded` less what this rank sent. Of this parameter only.

        Returns:
            A new tensor like `folded`; the same bits on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define take_mean_")


class ErrorsOnly:
    """For those whose state is the errors alone."""

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """See `ChangeCompression`."""
        return {ERRORS: torch.zeros_like(anchor)}


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
