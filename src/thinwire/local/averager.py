"""Average parameters when it is due: measure, agree, send, verify, apply."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.comm import Group, Pending, Regrouped
from thinwire.comm.nodes import Nodes
from thinwire.comm.private import forget_ended
from thinwire.comm.replicate import copy_from_first_, real_view
from thinwire.core.sharded import Shards
from thinwire.errors import Mismatch, NonFinite, PayloadCorrupt
from thinwire.exchange.agreement import AVERAGED, FLUSHING, Answers
from thinwire.exchange.digest import RollingDigest
from thinwire.exchange.replica import Replica
from thinwire.exchange.synchronizer import Synchronizer
from thinwire.local.averaging import Averaging, OneAveraging, PendingAveraging, widened
from thinwire.local.config import AdaptiveLocalSGD, fragments_of
from thinwire.local.interval import Due, Stage, Timetable
from thinwire.local.model import LocalModel, OtherBuffers, refuse_scaler
from thinwire.local.steps import of_site, weights_of
from thinwire.members.members import Member

_log = logging.getLogger("thinwire")
_FROZEN = (
    "frozen parameter {} (local updates do not average it: make it a buffer, keep it outside the "
    "model, or update it only where sync.synced is true)"
)


class OwnScale(Protocol):
    """Loss scale that a rank adapts on its own between averagings: `thinwire.amp.LossScaler`."""

    @property
    def scale(self) -> float:
        """Loss scale of this rank."""

    def take_scale(self, scale: float) -> None:
        """Continue with the smallest scale of all ranks."""


class Averager(Synchronizer):
    """Average what is due after a local step. A failed averaging moves only the counter."""

    def __init__(
        self,
        group: Group,
        tensors: LocalModel,
        when: Timetable,
        averaging: Averaging,
        *,
        scaler: OwnScale | None,
        identity: str,
        digest_every: int,
        member: Member | None,
        after_averaging: Callable[[bool], bool],
    ) -> None:
        # after_averaging(another follows in this call) -> this rank continues with the others
        self.other_buffers = OtherBuffers(tensors)
        super().__init__(group, averaging.sources, kind="changes", before=[self.other_buffers])
        self.tensors = tensors
        self.when = when
        self.averaging = averaging
        self.counters, self.interval, self.work = when.counters, when.interval, when.work
        self.config = when.config
        self.flushing = self.all_flush = False
        """True while this rank only waits for the end of timed rounds; if all ranks do."""
        self.written: str | None = None
        """Digest of parameters that other code wrote since the last full sync; else None."""
        self.pending: OneAveraging | None = None
        """Averaging in flight."""
        self.last: PendingAveraging | None = None
        """Last applied averaging, kept while a joiner needs it."""
        self.applied = 0
        """Averagings that were applied here, whatever a loaded state counts."""
        self.unsent = False
        """True if this member has changes that it has not sent, after it was late or away."""
        self.weight = 1.0
        self._member = member
        self._after_averaging = after_averaging
        self._scaler = scaler
        self._parts = fragments_of(tensors.trained, self.config)
        adaptive = isinstance(self.config, AdaptiveLocalSGD)
        shards = group.shards
        at_once = not when.overlaps or adaptive or scaler is not None or shards is not None
        # the next local step needs the answers of the agreement to send
        self._first_stage = Stage.SENT if at_once else Stage.PROPOSED
        if shards is not None:
            purpose = "asking whether a round is over"
            when.of_site = lambda over: shards.gather_now(bytes([over]), purpose)[0] == b"\x01"
        digest: RollingDigest | None = None
        if digest_every:
            # an anchor is the exact value of a parameter after an averaging
            anchors = {f"anchor of parameter {n}": a for n, a in averaging.anchors.items()}
            frozen = {_FROZEN.format(n): p for n, p in tensors.frozen.items()}
            outer = {f"outer momentum of {n}": m for n, m in averaging.momentum.items()}
            slices = max(1, digest_every // self.interval.longest)
            step = self.counters.step
            digest = RollingDigest(Shards(anchors | frozen), outer, every=slices, since=step)
        self.watch(Replica(None, digest), identity)

    def reset_after_load(self, work: Mapping[str, Any] | None) -> None:
        """Reset after all state was loaded, except a result in flight."""
        self.when.synced = False
        self.pending = None
        self.written = None
        self.drops.applied()
        forget_ended()  # an averaging in flight is dropped, and nothing else releases it
        if self.work is not None:
            self.work.load(work)
        if self.counters.averagings:
            self.duplicates.skip()

    def _residuals(self) -> Iterable[Tensor]:
        return self.averaging.errors.values()

    def start_anew(self) -> None:
        """Implement `LocalUpdates.start_anew`."""
        self.averaging.anchor_()
        self.averaging.forget_()
        self.tensors.made_common()
        self.counters.last_full_sync = self.counters.step
        self.written = None

    def require_equal(self, step: int | None = None) -> None:
        """Compare the ranks as `Synchronizer.require_equal` does, at the local step by default."""
        with self.group.one_deadline():
            self.settle()
            super().require_equal(self.counters.step if step is None else step)

    def refuse(self, problem: str) -> None:
        """Raise this user error on all ranks, at the next agreement of the others."""
        with self.group.one_deadline():
            self.settle()
            self.agreement(self.counters.step, "refusing", first=False, user_error=problem)

    def settle(self) -> None:
        """Wait for an agreement in flight: ranks agree on one thing at a time."""
        while (now := self.pending) is not None and now.stage in (Stage.PROPOSED, Stage.ARRIVED):
            with self.group.one_deadline():
                self._advance(Stage(now.stage + 1))

    def before_step(self) -> None:
        """Set anchors to weights that were loaded since the last full sync."""
        if self.group.size > 1 and self.work is None:
            refuse_scaler(self.tensors.optimizer)
        if self.when.unsynced or self.pending or self._member is not None or self.averaging.plain:
            return
        # other code wrote the parameters: not a change by this rank's steps
        if (digest := self.averaging.written()) is not None:
            self.averaging.anchor_()
            self.written = digest if self.group.shards is None else "a shard"  # shards differ

    def after_step(self) -> None:
        """Count a local step and do what follows from it."""
        self.when.count_step()
        try:
            # first the result in flight: its anchors are those of the next averaging
            if self._advance():
                self.make(self.when.due())
        finally:  # if the averaging fails, its loss must not count in the next step
            self.interval.observed.clear()

    def end_round(self) -> None:
        """Average this rank's work in a timed round, even none; nothing if all are `flushing`."""
        self.make(self.when.due_at_end())

    def _advance(self, to: Stage | None = None, *, goes_on: bool = False) -> bool:
        """Advance an averaging in flight; return True if this rank continues with the others."""
        pending = self.pending
        if pending is None:
            return True
        to = self.when.stage(pending.measured.step) if to is None else to
        # hand-over: after an error the result must not be applied a second time
        self.pending = None
        pending.advance(to)
        if to is Stage.APPLIED:
            return self._after_averaging(goes_on)
        self.pending = pending
        return True

    def make(self, due: Due) -> None:
        """Average what is due, or share the first loss."""
        if due is Due.EVERYTHING:
            self._average("averaging", self.tensors.params)
        elif due is Due.FRAGMENT:
            part = self.when.fragment
            self._average(f"averaging part {part}", self._parts[part], part)
        elif due is Due.NODE:
            self._average_in_node_()
        elif due is Due.FIRST_LOSS:
            self.interval.read(self._ask("first loss").wait(), self.counters.step)

    @torch.no_grad()
    def _average_in_node_(self) -> None:
        """Set parameters to their mean over the ranks of this node."""
        nodes, params = self.averaging.sources, self.tensors.params
        assert isinstance(nodes, Nodes), "node_size is above 1"
        values = {**params, **self.tensors.weight_copies()}
        parts = [widened(value).flatten() for value in values.values()]
        summed = nodes.node.all_reduce_(torch.cat(parts), action="averaging inside the node").wait()
        summed /= nodes.node_size
        means = torch.split(summed, [part.numel() for part in parts])
        for (name, value), mean in zip(values.items(), means, strict=True):
            for tensor in dict.fromkeys((value, params[name])):
                real = real_view(tensor)
                real.copy_(mean.view(real.shape))

    def flush(self) -> None:
        """Implement `LocalUpdates.flush`."""
        work = self.when.work_report()
        changed = list(self.tensors.changed_buffers())
        # a write that is not from these steps, such as by a second optimizer after the averaging
        still = self.counters.averagings and not (self.when.unsynced or self.unsent)
        moved = self.averaging.written() if still else None
        member = self._member
        self.settle()
        answers = self.agreement(
            *(self.counters.step, FLUSHING),
            first=False,
            work=work,
            state=changed,
            moved=moved,
            unsent=self.unsent or None,
        )
        last = max(report["step"] for report in answers)
        votes = any(report["phase"] == AVERAGED for report in answers)
        if member is not None and (votes or last > self.counters.step):
            # the others still vote on the averaging in flight, or have applied it
            if self._advance(Stage.APPLIED) and not votes:
                _log.warning(
                    "this member ends at step %d, before the others: it leaves the run after their "
                    "averaging of step %d",
                    *(self.counters.step, last),
                )
                member.leaving = True
                self.counters.step = last
                self.make(self.when.due())
                self._advance(Stage.APPLIED)
            if not member.left:
                self.flush()
            return
        self._advance(Stage.APPLIED, goes_on=True)
        # decided from the answers, so that all ranks enter the averaging or none does: other ranks
        # may have made steps
        some = any(steps for _, (_, steps, _) in answers.of("work")) or any(answers.of("unsent"))
        parted = any(answers.differences("moved"))
        if some or self.counters.step > self.counters.last_full_sync:
            self._average("averaging for the last time", self.tensors.params, adapt=False)
        elif parted or any(state for _, state in answers.of("state")):
            # such as after update_bn(): no step was made, so values are averaged as they are
            self._average("averaging without a step", (), adapt=False, written=parted)

    def _average(
        self,
        phase: str,
        names: Collection[str],
        part: int | None = None,
        *,
        adapt: bool = True,
        written: bool = False,
    ) -> None:
        """Average these parameters: a fragment, or everything without a delay."""
        self._advance(Stage.APPLIED, goes_on=True)  # a loaded state may hold one
        delayed = part is not None and self.config.delay > 0
        measured, problem, state = self._measure(names, keep=delayed, written=written)
        # a rank that only waits for the end waits for all
        self.group.early = adapt and not self.flushing
        agreement = self._ask(phase, problem, state, part)
        pending = OneAveraging(measured, self._stages(measured, agreement, part, adapt=adapt))
        pending.advance(self._first_stage if delayed else Stage.APPLIED)
        if self.all_flush:
            return
        self.when.synced |= bool(names)
        if part is None or len(self._parts) == 1:
            self.unsent = False
        if delayed:
            self.pending = pending
        else:
            self._after_averaging(False)

    def _measure(
        self, names: Collection[str], *, keep: bool, written: bool
    ) -> tuple[PendingAveraging, str | None, list[str]]:
        """Return this rank's part, a reason not to send it, and its optimizer state and buffers."""
        step = self.counters.step
        self.averaging.make_common()
        problem = self.tensors.difference()
        if problem is None and self.work is not None:
            problem = self.work.problem
        if problem is not None:  # a rank with a problem only votes
            return self.averaging.measure(step, {}, {}), problem, []
        copies = self.tensors.weight_copies()
        state = dict[str, Tensor]()
        if self.config.average_state:
            own = {copy.data_ptr() for copy in copies.values()}
            states = self.tensors.state(names).items()
            state = {key: tensor for key, tensor in states if tensor.data_ptr() not in own}
        values = {**self.tensors.params, **copies}
        others = self.tensors.parameters() if written else {}
        changed = self.tensors.changed_buffers() | dict.fromkeys(others, True)
        extras = {**self.tensors.buffers(), **state, **others}
        measured = self.averaging.measure(
            step, {name: values[name] for name in names}, extras, keep=keep
        )
        # a buffer of infinities, such as a mask, is valid while it does not change
        if (culprit := measured.first_not_finite(changed)) is not None:
            problem = (
                f"{culprit} is not finite at the averaging of step {step}: lower the learning "
                "rate, clip gradients, or check the data of that rank"
            )
        count = self.group.replica_count
        params = self.tensors.params.values()
        self.duplicates.sample(measured.moved.values(), params, count)
        return measured, problem, [*state, *changed]

    def _ask(
        self,
        phase: str,
        problem: str | None = None,
        state: Sequence[str] = (),
        part: int | None = None,
    ) -> Pending[Answers]:
        """Launch the agreement before an averaging: nothing is sent unless all ranks can."""
        loss, rate = self.interval.report()
        failure = None
        if (problem_here := self.drops.given_up) is not None:
            text = f"rank {self.group.rank}: {problem_here}. Nothing was applied on any rank"
            failure = NonFinite.__name__, text
        return self.agreement.launch(
            self.counters.step,
            phase,
            first=False,
            user_error=problem,
            loss=loss,
            rate=rate,
            scale=None if self._scaler is None else self._scaler.scale,
            state=state,
            work=self.when.work_report(part),
            flushing=self.flushing or None,
            failure=failure,
            written=self.written,
        )

    def _stages(
        self,
        measured: PendingAveraging,
        agreement: Pending[Answers],
        part: int | None,
        *,
        adapt: bool,
    ) -> Iterator[Stage]:
        """Agree to send and exchange; the next interval begins with the delay or the result."""
        answers = agreement.wait()  # nothing is sent before
        at = self.counters
        _refuse_different_writes(answers, measured.step)
        self.all_flush = all("flushing" in report for report in answers)
        refused = self._choose_extras(measured, answers)
        if self.work is not None:
            self._weigh(measured, answers)
        if self.all_flush:
            return
        k_steps = self.interval.k_steps
        if adapt:  # a loss that was observed after the last step does not count
            k_steps = self.interval.read(answers, at.step, adapt=part is not None)

        def begin_next() -> None:
            self.when.begin_round(measured.step, part)
            self.interval.k_steps = k_steps
            if measured.moved:
                at.last = measured.step
            at.fragments_averaged += part is not None
            if self._scaler is not None:
                self._scaler.take_scale(min(scale for _, scale in answers.of("scale")))

        exchange = self._exchange(measured, refused)
        sent = next(exchange)
        if measured.delayed:
            begin_next()
        yield sent
        yield from exchange
        if not measured.delayed:
            begin_next()
            if part is None or len(self._parts) == 1:
                at.last_full_sync = at.step

    def _exchange(self, measured: PendingAveraging, refused: str | None = None) -> Iterator[Stage]:
        """Send, verify, vote, and only then apply."""
        member = self._member
        compressed = self.averaging.changes is not None
        while True:
            try:
                with self.group.one_attempt():
                    record = member is not None and member.records(compressed=compressed)
                    self.averaging.launch(measured, record=record)
                yield Stage.SENT
                with self.group.one_attempt():
                    vote = self._vote(measured, refused)
                yield Stage.ARRIVED
                answers = vote.wait()
                break
            except Regrouped:  # members have left: send it again to the others
                pass
        yield Stage.VERIFIED
        if self.work is not None:
            # members may have left since the weights were agreed on: divide by those that voted
            weights = [weight for _, weight in answers.of("weight")]
            measured.share = sum(weights) / len(weights)
        # second vote passed: from here on nothing may fail on one rank only
        self.averaging.commit_(measured, self._targets(measured), self.tensors.weight_copies())
        self.tensors.made_common(measured.extras)
        self.written = None
        self.counters.averagings += 1
        self.applied += 1
        if member is not None:
            member.receive_reports([report.get("members", {}) for report in answers])
            self.last = measured

    def resume(self, measured: PendingAveraging, weight: float) -> None:
        """Take up an averaging of a loaded state, on which ranks had agreed."""
        self.weight = weight
        if self.work is not None:
            self.averaging.weigh_(measured, weight)
        self.pending = OneAveraging(measured, self._exchange(measured), Stage.AGREED)

    def _choose_extras(self, measured: PendingAveraging, answers: Answers) -> str | None:
        """Keep what all ranks can average; return why this rank refuses data of other shards."""
        shards = self.group.shards
        buffers = self.tensors.buffers()
        refused = None
        if shards is not None and buffers:
            purpose = "copying the buffers of the first shard"
            try:
                copy_from_first_(buffers.values(), shards, action=purpose)
            except PayloadCorrupt as refusal:
                refused = str(refusal)
            # a delayed averaging must not see later writes into the buffers
            measured.extras |= {key: widened(b).clone() for key, b in buffers.items()}
        # average only optimizer state that all ranks have (a parameter without a gradient has none
        # yet), and only buffers that some rank has changed
        reported = [set(report.get("state", [])) for report in answers]
        measured.extras = {
            key: value
            for key, value in measured.extras.items()
            if (all if key.startswith("state ") else any)(key in keys for keys in reported)
        }
        return refused

    def _weigh(self, measured: PendingAveraging, answers: Answers) -> None:
        """Weight this rank's change by its work, and advance to the step on which all agree."""
        works = [work for _, work in answers.of("work")]
        totals = [(steps, tokens) for _, steps, tokens in works]
        weights = weights_of(totals)
        width = 1
        if self.group.shards is not None:
            width = self.group.shards.size
            sites = [of_site(totals[at : at + width]) for at in range(0, len(totals), width)]
            weights = weights_of(sites)
        self.weight = weights[self.group.answer_index // width]
        self.averaging.weigh_(measured, self.weight)
        measured.step += max(steps for steps, *_ in works)

    def _vote(self, measured: PendingAveraging, refused: str | None) -> Pending[Answers]:
        """Wait for the messages and launch the agreement that all of them are sound."""
        # a rank that received damaged data still votes: else the others would wait
        try:
            measured.round.finish()
        except PayloadCorrupt as refusal:
            refused = str(refusal)
        if self.same is not None and self.group.size > 1:
            self.same.read(measured.step, self.counters.averagings)
            self.same.sums = measured.round.sums_digest
        return self.agreement.launch(
            measured.step,
            AVERAGED,
            first=False,
            last=True,
            corrupt=refused,
            user_error=self.tensors.difference() or self._missing_state(measured),
            members=None if self._member is None else self._member.report(),
            weight=None if self.work is None else self.weight,
        )

    def _missing_state(self, measured: PendingAveraging) -> str | None:
        """Describe a result in flight whose optimizer state no longer exists."""
        there = self._targets(measured)
        lost = next((key for key in measured.extras if key not in there), None)
        return lost and (
            f"{lost} was sent but no longer exists, so its mean cannot be stored: load the "
            "optimizer's state before the state of local updates"
        )

    def _targets(self, measured: PendingAveraging) -> dict[str, Tensor]:
        """Return the tensors that may be averaged as they are, by name."""
        tensors = self.tensors
        return tensors.buffers() | tensors.state(measured.moved) | tensors.parameters()


def _refuse_different_writes(answers: Answers, step: int) -> None:
    """Raise if other code wrote the parameters, and not the same on all ranks."""
    for first, ours, rank, theirs in answers.differences("written"):
        subject = f"ranks {first} and {rank}" if ours and theirs else "some ranks"
        raise Mismatch(
            f"agreeing on step {step}: {subject} wrote parameters differently after the last "
            "averaging (or the start) and before the next step. Load or change weights in the same "
            "way on all ranks"
        )
