"""Waiting for other ranks: time-outs of calls, log lines, and what this rank does meanwhile."""

import datetime
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from traceback import walk_stack

from thinwire import _validate as check
from thinwire._wording import PASSED

_LONG_S = 10.0
_LOG_EVERY_S = 5.0
_log = logging.getLogger("thinwire")
Timeout = float | datetime.timedelta | None
"""Argument of a user: seconds, or the time-out of the process group."""
Awaited = tuple[str, bool, int]
"""Exchange that is waited for: name of its group, True for a control message, and number."""
_activity: list[tuple[str, Awaited | None, float, str]] = [("", None, time.monotonic(), "")]
"""Last exchange of this process, whether it is waited for, since when, and the call of a long wait;
replaced as a whole."""
launches: dict[str, list[int]] = {}
"""Exchanges that this process has launched over each group: of data, and of control messages."""
_busy_until: list[float | None] = [None]
"""Time until which this process has announced work of its own; None: never announced."""


class _Call(threading.local):
    """Remaining time-out of the outermost call on this thread; None outside."""

    timeout_s: float | None = None
    left_s: float | None = None


_call = _Call()


@contextmanager
def one_deadline(timeout_s: float | None) -> Iterator[None]:
    """Count the time blocked in the outermost such block as one time-out; None: of each wait."""
    outer = _call.timeout_s, _call.left_s
    if timeout_s is not None and _call.left_s is not None:
        yield
        return
    _call.timeout_s = _call.left_s = timeout_s
    try:
        yield
    finally:
        _call.timeout_s, _call.left_s = outer


own_deadlines = partial(one_deadline, None)


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


def within_text(limit_s: float, timeout_s: float) -> str:
    """Return the limit of a wait in words, for errors."""
    whole = whole_s(timeout_s)
    if limit_s > 1.01 * whole:
        return f"{whole:g} s after a rank was last known to be busy"
    if limit_s < 0.99 * whole:
        return f"the {limit_s:.1f} s that were left of {whole:g} s for the whole call"
    return f"{whole:g} s"


class Progress:
    """Logs every few seconds how much of a large exchange is done."""

    def __init__(self, action: str, total_bytes: int, level: int = logging.INFO) -> None:
        self._action = action
        self._level = level
        self._total = total_bytes
        self._done = 0.0
        self._began_s = self._logged_s = time.monotonic()

    def add(self, nbytes: float) -> None:
        """Count a part that has arrived, and restart the time-out of the call."""
        progressed()
        self._done += nbytes
        now = time.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            rate = self._done / (now - self._began_s)
            megabytes = self._done / 1e6, self._total / 1e6, rate / 1e6
            left_s = (self._total - self._done) / rate
            text = "%s: %.1f of %.1f MB, %.2f MB/s, about %.0f s left"
            _log.log(self._level, text, self._action, *megabytes, left_s)


def seconds_of(timeout: Timeout) -> float | None:
    """Return a user's `timeout=` in seconds; None stays None, for the process group's own."""
    return None if timeout is None else _seconds("timeout", timeout)


def _seconds(name: str, value: float | datetime.timedelta) -> float:
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    return check.real(f"{name}, in seconds or as a timedelta,", seconds, above=0)


@contextmanager
def long_waits_logged(action: str, wait_s: Callable[[], float]) -> Iterator[None]:
    """Log how long this rank waited inside the block, by `wait_s`, if more than 10 s."""
    before = wait_s()
    try:
        yield
    finally:
        seconds = wait_s() - before
        if seconds > _LONG_S:
            _log.info("%s: waited %.1f s for other ranks", action, seconds)


def set_activity(action: str, awaited: Awaited | None) -> None:
    """Record the exchange in which this process waits, or which it has left for work of its own."""
    _activity[0] = action, awaited, time.monotonic(), ""


def note_call() -> None:
    """Record the call of this library in which this thread waits, and the line of the script."""
    for frame, _ in walk_stack(sys._getframe()):
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("thinwire."):
            call = frame.f_code.co_qualname
        if not name.startswith(PASSED):
            break
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    _activity[0] = *_activity[0][:3], f"{call} at {line}"


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

    Communication: none; the heartbeat thread reports the work through the rendezvous store. The
    time-out of data that nccl carries, and between stages of a pipeline, stays as it is.
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


def activity() -> tuple[str, Awaited | None, float, str]:
    """Return the current or last exchange, which one it waits for, since when, and the call."""
    return _activity[0]


_state = ContextVar("state", default="Nothing of this exchange was applied")


@contextmanager
def state_in_errors(state: str) -> Iterator[None]:
    """Let errors of exchanges inside the block describe the state of this rank, in a sentence."""
    before = _state.set(state)
    try:
        yield
    finally:
        _state.reset(before)


state_after_failure = _state.get
"""Returns the state after an exchange that fails now, as a sentence without its full stop."""
