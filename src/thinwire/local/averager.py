"""Which averaging follows after a local step, and how it is carried out: measure, agree, send,
verify, apply.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from thinwire.comm import Group, Regrouped
from thinwire.comm.private import forget_ended
from thinwire.errors import Diverged, NonFinite, PayloadCorrupt
from thinwire.exchange.digest import RollingDigest
from thinwire.exchange.likeness import Likeness
from thinwire.exchange.vote import COMPARING, Report, agree_on_step
from thinwire.local.averaging import Averaging, PendingAveraging, widened
from thinwire.local.config import LocalConfig
from thinwire.local.fragments import fragments_of
from thinwire.local.interval import Interval
from thinwire.local.model import LocalModel, refuse_scaler
from thinwire.local.work import RoundWork, weights_of

__all__ = [
    "Averager",
    "Counters",
    "OwnScale",
]

_FROZEN = "frozen parameter"
"""What parameters that do not train are called in errors."""


class Roll(Protocol):
    """Who takes part, where members come and go; `thinwire.members.Members` is one."""

    @property
    def gives(self) -> bool:
        """Whether a newcomer hears of every averaging from this rank."""

    def report(self) -> dict[str, Any]:
        """What this rank says in the agreement that ends an averaging."""

    def hear(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Remember what all ranks have said there."""


class OwnScale(Protocol):
    """A loss scale that every rank adapts on its own between two averagings;
    `thinwire.amp.LossScaler` is one.
    """

    @property
    def scale(self) -> float:
        """This rank's scale."""

    def take_scale(self, scale: float) -> None:
        """Go on with the smallest scale of all ranks."""


@dataclass(slots=True)
class Counters:
    """Where local updates stand; the same on all ranks."""

    last: int
    """Step of the last averaging."""
    step: int = 0
    """Local steps taken."""
    whole: int = 0
    """Step after which all ranks were equal in everything."""
    turn: int = 0
    """Averagings of single parts so far."""
    averagings: int = 0
    """Averagings so far."""


class Averager:
    """Follows the local steps and averages when a turn has come.

    An averaging that fails, on whichever rank, changes nothing on any rank but `Counters.step`,
    which counts the local steps that were made.
    """

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
        roll: Roll | None = None,
        after_averaging: Callable[[bool], bool] = lambda goes_on: True,
    ) -> None:
        """`after_averaging` says whether this rank goes on with the others, and is told whether
        another averaging follows in the same call.
        """
        self.tensors = tensors
        self.interval = interval
        self.averaging = averaging
        self.counters = counters
        self.synced = False
        """Whether the last step took part in an averaging (with a delay: measured one)."""
        seconds = config.round_seconds
        self.work = None if seconds is None else RoundWork(seconds)
        """What this rank has done in a round that ends by time; None where steps are counted."""
        self.steps_made = 0
        """Local steps since this was made, dropped ones too."""
        self.counting_only = False
        """Whether steps are counted and no round ends by time, since all are about to flush."""
        self.likeness = Likeness("changes")
        self.given_up: str | None = None
        """Why this rank cannot go on; all hear of it at the next averaging."""
        self._written: str | None = None
        self.pending: PendingAveraging | None = None
        """An averaging that is on its way."""
        self.last: PendingAveraging | None = None
        """The last averaging that was applied, while a newcomer needs it."""
        self._roll, self._after_averaging = roll, after_averaging
        self._group = group
        self.config = config
        self._parts = fragments_of(tensors.trained, config)
        self._scaler = scaler
        self._weight = 1.0
        self._identity = identity
        self.digest: RollingDigest | None = None
        """Of anchors, outer momentum and what does not train, at every averaging."""
        if digest_every:
            slices = max(1, digest_every // interval.longest)
            self.digest = RollingDigest(self._anchors, self._outer_momentum, every=slices)
            self.digest.start_from(counters.step)

    def begin_anew(self, tokens: int | None) -> None:
        """All state has been loaded, but for a result on its way.

        Args:
            tokens: Observed since the last step; None where none were told.
        """
        self.synced, self.pending, self._written = False, None, None
        self.given_up = None
        forget_ended()  # what was on its way has no other end
        if self.work is not None:
            self.work.begin()
            if tokens is not None:
                self.work.observe(tokens)
        if self.counters.averagings:
            self.likeness.skip()

    def start_anew(self) -> None:
        """See `LocalUpdates.start_anew`."""
        self.averaging.anchor_()
        self.averaging.forget_()
        self.tensors.made_common()
        self.counters.whole, self._written = self.counters.step, None

    @property
    def apart(self) -> bool:
        """Whether this rank made steps since all were equal in everything."""
        begun = self.work is not None and self.work.steps > 0
        return begun or self.counters.step > self.counters.whole

    @property
    def parts(self) -> int:
        """Into how many the model is cut, which are averaged in turn."""
        return len(self._parts)

    def require_equal(self) -> None:
        """See `LocalUpdates.require_equal`."""
        if self.digest is not None:
            with self._group.uncounted():  # no exchange of an update
                self._vote(Report(self.counters.step, COMPARING))
                if self._group.size > 1:
                    with _frozen_explained():
                        self.digest.require_equal(self._group, self.counters.step)

    def _anchors(self) -> dict[str, Tensor]:
        frozen = {f"{_FROZEN} {name}": p for name, p in self.tensors.frozen.items()}
        return {
            f"anchor of parameter {name}": anchor for name, anchor in self.averaging.anchors.items()
        } | frozen

    def _outer_momentum(self) -> dict[str, Tensor]:
        return {
            f"outer momentum of {name}": entry for name, entry in self.averaging.momentum.items()
        }

    def _vote(self, report: Report, digest: RollingDigest | None = None) -> list[Report]:
        with _frozen_explained():
            return agree_on_step(self._group, replace(report, engine=self._identity), [], digest)

    def before_step(self) -> None:
        """Where all ranks should be equal, measure from the parameters as they are: weights may
        have been loaded since. Whether all ranks have loaded the same comes out at the averaging.
        """
        if self._group.size > 1 and self.work is None:
            refuse_scaler(self.tensors.optimizer)
        if self.apart or self.pending or self._roll is not None or self.averaging.plain:
            return
        # written by others: no change of this rank's steps
        if (digest := self.averaging.written()) is not None:
            self.averaging.anchor_()
            self._written = digest if self._group.shards is None else "a shard"  # shards differ

    def after_step(self) -> None:
        """Count a local step and do what follows from it."""
        self.steps_made += 1
        try:
            if self.work is not None:
                self._after_step_of(self.work)
            else:
                self._after_counted_step()
        finally:  # a loss that an averaging was refused for is not seen again
            self.interval.forget()

    def _after_counted_step(self) -> None:
        at = self.counters
        at.step += 1
        self.synced = False
        due = self.pending is not None and at.step >= self.pending.step + self.config.delay
        if due and not self._apply_pending():
            return
        if at.step <= self.config.begin_step:
            self._average_all("averaging", with_loss=True)
        else:
            self.average_if_due()

    def _after_step_of(self, work: RoundWork) -> None:
        """`Counters.step` moves at averagings alone, so that it is the same on all ranks."""
        self.synced = False
        work.step()
        if self.counting_only:
            return
        if self.counters.step < self.config.begin_step or work.over(self.interval.k_steps):
            self.end_round()

    def end_round(self) -> None:
        """Average what this rank has done in a round that ends by time, however little."""
        if self.counters.step < self.config.begin_step:
            self._average_all("averaging", with_loss=False)
        else:
            self._average_part()

    def average_if_due(self) -> None:
        """Average a part whose turn has come."""
        at = self.counters
        if at.step - at.last >= max(1, self.interval.k_steps // self.config.fragments):
            self._average_part()
        elif self.interval.lacks_start:
            self.interval.read(self._agree("first loss", None, []), at.step)

    def flush(self) -> None:
        """See `LocalUpdates.flush`."""
        work = None if self.work is None else self.work.told()
        changed = list(self.tensors.changed_buffers())
        # what is not of these steps, as of a second optimizer after the last averaging
        moved = self.averaging.written() if self.counters.averagings and not self.apart else None
        report = Report(self.counters.step, "flushing", work=work, state=changed, likeness=moved)
        reports = self._vote(report)
        self._apply_pending(goes_on=True)
        some = any(report.work and report.work[0] for report in reports)  # maybe on other ranks
        parted = any(report.likeness != reports[0].likeness for report in reports)
        if some or parted or self.counters.step > self.counters.whole:
            self._average_all("averaging for the last time", with_loss=False)
        elif any(report.state for report in reports):
            # as after update_bn(): no step, so that nothing else may move, momentum included
            pending, _ = self._measure("averaging buffers", [])
            self._finish(pending)
            self._after_averaging(False)

    def _average_all(self, phase: str, *, with_loss: bool) -> None:
        at = self.counters
        self._apply_pending(goes_on=True)  # one is left where a loaded run begins with these
        pending, reports = self._measure(phase, list(self.tensors.params))
        if with_loss:
            self.interval.read(reports, at.step)
        self._finish(pending)
        self._share_scale(reports)
        at.last = at.whole = at.step
        self.synced = True
        self._after_averaging(False)

    def _average_part(self) -> None:
        self._apply_pending(goes_on=True)
        at = self.counters
        part = at.turn % len(self._parts)
        delayed = self.config.delay > 0
        mixing = self.config.mixing
        pending, reports = self._measure(
            f"averaging part {part}", self._parts[part], mixing=mixing, keep=delayed
        )
        k_steps = self.interval.read(reports, at.step, adapt=True)
        if delayed:
            try:
                self._launch(pending)
            except Regrouped:  # then it is launched when it is waited for
                pending.round = None
            self.pending = pending
        else:
            self._finish(pending)
            if len(self._parts) == 1 and not mixing:
                at.whole = at.step
        self._share_scale(reports)
        self.interval.k_steps = k_steps
        at.last = at.step
        at.turn += 1
        self.synced = True
        if not delayed:
            self._after_averaging(False)

    def _launch(self, pending: PendingAveraging) -> None:
        self.averaging.launch(pending, heard=self._roll is not None and self._roll.gives)

    @property
    def _number(self) -> int:
        """Of the next averaging, from 1; a part of the model counts its own."""
        at = self.counters
        return at.averagings - at.turn + at.turn // len(self._parts) + 1

    def _measure(
        self, phase: str, names: list[str], *, mixing: float = 0.0, keep: bool = False
    ) -> tuple[PendingAveraging, list[Report]]:
        """What this rank would send, once all ranks have agreed that it may be sent."""
        step = self.counters.step
        self.averaging.make_common()
        problem = self.tensors.difference()
        if problem is None and self.work is not None:
            problem = self.work.problem
        with_state = self.config.averages_state(self._number)
        state = self.tensors.state(names) if with_state and problem is None else {}
        pending = None
        changed: dict[str, bool] = {}
        if problem is None:
            values = {name: self.tensors.params[name] for name in names}
            changed = self.tensors.changed_buffers()
            pending = self.averaging.measure(
                step,
                values,
                {**self.tensors.buffers(), **state},
                mixing=mixing,
                keep=keep,
                fold=self.work is None,
            )
            # a mask of infinities that nobody changes is no fault
            if (culprit := pending.first_not_finite(changed)) is not None:
                problem = (
                    f"{culprit} is not finite at the averaging of step {step}: lower the learning "
                    "rate, clip"
                )
                problem += " gradients, or look at the data of that rank"
        likeness = None
        if pending is not None:
            likeness = self.likeness.of(pending.moved.values(), self._group.replica_count)
        reports = self._agree(phase, problem, [*state, *changed], likeness)
        self.likeness.hear([report.likeness for report in reports], self.tensors.params.values())
        assert pending is not None
        shards, buffers = self._group.shards, self.tensors.buffers()
        if shards is not None and buffers:
            pending.refused = self.tensors.settle_buffers(shards)
            wide = {key: widened(buffer) for key, buffer in buffers.items()}
            pending.extras |= {key: w.clone() if keep else w for key, w in wide.items()}
        # a rank whose parameters got no gradient yet has no state to give; buffers that no rank has
        # changed stay as they are
        common = set(state).intersection(*(report.state for report in reports))
        common |= set(buffers).intersection(chain(*(report.state for report in reports)))
        pending.extras = {key: value for key, value in pending.extras.items() if key in common}
        if self.work is not None:
            self._weigh(pending, reports)
        return pending, reports

    def _weigh(self, pending: PendingAveraging, reports: Sequence[Report]) -> None:
        """Let this rank's part count by what it did, and go on to the step that all agree on."""
        works = [(report.work[0] or 0, report.work[1]) for report in reports if report.work]
        self._weight = weights_of(works)[self._group.rank]
        self.averaging.weigh_(pending, self._weight)
        pending.step += max(steps for steps, _ in works)

    def _agree(
        self, phase: str, problem: str | None, state: list[str], likeness: str | None = None
    ) -> list[Report]:
        loss, rate = self.interval.report()
        scale = None if self._scaler is None else self._scaler.scale
        report = Report(
            self.counters.step,
            phase,
            misuse=problem,
            loss=loss,
            rate=rate,
            scale=scale,
            state=state,
            work=None if self.work is None else self.work.told(),
            written=self._written,
            failure=None if self.given_up is None else self._failure(self.given_up),
            likeness=likeness,
        )
        return self._vote(report)

    def _failure(self, why: str) -> tuple[str, str]:
        text = f"rank {self._group.rank}: {why}. Nothing was applied on any rank"
        return NonFinite.__name__, text

    def _share_scale(self, reports: Sequence[Report]) -> None:
        scales = [report.scale for report in reports if report.scale is not None]
        if self._scaler is not None and scales:
            self._scaler.take_scale(min(scales))

    def _finish(self, pending: PendingAveraging) -> None:
        """Send, verify, vote, and only then apply; again, where ranks have gone meanwhile."""
        while True:
            try:
                with self._group.one_attempt():
                    reports = self._verified(pending)
                break
            except Regrouped:
                pending.round = None
        names = list(pending.moved)
        if self.work is not None:
            self.counters.step = pending.step
            # some may have gone since the weights were agreed on
            weights = [report.weight for report in reports if report.weight is not None]
            pending.share = sum(weights) / len(weights)
            self.work.begin()
        self.averaging.commit_(pending, {**self.tensors.buffers(), **self.tensors.state(names)})
        self.tensors.made_common(pending.extras)
        self._written = None
        self.counters.averagings += 1
        if self._roll is not None:
            self._roll.hear([report.members for report in reports])
            self.last = pending if self._roll.gives else None

    def _verified(self, pending: PendingAveraging) -> list[Report]:
        """What all ranks have said once everything had arrived."""
        if pending.round is None:
            self._launch(pending)
        corrupt = pending.refused
        try:
            pending.finish()
        except PayloadCorrupt as refusal:
            corrupt = str(refusal)
        misuse = self.tensors.difference()
        if misuse is None:
            there = {*self.tensors.buffers(), *self.tensors.state(pending.moved)}
            misuse = _not_there(key for key in pending.extras if key not in there)
        report = Report(pending.step, "averaged", corrupt=corrupt, misuse=misuse)
        if self.digest is not None and self._group.size > 1:
            report = replace(
                report,
                digest=self.digest.at(pending.step, self.counters.averagings),
                sums=pending.digest,
            )
        if self._roll is not None:
            report = replace(report, members=self._roll.report())
        if self.work is not None:
            report = replace(report, weight=self._weight)
        return self._vote(report, self.digest)

    def _apply_pending(self, *, goes_on: bool = False) -> bool:
        """Whether this rank goes on with the others; `goes_on` as there is an averaging to come
        in this call, before which nobody comes or goes.
        """
        if self.pending is None:
            return True
        pending, self.pending = self.pending, None
        self._finish(pending)
        return self._after_averaging(goes_on)


def _not_there(keys: Iterable[str]) -> str | None:
    """What is wrong where a result on its way belongs to optimizer state that is gone."""
    key = next(iter(keys), None)
    if key is None:
        return None
    return (
        f"{key} was sent and is not there any more, so the mean cannot be put into it: load the "
        "optimizer's state before that of local updates"
    )


@contextmanager
def _frozen_explained() -> Iterator[None]:
    """Say why a parameter that does not train may differ by design."""
    try:
        yield
    except Diverged as error:
        if f": {_FROZEN} " in str(error):
            error.add_note(
                "Local updates do not average frozen parameters. If the script moves them after "
                "weights that ranks train apart, as a teacher that is a moving average, make them "
                "buffers, which are averaged, keep the teacher outside the model, or move them "
                "only where sync.synced is true."
            )
        raise
