"""The end of a run and its evaluations: after a number of steps, or when a budget of seconds is
used up.
"""

import math
from typing import Protocol, final

import torch
import torch.distributed as dist

__all__ = ["Budget", "ByClock", "BySteps", "rate_factor"]

_WARM_UP_SHARE, _LAST_FACTOR = 0.1, 0.1
_CONTROLS_PER_EVALUATION, _MOST_STEPS_BETWEEN_CONTROLS = 4, 50


def rate_factor(progress: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]: linear warm-up over a tenth, then
    cosine to a tenth.
    """
    if progress < _WARM_UP_SHARE:
        return max(progress, 0.01) / _WARM_UP_SHARE
    x = min(1.0, (progress - _WARM_UP_SHARE) / (1 - _WARM_UP_SHARE))
    return _LAST_FACTOR + (1 - _LAST_FACTOR) * 0.5 * (1 + math.cos(math.pi * x))


class Budget(Protocol):
    """Progress of a run; every rank gets the same answers."""

    def progress(self, step: int) -> float:
        """Share of the run that is over when `step` updates are done, in [0, 1]."""

    def advance(self, step: int, elapsed_s: float, reserve_s: float) -> tuple[bool, bool]:
        """After `step` updates: whether to evaluate now, and whether the run is over. Called on
        every rank.

        Args:
            step: Updates done.
            elapsed_s: Training time until now.
            reserve_s: Training time that the end of the run will take on top.
        """


@final
class BySteps:
    """A fixed number of updates."""

    def __init__(self, steps: int, evaluations: int) -> None:
        self.steps = steps
        self.marks = {round(steps * (i + 1) / evaluations) for i in range(evaluations)} | {steps}

    def progress(self, step: int) -> float:
        return min(1.0, step / self.steps)

    def advance(self, step: int, elapsed_s: float, reserve_s: float) -> tuple[bool, bool]:
        """See `Budget`; needs no communication."""
        return step in self.marks, step >= self.steps


@final
class ByClock:
    """A budget of seconds, measured on rank 0.

    **Communication**: one broadcast of five numbers from rank 0, four times between two evaluations
    and a few times more shortly before the end. Ranks that train on their own wait for nothing
    else.
    """

    def __init__(self, seconds: float, evaluations: int) -> None:
        self.seconds, self.evaluations = seconds, evaluations
        self.control_s = seconds / (_CONTROLS_PER_EVALUATION * evaluations)
        self.known_step, self.known_progress, self.progress_per_step = 0, 0.0, 0.0
        self.next_control_step, self.evaluated, self.planned_s = 1, 0, 0.0

    def progress(self, step: int) -> float:
        """See `Budget`; between two broadcasts extrapolated from the last one."""
        return min(1.0, self.known_progress + (step - self.known_step) * self.progress_per_step)

    def advance(self, step: int, elapsed_s: float, reserve_s: float) -> tuple[bool, bool]:
        if step < self.next_control_step:
            return False, False
        message = torch.tensor(self._plan(step, elapsed_s, reserve_s), dtype=torch.float64)
        dist.broadcast(message, src=0)
        progress, per_step, wait, evaluate, stop = message.tolist()
        self.known_step, self.known_progress, self.progress_per_step = step, progress, per_step
        self.next_control_step = step + int(wait)
        return bool(evaluate), bool(stop)

    def _plan(self, step: int, elapsed_s: float, reserve_s: float) -> list[float]:
        usable_s = max(self.seconds - reserve_s, 1e-6)
        progress = elapsed_s / usable_s
        step_s = max((elapsed_s - self.planned_s) / max(1, step - self.known_step), 1e-6)
        self.planned_s = elapsed_s
        due = math.floor(progress * self.evaluations)
        evaluate = due > self.evaluated or progress >= 1
        self.evaluated = max(self.evaluated, due)
        # half of what is left at most: the end is met to a step, however long the steps between
        # have been
        wait = round(min(self.control_s, (usable_s - elapsed_s) / 2) / step_s)
        wait = max(1, min(_MOST_STEPS_BETWEEN_CONTROLS, wait))
        return [min(1.0, progress), step_s / usable_s, wait, evaluate, progress >= 1]
