"""Work that may hang, on a thread of its own."""

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Late", "addresses_of", "within"]

_T = TypeVar("_T")


class Late(Exception):
    """Something did not end in its time."""


def within(limit_s: float, work: Callable[[], _T], *, name: str) -> _T:
    """The result of `work`, which is left behind on a thread of this name where it takes longer.

    Raises:
        Late: It takes longer.
    """
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failures:
        raise failures[0]
    if not results:
        raise Late
    return results[0]


def addresses_of(host: str, limit_s: float) -> tuple[str, ...]:
    """The addresses of a host, in the order in which they are to be tried.

    Args:
        host: Name or address.
        limit_s: How long to wait for name servers, which may keep silent for long.

    Raises:
        OSError: It has none, it is no name, or nobody answers; `strerror` says which.
    """
    try:
        rows = within(
            limit_s,
            lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM),
            name="thinwire-names",
        )
    except Late:
        told = f"no name server answered within {limit_s:.3g} s"
        raise socket.gaierror(socket.EAI_AGAIN, told) from None
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"it is no name: {error}") from None
    return tuple(dict.fromkeys(str(row[4][0]) for row in rows))
