"""Learning rate of a group: a number that the user may change, or a schedule that drives it."""

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire import _validate as check
from thinwire.schedules import Schedule, Table, rate_at


def parse_rate(name: str, lr: object) -> float | Schedule:
    """Return the checked argument `lr`: a number, or the schedule that drives the rate.

    A list with one rate for each update becomes a `Table`. A tensor is read once. Messages call the
    argument `name`.
    """
    if isinstance(lr, Schedule):
        return lr
    if isinstance(lr, list | tuple):
        if not lr:
            raise ValueError(
                f"{name} must not be an empty list: it needs one entry for each update"
            )
        return Table(check.sequence(check.scalar, name, lr, at_least=0))
    if callable(lr) and not isinstance(lr, torch.Tensor):
        raise TypeError(
            f"{name} must be a number, a list or a Schedule, got {lr!r}; subclass "
            "thinwire.schedules.Schedule"
        )
    return check.scalar(name, lr, at_least=0)


def rate_ahead(schedule: Schedule, step: int, before: float) -> float:
    """Return the rate that a group shows before update `step`; `before` if there is none."""
    try:
        return rate_at(schedule, step)
    except (IndexError, ValueError):
        return before


def rates_of_(
    groups: Sequence[dict[str, Any]],
    schedules: Sequence[Schedule | None],
    position: int,
    check_rate: Callable[[float, str], None],
) -> list[float]:
    """Return the rate of every group. Schedules write theirs after all checks."""
    rates = []
    for i, (group, schedule) in enumerate(zip(groups, schedules, strict=True)):
        decay = group["weight_decay"]
        if type(decay) is not float or not 0 <= decay < math.inf:  # a user may have written it
            check.scalar(f"weight_decay of group {i} at step {position}", decay, at_least=0)
        where = f"the learning rate of group {i} at step {position}"
        rate = group["lr"]
        if schedule is not None:
            rate = rate_at(schedule, position)
        elif isinstance(rate, float) and -1e-12 < rate < 0:
            # rounding of 0 by torch's `LinearLR` with end_factor=0, which multiplies the last rate
            # by a quotient in every step
            rate = 0.0
        else:
            rate = check.scalar(where, rate, at_least=0)
        check_rate(rate, where)
        rates.append(rate)
    for group, schedule, rate in zip(groups, schedules, rates, strict=True):
        if schedule is not None:
            group["lr"] = rate
    return rates


def text_of(schedule: object) -> str:
    """Return the repr of a schedule without memory addresses, which differ between processes."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(schedule))


def checksum_of(schedule: Schedule | None) -> int:
    """Return a CRC-32 of all values of a schedule, whose text shows only the first few."""
    values = dataclasses.astuple(schedule) if dataclasses.is_dataclass(schedule) else schedule
    return zlib.crc32(text_of(values).encode())
