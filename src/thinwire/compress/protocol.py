"""Protocol of a compression method: a generator of collectives, and a commit after the vote.

A method does not communicate and changes nothing before the vote. `send` yields the collectives
that it needs and receives their results. The driver launches the collectives of several methods
together, waits for all of them, and resumes the generators. `commit_` follows the vote.
"""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from thinwire._wording import warn_user
from thinwire.errors import PayloadCorrupt
from thinwire.layout.message import Layout, WholeLayout
from thinwire.layout.traffic import BUCKETS, GATHER, messages
from thinwire.wire.whole import spans

Entries = tuple[Tensor, Tensor]
"""Indices (j,), int64, ascending, and values (j,)."""
Shapes = Sequence[torch.Size]
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
    """Request for the messages of all sources to this one, shape (sources, lengths[source])."""

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
    """

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        self.context = context
        self.names = tuple(names)
        self.finite: Flags = {}
        self.bad_sum: str | None = None
        self.sums: Sequence[Tensor] = ()
        self.checks: Tensor | None = None
        self.node_means: Mapping[str, Tensor] = {}

    def refuse(self, checks: Sequence[int]) -> None:
        """Raise `PayloadCorrupt` for the first of `checks`, read by the host, that is not 0."""

    def first_bad_sum(self) -> str | None:
        """Return the first tensor whose sum is not finite, if there may be one."""
        return self.bad_sum

    def mean(self, name: str, param: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the mean over the sources, in the shape of `param` and in its `state_dtype`.

        `into`: overwritten with the result if it fits, as a gradient that is no longer needed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define mean")


def buffer_for(param: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """Return a tensor in the shape of `param` with undefined content: `into`, if it fits."""
    if into is not None and into.is_contiguous() and into.dtype == dtype:
        return into.detach()
    return torch.empty(param.shape, dtype=dtype, device=param.device)


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


class Config(ABC):
    """Numbers of a method, such as `LowRank`, in a frozen dataclass; and what follows from them.

    Steps of gradients are completed updates, from 0, those of changes local steps, from 1.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @abstractmethod
    def compresses(self, param: Tensor) -> bool:
        """Return True if this tensor, or its change, is ever compressed."""

    @property
    def exchange(self) -> str:
        """Return the route of messages: "gather", "split" or "auto"."""
        return GATHER

    @property
    def min_numel(self) -> int:
        """Return the number of entries below which a tensor is never compressed."""
        return 1

    def why_dense(self, param: Tensor) -> str | None:
        """Return the reason for which this tensor is never compressed, or None if it is."""
        if self.compresses(param):
            return None
        small = param.numel() < self.min_numel
        return f"below min_numel={self.min_numel}" if small else f"because of {param.dtype}"

    def unsent_share(self, step: int) -> float:
        """Return the fraction of a compressed tensor that the exchange of a step leaves out."""
        return 0.0

    def loops(self, params: Sequence[Tensor]) -> Callable[[], None] | None:
        """Return what compiles its loops for these tensors; None if it has none."""
        return None

    @property
    def settled_step(self) -> int:
        """Return the first update, from 1, whose gradient messages have their final length."""
        return 1

    def layout(self, step: int, numels: Sequence[int]) -> Layout | WholeLayout:
        """Return the layout of the message of tensors of these sizes at a step."""
        raise NotImplementedError(f"{type(self).__name__} must define layout or sent_bytes")

    def sent_bytes(self, step: int, shapes: Shapes, sources: int = 2, source: int = 0) -> int:
        """Return the bytes that `source` sends of these tensors at a step: headers, each copy."""
        layout = self.layout(step, [shape.numel() for shape in shapes])
        return messages(layout, self.exchange, sources).sent(source, sources)


class Compression(Config):
    """Config of a gradient compression, registered in `compress.COMPRESSIONS`."""

    buckets: ClassVar[tuple[int, int]] = BUCKETS
    """Gradient bytes of the first bucket of an update and of the others."""
    accumulates: ClassVar[bool] = False
    """True if it accumulates gradients, so that momentum and decay of an SGD act before it."""

    @property
    def node_size(self) -> int | None:
        """Return the ranks of a node, which count as one source; None to look for nodes."""
        return None

    @property
    def local_grad_clip_norm(self) -> float | None:
        """Return the limit on a source's share of a compressed tensor, if any."""
        return None

    @abstractmethod
    def compressor(
        self, params: Mapping[str, Tensor], momentum: "Momentum | None" = None
    ) -> "Compressor":
        """Build the compressor; `momentum` is that of an SGD, if it `accumulates`."""


class Momentum(Protocol):
    """The part of an SGD that acts on a rank's own gradients, by name of the parameter."""

    @property
    def limit(self) -> float | None:
        """Limit on the norm of each tensor, if any."""

    def factors(self, name: str) -> tuple[float, bool]:
        """Return the momentum, and True for Nesterov's."""

    @property
    def num_trainers(self) -> int | None:
        """Number that scales a local clip; None: the sources."""

    @property
    def position(self) -> int:
        """Updates that were made with this momentum."""

    def decayed(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient to accumulate, with sign and decay."""

    def rate(self, name: str) -> float:
        """Return the learning rate of this update."""

    def kept(self, name: str) -> dict[str, Tensor]:
        """Return the state of this tensor by kind, live; empty if it has none."""

    def keep_(self, name: str, entries: dict[str, Tensor]) -> None:
        """Replace the state of this tensor."""


class Compressor(Protocol):
    """Chooses what a rank sends of its gradients, and keeps the rest as residual."""

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        """Return True, on all ranks alike, if it sends this gradient, which is dense on all."""

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        """Send the gradients of one bucket that it takes. Gradients and state are read only."""

    def commit_(
        self,
        grads: Mapping[str, Tensor],
        arrived: Mapping[str, Arrived],
        row_sparse: Collection[str],
    ) -> Collection[str]:
        """Change the state after a vote; return the parameters that it updated, with momentum.

        `arrived` has all tensors of the update, and `grads` are unchanged since they were sent;
        `row_sparse` ones travelled densely.
        """

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of this rank, or its node: live tensors, by kind and parameter."""


class ChangeCompression(Config):
    """Config of a compression of local updates, registered in `compress.CHANGE_COMPRESSIONS`.

    Each parameter has an error e. The sum e <- decay * e + change is to be sent; its unsent part
    becomes e.
    """

    def compresses(self, param: Tensor) -> bool:
        """Return True for parameters of any size."""
        return True

    @property
    def last_dense_step(self) -> int:
        """Return the last local step whose averaging is dense; timed rounds count from 0."""
        return -1

    @property
    def decay(self) -> float:
        """Return the factor of a kept error at the next averaging, in [0, 1]."""
        return 1.0

    @property
    def conserves(self) -> bool:
        """Return True if every change is applied in time: none lost, none counted twice."""
        return self.decay == 1

    @property
    def steady_share(self) -> float | None:
        """Return the least share of a change that repeats at every averaging that is applied.

        The outer rate is 1, without momentum. None if the share depends on the values sent.
        """
        return 1.0 if self.conserves else None

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """Return the initial state of a parameter by kind. An error is zeros like the anchor."""
        return {ERRORS: torch.zeros_like(anchor)}

    @abstractmethod
    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """Yield the collectives of one averaging, and return a `MeanChange`.

        `folded` has the sums that this rank has to send, contiguous and finite, in the same order
        on all ranks; read only, as `kept`, and perhaps `Computed` anew at every read. Errors may be
        on another device; there messages and what arrived are kept too.
        """


class MeanChange(Arrived):
    """Changes that arrived without a problem, before they are applied.

    A subclass defines one of two methods.
    """

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        """Return the mean change of one parameter, a new tensor with the same bits on all ranks.

        The error in `kept` becomes `folded` minus the part that this rank sent.
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
