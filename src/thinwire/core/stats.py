"""What a rank has done so far, under one set of names, flat, numbers only; and how it keeps to its
plan: seconds of a step, and the share of them that is waiting.
"""

import math
from typing import Any, Protocol

__all__ = ["Pace", "Planned", "numbers", "planned_row"]


def numbers(
    *,
    step: int,
    bytes_sent: int,
    bytes_dense: int,
    bytes_received: int = 0,
    bytes_between_nodes: int | None = None,
    bytes_between_stages: int = 0,
    wait_s: float = 0.0,
    sparsity: float = 0.0,
    microsteps: int = 0,
    dropped_steps: int = 0,
    averagings: int = 0,
    k_steps: int = 1,
    loss_scale: float = 1.0,
    applied_share: float = 1.0,
    rate_bit_s: float = 0.0,
    waiting_share: float = 0.0,
    goodput: float = 1.0,
) -> dict[str, float]:
    """The statistics of an engine, of local updates, or of an optimizer that exchanges.

    Args:
        step: Updates made by this rank; local steps where it trains locally.
        bytes_sent: Message bytes that this rank gave to exchanges, with headers and agreements.
        bytes_dense: What dense gradients would have been: 4 bytes per trainable element and update.
        bytes_received: What came from other ranks, in this process.
        bytes_between_nodes: Of `bytes_sent` what left the node; all of it where that is None.
        bytes_between_stages: That this rank gave to the other stages of its pipeline, in this
            process; in no other sum.
        wait_s: Seconds in which this rank was blocked until an exchange was over, in this process.
        sparsity: Fraction of a compressed tensor that is not sent in the next exchange; 0 where
            nothing is left out, or no tensor is compressed.
        microsteps: Of an unfinished update.
        dropped_steps: Updates that were dropped.
        averagings: Of parameters, under local updates.
        k_steps: Updates between two exchanges that are in force.
        loss_scale: Factor of the next loss; 1 without one.
        applied_share: Estimated part of the ranks' mean change that compressed averagings have
            applied so far, see `LocalUpdates.stats`; 1 where all of it is applied in time.
        rate_bit_s: Payload that this rank's line carries, in bits a second: a moving mean over
            about the last 20 exchanges of 64 KiB and more that this rank was blocked for, late
            ranks included; 0 before the first one. Of this process.
        waiting_share: Part of the time for which this rank was blocked until an exchange was over:
            a moving mean over about the last 20 rounds, each an update or the local steps up to an
            averaging; 0 before the second one. Of this process.
        goodput: Useful steps over those that the time would have allowed without waiting for
            others and without saving, in [0, 1]; 1 before the second round. Of this process.

    Returns:
        All of these by name, and `ratio`, bytes_dense / bytes_sent: larger is better, infinite
        where nothing was sent.
    """
    return {
        "step": step,
        "microsteps": microsteps,
        "dropped_steps": dropped_steps,
        "averagings": averagings,
        "k_steps": k_steps,
        "sparsity": sparsity,
        "loss_scale": loss_scale,
        "applied_share": applied_share,
        "bytes_sent": bytes_sent,
        "bytes_received": bytes_received,
        "bytes_between_nodes": bytes_sent if bytes_between_nodes is None else bytes_between_nodes,
        "bytes_between_stages": bytes_between_stages,
        "bytes_dense": bytes_dense,
        "ratio": bytes_dense / bytes_sent if bytes_sent else math.inf,
        "wait_s": wait_s,
        "rate_bit_s": rate_bit_s,
        "waiting_share": waiting_share,
        "goodput": goodput,
    }


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
        self._begun: tuple[float, float] | None = None
        self._lost_s = 0.0
        self._outside: list[float] = []

    @property
    def waiting_share(self) -> float:
        """The part of the time for which this rank was blocked; 0 before the second round."""
        return self._mean_wait_s / self._mean_s if self._mean_s else 0.0

    def lose(self, seconds: float) -> None:
        """Count time that went to something else than steps, such as saving."""
        self._lost_s += seconds

    def goodput(self, useful: int, dropped: int) -> float:
        """The steps that count over those that the time since the first round would have allowed
        without waiting and other losses.

        Args:
            useful: Steps that count.
            dropped: Steps that were made for nothing.
        """
        if self._begun is None or self._now_s is None or self._now_s <= self._begun[0]:
            return 1.0
        begun_s, waited_s = self._begun
        lost_s = self._waited_s - waited_s + self._lost_s
        spent = 1 - lost_s / (self._now_s - begun_s)
        return max(0.0, min(spent, 1.0)) * useful / max(useful + dropped, 1)

    def round(
        self, steps: int, now_s: float, waited_s: float, bit_s: float = 0.0, *, compare: bool = True
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
            self._begun = now_s, waited_s
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
