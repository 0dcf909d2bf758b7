"""Run work that may hang on a thread of its own."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_T = TypeVar("_T")
_LONGEST_S = 3600.0
"""Longest wait at once: an infinite one is an error."""


class Late(Exception):
    """The work did not end within its time limit."""


def started(work: Callable[[], _T], name: str) -> "Future[_T]":
    """Begin `work` on a thread of this name; return its outcome, whatever that is."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as failure:
            outcome.set_exception(failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def within(
    limit_s: float,
    work: Callable[[], _T],
    *,
    name: str,
    moved_s: Callable[[], float] | None = None,
) -> _T:
    """Return the result of `work` on a thread of this name, or raise `Late`; it goes on there.

    The limit counts from the beginning, or from the time that `moved_s` returns.
    """
    outcome = started(work, name)
    begun_s = time.monotonic()
    left_s = limit_s
    while not wait([outcome], min(left_s, _LONGEST_S)).done:
        since_s = begun_s if moved_s is None else moved_s()
        left_s = since_s + limit_s - time.monotonic()
        if left_s <= 0:
            raise Late
    return outcome.result()


def addresses_of(host: str, limit_s: float) -> tuple[str, ...]:
    """Return the addresses of a name or address, in the order in which to try them. Where there is
    none, it is not valid, or no name server answers, an OSError says so in `strerror`.
    """
    try:
        rows = within(
            limit_s,
            lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM),
            name="thinwire-names",
        )
    except Late:
        text = f"no name server answered within {limit_s:.3g} s"
        raise socket.gaierror(socket.EAI_AGAIN, text) from None
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"it is no name: {error}") from None
    return tuple(dict.fromkeys(str(row[4][0]) for row in rows))
