"""Turning what a backend says about a broken exchange into one of our errors, and saying truly
whose fault it is.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.comm.courier import Courier, Sighting
from thinwire.errors import PeerLost, PeerStalled, ThinwireError

__all__ = ["explain_failure", "state_after_failure", "state_told"]

_PATIENCE_S = 0.5
"""For the reports of ranks that are alive: their exchange fails within milliseconds of this one's.
"""
_AT_WORK = (
    "Where a rank works that long on purpose, let it say so, with thinwire.busy, or give more "
    "timeout=."
)
_STALLED = re.compile(r"timed? ?out|timeout|watchdog", re.IGNORECASE)
_LOST = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|remote "
    r"(worker|process)|socket|aborted",
    re.IGNORECASE,
)


class _Told(threading.local):
    state = "Nothing of this exchange was applied"


_told = _Told()


@contextmanager
def state_told(state: str) -> Iterator[None]:
    """Let errors of the exchanges in here say this of the rank's state, where it has moved before
    them.

    Args:
        state: A sentence without its full stop.
    """
    before, _told.state = _told.state, state
    try:
        yield
    finally:
        _told.state = before


def state_after_failure() -> str:
    """The state after an exchange that fails now, as a sentence without its full stop."""
    return _told.state


def explain_failure(
    error: RuntimeError, *, what: str, rank: int, size: int, within: str, courier: Courier | None
) -> ThinwireError:
    """The error to raise on this rank for a collective that failed; keep `error` as its cause.
    Takes at most 1 s.

    Args:
        error: What the backend raised.
        what: The exchange in plain words, such as "gathering messages".
        rank: This rank.
        size: Number of ranks in the group.
        within: For how long this rank has waited at most, with the unit.
        courier: Through which ranks that still live report; None where there is none.

    Returns:
        `PeerStalled` for a time-out, here or on the rank that hung up; `PeerLost` for a closed
        connection; else `ThinwireError`.
    """
    text = str(error)
    stalled, lost = _STALLED.search(text), _LOST.search(text)
    where = f"rank {rank} of {size}, {what}"
    if not (stalled or lost):
        return ThinwireError(f"{where} failed: {text}")
    seen = None if courier is None else courier.ask("stalled" if stalled else "lost", _PATIENCE_S)
    others = None if seen is None else {r: s for r, s in enumerate(seen) if r != rank}
    if stalled or (
        others and any(s is not None and s.failed == "stalled" for s in others.values())
    ):
        return PeerStalled(
            f"{where}: {_who_stalled(others, within, what, known=courier is not None)} ({text})"
        )
    return PeerLost(f"{where}: {_who_left(others)}; restart from the last checkpoint. ({text})")


def _who_stalled(
    others: dict[int, Sighting | None] | None, within: str, what: str, *, known: bool
) -> str:
    end = f"{state_after_failure()}."
    if others is None:
        why = (
            "The store of the process group does not answer either: its host, or the network of "
            "this rank, is stopped or cut off. "
        )
        return f"another rank did not take part within {within}. {why if known else ''}{end}"
    away = {
        r: s
        for r, s in others.items()
        if s is None or not (s.failed or (s.waiting and not s.silent))
    }
    if away:
        told = "; ".join(f"rank {rank} {_place_of(sighting)}" for rank, sighting in away.items())
        at_work = any(s is not None and not (s.silent or s.waiting) for s in away.values())
        advice = f"{_AT_WORK} " if at_work else ""
        names = ", ".join(map(str, away))
        return f"rank {names} did not take part within {within}: {told}. {advice}{end}"
    elsewhere = {r: s for r, s in others.items() if s is not None and s.what != what}
    told = "; ".join(
        f"rank {rank} {_place_of(sighting)}" for rank, sighting in (elsewhere or others).items()
    )
    return (
        f"no exchange came about within {within}, though all ranks are alive: {told}. The network "
        f"between them is cut, or they do not make the same calls. {end}"
    )


def _who_left(others: dict[int, Sighting | None] | None) -> str:
    left = (
        f"closed its connection, it died or left after an error of its own. {state_after_failure()}"
    )
    if others is None:
        return f"another rank {left}"
    silent = [rank for rank, sighting in others.items() if sighting is None or not sighting.failed]
    if not silent:
        return (
            "a connection was closed, though all ranks are alive: the network cut it. "
            f"{state_after_failure()}"
        )
    names = ", ".join(map(str, silent))
    return f"{f'rank {names}' if len(silent) == 1 else f'one of the ranks {names}'} {left}"


def _place_of(sighting: Sighting | None) -> str:
    if sighting is None:
        return "has never been heard of"
    if not sighting.what:
        where = "before its first exchange"
    elif sighting.waiting:
        where = f"waiting {sighting.since_s:.0f} s for others in {sighting.what!r}"
    else:
        where = f"at work of its own for {sighting.since_s:.0f} s after {sighting.what!r}"
    if sighting.silent:
        return (
            f"has not been heard of for {sighting.age_s:.0f} s, it is stopped, cut off or gone (it "
            f"was {where})"
        )
    return f"was alive {sighting.age_s:.1f} s ago, {where}"
