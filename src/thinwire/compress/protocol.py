"""Protocol of a compression: what it keeps, a generator of collectives, and what follows the vote.

A method does not communicate and changes nothing before the vote. `begin` makes its state. `send`
yields the collectives that it needs and receives their results. The driver launches the collectives
of several buckets together, waits for all of them, and resumes the generators. `take_` of what
arrived follows the vote.
"""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._devices import moved
from thinwire._wording import warn_user
from thinwire.core.checksum import opened_rows, with_checksum
from thinwire.core.feedback import Proposal, top_k
from thinwire.core.tensors import state_dtype
from thinwire.errors import PayloadCorrupt
from thinwire.layout.message import Layout, WholeLayout
from thinwire.layout.traffic import BUCKETS, EXCHANGES, GATHER, Messages, messages
from thinwire.wire.bucket import Part, side_by_side, spans

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
    update: int = 0
    """Number of this exchange, from 0, which ramps count."""


class Arrived:
    """Result of one sending, by name. It may be applied only after all ranks have voted.

    Attributes:
        context: Of the sending.
        names: Tensors that were sent.
        finite: False if the method found that this rank's own gradients are not finite.
        bad_sum: First tensor whose sum over the sources the host found not finite.
        sums: Results of `checked_mean_` for each sum that is bit-identical on all ranks unless a
            message was damaged: int64, shape (2,), where the host has not looked yet.
        unread: Numbers that the host has not read yet, int64 (n,); `read` takes them.
        node_means: The gradients that were folded in, where they are means over a node.
    """

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        self.context = context
        self.names = tuple(names)
        self.finite: Flags = {}
        self.bad_sum: str | None = None
        self.sums: Sequence[Tensor] = ()
        self.unread: Tensor | None = None
        self.node_means: Mapping[str, Tensor] = {}

    def read(self, numbers: Sequence[int]) -> None:
        """Take the values of `unread`; raise `PayloadCorrupt` if they say so."""

    def first_bad_sum(self) -> str | None:
        """Return the first tensor whose sum is not finite, if there may be one."""
        return self.bad_sum

    def take_(
        self, name: str, folded: "Computed", kept: "Kept", into: Tensor | None = None
    ) -> Tensor:
        """Return the mean of one tensor over the sources, with the same bits on all ranks.

        The residual in `kept` becomes `folded` minus the part that this rank sent. `into`:
        overwritten with the result if it fits. A method defines this or `take_part_`.
        """
        residual = kept[RESIDUAL][name].view(-1)
        whole = folded[name].view(-1).to(residual.device)
        parts = []
        for start, end in spans(whole.numel(), whole.device):
            span = slice(start, end)
            parts.append(self.take_part_([(name, start, end)], whole[span], residual[span]))
        return torch.cat(parts).view_as(kept[RESIDUAL][name])

    def take_part_(self, part: Part, folded: Tensor, residual: Tensor) -> Tensor:
        """Do the same for a part of one tensor, or several whole ones `side_by_side`."""
        raise NotImplementedError(f"{type(self).__name__} must define take_ or take_part_")

    @property
    def has_parts(self) -> bool:
        """True if each part can be taken alone, by `wire.bucket.runs`."""
        return type(self).take_part_ is not Arrived.take_part_


def buffer_for(residual: Tensor, into: Tensor | None) -> Tensor:
    """Return a tensor for the mean, with undefined content: `into`, if it fits."""
    dtype = state_dtype(residual)
    if into is not None and into.is_contiguous() and into.dtype == dtype:
        return into.detach()
    return torch.empty(residual.shape, dtype=dtype, device=residual.device)


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
    """Tensors to send, computed when they are read: kept, they would be as large as the model.

    Each is what is new plus what was not sent before. All are contiguous, and read only. A method
    reads them by name, or as a bucket: several in one buffer, large ones in parts.
    """

    words: ClassVar[tuple[str, str]] = "messages", "sums"
    """Names of what a source sends, and of the sums, in errors."""

    def runs(self) -> list[list[Part]]:
        """Return the parts in which these tensors are best read; see `wire.bucket.runs`."""
        return [[[(name, 0, tensor.numel())]] for name, tensor in self.items()]

    def part(self, name: str, start: int, end: int) -> Tensor:
        """Return the entries [start, end) of one tensor, a new tensor of one dimension."""
        return self.read([(name, start, end)])

    def read(self, part: Part) -> Tensor:
        """Return a part: a new tensor of one dimension, several tensors `side_by_side`."""
        return side_by_side([self[name].view(-1)[start:end] for name, start, end in part])

    def terms(self, name: str) -> Sequence[Tensor]:
        """Return tensors whose sum is one tensor, which need no memory of their own."""
        return [self[name]]

    def largest(self, counts: Mapping[str, int], kept: "Kept") -> dict[str, Proposal]:
        """Return so many entries of largest magnitude of each tensor, where residuals are."""
        found = {}
        for name, k in counts.items():
            flat = self[name].view(-1)
            indices = top_k(flat, k)
            known = torch.ones(1, dtype=torch.bool, device=flat.device)
            entries = [indices, flat[indices], known]
            found[name] = Proposal(*moved(entries, kept[RESIDUAL][name].device))
        return found

    def leave_(self, name: str, sent: Entries, kept: "Kept") -> None:
        """Make the residual of one tensor what is left without the entries `sent`."""
        residual = kept[RESIDUAL][name].copy_(self[name]).view(-1)
        residual[sent[0]] -= sent[1].to(residual.dtype)

    def key(self, name: str) -> int:
        """Return the key of a tensor for `core.feedback.rounding_seed`."""
        return 0


Kept: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""State of a compression, by kind and name of the parameter: a plain dictionary whose owner, an
exchange, saves it and adapts it to another number of ranks."""
RESIDUAL = "residual"
"""The kind that always exists: the unsent part of a tensor, of this rank or node alone."""


class Compression(ABC):
    """Numbers of a method, such as `LowRank`, in a frozen dataclass; and what follows from them.

    A method compresses gradients, or changes of local updates. Each tensor has a residual e. The
    sum e <- decay * e + (gradient or change) is to be sent; its unsent part becomes e. Steps count
    from 1, but for `unsent_share`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kinds: ClassVar[Mapping[str, OtherRanks]] = {RESIDUAL: "mean_zero"}
    """Kinds of state, each with the rule for another number of ranks."""
    free: ClassVar[Sequence[str]] = ("*",)
    """Settings on which no state depends: a run that loads may have others."""
    buckets: ClassVar[tuple[int, int]] = BUCKETS
    """Gradient bytes of the first bucket of an update and of the others."""
    accumulates: ClassVar[bool] = False
    """True if momentum and decay of an SGD act on gradients before they are compressed."""
    elementwise: ClassVar[bool] = True
    """True if each entry is computed by itself, without products of matrices."""
    exchange: str = GATHER
    """Route of messages: "gather", "split" or "auto"."""
    min_numel: int = 1
    """Number of entries below which a tensor is never compressed."""
    node_size: int | None = None
    """Ranks of a node, which count as one source; None to look for nodes."""
    local_grad_clip_norm: float | None = None
    """Limit on a source's share of a compressed tensor, if any."""
    decay: float = 1.0
    """Factor of a residual in the next exchange, in [0, 1]."""
    meanings: ClassVar[Mapping[str, str]] = {
        "amp": "gradients are checked and unscaled before they are compressed, so what is kept "
        "holds unscaled values; a dropped step does not change it, nor a ramp",
        "recompute": "there is one gradient per parameter and step, after the repeated forward "
        "pass",
        "pipeline": "the replicas of one stage exchange among themselves, in separate messages; "
        "means are over replicas, not over all ranks",
        "gradient_merge": "the merged gradient is compressed: only updates exchange, and a ramp "
        "or begin_step counts updates",
        "lars": "the compression has no momentum, and LARS uses its mean as the gradient, also "
        "for trust ratios; momentum and weight decay are those of LARS",
        "lamb": "the compression has no momentum, and LAMB uses its mean as the gradient; moments "
        "and weight decay are those of LAMB",
    }
    """Meanings beside other fields of a strategy that compresses gradients so."""
    has_checksums: ClassVar[bool] = False
    """True if its messages have checksums; else the exchange adds 8 bytes to each gathered one."""
    passes: ClassVar[int] = 12
    """Passes over the memory of a tensor that compression takes, about, for a plan."""
    reports_finite: ClassVar[bool] = False
    """True if what arrives says whether all numbers were finite; else the exchange looks first."""

    def compresses(self, param: Tensor) -> bool:
        """Return True if this tensor, or its change, is ever compressed; others travel densely."""
        return param.numel() >= self.min_numel

    def why_dense(self, param: Tensor) -> str | None:
        """Return the reason for which this gradient is never compressed, or None if it is."""
        if self.compresses(param) and not param.is_complex():
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
        return max(1, 1 + self.last_dense_step)

    def layout(self, step: int, numels: Sequence[int]) -> Layout | WholeLayout:
        """Return the layout of the message of tensors of these sizes at a step."""
        raise NotImplementedError(f"{type(self).__name__} must define layout or messages")

    def messages(self, step: int, shapes: Shapes, sources: int) -> Messages:
        """Return the lengths of what each of `sources` sends of these tensors at a step."""
        layout = self.layout(step, [shape.numel() for shape in shapes])
        return messages(layout, self.exchange, sources)

    def sent_bytes(self, step: int, shapes: Shapes, sources: int = 2, source: int = 0) -> int:
        """Return the bytes that `source` sends of these tensors at a step: headers, each copy."""
        return self.messages(step, shapes, sources).sent(source, sources)

    @property
    def last_dense_step(self) -> int:
        """Return the last step that is dense; timed rounds of local updates count from 0."""
        return -1

    @property
    def conserves(self) -> bool:
        """Return True if every change is applied in time: none lost, none counted twice."""
        return self.decay == 1

    @property
    def steady_share(self) -> float | None:
        """Return the least share of a change that repeats in every exchange that is applied.

        The outer rate is 1, without momentum. None if the share depends on the values sent.
        """
        return 1.0 if self.conserves else None

    def message_text(self, step: int, shapes: Shapes) -> str:
        """Describe the message of tensors of these shapes at a step."""
        return f"a message has {self.sent_bytes(step, shapes):,} bytes"

    def remark(self, optimizers: Collection[str]) -> str | None:
        """Return what speaks against this method with optimizers of these classes, if anything."""
        return None

    def stored_dtype(self, param: Tensor) -> torch.dtype:
        """Return the type in which the residual of a gradient is stored."""
        return state_dtype(param)

    def begin(self, residual: Tensor) -> dict[str, Tensor]:
        """Return the initial state of a tensor beside its residual, by kind."""
        return {}

    @abstractmethod
    def send(self, context: Context, folded: Computed, kept: Kept) -> Sending:
        """Yield the collectives of one bucket, and return what arrived.

        `folded` has the sums that this rank has to send, in the same order on all ranks; `kept` is
        read only. Residuals may be on another device; there messages and what arrived are kept too.
        """


def check_messages(config: Any, value_bits: Sequence[int]) -> None:
    """Raise an error for bits of a value that are not allowed, and for an unknown exchange."""
    check.set_fields(config, check.integer, "value_bits")
    check.one_of("value_bits", config.value_bits, value_bits)
    check.one_of("exchange", config.exchange, EXCHANGES)


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
        answers = {}
        at = 0
        for index, collectives in waiting.items():
            answers[index] = results[at : at + len(collectives)]
            at += len(collectives)
    if refusal is not None:
        raise refusal
    return [result for result in arrived if result is not None]


def send_checked(method: Compression, context: Context, folded: Computed, kept: Kept) -> Sending:
    """Return the sending of a method, with checksums where its messages have none."""
    sending = method.send(context, folded, kept)
    return sending if method.has_checksums else _checked(sending, context)


def _checked(sending: Sending, context: Context) -> Sending:
    refusal: PayloadCorrupt | None = None
    asked: Sequence[Collective] = next(sending)
    while True:
        answers = yield [
            AllGather(with_checksum(one.message, salt_of(context)), one.purpose, one.within_node)
            if isinstance(one, AllGather)
            else one
            for one in asked
        ]
        found = list(answers)
        for index, one in enumerate(asked):
            if not isinstance(one, AllGather):
                continue
            rows, damaged = opened_rows(answers[index], salt_of(context))
            for source, damage in enumerate(damaged.tolist()):
                if damage:
                    rank = source * context.node_size
                    refusal = refusal or PayloadCorrupt(damaged_text(rank, context))
                    rows[source] = one.message  # which the method can read to its end
            found[index] = rows
        try:
            asked = sending.send(found)
        except StopIteration as end:
            if refusal is not None:
                raise refusal from None
            arrived: Arrived = end.value
            return arrived


def damaged_text(rank: int, context: Context) -> str:
    """Describe a message that does not match its checksum."""
    return (
        f"the message of rank {rank} for bucket {context.bucket} of step {context.step} was "
        "refused: it does not fit its checksum"
    )


def salt_of(context: Context) -> int:
    """Return the number that ties a checksum to one sending."""
    return (context.step << 20) + context.bucket


_log = logging.getLogger("thinwire")
_FEW = 1024
"""Number of dense entries below which a model gets no remark: they are a message of 4 kB."""


def report_coverage(
    config: Compression,
    params: Iterable[Tensor],
    compresses: Callable[[Tensor], bool] | None = None,
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
