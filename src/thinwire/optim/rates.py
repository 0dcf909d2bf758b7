"""The learning rate of a group: a number that anyone may change, or a schedule that drives it."""

import torch

from thinwire import _validate as check
from thinwire.schedules import Schedule, Table, rate_at

__all__ = ["parse_rate", "rate_ahead"]


def parse_rate(name: str, lr: object) -> float | Schedule:
    """The meaning of the argument `lr`: a number, or the schedule that drives the rate (a `Table`
    for a list).

    Args:
        name: What the message calls it.
        lr: A number, a tensor of one element (read once), a schedule, or a list of numbers, one for
            each update.

    Raises:
        TypeError: Anything else.
        ValueError: Negative or not finite, an empty list, a tensor of several elements.
    """
    if isinstance(lr, Schedule):
        return lr
    if isinstance(lr, list | tuple):
        if not lr:
            raise ValueError(
                f"{name} must not be an empty list: it needs one entry for each update"
            )
        return Table(
            tuple(check.scalar(f"{name}[{i}]", value, at_least=0) for i, value in enumerate(lr))
        )
    if callable(lr) and not isinstance(lr, torch.Tensor):
        raise TypeError(
            f"{name} must be a number, a list or a Schedule, got {lr!r}; subclass "
            "thinwire.schedules.Schedule"
        )
    return check.scalar(name, lr, at_least=0)


def rate_ahead(schedule: Schedule, step: int, before: float) -> float:
    """The rate that a group shows ahead of update `step`; `before` where the schedule has no rate
    for it.

    A schedule that ends, or has no finite value, is an error of the update that needs the value,
    not of the one before.
    """
    try:
        return rate_at(schedule, step)
    except (IndexError, ValueError):
        return before
