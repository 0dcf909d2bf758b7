"""Driver of the generators in `thinwire.compress`: launches, waits, and checks what arrived."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm import ALL_RANKS, Nodes, Pending, Sources, wrong_mac_text
from thinwire.compress.protocol import (
    AllGather,
    AllReduce,
    AllToAll,
    Arrived,
    Bucket,
    Collective,
    Context,
    Flags,
)
from thinwire.errors import PayloadCorrupt

__all__ = ["Findings", "Round", "read_flags"]


class Findings(NamedTuple):
    """Problems by kind, each with the name of the first tensor. None if there is no problem."""

    not_finite: str | None
    """First of this rank's own tensors that is not finite."""
    sum_not_finite: str | None
    """First tensor whose sum over the sources is not finite, though every part may be."""
    changed: str | None
    """First of the flags passed to `finish` that is False."""


@dataclass(slots=True)
class _OnItsWay:
    sending: Bucket
    pending: list[Pending[Tensor]]
    in_node: bool


class Round:
    """The exchange of one step: buckets of sendings that all ranks advance in the same order.

    `launch` may be called once per bucket while the backward pass runs; `finish` waits for all of
    them. Only this object is written, so that a failed exchange changes nothing else.

    Communication: the collectives that the sendings yield. All ranks must launch the same buckets
    in the same order.

    Example::

        one_round = Round(sources, step)
        sending = send_dense(one_round.context(0), grads)
        one_round.launch(grads.keys(), together([sending]))
        findings = one_round.finish()
    """

    def __init__(self, sources: Sources, step: int, *, read_sums: bool = True) -> None:
        self.step = step
        self.sums_digest = 0
        """Digest of the bits of all sums, once finished. The same on all ranks; 0 without
        `read_sums`.
        """
        self._read_sums = read_sums and sources.size > 1
        self.arrived: dict[str, Arrived] = {}
        """Results that brought each tensor's mean, by tensor, once finished."""
        self.row_sparse: Collection[str] = ()
        """Tensors whose gradient is row-sparse on some rank. They travel densely."""
        self.rows_only: Collection[str] = ()
        """Tensors among them whose gradient is row-sparse on every rank."""
        self._sources = sources
        self._waiting: list[_OnItsWay] = []
        self._names: set[str] = set()
        self._ended: list[Arrived] = []
        self._refusal: PayloadCorrupt | None = None
        self.heard: list[list[Tensor]] | None = None
        """Answers that the sendings received, if a list was put here. `replay` uses them in another
        process.
        """

    @property
    def names(self) -> Set[str]:
        """Names of the tensors that have been launched."""
        return self._names

    def context(self, bucket: int) -> Context:
        """Return the context of the sendings of one bucket."""
        sources = self._sources
        place = (self.step, bucket, sources.rank, sources.size, sources.node_size)
        return Context(*place, read_sums=self._read_sums)

    def launch(self, names: Collection[str], sending: Bucket) -> None:
        """Launch one bucket.

        A bucket whose ranks still average inside their nodes continues when the next one is
        launched.
        """
        self._names.update(names)
        self.leave_nodes()
        self._advance(sending, None)

    def leave_nodes(self) -> None:
        """Wait for the averages inside nodes, and launch the sendings that follow from them."""
        # the same collectives on all ranks: the choice must not depend on which have finished
        inside = [each for each in self._waiting if each.in_node]
        self._waiting = [each for each in self._waiting if not each.in_node]
        self._go_on(inside)

    def replay(
        self, names: Collection[str], sending: Bucket, heard: Sequence[Sequence[Tensor]]
    ) -> None:
        """Repeat the exchange of one bucket with the answers that another process received."""
        self._names.update(names)
        next(sending)
        for answer in heard:
            try:
                sending.send(answer)
            except StopIteration as end:
                self._ended += end.value

    def finish(
        self, unchanged: Flags | None = None, order: Mapping[str, int] | None = None
    ) -> Findings:
        """Wait for all buckets and check them.

        Args:
            unchanged: Flags that may still lie on a device; read in one copy with the others.
            order: By name which of several tensors is the first one; else it is the one that was
                launched first.

        Raises:
            PayloadCorrupt: A message is damaged or belongs elsewhere; names its source.
            PeerLost, PeerStalled: See `thinwire.comm.Group`.
        """
        # a sending may yield further collectives, so go on until none is left
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            self._go_on(waiting)
        if self._refusal is not None:
            raise self._refusal
        for each in self._ended:
            self.arrived.update(dict.fromkeys(each.names, each))
        own = {name: flag for each in self._ended for name, flag in each.finite.items()}
        own = dict(sorted(own.items(), key=lambda item: 0 if order is None else order[item[0]]))
        checked = [(each, each.checks) for each in self._ended if each.checks is not None]
        summed = [(each, report) for each in self._ended for report in each.sums]
        reports = [report for _, report in summed]
        # one copy to the host for all flags and checks
        found, read = read_flags(
            [own, unchanged or {}], [*(checks for _, checks in checked), *reports]
        )
        for (each, _), numbers in zip(checked, read, strict=False):
            each.refuse(numbers)
        suspects = [each for each in self._ended if not each.sums_finite]
        for (each, _), (finite, *digest) in zip(summed, read[len(checked) :], strict=True):
            for bits in digest:
                self.sums_digest = (self.sums_digest * 1_000_003 + bits) % (1 << 64)
            suspects += [] if finite else [each]
        bad_sums = [name for each in suspects if (name := each.first_bad_sum()) is not None]
        bad_sum = min(bad_sums, key=lambda name: 0 if order is None else order[name], default=None)
        return Findings(found[0], bad_sum, found[1])

    def _go_on(self, those: Sequence[_OnItsWay]) -> None:
        # in the same order on all ranks; one answer is read while the next ones still travel
        for each in those:
            answers = [pending.wait() for pending in each.pending]
            if self.heard is not None:
                self.heard.append([answer.clone() for answer in answers])
            self._advance(each.sending, answers)

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
            self._waiting.append(_OnItsWay(sending, pending, in_node))

    def _launched(self, collective: Collective) -> Pending[Tensor]:
        sources, what = self._sources, collective.purpose
        macs = sources.macs
        if macs is not None and sources.relayed and isinstance(collective, AllReduce):
            return self._summed(collective.buffer, what)
        # a sum is formed in transit, so no rank can authenticate it
        if macs is None or isinstance(collective, AllReduce):
            return self._unproven(collective)
        number, to = macs.next(), ALL_RANKS
        if isinstance(collective, AllGather):
            pending = sources.all_gather(macs.with_mac(collective.message, number), action=what)
        else:
            to = sources.rank
            parts, lengths = macs.with_macs(collective.messages, collective.lengths, number)
            pending = sources.all_to_all(parts, lengths, action=what)

        def rows() -> Tensor:
            messages, wrong = macs.verified(pending.wait(), number, to)
            if wrong:
                self._refusal = self._refusal or PayloadCorrupt(wrong_mac_text(what, wrong[0]))
            return messages

        return Pending(rows)

    def _summed(self, buffer: Tensor, what: str) -> Pending[Tensor]:
        """The sum, in the order of the sources, of what all gather and can prove."""
        gathered = self._launched(AllGather(buffer.flatten().view(torch.uint8), what))

        def total() -> Tensor:
            found, *others = gathered.wait().view(buffer.dtype).unbind()
            for each in others:
                found += each
            return found.view_as(buffer)

        return Pending(total)

    def _unproven(self, collective: Collective) -> Pending[Tensor]:
        sources, what = self._sources, collective.purpose
        if isinstance(collective, AllToAll):
            return sources.all_to_all(collective.messages, collective.lengths, action=what)
        if collective.within_node:
            assert isinstance(sources, Nodes)
            sources = sources.node
        if isinstance(collective, AllGather):
            return sources.all_gather(collective.message, action=what)
        # hand-over: from here on gloo may write into the buffer at any time
        return sources.all_reduce_(collective.buffer, action=what)


def read_flags(
    several: Sequence[Flags], numbers: Sequence[Tensor] = ()
) -> tuple[list[str | None], list[list[int]]]:
    """Return per set of flags the first name that is False, and the values of integer tensors.

    Args:
        several: Sets of flags.
        numbers: int64, shape (m,) each.

    Returns:
        The names, None where all flags are True, and the numbers. One copy to the host per device,
        for everything together.

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
