"""How long a rank waits for others: one time-out for a whole call, whatever number of exchanges it
makes, and a line in the log where it was long; and where this process is, for those that wait for
it.
"""

import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thinwire import _validate as check

__all__ = [
    "busy_for",
    "here",
    "idle_s",
    "left_s",
    "long_waits_logged",
    "one_deadline",
    "own_deadlines",
    "progressed",
    "seconds_given",
    "seconds_of",
    "waited",
    "waits",
    "whereabouts",
    "whole_s",
]

_LONG_S = 10.0
_log = logging.getLogger("thinwire")
_place: list[tuple[str, bool, float]] = [("", False, time.monotonic())]
"""The last exchange of this process, whether it is waited for, and since when it is or is not;
replaced as a whole."""
_busy_until: list[float | None] = [None]
"""Until when this process has said that it may be at work of its own; None: it never has."""


class _Call(threading.local):
    """The rest of the time-out of the outermost call that this thread is in; None outside."""

    timeout_s: float | None = None
    left_s: float | None = None


_call = _Call()


@contextmanager
def one_deadline(timeout_s: float) -> Iterator[None]:
    """Let all waiting for others in here count against one time-out; in another such block, against
    that one's.

    What counts is the time for which this rank is blocked: its own work in between takes nothing
    off.
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
    """Let every wait in here have the whole time-out: for work that is known to go on."""
    outer = _call.timeout_s, _call.left_s
    _call.timeout_s = _call.left_s = None
    try:
        yield
    finally:
        _call.timeout_s, _call.left_s = outer


def left_s(timeout_s: float) -> float:
    """What is left of the call that a wait is in, or `timeout_s` outside of any."""
    return timeout_s if _call.left_s is None else max(_call.left_s, 0.0)


def whole_s(timeout_s: float) -> float:
    """The time-out of the call that a wait is in, or `timeout_s` outside of any."""
    return timeout_s if _call.timeout_s is None else _call.timeout_s


def waited(seconds: float) -> None:
    """Count time for which this rank was blocked."""
    if _call.left_s is not None:
        _call.left_s -= seconds


def progressed() -> None:
    """Let the time-out of the call begin anew: a part of something large has arrived."""
    _call.left_s = _call.timeout_s


def seconds_of(timeout: float | datetime.timedelta | None) -> float | None:
    """A user's `timeout=` in seconds; None stays None, for the process group's own.

    Raises:
        TypeError, ValueError: As `seconds_given`.
    """
    return None if timeout is None else seconds_given("timeout", timeout)


def seconds_given(name: str, value: float | datetime.timedelta) -> float:
    """A time that a user gave for the argument `name`, in seconds.

    Raises:
        TypeError: No number and no timedelta.
        ValueError: Not positive or not finite.
    """
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    return check.real(f"{name}, in seconds or as a timedelta,", seconds, above=0)


@contextmanager
def long_waits_logged(what: str, wait_s: Callable[[], float]) -> Iterator[None]:
    """Log how long this rank waited in the block by `wait_s`, if that was more than 10 s."""
    before = wait_s()
    try:
        yield
    finally:
        seconds = wait_s() - before
        if seconds > _LONG_S:
            _log.info("%s: waited %.1f s for other ranks", what, seconds)


def here(what: str, *, waiting: bool) -> None:
    """Note where this process is: it waits for `what`, or has left it for work of its own."""
    _place[0] = what, waiting, time.monotonic()


@contextmanager
def busy_for(seconds: float) -> Iterator[None]:
    """Tell the others, with the next sign of life, that they may wait until the block ends, but not
    for longer than this; of nested blocks the one that ends last counts.
    """
    outer, until = _busy_until[0], time.monotonic() + seconds
    _busy_until[0] = until if outer is None else max(outer, until)
    try:
        yield
    finally:
        said = min(time.monotonic(), until)
        _busy_until[0] = said if outer is None else max(outer, said)


def idle_s() -> float | None:
    """Since this process was known to be at long work of its own; None: it never was."""
    return None if _busy_until[0] is None else max(time.monotonic() - _busy_until[0], 0.0)


def whereabouts() -> tuple[str, bool, float]:
    """The exchange that this process is in or has left, whether it waits there, and since when."""
    return _place[0]


def waits() -> bool:
    """Whether this process waits in an exchange."""
    return _place[0][1]
