"""Statistics of a rank: numbers only, flat, under one set of names.

They also compare the run with its plan: seconds per step, and the share of waiting.
"""

import math
from typing import Any, Literal, Protocol


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
    lost_waiting: float = 0.0,
    lost_regrouping: float = 0.0,
    lost_joining: float = 0.0,
    lost_saving: float = 0.0,
    joining_bytes: float = 0.0,
    joining_total_bytes: float = 0.0,
    joining_bit_s: float = 0.0,
    joining_left_s: float = 0.0,
) -> dict[str, float]:
    """Return the statistics of an engine, of local updates, or of an optimizer that exchanges.

    Args:
        step: Updates made by this rank; local steps if it trains locally.
        bytes_sent: Message bytes that this rank sent, with headers and agreements.
        bytes_dense: Bytes of dense gradients: 4 per trainable element and update.
        bytes_received: Bytes received from other ranks, in this process.
        bytes_between_nodes: The part of `bytes_sent` that left the node; None: all of it.
        bytes_between_stages: Bytes that this rank sent to other stages of its pipeline, in this
            process; in no other sum.
        wait_s: Seconds for which this rank waited for exchanges, in this process.
        sparsity: Fraction of a compressed tensor that is not sent in the next exchange; 0 if
            nothing is left out, or no tensor is compressed.
        microsteps: Microsteps of an unfinished update.
        dropped_steps: Updates that were dropped.
        averagings: Averagings of parameters, under local updates.
        k_steps: Updates between two exchanges, as currently in force.
        loss_scale: Factor of the next loss; 1 without one.
        applied_share: Estimated part of the ranks' mean change that compressed averagings have
            applied so far, see `LocalUpdates.stats`; 1 if all of it is applied in time.
        rate_bit_s: Payload rate of this rank's link, in bits per second: a moving mean over about
            the last 20 exchanges of 64 KiB and more that this rank waited for, late ranks included;
            0 before the first one. Of this process.
        waiting_share: Share of the time for which this rank waited for exchanges: a moving mean
            over about the last 20 rounds; 0 before the second one. A round is an update, or the
            local steps up to an averaging. Of this process.
        goodput: Useful steps over the steps that were possible in the time without the four losses
            below, in [0, 1]; 1 before the second round. Of this process.
        lost_waiting: Share of that time that went to waiting for exchanges.
        lost_regrouping: Share that went to forming a new generation of members, before an
            averaging is made again.
        lost_joining: Share that went to the copy of the state to this process, a joiner, and to its
            admission.
        lost_saving: Share that went to writing checkpoints.
        joining_bytes: Bytes of the run's state that this process, a joiner, has received.
        joining_total_bytes: Bytes of that state that differed here.
        joining_bit_s: Rate at which they come, in bits per second.
        joining_left_s: Seconds until the rest is here.

    Returns:
        All of these by name, and `ratio`, bytes_dense / bytes_sent: larger is better, infinite if
        nothing was sent.

    >>> numbers(step=10, bytes_sent=100, bytes_dense=400)["ratio"]
    4.0
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
        "lost_waiting": lost_waiting,
        "lost_regrouping": lost_regrouping,
        "lost_joining": lost_joining,
        "lost_saving": lost_saving,
        "joining_bytes": joining_bytes,
        "joining_total_bytes": joining_total_bytes,
        "joining_bit_s": joining_bit_s,
        "joining_left_s": joining_left_s,
    }


_ROUNDS = 20
_KEPT = 1 - 1 / _ROUNDS


class Planned(Protocol):
    """Expectation of a run: a row of `thinwire.plan`."""

    @property
    def name(self) -> str:
        """Name of the strategy."""
        ...

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Seconds of a step: low, mid and high."""
        ...

    @property
    def waiting_share(self) -> float:
        """Share of a step that is spent on waiting."""
        ...


def planned_row(plan: Any) -> Planned | None:
    """Return the row of a plan: the recommended one, or the row itself."""
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

    def exclude(
        self, seconds: float, lost: Literal["regrouping", "joining", "saving"] = "saving"
    ) -> None:
        """Count seconds lost to something other than steps."""
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
        """End a round.

        Args:
            steps: Steps in the round, at least 1.
            now_s: The time, by any clock.
            waited_s: Seconds of waiting so far.
            bit_s: The measured rate, for the text; 0 if unknown.
            compare: True if the plan covers this round.

        Returns:
            A warning, once: 20 rounds in a row were all outside the plan.
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
