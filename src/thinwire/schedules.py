"""Schedules: pure functions of the step that give learning rates and the sparsity ramp.

A schedule is called with the number of updates made so far, from 0, and returns a float64 number. A
schedule keeps no counter. One schedule may drive many optimizers, and equal steps give equal
values. s is the step and D the length of a decay in steps.

Sources: MindSpore 1.5, nn/dynamic_lr.py and nn/learning_rate_schedule.py; Paddle, optimizer/lr.py.
Differs from both: float64 throughout, integer ceil and floor of s/D, a value that is not finite is
an error.
"""

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from thinwire import _validate as check

__all__ = [
    "Constant",
    "CosineDecay",
    "ExponentialDecay",
    "InverseDecay",
    "NaturalExpDecay",
    "PiecewiseConstant",
    "PolynomialDecay",
    "Schedule",
    "ScheduledLR",
    "Table",
    "WarmUp",
    "sparsity_at",
]


class Schedule:
    """Base of the schedules. A subclass implements `value_at(step)`; this class checks steps and
    values.

    Make instances immutable and picklable: an optimizer stores and copies them, and never writes to
    them.

    Example:
        >>> WarmUp(0.1, 2).then(Constant(0.1), at=2).table(4)
        [0.0, 0.05, 0.1, 0.1]
    """

    def __call__(self, step: int) -> float:
        """Return the value at `step`.

        Args:
            step: Updates made so far, an int >= 0 or an integer tensor without dimensions.

        Raises:
            TypeError: `step` is not an integer.
            ValueError: `step` is negative, or the value is not finite.
            IndexError: `step` is past the end of a table.
        """
        s = check.integer("step", step, at_least=0)
        try:
            value = float(self.value_at(s))
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ValueError(
                f"{self!r} has no finite value at step {s} (it gives {value}); use a shorter or "
                "slower schedule"
            )
        return value

    def value_at(self, step: int) -> float:
        """Return the formula's value. `step` is known to be an int >= 0."""
        raise NotImplementedError(f"{type(self).__name__} must define value_at(step)")

    def then(self, schedule: "Schedule", at: int) -> "Schedule":
        """Return this schedule before step `at`, and `schedule` from there on, with its steps
        counted from `at`.

        Example:
            >>> WarmUp(0.1, 2).then(CosineDecay(0.0, 0.1, 4), at=2)(6)
            0.0

        Args:
            schedule: The schedule from step `at` on.
            at: First step of `schedule`, an int >= 0.

        Raises:
            TypeError: `schedule` is no schedule, or `at` no integer.
            ValueError: `at` is negative.
        """
        return _Then(self, schedule, at)

    def table(self, total_steps: int, steps_per_epoch: int = 1) -> list[float]:
        """Return the values of a whole training as a list. Entry i is the value at `i //
        steps_per_epoch`.

        Example:
            >>> ExponentialDecay(0.5, 0.5, 1).table(4, steps_per_epoch=2)
            [0.5, 0.5, 0.25, 0.25]

        Args:
            total_steps: Length of the list, at least the number of updates that will be made.
            steps_per_epoch: If more than 1, the schedule's steps are epochs, and the value is
                constant within an epoch.

        Raises:
            TypeError: An argument is not an integer.
            ValueError: An argument is below 1, or a value is not finite.
        """
        total = check.integer("total_steps", total_steps, at_least=1)
        per_epoch = check.integer("steps_per_epoch", steps_per_epoch, at_least=1)
        return [self(i // per_epoch) for i in range(total)]


@dataclass(frozen=True)
class Constant(Schedule):
    """The same value at every step.

    Example:
        >>> Constant(0.1)(1000)
        0.1

    Attributes:
        value: >= 0.
    """

    value: float

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "value", at_least=0)

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        return self.value


@dataclass(frozen=True)
class PiecewiseConstant(Schedule):
    """`values[j]` for the first j with step < `milestones[j]`. The last value holds after the last
    milestone.

    Example:
        >>> PiecewiseConstant((2, 4), (0.4, 0.2, 0.1)).table(5)
        [0.4, 0.4, 0.2, 0.2, 0.1]

    Attributes:
        milestones: Strictly increasing ints >= 1: the steps at which the next value begins.
        values: Numbers >= 0, as many as milestones or one more.
    """

    milestones: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        steps = check.sequence(check.integer, "milestones", self.milestones, at_least=1)
        values = check.sequence(check.real, "values", self.values, at_least=0)
        if not steps:
            raise ValueError(
                "milestones must not be empty; use Constant for a value that never changes"
            )
        if any(b <= a for a, b in itertools.pairwise(steps)):
            raise ValueError(f"milestones must be strictly increasing, got {list(steps)}")
        if len(values) - len(steps) not in (0, 1):
            raise ValueError(
                f"values must have as many entries as milestones or one more, got {len(values)} "
                f"values for {len(steps)}"
            )
        object.__setattr__(self, "milestones", steps)
        object.__setattr__(self, "values", values)

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        passed = sum(step >= milestone for milestone in self.milestones)
        return self.values[min(passed, len(self.values) - 1)]


@dataclass(frozen=True)
class _Decay(Schedule):
    """Arguments of the three decays that share them, and s/D with or without staircase."""

    lr: float
    decay_rate: float
    decay_steps: int
    staircase: bool = False

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "lr", "decay_rate", above=0)
        check.set_fields(self, check.integer, "decay_steps", at_least=1)
        check.boolean("staircase", self.staircase)

    def _decays(self, step: int) -> float:
        return step // self.decay_steps if self.staircase else step / self.decay_steps


@dataclass(frozen=True)
class ExponentialDecay(_Decay):
    """lr * decay_rate^(s/D), with s/D rounded down when `staircase`.

    Example:
        >>> ExponentialDecay(1.0, 0.5, 10)(20)
        0.25

    Attributes:
        lr: Value at step 0, > 0.
        decay_rate: Factor per D steps, > 0; above 1 the value grows.
        decay_steps: D, an int >= 1.
        staircase: True if the value changes only every D steps.
    """

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        return self.lr * float(self.decay_rate ** self._decays(step))


@dataclass(frozen=True)
class NaturalExpDecay(_Decay):
    """lr * exp(-decay_rate * s), with s rounded down to a multiple of D when `staircase`.

    Without `staircase` D has no effect.

    Example:
        >>> NaturalExpDecay(0.5, 0.1, 10, staircase=True)(9)
        0.5

    Attributes:
        lr: Value at step 0, > 0.
        decay_rate: Per step (not per D steps), > 0.
        decay_steps: D, an int >= 1.
        staircase: True if the value changes only every D steps.

    Differs: MindSpore's documentation divides s by D; its code and this class do not.
    """

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        s = step // self.decay_steps * self.decay_steps if self.staircase else step
        return self.lr * math.exp(-self.decay_rate * s)


@dataclass(frozen=True)
class InverseDecay(_Decay):
    """lr / (1 + decay_rate * s/D), with s/D rounded down when `staircase`.

    Example:
        >>> InverseDecay(1.0, 1.0, 10)(10)
        0.5

    Attributes:
        lr: Value at step 0, > 0.
        decay_rate: Per D steps, > 0.
        decay_steps: D, an int >= 1.
        staircase: True if the value changes only every D steps.
    """

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        return self.lr / (1 + self.decay_rate * self._decays(step))


@dataclass(frozen=True)
class CosineDecay(Schedule):
    """Half a cosine from `max_lr` down to `min_lr` over D steps; `min_lr` afterwards.

    Example:
        >>> CosineDecay(0.0, 1.0, 10)(0)
        1.0

    Attributes:
        min_lr: >= 0.
        max_lr: > `min_lr`.
        decay_steps: D, an int >= 1.
    """

    min_lr: float
    max_lr: float
    decay_steps: int

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "min_lr", at_least=0)
        check.set_fields(self, check.real, "max_lr", above=self.min_lr)
        check.set_fields(self, check.integer, "decay_steps", at_least=1)

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        phase = math.pi * (min(step, self.decay_steps) / self.decay_steps)
        return self.min_lr + (self.max_lr - self.min_lr) / 2 * (1 + math.cos(phase))


@dataclass(frozen=True)
class PolynomialDecay(Schedule):
    """(lr - end_lr) * (1 - u/d)^power + end_lr, with d = D and u = min(s, D).

    With `update_decay_steps` the length grows instead, d = D * max(ceil(s/D), 1) and u = s: the
    value falls to `end_lr` at every multiple of D, then restarts from a lower value.

    Example:
        >>> PolynomialDecay(1.0, 0.0, 4, 1.0).table(5)
        [1.0, 0.75, 0.5, 0.25, 0.0]

    Attributes:
        lr: Value at step 0, > 0.
        end_lr: Value at the end, >= 0; it may exceed `lr`.
        decay_steps: D, an int >= 1.
        power: > 0; 1 is a straight line.
        update_decay_steps: True if the length grows.
    """

    lr: float
    end_lr: float
    decay_steps: int
    power: float
    update_decay_steps: bool = False

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "lr", "power", above=0)
        check.set_fields(self, check.real, "end_lr", at_least=0)
        check.set_fields(self, check.integer, "decay_steps", at_least=1)
        check.boolean("update_decay_steps", self.update_decay_steps)

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        length = self.decay_steps
        if self.update_decay_steps:
            length *= max(-(-step // length), 1)
        done = min(step, length)
        return (self.lr - self.end_lr) * float((1 - done / length) ** self.power) + self.end_lr


@dataclass(frozen=True)
class WarmUp(Schedule):
    """lr * min(s, W)/W: a straight line from 0 at step 0 to `lr` at step W, and `lr` from there on.

    Example:
        >>> WarmUp(1.0, 4).table(6)
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]

    Attributes:
        lr: Value after the warm-up, >= 0.
        warmup_steps: W, an int >= 1.
    """

    lr: float
    warmup_steps: int

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "lr", at_least=0)
        check.set_fields(self, check.integer, "warmup_steps", at_least=1)

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        return self.lr * (min(step, self.warmup_steps) / self.warmup_steps)


@dataclass(frozen=True, repr=False)
class Table(Schedule):
    """A precomputed list: `values[step]`, and an `IndexError` past its end.

    Example:
        >>> Table([0.3, 0.2, 0.1])(1)
        0.2

    Attributes:
        values: Numbers >= 0; a list, a tuple or a tensor of one dimension, not empty.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        values: object = self.values
        if isinstance(values, torch.Tensor):
            if values.ndim != 1:
                raise ValueError(
                    f"values must have one dimension, got a tensor of shape {tuple(values.shape)}"
                )
            values = values.tolist()
        object.__setattr__(self, "values", check.sequence(check.real, "values", values, at_least=0))
        if not self.values:
            raise ValueError("values must not be empty: a table needs one entry for each update")

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.values[:3]))
        more = f", ... {len(self.values)} in all" if len(self.values) > 3 else ""
        return f"Table(values=({shown}{more}))"

    def value_at(self, step: int) -> float:
        """See `Schedule.value_at`."""
        if step >= len(self.values):
            raise IndexError(
                f"step {step} is past the end of a table of {len(self.values)} values (steps 0 to "
                f"{len(self.values) - 1}); generate one value for each update"
            )
        return self.values[step]


@dataclass(frozen=True)
class _Then(Schedule):
    """Two schedules, one after the other."""

    first: Schedule
    second: Schedule
    at: int

    def __post_init__(self) -> None:
        check.instance("schedule", self.second, Schedule)
        check.set_fields(self, check.integer, "at", at_least=0)

    def value_at(self, step: int) -> float:
        return self.first(step) if step < self.at else self.second(step - self.at)


def sparsity_at(step: int, begin: int, rampup_step: int, levels: Sequence[float]) -> float:
    """Fraction of a gradient that is not sent in update `step`.

    The ramp of `rampup_step` updates is cut evenly into as many parts as there are levels, in
    integers: level[min(len - 1, (step - begin) * len // rampup_step)]. Before `begin` the value is
    0: everything is sent.

    Args:
        step: Updates made so far, from 0.
        begin: First update of the ramp.
        rampup_step: Length of the ramp in updates, >= 1.
        levels: Fractions in [0, 1), at least one; the last holds after the ramp.

    Example:
        >>> [sparsity_at(step, 10, 4, (0.75, 0.999)) for step in (9, 10, 11, 12, 13, 14, 99)]
        [0.0, 0.75, 0.75, 0.999, 0.999, 0.999, 0.999]

    Source: Lin et al., 2018, arXiv 1712.01887, section 3.3.
    """
    if step < begin:
        return 0.0
    return levels[min(len(levels) - 1, (step - begin) * len(levels) // rampup_step)]


_scheduled: "weakref.WeakKeyDictionary[object, weakref.ref[ScheduledLR]]" = (
    weakref.WeakKeyDictionary()
)


def is_scheduled(optimizer: object) -> bool:
    """Return True if a living `ScheduledLR` drives the rate of `optimizer`."""
    reference = _scheduled.get(optimizer)
    return reference is not None and reference() is not None


class ScheduledLR(LRScheduler):
    """Drives the rate of an optimizer from outside thinwire: every group gets `schedule(c)`.

    c is 0 at construction and grows by 1 with every `step()`. Call `step()` after each
    `optimizer.step()`.

    Example::

        scheduler = ScheduledLR(optimizer, WarmUp(0.1, 500))
        optimizer.step()
        scheduler.step()

    **State**: the counter. The schedule itself is not saved; build the same one to resume.

    Args:
        optimizer: Any optimizer of torch. Optimizers of `thinwire.optim` take the schedule itself
            as `lr`.
        schedule: The schedule to follow.

    Raises:
        TypeError: `schedule` is no `Schedule`.
        ValueError: A schedule of its own drives the optimizer, or a value is negative or not
            finite.
        IndexError: `step()` goes past the end of a table: not after the update of its last value,
            when the rate stays, but after the next one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        check.instance("schedule", schedule, Schedule)
        if getattr(optimizer, "has_schedule", False):
            raise ValueError(
                "optimizer already follows a schedule of its own, which was given as its lr; "
                "give it a number as lr, or do without ScheduledLR"
            )
        self.schedule = schedule
        super().__init__(optimizer)
        _scheduled[optimizer] = weakref.ref(self)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of every group at the current count."""
        try:
            rate = rate_at(self.schedule, self.last_epoch)
        except IndexError:
            if self.last_epoch == 0:
                raise
            rate = rate_at(self.schedule, self.last_epoch - 1)
        return [rate for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the counter and the rates in force, without the schedule."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}


def rate_at(schedule: Schedule, step: int) -> float:
    """Return `schedule(step)`, or raise if it cannot be a learning rate.

    Raises:
        ValueError: The value is negative or not finite.
        IndexError: `step` is past the end of a table.
    """
    rate = schedule(step)
    if not 0 <= rate < math.inf:  # a user's schedule may override __call__
        raise ValueError(
            f"the learning rate must be a finite number >= 0, got {rate} at step {step} from "
            f"{schedule!r}"
        )
    return float(rate)
