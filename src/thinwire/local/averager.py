"""Decide which averaging follows a local step and run it: measure, agree, send, verify, apply."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from thinwire.comm import Group, Pending, Regrouped
from thinwire.comm.private import forget_ended
from thinwire.errors import Diverged, Mismatch, NonFinite, PayloadCorrupt
from thinwire.exchange.agreement import Answers, Check, Report, Vote
from thinwire.exchange.digest import RollingDigest
from thinwire.exchange.synchronizer import Synchronizer
from thinwire.layout.traffic import AGREEING_DELAY
from thinwire.local.averaging import Averaging, PendingAveraging, widened
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig, fragments_of
from thinwire.local.interval import Interval
from thinwire.local.model import LocalModel, OtherBuffers, refuse_scaler
from thinwire.local.work import RoundWork, of_site, weights_of
from thinwire.members.members import Members

_FROZEN = "frozen parameter"
"""Label of frozen parameters in errors."""


class OwnScale(Protocol):
    """Loss scale that a rank adapts on its own between averagings: `thinwire.amp.LossScaler`."""

    @property
    def scale(self) -> float:
        """Loss scale of this rank."""

    def take_scale(self, scale: float) -> None:
        """Continue with the smallest scale of all ranks."""


@dataclass(slots=True)
class Counters:
    """Progress of local updates; the same on all ranks."""

    last: int
    """Step of the last averaging."""
    step: int = 0
    """Local steps taken."""
    last_full_sync: int = 0
    """Step of the last full sync: all ranks were equal in everything after it."""
    fragments_averaged: int = 0
    """Averagings of single fragments so far; selects the next fragment."""
    averagings: int = 0
    """Averagings so far."""


class Averager(Synchronizer):
    """Count local steps and average when one is due. A failed averaging moves only the counter."""

    def __init__(
        self,
        group: Group,
        tensors: LocalModel,
        config: LocalConfig,
        *,
        interval: Interval,
        averaging: Averaging,
        counters: Counters,
        scaler: OwnScale | None,
        identity: str = "",
        digest_every: int = 0,
        members: Members | None = None,
        after_averaging: Callable[[bool], bool] = lambda goes_on: True,
    ) -> None:
        # after_averaging(another follows in this call) -> this rank continues with the others
        self.other_buffers = OtherBuffers(tensors)
        before: list[Check] = [_SameWrites(self), self.other_buffers]
        super().__init__(group, averaging.sources, kind="changes", before=before)
        self.tensors = tensors
        self.interval = interval
        self.averaging = averaging
        self.counters = counters
        self.synced = False
        """True if the last step took part in an averaging (with a delay: was measured for one)."""
        seconds = config.round_seconds
        self.work = None if seconds is None else RoundWork(seconds, config.fragments)
        """Work of this rank in a timed round; None if rounds are counted in steps."""
        self.steps_made = 0
        """Local steps since construction, dropped ones included."""
        self.flushing = self.all_flush = False
        """True while this rank only waits for the end of timed rounds; if all ranks do."""
        self.given_up: str | None = None
        """Reason why this rank cannot continue; sent to all ranks at the next averaging."""
        self.written: str | None = None
        """Digest of parameters that other code wrote since the last full sync; else None."""
        self.pending: PendingAveraging | None = None
        """Averaging in flight."""
        self.last: PendingAveraging | None = None
        """Last applied averaging, kept while a joiner needs it."""
        self._members, self._after_averaging = members, after_averaging
        self.config = config
        self._parts = fragments_of(tensors.trained, config)
        self._overlaps = config.delay >= AGREEING_DELAY and self.work is None
        """True if local steps continue while ranks agree on an averaging."""
        adaptive, sharded = isinstance(config, AdaptiveLocalSGD), group.shards is not None
        self._answers_at_once = not self._overlaps or adaptive or scaler is not None or sharded
        """True if the next local step needs the answers of the agreement to send."""
        self._scaler = scaler
        self.weight = 1.0
        self.digest: RollingDigest | None = None
        """Digest of anchors, outer momentum and frozen parameters, compared at averagings."""
        if digest_every:
            slices = max(1, digest_every // interval.longest)
            self.digest = RollingDigest(self._anchors, self._outer_momentum, every=slices)
            self.digest.start_from(counters.step)
        self.watch(self.digest, identity)

    def reset_after_load(self, work: Mapping[str, Any] | None) -> None:
        """Reset after all state was loaded, except a result in flight."""
        self.synced, self.pending, self.written = False, None, None
        self.given_up = None
        forget_ended()  # an averaging in flight is dropped, and nothing else releases it
        if self.work is not None:
            self.work.load(work)
        if self.counters.averagings:
            self.duplicates.skip()

    def start_anew(self) -> None:
        """Implement `LocalUpdates.start_anew`."""
        self.averaging.anchor_()
        self.averaging.forget_()
        self.tensors.made_common()
        self.counters.last_full_sync, self.written = self.counters.step, None

    @property
    def unsynced(self) -> bool:
        """True if this rank made steps since the last full sync."""
        begun = self.work is not None and self.work.steps > 0
        return begun or self.counters.step > self.counters.last_full_sync

    @property
    def parts(self) -> int:
        """Number of fragments, which are averaged in turn."""
        return len(self._parts)

    def require_equal(self, step: int | None = None) -> None:
        """Compare the ranks as `Synchronizer.require_equal` does, at the local step by default."""
        self.settle()
        with _frozen_explained():
            super().require_equal(self.counters.step if step is None else step)

    def _anchors(self) -> dict[str, Tensor]:
        frozen = {f"{_FROZEN} {name}": p for name, p in self.tensors.frozen.items()}
        return {
            f"anchor of parameter {name}": anchor for name, anchor in self.averaging.anchors.items()
        } | frozen

    def _outer_momentum(self) -> dict[str, Tensor]:
        return {
            f"outer momentum of {name}": entry for name, entry in self.averaging.momentum.items()
        }

    def _agree_on(
        self, step: int, phase: str, *, last: bool = False, **facts: Any
    ) -> Pending[Answers]:
        self.settle()
        launched = self.agreement.launch(step, phase, first=False, last=last, **facts)

        def judged() -> Answers:
            with _frozen_explained():
                return launched.wait()

        return Pending(judged)

    def settle(self) -> None:
        """Wait for the agreement about a result in flight: ranks agree on one thing at a time."""
        pending = self.pending
        if pending is None or pending.agreement is None:
            return
        if pending.round is None:
            self._send(pending)
            return
        self.pending = None
        answers = self._verified(pending)
        self.pending, pending.agreement = pending, Pending(lambda: answers)

    def before_step(self) -> None:
        """Set anchors to weights that were loaded since the last full sync."""
        if self.group.size > 1 and self.work is None:
            refuse_scaler(self.tensors.optimizer)
        if self.unsynced or self.pending or self._members is not None or self.averaging.plain:
            return
        # other code wrote the parameters: not a change by this rank's steps
        if (digest := self.averaging.written()) is not None:
            self.averaging.anchor_()
            self.written = digest if self.group.shards is None else "a shard"  # shards differ

    def after_step(self) -> None:
        """Count a local step and do what follows from it."""
        self.steps_made += 1
        try:
            if self.work is not None:
                self._after_step_of(self.work)
            else:
                self._after_counted_step()
        finally:  # if the averaging fails, its loss must not count in the next step
            self.interval.forget()

    def _after_counted_step(self) -> None:
        at = self.counters
        at.step += 1
        self.synced = False
        # first the result in flight: its anchors are those of the next averaging
        if self.pending is not None and not self._advance(self.pending):
            return
        if at.step <= self.config.begin_step:
            self._average_all("averaging", with_loss=True)
        else:
            self.average_if_due()

    def _advance(self, pending: PendingAveraging) -> bool:
        """Continue an averaging in flight; return True if this rank continues with the others."""
        # the step alone decides what is launched: in the same order on all ranks, whoever is late
        steps, delay = self.counters.step - pending.step, self.config.delay
        if steps >= delay:
            return self._apply_pending()
        if self._overlaps and pending.round is None:
            self._send(pending)
        elif self._overlaps and steps == delay - 1:
            self.pending = None  # after an error it is not applied
            self._verify(pending)
            self.pending = pending
        return True

    def _after_step_of(self, work: RoundWork) -> None:
        """Count a step of a timed round. `Counters.step`, equal on all ranks, moves later."""
        self.synced = False
        work.step()
        config, k_steps = self.config, self.interval.k_steps
        arrived = self.pending is not None and self._over(
            work, config.delay, config.delay / k_steps
        )
        if arrived and not self._apply_pending():
            return
        first = self.counters.step < config.begin_step
        most = max(1, k_steps // config.fragments)
        if first or self._over(work, most, 1 / config.fragments):
            self.end_round()

    def _over(self, work: RoundWork, most_steps: int, share: float) -> bool:
        """Return True after `most_steps` steps or `share` of the seconds on the site's clock."""
        over, shards = work.over(most_steps, share), self.group.shards
        if shards is None or work.steps >= most_steps:
            return over
        return shards.gather_now(bytes([over]), "asking whether a round is over")[0] == b"\x01"

    def end_round(self) -> None:
        """Average this rank's work in a timed round, even none; nothing if all are `flushing`."""
        if self.counters.step < self.config.begin_step:
            self._average_all("averaging", with_loss=False)
        else:
            self._average_part()

    def average_if_due(self) -> None:
        """Average the next fragment if its interval is over."""
        at = self.counters
        if at.step - at.last >= max(1, self.interval.k_steps // self.config.fragments):
            self._average_part()
        elif self.interval.lacks_start:
            self.interval.read(self._agree("first loss", None, []).wait(), at.step)

    def flush(self) -> None:
        """Implement `LocalUpdates.flush`."""
        work = self._work_report()
        changed = list(self.tensors.changed_buffers())
        # a write that is not from these steps, such as by a second optimizer after the averaging
        moved = self.averaging.written() if self.counters.averagings and not self.unsynced else None
        answers = self._agree_on(
            self.counters.step, "flushing", work=work, state=changed, moved=moved
        ).wait()
        self._apply_pending(goes_on=True)
        # decided from the answers, so that all ranks enter the averaging or none does
        some = any(
            steps for _, (_, steps, _) in answers.of("work")
        )  # other ranks may have made steps
        parted = any(answers.differences("moved"))
        if some or self.counters.step > self.counters.last_full_sync:
            self._average_all("averaging for the last time", with_loss=False)
        elif parted or any(state for _, state in answers.of("state")):
            # such as after update_bn(): no step was made, so values are averaged as they are
            pending = self._propose("averaging without a step", [], written=parted)
            self._agreed(pending)
            self._finish(pending)
            if parted:
                self.averaging.anchor_()
            self._after_averaging(False)

    def _average_all(self, phase: str, *, with_loss: bool) -> None:
        at = self.counters
        self._apply_pending(goes_on=True)  # a loaded state may hold one
        pending = self._propose(phase, list(self.tensors.params))
        answers = self._agreed(pending)
        if self.all_flush:
            return
        if with_loss:
            self.interval.read(answers, at.step)
        self._finish(pending)
        self._share_scale(answers)
        at.last = at.last_full_sync = at.step
        self.synced = True
        self._after_averaging(False)

    def _average_part(self) -> None:
        self._apply_pending(goes_on=True)
        at = self.counters
        # the counter is equal on all ranks, and so is the fragment
        part = at.fragments_averaged % len(self._parts)
        delayed = self.config.delay > 0
        pending = self._propose(f"averaging part {part}", self._parts[part], part, keep=delayed)
        pending.last = at.last
        if self._answers_at_once:
            answers = self._agreed(pending)
            if self.all_flush:
                return
            k_steps = self.interval.read(answers, at.step, adapt=True)
            if delayed:
                self._send(pending)
                self._begin_round(pending, part)
            else:
                self._finish(pending, part)
                if len(self._parts) == 1:
                    at.last_full_sync = at.step
            self._share_scale(answers)
            self.interval.k_steps = k_steps
        self.pending = pending if delayed else None
        at.last = at.step
        at.fragments_averaged += 1
        self.synced = True
        if not delayed:
            self._after_averaging(False)

    def _send(self, pending: PendingAveraging) -> None:
        """Launch the messages of an averaging in flight, once ranks have agreed to send them."""
        if pending.agreement is not None:
            try:
                self._agreed(pending)
            except BaseException:  # as if it had not been measured
                self.pending, self.counters.last = None, pending.last
                self.counters.fragments_averaged -= 1
                raise
        try:
            self._launch(pending)
        except Regrouped:  # launched again when it is waited for
            pending.round = None

    def _launch(self, pending: PendingAveraging) -> None:
        self.averaging.launch(
            pending, record=self._members is not None and self._members._has_joiners
        )

    def _propose(
        self,
        phase: str,
        names: list[str],
        part: int | None = None,
        *,
        keep: bool = False,
        written: bool = False,
    ) -> PendingAveraging:
        """Measure the change of this rank, and launch the agreement to send it."""
        step = self.counters.step
        self.averaging.make_common()
        problem = self.tensors.difference()
        if problem is None and self.work is not None:
            problem = self.work.problem
        state: dict[str, Tensor] = {}
        pending = self.averaging.measure(step, {}, {})  # a rank with a problem only votes
        changed: dict[str, bool] = {}
        if problem is None:
            copies = self.tensors.weight_copies()
            if self.config.average_state:
                own = {copy.data_ptr() for copy in copies.values()}
                states = self.tensors.state(names).items()
                state = {key: tensor for key, tensor in states if tensor.data_ptr() not in own}
            values = {**self.tensors.params, **copies}
            changed = self.tensors.changed_buffers()
            others = self.tensors.parameters() if written else {}
            changed |= dict.fromkeys(others, True)
            pending = self.averaging.measure(
                step,
                {name: values[name] for name in names},
                {**self.tensors.buffers(), **state, **others},
                keep=keep,
            )
            # a buffer of infinities, such as a mask, is valid while it does not change
            if (culprit := pending.first_not_finite(changed)) is not None:
                problem = (
                    f"{culprit} is not finite at the averaging of step {step}: lower the learning "
                    "rate, clip gradients, or check the data of that rank"
                )
            count, params = self.group.replica_count, self.tensors.params.values()
            self.duplicates.sample(pending.moved.values(), params, count)
        pending.agreement = self._agree(phase, problem, [*state, *changed], part)
        return pending

    def _agreed(self, pending: PendingAveraging) -> Answers:
        """Wait until all ranks have a change to send: nothing is sent before."""
        agreement, pending.agreement = pending.agreement, None
        assert agreement is not None, "proposed"
        answers = agreement.wait()
        self.all_flush = all("flushing" in report for report in answers)
        shards, buffers = self.group.shards, self.tensors.buffers()
        if shards is not None and buffers:
            pending.refused = self.tensors.settle_buffers(shards)
            wide = {key: widened(buffer) for key, buffer in buffers.items()}
            # a delayed averaging must not see later writes into the buffers
            keep = pending.delayed
            pending.extras |= {key: w.clone() if keep else w for key, w in wide.items()}
        # average only optimizer state that all ranks have (a parameter without a gradient has none
        # yet), and only buffers that some rank has changed
        reported = [set(report.get("state", [])) for report in answers]
        pending.extras = {
            key: value
            for key, value in pending.extras.items()
            if (all if key.startswith("state ") else any)(key in keys for keys in reported)
        }
        if self.work is not None:
            self._weigh(pending, answers)
        return answers

    def _weigh(self, pending: PendingAveraging, answers: Answers) -> None:
        """Weight this rank's change by its work, and advance to the step on which all agree."""
        works = [(steps, tokens) for _, (_, steps, tokens) in answers.of("work")]
        weights, width = weights_of(works), 1
        if self.group.shards is not None:
            width = self.group.shards.size
            sites = [of_site(works[at : at + width]) for at in range(0, len(works), width)]
            weights = weights_of(sites)
        self.weight = weights[self.group.answer_index // width]
        self.averaging.weigh_(pending, self.weight)
        pending.step += max(steps for _, (steps, _, _) in answers.of("work"))

    def _work_report(self, part: int | None = None) -> tuple[int, int, int | None] | None:
        """Return the steps of this timed round, and the work on a fragment or the whole model."""
        return None if self.work is None else (self.work.steps, *self.work.totals(part))

    def _begin_round(self, pending: PendingAveraging, part: int | None) -> None:
        """Advance to the step on which all ranks agreed and start the next timed round."""
        if self.work is not None:
            self.counters.step = pending.step
            self.work.begin(part)

    def _agree(
        self, phase: str, problem: str | None, state: list[str], part: int | None = None
    ) -> Pending[Answers]:
        loss, rate = self.interval.report()
        failure = None
        if self.given_up is not None:
            text = f"rank {self.group.rank}: {self.given_up}. Nothing was applied on any rank"
            failure = NonFinite.__name__, text
        return self._agree_on(
            self.counters.step,
            phase,
            user_error=problem,
            loss=loss,
            rate=rate,
            scale=None if self._scaler is None else self._scaler.scale,
            state=state,
            work=self._work_report(part),
            flushing=self.flushing or None,
            failure=failure,
        )

    def _share_scale(self, answers: Answers) -> None:
        scales = [scale for _, scale in answers.of("scale")]
        if self._scaler is not None and scales:
            self._scaler.take_scale(min(scales))

    def _finish(self, pending: PendingAveraging, part: int | None = None) -> None:
        """Send, verify, vote, and only then apply. Retry if members have left meanwhile."""
        answers = self._verified(pending)
        names = list(pending.moved)
        if self.work is not None:
            # members may have left since the weights were agreed on: divide by those that voted
            weights = [weight for _, weight in answers.of("weight")]
            pending.share = sum(weights) / len(weights)
        if not pending.delayed:  # a delayed result: the round began when it was measured
            self._begin_round(pending, part)
        # second vote passed: from here on nothing may fail on one rank only
        targets = self.tensors.buffers() | self.tensors.state(names) | self.tensors.parameters()
        self.averaging.commit_(pending, targets, self.tensors.weight_copies())
        self.tensors.made_common(pending.extras)
        self.written = None
        self.counters.averagings += 1
        if self._members is not None:
            self._members._receive_reports([report.get("members", {}) for report in answers])
            self.last = pending if self._members._has_joiners else None

    def _verified(self, pending: PendingAveraging) -> Answers:
        """Return the answers of all ranks after everything has arrived."""
        while True:
            if pending.agreement is None:
                self._verify(pending)
            # None again if members have left meanwhile
            if pending.agreement is not None:
                try:
                    return pending.agreement.wait()
                except Regrouped:
                    pending.round = pending.agreement = None

    def _verify(self, pending: PendingAveraging) -> None:
        """Wait for the messages and launch the agreement that all of them are sound."""
        try:
            with self.group.one_attempt():
                if pending.round is None:
                    self._launch(pending)
                pending.agreement = self._agree_on_arrived(pending)
        except Regrouped:
            pending.round = pending.agreement = None

    def _agree_on_arrived(self, pending: PendingAveraging) -> Pending[Answers]:
        # a rank that received damaged data still votes: if it raised here, the others would wait
        corrupt = pending.refused
        try:
            pending.finish()
        except PayloadCorrupt as refusal:
            corrupt = str(refusal)
        user_error = self.tensors.difference()
        if user_error is None:
            there = {*self.tensors.buffers(), *self.tensors.state(pending.moved)}
            there |= self.tensors.parameters().keys()
            user_error = _missing_state(key for key in pending.extras if key not in there)
        if self.same is not None and self.group.size > 1:
            self.same.read(pending.step, self.counters.averagings)
            assert pending.round is not None, "launched"
            self.same.sums = pending.round.sums_digest
        return self._agree_on(
            pending.step,
            "averaged",
            last=True,
            corrupt=corrupt,
            user_error=user_error,
            members=None if self._members is None else self._members._report(),
            weight=None if self.work is None else self.weight,
        )

    def _apply_pending(self, *, goes_on: bool = False) -> bool:
        """Apply a result in flight; return True if this rank continues with the others."""
        pending = self.pending
        if pending is None:
            return True
        if pending.round is None and pending.agreement is not None:
            self._send(pending)
        # hand-over: after an error the result must not be applied a second time
        self.pending = None
        self._finish(pending)
        return self._after_averaging(goes_on)


class _SameWrites:
    """Check that writes of other code into the parameters were the same on all ranks."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def report(self, vote: Vote) -> Report:
        """Implement `Check.report`."""
        written = self._averager.written
        return {} if vote.last or written is None else {"written": written}

    def judge(self, vote: Vote, answers: Answers) -> None:
        """Implement `Check.judge`."""
        for first, ours, rank, theirs in answers.differences("written"):
            subject = f"ranks {first} and {rank}" if ours and theirs else "some ranks"
            raise Mismatch(
                f"{vote.purpose}: {subject} wrote parameters differently after the last averaging "
                "(or the start) and before the next step. Load or change weights in the same way "
                "on all ranks"
            )


def _missing_state(keys: Iterable[str]) -> str | None:
    """Describe a result in flight whose optimizer state no longer exists."""
    key = next(iter(keys), None)
    if key is None:
        return None
    return (
        f"{key} was sent but no longer exists, so its mean cannot be stored: load the optimizer's "
        "state before the state of local updates"
    )


@contextmanager
def _frozen_explained() -> Iterator[None]:
    """Add to errors why a frozen parameter may differ by design."""
    try:
        yield
    except Diverged as error:
        if f": {_FROZEN} " in str(error):
            error.add_note(
                "Local updates do not average frozen parameters. If the script updates them from "
                "trained weights, as a moving-average teacher does, make them buffers (which are "
                "averaged), keep them outside the model, or update them only where sync.synced is "
                "true."
            )
        raise
