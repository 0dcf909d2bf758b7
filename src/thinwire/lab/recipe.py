"""What it takes to compare a strategy, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """

    name: str
    summary: str
    trainer: str
    lr: float
    counted_by: str
    options: Mapping[str, Any] = field(default_factory=dict)
