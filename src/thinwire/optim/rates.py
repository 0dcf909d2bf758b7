"""The learning rate of a group: a number that anyone may change, or a schedule that drives it."""

import dataclasses
import re
import zlib

import torch

from thinwire import _validate as check
from thinwire.schedules import Schedule, Table, rate_at

__all__ = ["checksum_of", "parse_rate", "rate_ahead", "text_of", "without_rounding"]


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


def without_rounding(rate: object) -> object:
    """0 for what a scheduler of torch leaves where it means 0, such as `LinearLR` with
    end_factor=0: it multiplies the rate before by a quotient in every step.
    """
    return 0.0 if isinstance(rate, float) and -1e-12 < rate < 0 else rate


def text_of(schedule: object) -> str:
    """The text without what differs between processes, for schedules without text of their own."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(schedule))


def checksum_of(schedule: Schedule | None) -> int:
    """CRC-32 of all values, of which the text shows the first few."""
    values = dataclasses.astuple(schedule) if dataclasses.is_dataclass(schedule) else schedule
    return zlib.crc32(text_of(values).encode())
