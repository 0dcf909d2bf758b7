"""Driver of the generators in `thinwire.compress`: launches, waits, and checks what arrived."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm import ALL_RANKS, Pending, Sources, wrong_mac_text
from thinwire.compress.protocol import (
    AllGather,
    AllReduce,
    AllToAll,
    Arrived,
    Bucket,
    Collective,
    Context,
    Flags,
    combined,
)
from thinwire.errors import PayloadCorrupt
from thinwire.exchange.nodes import Send, in_nodes


class Findings(NamedTuple):
    """Problems by kind, each with the name of the first tensor. None if there is no problem."""

    not_finite: str | None
    """First of this rank's own tensors that is not finite."""
    sum_not_finite: str | None
    """First tensor whose sum over the sources is not finite, though every part may be."""
    changed: str | None
    """First of the flags passed to `finish` that is False."""


@dataclass(slots=True)
class _InFlight:
    sending: Bucket
    pending: list[Pending[Tensor]]
    in_node: bool


class Round:
    """The exchange of one step: buckets of sendings that all ranks advance in the same order.

    `launch` may be called once per bucket while the backward pass runs; `finish` waits for all of
    them. Only this object is written, so that a failed exchange changes nothing else.

    Communication: the collectives that the sendings yield. All ranks must launch the same buckets
    in the same order.
    """

    def __init__(self, sources: Sources, step: int, *, read_sums: bool = True) -> None:
        self.step = step
        self.sums_digest = 0
        """Digest of all sums' bits, once finished; the same on all ranks, 0 without `read_sums`."""
        # a single source has nothing to compare
        self._read_sums = read_sums and sources.size > 1
        self.arrived: dict[str, Arrived] = {}
        """Results that brought each tensor's mean, by tensor, once finished."""
        self.row_sparse: Collection[str] = ()
        """Tensors whose gradient is row-sparse on some rank. They travel densely."""
        self.rows_only: Collection[str] = ()
        """Tensors among them whose gradient is row-sparse on every rank."""
        self._sources = sources
        self._waiting: list[_InFlight] = []
        self.names: set[str] = set()
        """Names of the tensors that have been launched."""
        self._ended: list[Arrived] = []
        self._refusal: PayloadCorrupt | None = None
        self.received: list[list[Tensor]] | None = None
        """Answers that the sendings received, for `replay`, if a list was put here."""

    def bucket(self, number: int, tensors: Iterable[tuple[str, Tensor]], send: Send) -> Bucket:
        """Return the sendings of one bucket; `tensors` are averaged inside a node."""
        sources = self._sources
        position = (self.step, number, sources.rank, sources.size, sources.node_size)
        context = Context(*position, read_sums=self._read_sums)
        if context.node_size == 1:
            return combined(send(context, {}))
        return in_nodes(context, tensors, send)

    def launch(self, names: Collection[str], sending: Bucket) -> None:
        """Launch one bucket; averages inside nodes continue when the next one is launched."""
        # first the messages of earlier buckets to other nodes
        self.names.update(names)
        self.leave_nodes()
        self._advance(sending, None)

    def leave_nodes(self) -> None:
        """Wait for the averages inside nodes, and launch the sendings that follow from them."""
        # the same collectives on all ranks: the choice must not depend on which have finished
        inside = [bucket for bucket in self._waiting if bucket.in_node]
        self._waiting = [bucket for bucket in self._waiting if not bucket.in_node]
        self._continue(inside)

    def replay(
        self, names: Collection[str], sending: Bucket, received: Sequence[Sequence[Tensor]]
    ) -> None:
        """Repeat the exchange of one bucket with the answers that another process received."""
        self.names.update(names)
        # a yield launches; here its messages were sent by another process
        collectives = next(sending)
        for answer in received:
            placed = [a.to(c[0].device) for a, c in zip(answer, collectives, strict=True)]
            try:
                collectives = sending.send(placed)
            except StopIteration as end:
                self._ended += end.value

    def finish(
        self, unchanged: Flags | None = None, order: Mapping[str, int] | None = None
    ) -> Findings:
        """Wait for all buckets and check them; `order` decides which tensor is the first.

        Raises:
            PayloadCorrupt: A message is damaged or belongs to another exchange; names its source.
        """
        # a sending may yield further collectives, so go on until none is left
        while self._waiting:
            waiting = self._waiting
            self._waiting = []
            self._continue(waiting)
        # only now: an earlier raise would leave collectives that the other ranks wait in
        if self._refusal is not None:
            raise self._refusal
        for arrived in self._ended:
            self.arrived.update(dict.fromkeys(arrived.names, arrived))
        own = {name: flag for arrived in self._ended for name, flag in arrived.finite.items()}
        # the first one in the model's order, which all ranks share
        own = dict(sorted(own.items(), key=lambda item: 0 if order is None else order[item[0]]))
        asking = {a: a.unread for a in self._ended if a.unread is not None}
        summed = [(arrived, report) for arrived in self._ended for report in arrived.sums]
        reports = [report for _, report in summed]
        # one copy to the host for all flags and numbers
        found, read = read_flags([own, unchanged or {}], [*asking.values(), *reports])
        # messages before sums: a damaged message also makes a sum wrong
        for arrived, numbers in zip(asking, read, strict=False):
            arrived.read(numbers)
        suspects = [arrived for arrived in self._ended if arrived.bad_sum is not None]
        for (arrived, _), (finite, bits) in zip(summed, read[len(asking) :], strict=True):
            # order counts, so that swapped sums are noticed as well
            self.sums_digest = (self.sums_digest * 1_000_003 + bits) % (1 << 64)
            suspects += [] if finite else [arrived]
        bad_sums = [name for arrived in suspects if (name := arrived.first_bad_sum()) is not None]
        bad_sum = min(bad_sums, key=lambda name: 0 if order is None else order[name], default=None)
        return Findings(found[0], bad_sum, found[1])

    def _continue(self, buckets: Sequence[_InFlight]) -> None:
        # in the same order on all ranks; one answer is read while the next ones still travel
        for bucket in buckets:
            answers = [pending.wait() for pending in bucket.pending]
            # a copy, since the sending may change its answers
            if self.received is not None:
                self.received.append([answer.clone() for answer in answers])
            self._advance(bucket.sending, answers)

    def _advance(self, sending: Bucket, answer: Sequence[Tensor] | None) -> None:
        try:
            collectives = next(sending) if answer is None else sending.send(answer)
        except StopIteration as end:
            self._ended += end.value
        except PayloadCorrupt as found:
            self._refusal = self._refusal or found  # raised by `finish`, after all collectives
        else:
            pending = [self._launched(collective) for collective in collectives]
            in_node = any(not isinstance(c, AllToAll) and c.within_node for c in collectives)
            self._waiting.append(_InFlight(sending, pending, in_node))

    def _launched(self, collective: Collective) -> Pending[Tensor]:
        sources = self._sources
        purpose = collective.purpose
        macs = sources.macs
        if macs is not None and sources.relayed and isinstance(collective, AllReduce):
            return self._summed(collective.buffer, purpose)
        # a sum is formed in transit, so no rank can authenticate it
        if macs is None or isinstance(collective, AllReduce):
            return self._unauthenticated(collective)
        # each MAC covers the number of the collective: an old message cannot be replayed
        number = macs.next()
        to = ALL_RANKS
        if isinstance(collective, AllGather):
            pending = sources.all_gather(macs.with_mac(collective.message, number), action=purpose)
        else:
            to = sources.rank
            parts, lengths = macs.with_macs(collective.messages, collective.lengths, number)
            pending = sources.all_to_all(parts, lengths, action=purpose)

        def rows() -> Tensor:
            messages, wrong = macs.verified(pending.wait(), number, to)
            # keep the first refusal and go on: this rank still takes part in the vote
            if wrong:
                self._refusal = self._refusal or PayloadCorrupt(wrong_mac_text(purpose, wrong[0]))
            return messages

        return Pending(rows)

    def _summed(self, buffer: Tensor, purpose: str) -> Pending[Tensor]:
        """Return the sum over the sources, in their order, of gathered parts with MACs."""
        # a relay could alter a sum in transit; gathered parts each have a MAC
        gathered = self._launched(AllGather(buffer.flatten().view(torch.uint8), purpose))

        def total() -> Tensor:
            found, *others = gathered.wait().view(buffer.dtype).unbind()
            for other in others:
                found += other
            return found.view_as(buffer)

        return Pending(total)

    def _unauthenticated(self, collective: Collective) -> Pending[Tensor]:
        sources = self._sources
        purpose = collective.purpose
        if isinstance(collective, AllToAll):
            return sources.all_to_all(collective.messages, collective.lengths, action=purpose)
        if collective.within_node:
            sources = sources.node
        if isinstance(collective, AllGather):
            return sources.all_gather(collective.message, action=purpose)
        # hand-over: from here on gloo may write into the buffer at any time
        return sources.all_reduce_(collective.buffer, action=purpose)


def read_flags(
    several: Sequence[Flags], numbers: Sequence[Tensor] = ()
) -> tuple[list[str | None], list[list[int]]]:
    """Return per set of flags the first name that is False, and the values of integer tensors.

    >>> read_flags([{"a": True, "b": False}, {}], [torch.tensor([1, 2])])
    (['b', None], [[1, 2]])
    """
    waiting = [
        (i, name, flag)
        for i, flags in enumerate(several)
        for name, flag in flags.items()
        if isinstance(flag, Tensor)
    ]
    values = _read([*(flag.long().view(1) for *_, flag in waiting), *numbers])
    known = [dict(flags) for flags in several]
    for (i, name, _), value in zip(waiting, values, strict=False):
        known[i][name] = bool(value[0])
    bad = [next((name for name, flag in flags.items() if not flag), None) for flags in known]
    return bad, values[len(waiting) :]


def _read(pieces: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers in each of the tensors, which are joined per device before the copy."""
    devices = dict.fromkeys(piece.device for piece in pieces)
    hosts = {
        device: torch.cat([p for p in pieces if p.device == device]).tolist() for device in devices
    }
    return [[hosts[piece.device].pop(0) for _ in range(piece.numel())] for piece in pieces]
