"""Telling the log of long waits for other ranks."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["LONG_S", "long_waits_logged"]

LONG_S = 10.0
_log = logging.getLogger("thinwire")


@contextmanager
def long_waits_logged(what: str, wait_s: Callable[[], float]) -> Iterator[None]:
    """Say how long this rank waited in the block, if that was more than `LONG_S` seconds.

    Args:
        what: Such as "step 7".
        wait_s: The seconds waited so far.
    """
    before = wait_s()
    try:
        yield
    finally:
        waited = wait_s() - before
        if waited > LONG_S:
            _log.info("%s: waited %.1f s for other ranks", what, waited)
