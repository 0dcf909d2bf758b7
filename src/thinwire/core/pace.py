"""How a run keeps to its plan: seconds of a step, and the share of them that is waiting."""

from typing import Any, Protocol

__all__ = ["Pace", "Planned", "planned_row"]

_ROUNDS = 20
_KEPT = 1 - 1 / _ROUNDS


class Planned(Protocol):
    """What was expected of a run: a row of `thinwire.plan`."""

    @property
    def name(self) -> str:
        """Of the strategy."""
        ...

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Of a step: low, mid and high."""
        ...

    @property
    def waiting_share(self) -> float:
        """The part of a step that is not spent on the step itself."""
        ...


def planned_row(plan: Any) -> Planned | None:
    """The row that is meant: a plan stands for the one that it recommends.

    Raises:
        TypeError: Neither a plan nor a row of one.
    """
    row = plan[plan.recommended] if hasattr(plan, "recommended") else plan
    if row is None or all(hasattr(row, name) for name in ("name", "step_seconds", "waiting_share")):
        return row  # type: ignore[no-any-return]
    raise TypeError(
        f"plan must be what thinwire.plan returns, or a row of it such as plan['dense'], got "
        f"{plan!r} of type {type(plan).__name__}"
    )


class Pace:
    """Moving means over about the last 20 rounds; a round ends with an exchange.

    Args:
        planned: What the rounds are compared with; None for nothing.
    """

    def __init__(self, planned: Planned | None = None) -> None:
        self._planned = planned
        self._now_s: float | None = None
        self._waited_s = 0.0
        self._mean_wait_s = self._mean_s = 0.0
        self._outside: list[float] = []

    @property
    def waiting_share(self) -> float:
        """The part of the time for which this rank was blocked; 0 before the second round."""
        return self._mean_wait_s / self._mean_s if self._mean_s else 0.0

    def round(
        self,
        steps: int,
        now_s: float,
        waited_s: float,
        bit_s: float = 0.0,
        *,
        compare: bool = True,
    ) -> str | None:
        """A round is over.

        Args:
            steps: That it has had, at least 1.
            now_s: The time, by any clock.
            waited_s: Seconds of waiting so far.
            bit_s: The measured rate, for the text; 0 where it is not known.
            compare: Whether the round is one that the plan is about.

        Returns:
            What to warn of, once: 20 rounds in a row were all outside what was planned.
        """
        before_s, self._now_s = self._now_s, now_s
        wait_s, self._waited_s = waited_s - self._waited_s, waited_s
        if before_s is None:
            return None
        self._mean_s = _KEPT * self._mean_s + now_s - before_s
        self._mean_wait_s = _KEPT * self._mean_wait_s + wait_s
        if self._planned is None or not compare:
            return None
        low, _, high = self._planned.step_seconds
        step_s = (now_s - before_s) / steps
        self._outside = [*self._outside, step_s] if not low <= step_s <= high else []
        return self._departure(bit_s) if len(self._outside) == _ROUNDS else None

    def _departure(self, bit_s: float) -> str:
        assert self._planned is not None, "there is something to depart from"
        planned, self._planned = self._planned, None
        low, _, high = planned.step_seconds
        step_s = sum(self._outside) / len(self._outside)
        rate = f", and sends at {bit_s / 1e6:.3g} Mbit/s" if bit_s else ""
        return (
            f"plan {planned.name!r}: a step takes {step_s:.3g} s in the last {_ROUNDS} rounds, and "
            f"{low:.3g} to {high:.3g} s were planned; this rank waits for "
            f"{100 * self.waiting_share:.0f} % of the time, where "
            f"{100 * planned.waiting_share:.0f} % were planned{rate}: measure again with thinwire "
            "probe, and plan again"
        )
