"""What it takes to compare a strategy, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as with_default
from typing import Any

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """One strategy that can be compared.

    Attributes:
        name: What the command line calls it.
        summary: One line for the help and the report.
        trainer: Where its class is, as "module:Class"; imported in the workers only.
        lr: Peak learning rate, the best of the same grid for every strategy.
        counted_by: How the bytes of the library's column come about.
        options: Keyword arguments of that class, as JSON knows them.
        field: Which field of a strategy the options are; "" where it has none, None where they are
            no such field.
        code: Lines of Python that do the same without the comparison, for what is no strategy of
            ours.
        file: The strategy file, as the command line names it; None for those that come with the
            command.
    """

    name: str
    summary: str
    trainer: str
    lr: float
    counted_by: str
    options: Mapping[str, Any] = with_default(default_factory=dict)
    field: str | None = None
    code: str | None = None
    file: str | None = None
