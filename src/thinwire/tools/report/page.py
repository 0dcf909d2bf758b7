"""Parts of self-contained HTML pages: style and script are inline, nothing is loaded."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from thinwire._files import replace_file

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """A range of values mapped to a range of the drawing; by factors if logarithmic."""

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
        """Return an axis that contains all values, with a margin on both sides."""
        low, high = min(values), max(values)
        if logarithmic:
            factor = (high / low if high > low else 10.0) ** margin
            return cls(low / factor, high * factor if high > low else low * 10, begin, end, True)
        room = (high - low or abs(high) or 1.0) * margin
        return cls(low - room, high + room, begin, end)

    def pixel(self, value: float) -> float:
        """Return the coordinate of a value in the drawing."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round values inside the range."""
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
"""Colour of each strategy on light and dark pages, with a contrast of at least 4.5."""

_SHAPES = (
    '<circle r="3.6"/>', '<path d="M-3.4-3.4H3.4V3.4H-3.4Z"/>', '<path d="M0-4.4 4.2 3.4H-4.2Z"/>',
    '<path d="M0-4.8 4.4 0 0 4.8-4.4 '
    '0Z"/>', '<path d="M0 4.4 4.2-3.4H-4.2Z"/>', '<path d="M-4-1.5H4V1.5H-4Z"/>',
    '<path d="M-4.2-2.4-2.4-4.2 0-1.8 2.4-4.2 4.2-2.4 1.8 0 4.2 2.4 2.4 4.2 0 1.8-2.4 4.2-4.2 '
    '2.4-1.8 0Z"/>',
    '<path d="M-1.4-4.4H1.4V4.4H-1.4Z"/>',
)  # fmt: skip
_WIDE = 7.5
"""Width of a letter of a tick label, in drawing units."""
_DASHES = ("", "", "", "", "7 3", "2 3", "9 3 2 3", "4 2")


@dataclass(frozen=True)
class Frame:
    """Size of a drawing and position of its axes, in units of about a pixel."""

    kind: str
    width: float
    height: float
    left: float = 52
    right: float = 14
    top: float = 26
    bottom: float = 44
    x_ticks: int = 8
    y_ticks: int = 6

    def x_axis(self, values: Sequence[float], *, logarithmic: bool) -> Axis:
        """Return the horizontal axis for these values."""
        right = self.width - self.right
        return Axis.around(values, self.left, right, logarithmic=logarithmic)

    def y_axis(
        self, values: Sequence[float], *, logarithmic: bool = False, margin: float = 0.03
    ) -> Axis:
        """Return the vertical axis for these values."""
        bottom = self.height - self.bottom
        return Axis.around(values, bottom, self.top, logarithmic=logarithmic, margin=margin)


FRAMES = (Frame("wide", 920, 380), Frame("narrow", 380, 320, x_ticks=4, y_ticks=5))


def sample(number: int) -> str:
    """Return a piece of the line of strategy `number` with its mark, for legends."""
    line = f'<path d="M1 7H27"{stroke(number)}/>'
    mark = (
        f'<g transform="translate(14 7)" fill="var(--series-{number})">{_SHAPES[_look(number)]}</g>'
    )
    return f'<svg class="sample" viewBox="0 0 28 14" aria-hidden="true">{line}{mark}</svg>'


def legend(names: Iterable[str]) -> str:
    """Return the list of strategies, each with its line and mark."""
    items = "".join(f"<li>{named(number, name)}</li>" for number, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def named(number: int, name: str) -> str:
    """Return the name of strategy `number` behind its sample."""
    return f"{sample(number)}{escape(name)}"


def mark(number: int, x: float, y: float, values: str) -> str:
    """Return the mark of strategy `number` at a point, with its tooltip."""
    return (
        f'<g class="pt" transform="translate({x:.1f} {y:.1f})">{_SHAPES[_look(number)]}'
        f"<title>{escape(values)}</title></g>"
    )


def _look(number: int) -> int:
    """Return the index of mark and dash; strategies of one colour differ in it."""
    again, index = divmod(number, len(PALETTE))
    return (index + len(PALETTE) // 2 * again) % len(PALETTE)


def stroke(number: int) -> str:
    """Return the attributes of the line of strategy `number`."""
    dash = _DASHES[_look(number)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f' fill="none" stroke="var(--series-{number})" stroke-width="1.8"{dashes}'


def svg(frame: Frame, title: str, parts: Sequence[str]) -> str:
    """Return the drawing; its points are shown at the pointer and by the arrow keys."""
    return (
        f'<svg class="plot {frame.kind}" viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" '
        'tabindex="0" '
        f'aria-label="{escape(title)}">\n' + "\n".join(parts) + "\n</svg>"
    )


def grid(
    frame: Frame, x: Axis, y: Axis, form: Callable[[float], str], x_name: str, y_name: str
) -> list[str]:
    """Return lines, labels and names of both axes; `form` formats the horizontal values."""
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    rules = [f"M{frame.left:g} {y.pixel(tick):.1f}H{right:g}" for tick in y.ticks(frame.y_ticks)]
    rules += [f"M{x.pixel(tick):.1f} {frame.top:g}V{bottom:g}" for tick in x.ticks(frame.x_ticks)]
    texts = [
        *(
            text_at(frame.left - 6, y.pixel(tick) + 4, f"{tick:.3g}", "end")
            for tick in y.ticks(frame.y_ticks)
        ),
        *(_under(frame, x.pixel(tick), form(tick)) for tick in x.ticks(frame.x_ticks)),
    ]
    edge = f"M{frame.left:g} {frame.top:g}V{bottom:g}H{right:g}"
    return [
        f'<path class="grid" d="{"".join(rules)}"/>',
        f'<path class="edge" d="{edge}"/>',
        *texts,
        text_at(frame.left - 6, 14, y_name, "start", "name"),
        text_at((frame.left + right) / 2, frame.height - 6, x_name, "middle", "name"),
    ]


def _under(frame: Frame, x: float, text: str) -> str:
    """Return a tick label below the frame, moved left if it would leave the drawing."""
    y = frame.height - frame.bottom + 17
    if x + _WIDE * len(text) / 2 > frame.width:
        return text_at(frame.width - 1, y, text, "end")
    return text_at(x, y, text, "middle")


def text_at(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    """Return a text at a point; `anchor` is start, middle or end, `kind` tick or name."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def bytes_text(count: float) -> str:
    """Format a number of bytes, in powers of 1000."""
    size = count
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def loss_text(loss: float) -> str:
    """Format a loss with three decimals, or more if these show nothing."""
    return f"{loss:.{loss_digits([loss])}f}"


def loss_digits(losses: Sequence[float]) -> int:
    """Return the number of decimals that tell these losses apart."""
    smallest = min((abs(loss) for loss in losses if loss), default=1.0)
    return min(9, max(3, 2 - math.floor(math.log10(smallest))))


def number(value: float, digits: int) -> str:
    """Format a number with commas between thousands; a vanishing share has no sign."""
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def page_of(title: str, colours: int, body: Iterable[str]) -> str:
    """Return a page of these lines, with style and script inline."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_series_colours(colours)}{_resource('report.css')}</style>\n</head>\n<body>",
            "<main>",
            *body,
            f"</main>\n<script>{_resource('report.js')}</script>\n</body>\n</html>\n",
        ]
    )


def write_page(page: str, path: Path) -> None:
    """Write a file atomically."""
    # a file's name need not be text
    replace_file(path, page.encode("utf-8", "backslashreplace"))


def _resource(name: str) -> str:
    """Return the style `report.css` or the script `report.js`."""
    return "\n" + files("thinwire.tools.report").joinpath(name).read_text(encoding="utf-8")


def _series_colours(count: int) -> str:
    """Return CSS variables `--series-0`, `--series-1`, ... for light and dark pages."""
    light, dark = (
        " ".join(
            f"--series-{number}: {PALETTE[number % len(PALETTE)][shade]};"
            for number in range(count)
        )
        for shade in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


# the roles are those of the elements, which narrow pages lay out as blocks and thereby take from
# them
def table_of(label: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table of strategies: column heads, and rows from `table_row`."""
    columns = "".join(
        f'<th scope="col" role="columnheader">{head}</th>' for head in ("strategy", *heads)
    )
    return "\n".join(
        [
            f'<table role="table" aria-label="{label}">',
            f'<thead role="rowgroup"><tr role="row">{columns}</tr></thead>',
            '<tbody role="rowgroup">',
            *rows,
            "</tbody>\n</table>",
        ]
    )


def cell(label: str, text: str, more: str = "") -> str:
    """Return a table cell, with its column head for narrow pages."""
    return (
        f'<td role="cell"{more} data-label="{escape(label)}">'
        f'<span class="value">{escape(text)}</span></td>'
    )


def table_row(head: str, cells: str, more: str = "") -> str:
    """Return a table row, with optional attributes."""
    return f'<tr role="row"{more}><th scope="row" role="rowheader">{head}</th>{cells}</tr>'


def copied(name: str, text: str) -> str:
    """Return a text with a copy button."""
    button = f'<button type="button" data-copy="{name}">copy</button>'
    return f'{button}\n<pre id="{name}">{escape(text)}</pre>'


def definitions(entries: Mapping[str, Any]) -> str:
    """Return names and values as a list; None is left out."""
    items = "\n".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(value_text(value))}</dd>"
        for key, value in entries.items()
        if value is not None
    )
    return f"<dl>\n{items}\n</dl>"


def value_text(value: Any) -> str:
    """Format a setting."""
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value_text(entry)}" for key, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
