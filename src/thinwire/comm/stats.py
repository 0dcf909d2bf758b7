"""Statistics of a rank: numbers only, flat, under one set of names.

Measured here: the rate at which a rank sends, and its pace, which is compared with a plan.
"""

import math
from typing import Any, Protocol, runtime_checkable

_NAMES = (
    "step microsteps dropped_steps averagings k_steps sparsity loss_scale applied_share bytes_sent "
    "bytes_received bytes_between_nodes bytes_between_stages bytes_dense ratio wait_s rate_bit_s "
    "waiting_share goodput lost_waiting lost_regrouping lost_joining lost_saving grad_norm "
    "clipped_share drift error_norm joining_bytes joining_total_bytes joining_bit_s joining_left_s "
    "merge_steps batch_share published_step"
)
_ONES = "k_steps loss_scale applied_share goodput merge_steps batch_share"
_ONE = dict.fromkeys(_ONES.split(), 1)
_AT_START: dict[str, float] = {**dict.fromkeys(_NAMES.split(), 0), **_ONE, "ratio": math.inf}


def numbers(**found: float) -> dict[str, float]:
    """Return all statistics by name, see `thinwire.Engine.stats`; others have their first value.

    >>> numbers(step=10, bytes_sent=100, bytes_dense=400)["ratio"]
    4.0
    """
    every = _AT_START | found
    assert every.keys() == _AT_START.keys(), "all names are known"
    if every["bytes_sent"]:
        every["ratio"] = every["bytes_dense"] / every["bytes_sent"]
    return every


_ROUNDS = 20
_KEPT = 1 - 1 / _ROUNDS
"""Weight of an old mean, which covers about the last 20 rounds or exchanges."""
_LEAST_BYTES = 2**16
_SEEN_S = 1e-4


class Rate:
    """Moving mean of this rank's send throughput during exchanges."""

    def __init__(self) -> None:
        self._bytes = self._s = self._until_s = 0.0

    @property
    def bit_s(self) -> float:
        """Bits a second; 0 before the first exchange that counts."""
        return 8 * self._bytes / self._s if self._s else 0.0

    def ended(self, nbytes: float, launched_s: float, waits_s: float, now_s: float) -> None:
        """Count an exchange by the times of its launch, of the first wait, and of its end."""
        if nbytes < _LEAST_BYTES or now_s - waits_s < _SEEN_S:
            return
        seconds = now_s - max(launched_s, self._until_s)
        self._until_s = now_s
        self._bytes = _KEPT * self._bytes + nbytes
        self._s = _KEPT * self._s + seconds


@runtime_checkable
class Planned(Protocol):
    """Expectation of a run: a row of `thinwire.plan`."""

    @property
    def name(self) -> str:
        """Name of the strategy."""

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Seconds of a step: low, mid and high."""

    @property
    def waiting_share(self) -> float:
        """Share of a step that is spent on waiting."""


def planned_row(plan: Any) -> Planned | None:
    """Return the row of a plan: the recommended one, or the row itself."""
    row = plan[plan.recommended] if hasattr(plan, "recommended") else plan
    if row is None or isinstance(row, Planned):
        return row
    raise TypeError(
        f"plan must be what thinwire.plan returns, or a row of it such as plan['dense'], got "
        f"{plan!r} of type {type(plan).__name__}"
    )


class Pace:
    """Moving means over about the last 20 rounds; a round ends with an exchange.

    Args:
        planned: Expectation to compare the rounds with; None for no comparison.

    >>> pace = Pace()
    >>> for now_s, waited_s in ((0.0, 0.0), (1.0, 0.25), (2.0, 0.5)):
    ...     _ = pace.round(1, now_s, waited_s)
    >>> round(pace.waiting_share, 2)
    0.25
    """

    def __init__(self, planned: Planned | None = None) -> None:
        self._planned = planned
        self._now_s: float | None = None
        self._waited_s = 0.0
        self._mean_wait_s = self._mean_s = 0.0
        self._begun: tuple[float, float] | None = None
        self._lost_s = {"regrouping": 0.0, "joining": 0.0, "saving": 0.0}
        self._outside: list[float] = []

    @property
    def waiting_share(self) -> float:
        """Share of the time for which this rank waited; 0 before the second round."""
        return self._mean_wait_s / self._mean_s if self._mean_s else 0.0

    def exclude(self, seconds: float, lost: str = "saving") -> None:
        """Count seconds lost to something other than steps: regrouping, joining or saving."""
        self._lost_s[lost] += seconds

    def goodput(self, useful: int, dropped: int) -> dict[str, Any]:
        """Return the goodput since the first round, and the losses; see `numbers`."""
        if self._begun is None or self._now_s is None or self._now_s <= self._begun[0]:
            return {"goodput": 1.0}
        begun_s, waited_s = self._begun
        lost_s = {"waiting": self._waited_s - waited_s, **self._lost_s}
        whole_s = self._now_s - begun_s + lost_s["joining"]
        spent = 1 - sum(lost_s.values()) / whole_s
        counted = useful / max(useful + dropped, 1)
        shares = {f"lost_{name}": seconds / whole_s for name, seconds in lost_s.items()}
        return {"goodput": max(0.0, min(spent, 1.0)) * counted, **shares}

    def round(
        self, steps: int, now_s: float, waited_s: float, bit_s: float = 0.0, *, compare: bool = True
    ) -> str | None:
        """End a round of at least one step; return a warning after 20 in a row outside the plan.

        `waited_s`: seconds of waiting so far. `bit_s`: the measured rate, for the text; 0 if
        unknown. `compare`: the plan covers this round.
        """
        before_s = self._now_s
        self._now_s = now_s
        wait_s = waited_s - self._waited_s
        self._waited_s = waited_s
        if before_s is None:
            self._begun = now_s, waited_s
            return None
        self._mean_s = _KEPT * self._mean_s + now_s - before_s
        self._mean_wait_s = _KEPT * self._mean_wait_s + wait_s
        if self._planned is None or not compare:
            return None
        low, _, high = self._planned.step_seconds
        step_s = (now_s - before_s) / steps
        self._outside = [*self._outside, step_s] if not low <= step_s <= high else []
        if len(self._outside) < _ROUNDS:
            return None
        planned = self._planned
        self._planned = None
        step_s = sum(self._outside) / len(self._outside)
        rate = f", and sends at {bit_s / 1e6:.3g} Mbit/s" if bit_s else ""
        return (
            f"plan {planned.name!r}: a step takes {step_s:.3g} s in the last {_ROUNDS} rounds, and "
            f"{low:.3g} to {high:.3g} s were planned; this rank waits for "
            f"{100 * self.waiting_share:.0f} % of the time, where "
            f"{100 * planned.waiting_share:.0f} % were planned{rate}: measure again with thinwire "
            "probe, and plan again"
        )
