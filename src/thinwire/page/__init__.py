"""Live page of runs: who takes part, how far they are, who is slow and why, joins and deaths."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from statistics import fmean, median
from typing import Any

_SHOWN = (
    *("at", "step", "averagings", "loss", "bytes_sent", "bytes_received", "rate_bit_s"),
    *("waiting_share", "goodput", "lost_waiting", "lost_regrouping", "lost_joining", "lost_saving"),
    *("total_steps", "held_out_loss"),
)
_SLOWER, _NARROWER = 1.15, 0.67
_MOST_SAMPLES, _MOST_EVENTS, _MOST_POINTS = 8, 100, 400
_MOST_NAME = 64
_LEAST_SPAN_S, _MOST = 1e-3, 1e60  # rates of such numbers are finite
_LEAST_STEP = 1e-99
_SECONDS = 1, 5, 15, 60, 300, 600, 1800, 3600, 10800, 43200, 86400, 604800
_Row = dict[str, Any]


def report_of(stats: Mapping[str, Any], loss: Any) -> dict[str, float]:
    """Return what a member reports of its stats and of its last loss, None if unknown."""
    known = {"at": time.time(), **stats} | ({} if loss is None else {"loss": float(loss)})
    return {name: known[name] for name in _SHOWN if name in known}


def shown_name(name: object) -> str:
    """Return what the page shows of a name, which a stranger may have written."""
    return "".join(filter(str.isprintable, name[:_MOST_NAME])) if isinstance(name, str) else ""


@dataclass
class _Member:
    id: str
    since: float
    until: float | None = None
    name: str = ""
    beat: Any = None
    beat_s: float = 0.0
    reports: deque[_Row] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))

    @property
    def label(self) -> str:
        """Name and identity: another member may have the same name."""
        return f"{self.name} ({self.id})" if self.name else self.id


class RunView:
    """Members of one run, what became of those that have gone, and the curve of the loss.

    Args:
        silent_s: Age of the last heartbeat in seconds from which a member counts as silent.
    """

    def __init__(self, silent_s: float = 5.0) -> None:
        self.generation: int | None = None
        self._silent_s = silent_s
        self._members: dict[str, _Member] = {}
        self._events: deque[tuple[float, _Member, str]] = deque(maxlen=_MOST_EVENTS)
        self._curve: list[tuple[float, float]] = []
        self._sent: dict[str, float] = {}
        """Bytes by process, with those that have gone."""
        self.latest: _Row = {}
        """JSON values for the page, replaced as a whole: other threads read them."""

    def update(
        self,
        generation: int | None,
        found: Mapping[str, tuple[Any, Any]],
        fate: Callable[[str], str] = lambda _: "lost",
    ) -> None:
        """Take heartbeat and report of each member; `fate` tells what became of one."""
        now = time.time()
        for id in [*self._members]:
            if id not in found:
                member = self._members.pop(id)
                member.until = now
                self._events.append((now, member, fate(id)))
        self.generation = generation
        for id, (beat, report) in found.items():
            if id not in self._members:
                self._members[id] = _Member(id, now)
                self._events.append((now, self._members[id], "joined"))
            member = self._members[id]
            if isinstance(report, dict):
                member.name = member.name or shown_name(report.get("name"))
            if beat != member.beat or not member.beat_s:
                member.beat = beat
                member.beat_s = now
            numbers = _numbers(report)
            if "at" in numbers and numbers not in member.reports:
                member.reports.append(numbers)
                # one that has returned goes on counting
                self._sent[id.partition("+")[0]] = numbers.get("bytes_sent", 0.0)
        latest = [member.reports[-1] for member in self._members.values() if member.reports]
        losses = [report["loss"] for report in latest if "loss" in report]
        step = max((report.get("step", 0.0) for report in latest), default=0.0)
        if losses and (not self._curve or step > self._curve[-1][0]):
            self._curve.append((step, fmean(losses)))
            if len(self._curve) > _MOST_POINTS:
                del self._curve[1::2]
        self.latest = self._to_dict(now)

    def _to_dict(self, now: float) -> _Row:
        rows = [
            {
                "name": one.label,
                "since": one.since,
                "silent_s": now - one.beat_s,
                **_rates(one.reports),
            }
            for one in self._members.values()
        ]
        for row in rows:
            silent = row["silent_s"] > self._silent_s
            row["note"] = f"silent for {row['silent_s']:.0f} s" if silent else _slow(row, rows)
        sent = sum(self._sent.values())
        run = {"now": now, "generation": self.generation, "sent": sent, "members": rows}
        # a name that came after the member itself counts for its first events too
        events = [{"at": at, "who": one.label, "what": event} for at, one, event in self._events]
        # the event of a present one may be among those that were dropped
        known = [*(one for _, one, _ in self._events), *self._members.values()]
        lives = {(one.since, one.id): one for one in known}
        stays: dict[str, list[tuple[float, float | None]]] = {}
        for _, one in sorted(lives.items()):
            stays.setdefault(one.label, []).append((one.since, one.until))
        steps, losses = zip(*self._curve or [(0.0, 0.0)], strict=True)
        axes = {
            "steps": _marks(steps[0], steps[-1], [1]),
            "losses": _marks(min(losses), max(losses)),
            "ago": _marks(0.0, now - min(lives, default=(now, ""))[0], _SECONDS),
        }
        drawn = {"curve": [*self._curve], "stays": stays, "axes": axes}
        return {**run, "events": events, **drawn}


def _marks(low: float, high: float, steps: Sequence[float] = ()) -> list[float]:
    """Return at most six round numbers of an axis, one of `steps` apart if these are enough."""
    least = max((high - low) / 5, _LEAST_STEP)
    unit = 10.0 ** floor(log10(least))
    round_steps = (factor * unit for factor in (1, 2, 5, 10, 20))
    step = next(one for one in (*steps, *round_steps) if one >= least)
    return [at * step for at in range(ceil(low / step), floor(high / step) + 1)]


def _numbers(report: Any) -> dict[str, float]:
    """Return the known numbers of a report, which a stranger may have written."""
    found = [(name, report.get(name)) for name in _SHOWN] if isinstance(report, dict) else []
    return {
        name: float(value)
        for name, value in found
        if isinstance(value, int | float) and abs(value) < _MOST
    }


def _rates(reports: Sequence[_Row]) -> _Row:
    """Return the last report, with rates and seconds of a step since the first one."""
    if not reports:
        return {}
    first, last = reports[0], reports[-1]
    row = {**last}
    span_s = last["at"] - first["at"]
    if span_s > _LEAST_SPAN_S:
        for rate, name in (("up_bit_s", "bytes_sent"), ("down_bit_s", "bytes_received")):
            row[rate] = 8 * (last.get(name, 0.0) - first.get(name, 0.0)) / span_s
        if (steps := last.get("step", 0.0) - first.get("step", 0.0)) >= 1:
            row["step_s"] = span_s / steps
            row["computing_s"] = row["step_s"] * (1 - last.get("waiting_share", 0.0))
    return row


def _slow(row: _Row, rows: Sequence[_Row]) -> str:
    others = [other for other in rows if other is not row]
    busy = [other["computing_s"] for other in others if "computing_s" in other]
    lines = [other["rate_bit_s"] for other in others if other.get("rate_bit_s")]
    if busy and row.get("computing_s", 0.0) > _SLOWER * median(busy):
        return f"slow: computes {row['computing_s']:.2g} s a step, others {median(busy):.2g} s"
    if lines and 0 < row.get("rate_bit_s", 0.0) < _NARROWER * median(lines):
        rates = f"{row['rate_bit_s'] / 1e6:.3g} Mbit/s, others {median(lines) / 1e6:.3g}"
        return f"slow line: {rates}"
    return ""
