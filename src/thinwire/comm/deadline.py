"""The time that a rank waits for others: one time-out for a whole call, whatever number of
exchanges it makes, and a line in the log where it was long.
"""

import datetime
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thinwire import _validate as check

__all__ = [
    "left_s",
    "long_waits_logged",
    "one_deadline",
    "own_deadlines",
    "progressed",
    "seconds_given",
    "seconds_of",
    "waited",
    "whole_s",
]

_LONG_S = 10.0
_log = logging.getLogger("thinwire")


class _Call(threading.local):
    """The rest of the time-out of the outermost call that this thread is in; None outside of
    any.
    """

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
    """Let every wait in here have the whole time-out for itself: for work that is known to
    go on.
    """
    outer = _call.timeout_s, _call.left_s
    _call.timeout_s = _call.left_s = None
    try:
        yield
    finally:
        _call.timeout_s, _call.left_s = outer


def left_s(timeout_s: float) -> float:
    """Seconds that one wait may take: what is left of the call that it is in, or `timeout_s`
    outside of any.
    """
    return timeout_s if _call.left_s is None else max(_call.left_s, 0.0)


def whole_s(timeout_s: float) -> float:
    """The time-out of the call that a wait is in, of which `left_s` is left, or `timeout_s` outside
    of any.
    """
    return timeout_s if _call.timeout_s is None else _call.timeout_s


def waited(seconds: float) -> None:
    """Count time for which this rank was blocked."""
    if _call.left_s is not None:
        _call.left_s -= seconds


def progressed() -> None:
    """A part of something large has arrived: the time-out of the call, if there is one, begins
    anew.
    """
    _call.left_s = _call.timeout_s


def seconds_of(timeout: float | datetime.timedelta | None) -> float | None:
    """A user's `timeout=` in seconds; None stays None, for the process group's own.

    Raises:
        TypeError: No number and no timedelta.
        ValueError: Not positive or not finite.
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
    """Say how long this rank waited in the block, if that was more than `_LONG_S` seconds.

    Args:
        what: Such as "step 7".
        wait_s: The seconds waited so far.
    """
    before = wait_s()
    try:
        yield
    finally:
        seconds = wait_s() - before
        if seconds > _LONG_S:
            _log.info("%s: waited %.1f s for other ranks", what, seconds)
