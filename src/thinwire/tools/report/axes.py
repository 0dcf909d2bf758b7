"""Ticks and places on the axes of a plot, linear or logarithmic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["Axis"]

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """A range of values along a range of the drawing.

    Attributes:
        low: Value at `begin`; positive where `logarithmic`.
        high: Value at `end`, above `low`.
        begin: Place in the drawing, in its units.
        end: Likewise.
        logarithmic: Whether equal factors, not equal differences, are equally long.
    """

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        begin: float,
        end: float,
        *,
        logarithmic: bool = False,
        margin: float = 0.03,
    ) -> Self:
        """An axis on which all values lie, with a little room on both sides, and never of no
        length.

        Args:
            values: At least one; positive where `logarithmic`.
            begin: Of the drawing.
            end: Of the drawing.
            logarithmic: See the class.
            margin: Room on each side as a part of the range.
        """
        low, high = min(values), max(values)
        if logarithmic:
            factor = (high / low if high > low else 10.0) ** margin
            return cls(low / factor, high * factor if high > low else low * 10, begin, end, True)
        room = (high - low or abs(high) or 1.0) * margin
        return cls(low - room, high + room, begin, end)

    def place(self, value: float) -> float:
        """Where a value lies in the drawing."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self, count: int) -> list[float]:
        """Round values inside the range, about `count` of them."""
        return self._decades(count) if self.logarithmic else self._even(count)

    def _even(self, count: int) -> list[float]:
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * min(_STEPS, key=lambda factor: abs(math.log(factor * power / rough)))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def _decades(self, count: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = [10.0**i for i in range(first, last + 1)]
        # few decades are divided by 1-2-5, many are thinned out
        factors = (1.0, 2.0, 5.0) if len(decades) <= count / 2 else (1.0,)
        found = [
            factor * decade
            for decade in decades
            for factor in factors
            if self.low <= factor * decade <= self.high
        ]
        stride = max(1, -(-len(found) // count))
        return found[::stride]
