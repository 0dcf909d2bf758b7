"""State of local updates for a joiner: all values that ranks share, and every averaging since."""

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import own_deadlines
from thinwire.comm.replicate import real_view
from thinwire.compress import kinds_of_state
from thinwire.compress.dense import not_finite
from thinwire.core.sharded import Shards
from thinwire.errors import ThinwireError
from thinwire.local.averager import Averager
from thinwire.local.averaging import Changes, PendingAveraging, widened
from thinwire.local.interval import Stage
from thinwire.local.saving import copied
from thinwire.members.closing import Late
from thinwire.members.group import AWAY, ElasticGroup
from thinwire.members.members import Member
from thinwire.members.transfer import StateMessage

_log = logging.getLogger("thinwire")


def receive_state(averager: Averager, member: Member, why: ThinwireError | None = None) -> float:
    """Copy the state of the run to this process, continue where the others are; return seconds.

    After the error `why` this member enters the run again, and keeps what it has not sent.
    """
    began_s = time.perf_counter()
    state = JoinerState(averager, member.group)
    state.copies = averager.tensors.weight_copies()
    with own_deadlines():
        if why is not None:
            state.keep()
        averager.pending = None  # of a loaded state: the others have applied it
        if why is None:
            member.fetch_state(state)
        elif isinstance(why, Late):
            try:
                member.catch_up(state)
            finally:
                state.begin(into_residuals=averager.work is None)
        else:
            member.rejoin(state, why)
        for optimizer in averager.tensors.optimizers:
            if hasattr(optimizer, "begin_at"):  # the schedules of the other ranks are at this step
                optimizer.begin_at(averager.counters.step)
        averager.make(averager.when.due_by_steps())
    return time.perf_counter() - began_s


class JoinerState:
    """Shared state of local updates, copied from a donor to a joiner."""

    def __init__(self, averager: Averager, group: ElasticGroup) -> None:
        self._averager = averager
        self._group = group
        self._averaging = averager.averaging
        self._tensors = averager.tensors
        self._when = averager.when
        self._own = StateMessage("own", {}, {})
        self._unsent: dict[str, Tensor] = {}
        """Own state of a member that enters again, and its change since its anchors."""
        self.copies: Mapping[str, Tensor] = {}
        """The optimizer's copies, found before messages change the parameters alone."""
        self._work: Mapping[str, Any] | None = None

    @torch.no_grad()
    def keep(self) -> None:
        """Keep what this member has not sent: it is part of its next averaging."""
        averager, tensors = self._averager, self._tensors
        if averager.pending is not None:
            with suppress(*AWAY):  # if the others have applied it, else its change is unsent
                averager.pending.advance(Stage.APPLIED)
        if averager.work is not None:
            self._work = averager.work.state()
        self._own = self.own_state()
        values = {**tensors.params, **self.copies}
        self._unsent = dict(Changes(self._averaging, values, frozenset()))
        if found := not_finite(self._unsent):
            _log.warning("%s is not finite: what this member trained is dropped", found[0])
            self._unsent = {}

    @property
    def max_bytes(self) -> int:
        """Upper bound on one message's tensor bytes: 64 times the model's, and 64 MiB."""
        tensors = self.tensors() | self._tensors.other_buffers()
        return 64 * sum(tensor.nbytes for tensor in tensors.values()) + (64 << 20)

    def tensors(self) -> dict[str, Tensor]:
        """Return the shared state itself by name; see `SharedState`."""
        averaging = self._averaging
        shared = {
            "anchor": averaging.anchors,
            "outer momentum": averaging.momentum,
            **{f"kept {k}": t for k, t in averaging.kept.items() if not _is_own(k)},
            "frozen": dict(Shards(self._tensors.frozen)),
            "buffer": self._tensors.buffers(),
            "sketch": {"sums": averaging.sketches},
        }
        return {f"{k} {name}": t for k, of_kind in shared.items() for name, t in of_kind.items()}

    def counters(self) -> StateMessage:
        """Return all other shared state; see `SharedState`."""
        buffers = copied(self._tensors.other_buffers())
        return StateMessage("state", {"timetable": self._when.state()}, buffers)

    @property
    def averagings(self) -> int:
        """Number of the last averaging; see `SharedState`."""
        return self._averager.counters.averagings

    def begin_round(self, before: int, members: int) -> None:
        """Count the microbatches of an update anew; see `SharedState`."""
        when = self._when
        at = self._when.counters
        if not at.batch:
            at.batch = before * when.merge_steps
            at.members = before
        before = at.members
        at.members = members
        if members != before:
            text = "members: %d, %d before; microbatches of each in an update: %d, batch_share %.3g"
            say, sign = (_log.warning, "it goes on alone; ") if members == 1 else (_log.info, "")
            say(sign + text, members, before, when.microbatches, when.batch_share)

    def last_update(self) -> StateMessage | None:
        """Return the messages received in the last averaging; see `SharedState`."""
        pending = self._averager.last
        if pending is None or pending.round.received is None:
            return None
        received = pending.round.received
        about = {
            "rank": self._group.rank,
            "size": self._group.size,
            "step": pending.step,
            "share": pending.share,
            "delayed": pending.delayed,
            "moved": list(pending.moved),
            "extras": list(pending.extras),
            "compressed": sorted(pending.moved.compressed),
            "sketched": pending.sketch is not None,
            "answers": [*map(len, received)],
        }
        tensors = {
            f"{n} {index}": answer
            for n, answers in enumerate(received)
            for index, answer in enumerate(answers)
        }
        tensors |= copied(self._averager.other_buffers.variable())
        return StateMessage("round", {"timetable": self._when.state(), "about": about}, tensors)

    @torch.no_grad()
    def apply(self, given: StateMessage) -> None:
        """Take the state of a donor; see `SharedState`."""
        if given.kind == "round":
            self._replay(given)
        self._averager.other_buffers.take_(given.tensors)
        self._when.load(given.plain["timetable"])
        if given.last:
            self.begin()

    @torch.no_grad()
    def begin(self, *, into_residuals: bool = False) -> None:
        """Continue from the shared state: parameters at their anchors, but for what was kept.

        With `into_residuals` changes of compressed parameters become residuals.
        """
        tensors, averager = self._tensors, self._averager
        averager.unsent = bool(self._unsent)
        tensors.forget_common()
        for tensor in self._own_tensors().values():
            tensor.zero_()
        if self._own.tensors:
            self.add_handoff(self._own, 1.0)
        # steps from the anchor learn more than steps from a change that the others do not have
        # (research/members/README.md)
        for name in self._averaging.errors.keys() & self._unsent.keys() if into_residuals else ():
            error = self._averaging.errors[name]
            error.add_(self._unsent.pop(name).to(error))
        for name, value in {**tensors.params, **self.copies}.items():
            real = real_view(value)
            real.copy_(self._averaging.anchors[name])
            if name in self._unsent:
                real.sub_(self._unsent[name])
            real_view(tensors.params[name]).copy_(real)
        if averager.same is not None:
            averager.same.start_from(averager.counters.step)
        averager.duplicates.skip()
        if averager.work is not None:
            averager.work.load(self._work)

    def own_state(self) -> StateMessage:
        """Return copies of the residuals, if any is not zero; see `SharedState`."""
        found = copied(self._own_tensors())
        return StateMessage("own", {}, found if any(map(torch.any, found.values())) else {})

    @torch.no_grad()
    def add_handoff(self, given: StateMessage, factor: float) -> None:
        """Take over the residuals of a member that left; see `SharedState`."""
        for key, tensor in self._own_tensors().items():
            if (own := given.tensors.get(key)) is not None:
                tensor.add_(own.to(tensor), alpha=factor)

    def _replay(self, given: StateMessage) -> None:
        about: Mapping[str, Any] = given.plain["about"]
        averaging, tensors = self._averaging, self._tensors
        received = [
            [given.tensors[f"{n} {index}"] for index in range(count)]
            for n, count in enumerate(about["answers"])
        ]
        with self._group.as_if(about["rank"], about["size"]):
            targets = {**tensors.buffers(), **self._state_targets(about["extras"])}
            targets |= tensors.parameters()
            own = {name: tensors.params[name] for name in about["moved"]}
            pending = PendingAveraging(
                about["step"],
                Changes(averaging, own, frozenset(about["compressed"])),
                {key: widened(targets[key]) for key in about["extras"]},
                torch.zeros_like(averaging.sketches[0]) if about["sketched"] else None,
                about["delayed"],
                share=about["share"],
            )
            pending.moved.unsent = True
            averaging.replay(pending, received)
            averaging.commit_(pending, targets)

    def _state_targets(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors for averaged optimizer state: this member's own, or new ones."""
        params = self._tensors.params
        found = self._tensors.state(params)
        for key in keys:
            if key.startswith("state ") and key not in found:
                name = key.removeprefix("state ").rpartition(" ")[0]
                found[key] = torch.zeros_like(params[name])
        return found

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the state that belongs to this rank alone, by kind and name."""
        own = {kind: t for kind, t in self._averaging.kept.items() if _is_own(kind)}
        return {f"{k} {name}": t for k, tensors in own.items() for name, t in tensors.items()}


def _is_own(kind: str) -> bool:
    return kinds_of_state()[kind] == "mean_zero"
