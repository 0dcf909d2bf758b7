"""Which averaging follows after a local step, and how it is carried out: measure, agree, send,
verify, apply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from thinwire.comm import Group
from thinwire.core.fragments import cut
from thinwire.errors import PayloadCorrupt
from thinwire.sync.agreement import COMPARING, Report, agree_on_step
from thinwire.sync.averaging import Averaging, Flight
from thinwire.sync.digest import RollingDigest
from thinwire.sync.likeness import Likeness
from thinwire.sync.local_config import LocalConfig
from thinwire.sync.local_model import LocalModel
from thinwire.sync.own_state import OwnState
from thinwire.sync.pace import Pace

__all__ = ["Counters", "OwnScale", "Turns", "parts_of"]


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


class Turns:
    """Follows the local steps and averages when a turn has come.

    An averaging that fails, on whichever rank, changes nothing on any rank but `Counters.step`.
    """

    def __init__(
        self,
        group: Group,
        tensors: LocalModel,
        config: LocalConfig,
        *,
        pace: Pace,
        averaging: Averaging,
        counters: Counters,
        scaler: OwnScale | None,
        identity: str = "",
        digest_every: int = 0,
    ) -> None:
        self.tensors = tensors
        self.pace = pace
        self.averaging = averaging
        self.counters = counters
        self.synced = False
        """Whether the last step took part in an averaging (with a delay: measured one)."""
        self.likeness = Likeness("changes")
        self.pending: Flight | None = None
        """An averaging that is on its way."""
        self._group = group
        self._config = config
        self._parts = parts_of(tensors, config.fragments)
        self._scaler = scaler
        self._identity = identity
        self.digest: RollingDigest | None = None
        """Of anchors, outer momentum and what does not train, at every averaging."""
        self.own: OwnState | None = None
        """Of what this rank has kept back."""
        if digest_every:
            slices = max(1, digest_every // pace.k_steps)
            self.digest = RollingDigest(self._anchors, self._outer_momentum, every=slices)
            self.digest.start_from(counters.step)
            self.own = OwnState(
                lambda: {f"kept error of {name}": e for name, e in averaging.errors.items()}
            )

    def require_equal(self) -> None:
        """See `LocalUpdates.require_equal`."""
        if self.digest is not None:
            sent = self._group.bytes_sent
            self._vote(Report(self.counters.step, COMPARING, damaged=self._damage()))
            if self._group.size > 1:
                self.digest.require_equal(self._group, self.counters.step)
            self._group.bytes_sent = sent  # no exchange of an update

    def _anchors(self) -> dict[str, Tensor]:
        frozen = {
            f"parameter {n}": p
            for n, p in self.tensors.model.named_parameters()
            if n not in self.tensors.params
        }
        return {
            f"anchor of parameter {name}": anchor for name, anchor in self.averaging.anchors.items()
        } | frozen

    def _outer_momentum(self) -> dict[str, Tensor]:
        return {
            f"outer momentum of {name}": entry for name, entry in self.averaging.momentum.items()
        }

    def _damage(self) -> str | None:
        return None if self.own is None else self.own.damage(self.counters.step, everything=True)

    def _vote(self, report: Report, digest: RollingDigest | None = None) -> list[Report]:
        return agree_on_step(self._group, replace(report, engine=self._identity), [], digest)

    def after_step(self) -> None:
        """Count a local step and do what follows from it."""
        at = self.counters
        at.step += 1
        self.synced = False
        if self.pending is not None and at.step >= self.pending.step + self._config.delay:
            self._land()
        if at.step <= self._config.begin_step:
            self._average_all("averaging", with_loss=True)
        elif at.step - at.last >= max(1, self.pace.k_steps // self._config.fragments):
            self._take_turn()
        elif self.pace.lacks_start:
            self.pace.read(self._agree("first loss", None, []), at.step)
        self.pace.forget()

    def flush(self) -> None:
        """See `LocalUpdates.flush`."""
        self._vote(Report(self.counters.step, "flushing"))
        self._land()
        if self.counters.step > self.counters.whole:
            self._average_all("averaging for the last time", with_loss=False)

    def _average_all(self, phase: str, *, with_loss: bool) -> None:
        at = self.counters
        flight, reports = self._measure(phase, list(self.tensors.params), keep=False)
        if with_loss:
            self.pace.read(reports, at.step)
        self._fly(flight)
        self._share_scale(reports)
        at.last = at.whole = at.step
        self.synced = True

    def _take_turn(self) -> None:
        self._land()
        at = self.counters
        part = at.turn % len(self._parts)
        delayed = self._config.delay > 0
        flight, reports = self._measure(f"averaging part {part}", self._parts[part], keep=delayed)
        k_steps = self.pace.read(reports, at.step, adapt=True)
        if delayed:
            self.averaging.launch(flight)
            self.pending = flight
        else:
            self._fly(flight)
            if len(self._parts) == 1:
                at.whole = at.step
        self._share_scale(reports)
        self.pace.k_steps = k_steps
        at.last = at.step
        at.turn += 1
        self.synced = True

    def _measure(self, phase: str, names: list[str], *, keep: bool) -> tuple[Flight, list[Report]]:
        """What this rank would send, once all ranks have agreed that it may be sent."""
        step = self.counters.step
        problem = self.tensors.difference()
        state = self.tensors.state(names) if self._config.average_state and problem is None else {}
        flight = None
        if problem is None:
            values = {name: self.tensors.params[name] for name in names}
            flight = self.averaging.measure(
                step, values, {**self.tensors.buffers(), **state}, keep=keep
            )
            if (culprit := flight.first_not_finite()) is not None:
                problem = (
                    f"{culprit} is not finite at the averaging of step {step}: lower the learning "
                    "rate, clip"
                )
                problem += " gradients, or look at the data of that rank"
        likeness = (
            None if flight is None else self.likeness.of(flight.moved.values(), self._group.size)
        )
        reports = self._agree(phase, problem, list(state), likeness)
        self.likeness.hear([report.likeness for report in reports], self.tensors.params.values())
        assert flight is not None
        # a rank whose parameters got no gradient yet has no state to give
        common = set(state).intersection(*(report.state for report in reports))
        flight.extras = {
            key: v for key, v in flight.extras.items() if key not in state or key in common
        }
        return flight, reports

    def _agree(
        self, phase: str, problem: str | None, state: list[str], likeness: str | None = None
    ) -> list[Report]:
        loss, rate = self.pace.report()
        scale = None if self._scaler is None else self._scaler.scale
        report = Report(
            self.counters.step,
            phase,
            misuse=problem,
            loss=loss,
            rate=rate,
            scale=scale,
            state=state,
        )
        if state or phase.startswith("averaging"):
            report = replace(report, damaged=self._damage())
        return self._vote(replace(report, likeness=likeness))

    def _share_scale(self, reports: Sequence[Report]) -> None:
        scales = [report.scale for report in reports if report.scale is not None]
        if self._scaler is not None and scales:
            self._scaler.take_scale(min(scales))

    def _fly(self, flight: Flight) -> None:
        """Send, verify, vote, and only then apply."""
        if flight.round is None:
            self.averaging.launch(flight)
        corrupt = None
        try:
            flight.finish()
        except PayloadCorrupt as refusal:
            corrupt = str(refusal)
        report = Report(flight.step, "averaged", corrupt=corrupt, misuse=self.tensors.difference())
        if self.digest is not None and self._group.size > 1:
            report = replace(
                report,
                digest=self.digest.at(flight.step, self.counters.averagings),
                sums=flight.digest,
            )
        self._vote(report, self.digest)
        names = list(flight.moved)
        self.averaging.commit_(flight, {**self.tensors.buffers(), **self.tensors.state(names)})
        self.counters.averagings += 1
        if self.own is not None:
            self.own.seal(self.counters.step)

    def _land(self) -> None:
        if self.pending is not None:
            flight, self.pending = self.pending, None
            self._fly(flight)


def parts_of(tensors: LocalModel, fragments: int) -> list[list[str]]:
    """The names of the parameters that are averaged in one turn, by turn."""
    names = list(tensors.params)
    return [
        [names[i] for i in part]
        for part in cut([p.numel() for p in tensors.params.values()], fragments)
    ]
