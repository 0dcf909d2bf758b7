"""Protocol of a compression method: a generator of collectives, and a commit after the vote.

A method does not communicate and changes nothing before the vote. `send` yields the collectives
that it needs and receives their results. The driver launches the collectives of several methods
together, waits for all of them, and resumes the generators. `commit_` follows the vote.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.wire.whole import spans

Entries = tuple[Tensor, Tensor]
"""Indices (j,), int64, ascending, and values (j,)."""
Flags = Mapping[str, bool | Tensor]
"""One flag per name, True for a gradient without a problem. A tensor has shape () and
dtype bool.
"""
Limit = Callable[[int, Mapping[str, Tensor]], dict[str, Tensor]]
"""Applies a local clip to a rank's gradients, given the update, from 0."""


class AllGather(NamedTuple):
    """Request for the messages of all sources, shape (sources, B): row i is from source i."""

    message: Tensor
    """Shape (B,), uint8, of the same length on every source."""
    purpose: str
    within_node: bool = False
    """True: over the ranks of this node instead of over the nodes."""


class AllToAll(NamedTuple):
    """Request for the messages of all sources to this one.

    The answer has shape (sources, lengths[source]).
    """

    messages: Tensor
    """Messages for each source, end to end, uint8."""
    lengths: Sequence[int]
    """Bytes for each source, the same list on all of them."""
    purpose: str


class AllReduce(NamedTuple):
    """Request for the sum over the sources, the same bits on all of them."""

    buffer: Tensor
    """Any floating-point type; may be overwritten."""
    purpose: str
    within_node: bool = False
    """True: over the ranks of this node instead of over the nodes."""


Collective = AllGather | AllToAll | AllReduce


@dataclass(frozen=True, slots=True)
class Context:
    """Step and participants of a message."""

    step: int
    """Completed updates, from 0."""
    bucket: int
    source: int
    """Index of the source that this rank is, or belongs to."""
    sources: int
    """W, at least 1: number of ranks, or of nodes."""
    node_size: int = 1
    """Number of ranks per source."""
    read_sums: bool = False
    """True if the bits of sums are to be compared over the ranks."""


class Arrived:
    """Result of one sending, by name. It may be applied only after all ranks have voted.

    Attributes:
        context: Of the sending.
        names: Tensors that were sent.
        finite: False if the method found that this rank's own gradients are not finite.
        bad_sum: First tensor whose sum over the sources the host found not finite.
        sums: Results of `checked_mean_` for each sum that is bit-identical on all ranks unless a
            message was damaged: int64, shape (2,), where the host has not looked yet.
        checks: Code of the problem with each message, 0 for none, int64 (sources,), where the host
            has not looked yet.
        node_means: The gradients that were folded in, where they are means over a node.
        sender: The compressor that sent it.
    """

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        self.context = context
        self.names = tuple(names)
        self.finite: Flags = {}
        self.bad_sum: str | None = None
        self.sums: Sequence[Tensor] = ()
        self.checks: Tensor | None = None
        self.node_means: Mapping[str, Tensor] = {}
        self.sender: Compressor | None = None

    def refuse(self, checks: Sequence[int]) -> None:
        """Raise `PayloadCorrupt` for the first of `checks`, read by the host, that is not 0."""

    def first_bad_sum(self) -> str | None:
        """Return the first tensor whose sum is not finite, if there may be one."""
        return self.bad_sum

    def entries(self, name: str) -> list[Entries] | None:
        """Return indices and values of each source, or of their sum.

        None if every entry has a value.
        """
        return None

    def mean(self, name: str, param: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the mean over the sources.

        Args:
            name: Of the tensor.
            param: Gives the shape. The type is float32, float64 for float64 parameters, and that of
                `param` itself if it is not floating-point.
            into: Overwritten with the result if it fits: a gradient that is no longer needed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define mean")


def buffer_for(param: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """Return a tensor in the shape of `param` with undefined content: `into`, if it fits."""
    if into is not None and into.is_contiguous() and into.dtype == dtype:
        return into.detach()
    return torch.empty(param.shape, dtype=dtype, device=param.device)


def zeros_for(param: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """Return zeros in the shape of `param`: `into`, if it fits."""
    return buffer_for(param, dtype, into).zero_()


OtherRanks: TypeAlias = Literal["mean_zero", "first"]
"""Rule for state when the number of ranks changes, in the words of `checkpoint.combine`: the mean,
to which ranks without state add zero, or the state of the first rank.
"""
Sending = Generator[Sequence[Collective], Sequence[Tensor], Arrived]
"""Yields collectives that are launched together, and receives their results in the same order.

All sources yield the same kinds, in the same order, with equally long messages. A method that
cannot use what arrived continues to its end with a message that reports it. It raises
`PayloadCorrupt` after its last result, so that no source waits for another one.
"""
Bucket = Generator[Sequence[Collective], Sequence[Tensor], list[Arrived]]


class Computed(Mapping[str, Tensor]):
    """Tensors that are computed when they are read: kept, they would be as large as the model."""

    def part(self, name: str, start: int, end: int) -> Tensor:
        """Return the entries [start, end) of one tensor, a new tensor of one dimension."""
        raise NotImplementedError(f"{type(self).__name__} must define part")


def part_of(tensors: Mapping[str, Tensor], name: str, start: int, end: int) -> Tensor:
    """Return the entries [start, end) of one tensor; read only."""
    if isinstance(tensors, Computed):
        return tensors.part(name, start, end)
    return tensors[name].view(-1)[start:end]


Kept: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""State of a change compression, by kind and name of the parameter."""
ERRORS = "errors"
"""The kind that always exists: the unsent part of a change, of this rank alone."""


class Config(Protocol):
    """Numbers of a method, such as `LowRank`: a frozen dataclass.

    Their consequences are in `compress.figures`, their descriptions in `strategy.explain.texts`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def compresses(self, param: Tensor) -> bool:
        """Return True if this tensor, or its change, is ever compressed."""


class Compression(Config, Protocol):
    """Config of a gradient compression, registered in `compress.COMPRESSIONS`."""

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> "Compressor":
        """Build the compressor for an optimizer that has its own momentum and clipping.

        Args:
            params: The trainable parameters by name, in the same order on all ranks.
            num_trainers: Number that scales a local clip; None: the sources.
        """


class Compressor(Protocol):
    """Chooses what a rank sends of its gradients, and keeps the rest as residual."""

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        """Return True if it sends this gradient.

        The gradient is dense on all ranks, and the answer is equal on all ranks.
        """

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        """Send the gradients of one bucket that it takes. Gradients and state are read only."""

    def commit_(self, grads: Mapping[str, Tensor], arrived: Arrived) -> None:
        """Change the state after a vote that found no problem.

        Args:
            grads: The gradients that were sent, unchanged since.
            arrived: Result of `send`.
        """

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of this rank, or its node: live tensors, by kind and parameter.

        `compress.OTHER_RANKS` has each kind.
        """


class ChangeCompression(Config, Protocol):
    """Config of a compression of local updates, registered in `compress.CHANGE_COMPRESSIONS`.

    Each parameter has an error e. The sum e <- decay * e + change is to be sent; its unsent part
    becomes e. Steps are local steps, from 1.
    """

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """Return the initial state of a parameter by kind. An error is zeros like the anchor."""

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """Yield the collectives of one averaging, and return a `MeanChange`.

        Args:
            context: Its step is a local step, from 1, for the headers of messages.
            folded: By name the sum that this rank has to send, contiguous, float32 or float64,
                finite; read only, and perhaps `Computed` anew at every read. All names are
                compressed at this step, at least one, in the same order on all ranks.
            kept: The state; read only.
        """


class MeanChange(Arrived):
    """Changes that arrived without a problem, before they are applied.

    A subclass defines one of two methods.
    """

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        """Return the mean change of one parameter, and store the unsent part as error in `kept`.

        Args:
            name: Of the parameter.
            folded: The sum that this rank had to send; read only.
            kept: The state of this parameter. An error has shape and dtype of `folded`, contiguous;
                it becomes `folded` minus the part that this rank sent.

        Returns:
            A new tensor like `folded`; the same bits on all ranks.
        """
        error, parts = kept[ERRORS][name].view(-1), []
        for start, end in spans(folded.numel(), folded.device):
            flat = folded.view(-1)[start:end]
            parts.append(self.take_part_(name, start, flat, error[start:end]))
        return torch.cat(parts).view_as(folded)

    def take_part_(self, name: str, start: int, folded: Tensor, error: Tensor) -> Tensor:
        """Do the same for the entries of a part, of one dimension, that begins at `start`."""
        raise NotImplementedError(f"{type(self).__name__} must define take_mean_ or take_part_")

    @property
    def has_parts(self) -> bool:
        """True if each part of a change can be taken alone, by `wire.whole.spans`."""
        return type(self).take_part_ is not MeanChange.take_part_


class ErrorsOnly:
    """Base of change compressions whose only state is the errors."""

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """See `ChangeCompression`."""
        return {ERRORS: torch.zeros_like(anchor)}


def combined(sendings: Sequence[Sending]) -> Bucket:
    """Combine several sendings into one, whose collectives are launched together.

    Raises:
        PayloadCorrupt: The first that any of them raises, after all of them have ended.
    """
    arrived: list[Arrived | None] = [None] * len(sendings)
    waiting: dict[int, Sequence[Collective]] = {}
    refusal: PayloadCorrupt | None = None
    answers: dict[int, Sequence[Tensor] | None] = dict.fromkeys(range(len(sendings)))
    while answers:
        waiting = {}
        for index, answer in answers.items():
            try:
                sending = sendings[index]
                waiting[index] = next(sending) if answer is None else sending.send(answer)
            except StopIteration as end:
                arrived[index] = end.value
            except PayloadCorrupt as found:
                refusal = refusal or found
        if not waiting:
            break
        results = yield [
            collective for collectives in waiting.values() for collective in collectives
        ]
        answers, at = {}, 0
        for index, collectives in waiting.items():
            answers[index] = results[at : at + len(collectives)]
            at += len(collectives)
    if refusal is not None:
        raise refusal
    return [result for result in arrived if result is not None]
