"""Rounds that end by time, for tests: after a number of steps, or by a clock of the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from tests.api import RoundWork, work


@contextmanager
def rounds_of(steps: int) -> Iterator[None]:
    """A round of this process ends after so many steps, whatever its time."""

    def at_steps(work: RoundWork, most_steps: int, share: float = 1.0) -> bool:
        return work.steps == steps or work.steps >= most_steps

    with patch.object(RoundWork, "over", at_steps):
        yield


@contextmanager
def steps_that_take(step_s: float) -> Iterator[None]:
    """Rounds of this process go by a clock that moves on by so much a step, and not else."""
    made, step = 0, RoundWork.step

    def counted(work_: RoundWork) -> None:
        nonlocal made
        made += 1
        step(work_)

    clock = SimpleNamespace(monotonic=lambda: made * step_s)
    with patch.object(work, "time", clock), patch.object(RoundWork, "step", counted):
        yield
