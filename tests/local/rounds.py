"""Rounds that end by time, for tests: after a number of steps instead."""

from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.local.work import RoundWork


@contextmanager
def rounds_of(steps: int) -> Iterator[None]:
    """A round of this process ends after so many steps, whatever its time."""
    over, RoundWork.over = RoundWork.over, lambda work, _: work.steps == steps  # type: ignore[method-assign]
    try:
        yield
    finally:
        RoundWork.over = over  # type: ignore[method-assign]
