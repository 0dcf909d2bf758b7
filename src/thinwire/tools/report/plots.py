"""The plots of the report as SVG that takes its colours from the page around it.

Each is drawn twice, for wide and for narrow pages, so that text keeps its size. Drawn here and not
by a library: three line charts do not need one, and the page must be small and load nothing. The
values of a point are in its `<title>`, which `report.js` shows at the pointer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Self

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """A range of values along a range of the drawing; where it is logarithmic, equal factors are
    equally long.
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


PALETTE = (
    ("#0067a5", "#56b4e9"), ("#b34700", "#ff9e4a"), ("#00704d", "#4fd1a1"), ("#96348a", "#ee9fdd"),
    ("#785a00", "#f0e04a"), ("#3b3fb5", "#a9b1ff"), ("#ad1235", "#ff8fa0"), ("#4b5563", "#c6cdd8"),
)  # fmt: skip
"""Colour of each strategy on a light and on a dark page; each has a contrast of at least 4.5 to it.
"""

_SHAPES = (
    '<circle r="3.6"/>', '<path d="M-3.4-3.4H3.4V3.4H-3.4Z"/>', '<path d="M0-4.4 4.2 3.4H-4.2Z"/>',
    '<path d="M0-4.8 4.4 0 0 4.8-4.4 '
    '0Z"/>', '<path d="M0 4.4 4.2-3.4H-4.2Z"/>', '<path d="M-4-1.5H4V1.5H-4Z"/>',
    '<path d="M-4.2-2.4-2.4-4.2 0-1.8 2.4-4.2 4.2-2.4 1.8 0 4.2 2.4 2.4 4.2 0 1.8-2.4 4.2-4.2 '
    '2.4-1.8 0Z"/>',
    '<path d="M-1.4-4.4H1.4V4.4H-1.4Z"/>',
)  # fmt: skip
_WIDE = 7.5
"""Room for a letter of a tick's text, in units of the drawing."""
_DASHES = ("", "", "", "", "7 3", "2 3", "9 3 2 3", "4 2")


@dataclass(frozen=True)
class Frame:
    """Size of a drawing and where its axes are, in its own units, which are about pixels."""

    kind: str
    width: float
    height: float
    left: float = 52
    right: float = 14
    top: float = 26
    bottom: float = 44
    x_ticks: int = 8
    y_ticks: int = 6


FRAMES = (Frame("wide", 920, 380), Frame("narrow", 380, 320, x_ticks=4, y_ticks=5))


def sample(number: int) -> str:
    """A piece of the line of strategy `number` with its mark, for legends; hidden from screen
    readers.
    """
    line = f'<path d="M1 7H27"{stroke(number)}/>'
    mark = (
        f'<g transform="translate(14 7)" fill="var(--series-{number})">{_SHAPES[_look(number)]}</g>'
    )
    return f'<svg class="sample" viewBox="0 0 28 14" aria-hidden="true">{line}{mark}</svg>'


def mark(number: int, x: float, y: float, values: str) -> str:
    """The mark of strategy `number` at a place of the drawing, with what is said of it."""
    return (
        f'<g class="pt" transform="translate({x:.1f} {y:.1f})">{_SHAPES[_look(number)]}'
        f"<title>{escape(values)}</title></g>"
    )


def _look(number: int) -> int:
    """Which mark and dash; those who share a colour have others."""
    again, place = divmod(number, len(PALETTE))
    return (place + len(PALETTE) // 2 * again) % len(PALETTE)


def stroke(number: int) -> str:
    """Attributes of the line of strategy `number`."""
    dash = _DASHES[_look(number)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f' fill="none" stroke="var(--series-{number})" stroke-width="1.8"{dashes}'


def svg(frame: Frame, title: str, parts: Sequence[str]) -> str:
    """The whole drawing; its points are shown at the pointer and by the arrow keys."""
    return (
        f'<svg class="plot {frame.kind}" viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" '
        'tabindex="0" '
        f'aria-label="{escape(title)}">\n' + "\n".join(parts) + "\n</svg>"
    )


def grid(frame: Frame, x: Axis, y: Axis, form: Callable[[float], str]) -> list[str]:
    """Lines and texts of both axes; `form` writes the values of the horizontal one."""
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    rules = [f"M{frame.left:g} {y.place(tick):.1f}H{right:g}" for tick in y.ticks(frame.y_ticks)]
    rules += [f"M{x.place(tick):.1f} {frame.top:g}V{bottom:g}" for tick in x.ticks(frame.x_ticks)]
    texts = [
        *(
            text_at(frame.left - 6, y.place(tick) + 4, f"{tick:.3g}", "end")
            for tick in y.ticks(frame.y_ticks)
        ),
        *(_under(frame, x.place(tick), form(tick)) for tick in x.ticks(frame.x_ticks)),
    ]
    edge = f"M{frame.left:g} {frame.top:g}V{bottom:g}H{right:g}"
    return [
        f'<path class="grid" d="{"".join(rules)}"/>',
        f'<path class="edge" d="{edge}"/>',
        *texts,
    ]


def _under(frame: Frame, x: float, text: str) -> str:
    """A tick's text below the frame, moved to the left where it would leave the drawing."""
    y = frame.height - frame.bottom + 17
    if x + _WIDE * len(text) / 2 > frame.width:
        return text_at(frame.width - 1, y, text, "end")
    return text_at(x, y, text, "middle")


def text_at(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    """A text at a place of the drawing; `anchor` is start, middle or end, `kind` tick or name."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
