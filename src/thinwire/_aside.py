"""Work that may hang, on a thread of its own."""

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Late", "within"]

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
