"""Waiting for other ranks: one time-out for a whole call, log lines for long waits, and this
process's current exchange, for the heartbeat.
"""

import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thinwire import _validate as check

_LONG_S = 10.0
_log = logging.getLogger("thinwire")
_activity: list[tuple[str, bool, float]] = [("", False, time.monotonic())]
"""Last exchange of this process, whether it is waited for, and since when; replaced as a whole."""
_busy_until: list[float | None] = [None]
"""Time until which this process has announced work of its own; None: never announced."""


class _Call(threading.local):
    """Remaining time-out of the outermost call on this thread; None outside."""

    timeout_s: float | None = None
    left_s: float | None = None


_call = _Call()


@contextmanager
def one_deadline(timeout_s: float) -> Iterator[None]:
    """Count all waiting inside the block against one time-out; nested blocks share the outer one.

    Only the time for which this rank is blocked counts; its own work in between does not.
    """
    if _call.left_s is not None:
        yield
        return
    _call.timeout_s = _call.left_s = timeout_s
    try:
        yield
    finally:
        _call.timeout_s = _call.left_s = None


@contextmanager
def own_deadlines() -> Iterator[None]:
    """Give every wait inside the block the whole time-out, for work that is known to progress."""
    outer = _call.timeout_s, _call.left_s
    _call.timeout_s = _call.left_s = None
    try:
        yield
    finally:
        _call.timeout_s, _call.left_s = outer


def left_s(timeout_s: float) -> float:
    """Return the time left in the current call, or `timeout_s` outside of any."""
    return timeout_s if _call.left_s is None else max(_call.left_s, 0.0)


def whole_s(timeout_s: float) -> float:
    """Return the time-out of the current call, or `timeout_s` outside of any."""
    return timeout_s if _call.timeout_s is None else _call.timeout_s


def waited(seconds: float) -> None:
    """Count time for which this rank was blocked."""
    if _call.left_s is not None:
        _call.left_s -= seconds


def progressed() -> None:
    """Restart the time-out of the call: a part of a large exchange has arrived."""
    _call.left_s = _call.timeout_s


def seconds_of(timeout: float | datetime.timedelta | None) -> float | None:
    """Return a user's `timeout=` in seconds; None stays None, for the process group's own."""
    return None if timeout is None else _seconds("timeout", timeout)


def _seconds(name: str, value: float | datetime.timedelta) -> float:
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    return check.real(f"{name}, in seconds or as a timedelta,", seconds, above=0)


@contextmanager
def long_waits_logged(action: str, wait_s: Callable[[], float]) -> Iterator[None]:
    """Log how long this rank waited inside the block, measured by `wait_s`, if that was more than
    10 s.
    """
    before = wait_s()
    try:
        yield
    finally:
        seconds = wait_s() - before
        if seconds > _LONG_S:
            _log.info("%s: waited %.1f s for other ranks", action, seconds)


def set_activity(action: str, *, waiting: bool) -> None:
    """Record the exchange in which this process waits, or which it has left for work of its own."""
    _activity[0] = action, waiting, time.monotonic()


@contextmanager
def busy(at_most: float | datetime.timedelta) -> Iterator[None]:
    """Announce long work of one rank, such as evaluation on rank 0, so that the others wait for it.

    >>> with busy(600):
    ...     total = sum(range(10))

    The other ranks wait for it in their next exchange. Their time-out starts again when the block
    ends or `at_most` has passed. A rank that dies in the block is detected at once. A stopped or
    disconnected rank is detected one time-out after its last heartbeat. Blocks may be nested; the
    one that ends last counts.

    Args:
        at_most: Longest duration, in seconds or as a timedelta; exceeding it is no error here.

    Raises:
        TypeError, ValueError: `at_most` is not a duration, or not positive.

    Communication: none; the heartbeat thread reports the work through the rendezvous store. With
    nccl, and between the stages of a pipeline, the time-out stays as it is.
    """
    outer = _busy_until[0]
    until = time.monotonic() + _seconds("at_most", at_most)
    _busy_until[0] = until if outer is None else max(outer, until)
    try:
        yield
    finally:
        ended = min(time.monotonic(), until)
        _busy_until[0] = ended if outer is None else max(outer, ended)


def idle_s() -> float | None:
    """Return the time since this process was last known to be at announced work; None: never."""
    return None if _busy_until[0] is None else max(time.monotonic() - _busy_until[0], 0.0)


def activity() -> tuple[str, bool, float]:
    """Return the current or last exchange, True if this process waits there, and since when."""
    return _activity[0]
