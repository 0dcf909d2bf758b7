"""The plots of the report as SVG that takes its colours from the page around it.

Each is drawn twice, for wide and for narrow pages, so that text keeps its size. Drawn here and not
by a library: three line charts do not need one, and the page must be small and load nothing. The
values of a point are in its `<title>`, which `report.js` shows at the pointer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Self

from thinwire.tools.report.measures import bytes_text, loss_text

__all__ = [
    "FRAMES",
    "PALETTE",
    "Axis",
    "Frame",
    "grid",
    "loss_plots",
    "mark",
    "sample",
    "svg",
    "text_at",
]

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


def loss_plots(results: Mapping[str, Any], axis: str, label: str) -> str:
    """Held-out loss against time, bytes or steps, one line per strategy: two `<svg>` elements, of
    which one is shown.

    Args:
        results: Content of `results.json`.
        axis: Key of the evaluations for the horizontal axis: "seconds", "library_bytes"
            (logarithmic) or "step".
        label: Name of that axis.

    Returns:
        The elements; their colours are CSS variables: `--ink`, `--soft`, `--line`, `--series-0`,
        `--series-1`, ... Empty where there is nothing to draw.
    """
    logarithmic = axis == "library_bytes"
    lines = [
        [point for point in run["evaluations"] if point[axis] > 0 or not logarithmic]
        for run in results["strategies"]
    ]
    if not any(lines):
        return ""
    names = [run["strategy"] for run in results["strategies"]]
    single = [
        [
            [point for point in seed["evaluations"] if point[axis] > 0 or not logarithmic]
            for seed in (run.get("seeds", ()) if len(run.get("seeds", ())) > 1 else ())
        ]
        for run in results["strategies"]
    ]
    unit = results["settings"].get("loss_unit")
    loss = f"held-out loss, {unit}" if unit else "held-out loss"
    return "\n".join(
        _drawing(frame, names, lines, single, axis, label, loss, logarithmic) for frame in FRAMES
    )


def sample(number: int) -> str:
    """A piece of the line of strategy `number` with its mark, for legends; hidden from screen
    readers.
    """
    line = f'<path d="M1 7H27"{_stroke(number)}/>'
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


def _stroke(number: int) -> str:
    dash = _DASHES[_look(number)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f' fill="none" stroke="var(--series-{number})" stroke-width="1.8"{dashes}'


def _drawing(
    frame: Frame,
    names: Sequence[str],
    lines: Sequence[Sequence[Mapping[str, Any]]],
    single: Sequence[Sequence[Sequence[Mapping[str, Any]]]],
    axis: str,
    label: str,
    loss: str,
    logarithmic: bool,
) -> str:
    points = [point for line in (*lines, *(x for runs in single for x in runs)) for point in line]
    x = Axis.around(
        [float(point[axis]) for point in points],
        frame.left,
        frame.width - frame.right,
        logarithmic=logarithmic,
    )
    # the loss before training is far above the rest: lines come in over the upper edge
    later = [float(point["loss"]) for line in lines for point in line if point["step"] > 0]
    losses = later or [float(point["loss"]) for point in points]
    y = Axis.around(losses, frame.height - frame.bottom, frame.top, margin=0.06)
    form: Callable[[float], str] = bytes_text if logarithmic else "{:,g}".format
    parts = [
        *grid(frame, x, y, form),
        *(_thin(number, line, axis, x, y) for number, runs in enumerate(single) for line in runs),
        *(
            _series(number, name, line, axis, x, y)
            for number, (name, line) in enumerate(zip(names, lines, strict=True))
        ),
        text_at(frame.left - 6, 14, loss, "start", "name"),
        text_at(
            (frame.left + frame.width - frame.right) / 2, frame.height - 6, label, "middle", "name"
        ),
    ]
    title = f"Held-out loss against {label}, one line per strategy: {', '.join(names)}"
    return svg(frame, title, parts)


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


def _series(
    number: int, name: str, line: Sequence[Mapping[str, Any]], axis: str, x: Axis, y: Axis
) -> str:
    places = [(x.place(point[axis]), y.place(point["loss"]), point) for point in line]
    path = (
        "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in _below(places, y.end)) if places else ""
    )
    marks = "".join(
        mark(number, px, py, _values(name, point)) for px, py, point in places if py >= y.end
    )
    return (
        f'<path d="{path}"{_stroke(number)}/><g fill="var(--series-{number})">{marks}</g>'
        if path
        else ""
    )


def _thin(number: int, line: Sequence[Mapping[str, Any]], axis: str, x: Axis, y: Axis) -> str:
    """The curve of one seed."""
    places = [(x.place(point[axis]), y.place(point["loss"]), point) for point in line]
    inside = [(px, py) for px, py in _below(places, y.end) if py >= y.end]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in inside)
    return (
        f'<path d="{path}" fill="none" stroke="var(--series-{number})" stroke-width="0.8" '
        'stroke-opacity="0.45"/>'
        if inside
        else ""
    )


def _below(
    places: Sequence[tuple[float, float, Mapping[str, Any]]], top: float
) -> list[tuple[float, float]]:
    """The line, cut where its first piece comes in over the upper edge."""
    line = [(px, py) for px, py, _ in places]
    if len(line) > 1 and line[0][1] < top <= line[1][1]:
        (x0, y0), (x1, y1) = line[:2]
        line[0] = (x0 + (top - y0) / (y1 - y0) * (x1 - x0), top)
    return line


def _values(name: str, point: Mapping[str, Any]) -> str:
    return (
        f"{name}: loss {loss_text(point['loss'])} at {point['seconds']:,.1f} s, "
        f"step {point['step']:,}, {bytes_text(point['library_bytes'])} sent per worker"
    )
