"""Self-contained HTML pages from templates; style and script are inline, nothing is loaded."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Axis:
    """A range of values mapped to a range of the drawing; of their logarithms where so named."""

    low: float
    high: float
    begin: float
    end: float
    count: int
    logarithmic: bool

    @classmethod
    def around(
        cls, values: Iterable[float], begin: float, end: float, count: int, logarithmic: bool
    ) -> Self:
        """Return an axis of about `count` ticks that contains all values, with a margin."""
        found = [math.log10(value) if logarithmic else value for value in values]
        low = min(found)
        high = max(found)
        room = 0.04 * (high - low) or 0.1 * abs(high) or 0.5
        return cls(low - room, high + room, begin, end, count, logarithmic)

    def pixel(self, value: float) -> float:
        """Return the coordinate of a value in the drawing."""
        at = math.log10(value) if self.logarithmic else value
        return self.begin + (at - self.low) / (self.high - self.low) * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        """Round values inside the range; few decades are divided by 1-2-5, many are thinned out."""
        if self.logarithmic:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            factors = (1, 2, 5) if len(decades) <= self.count / 2 else (1,)
            found = [factor * 10.0**decade for decade in decades for factor in factors]
            found = [tick for tick in found if self.low <= math.log10(tick) <= self.high]
            return found[:: max(1, -(-len(found) // self.count))]
        rough = (self.high - self.low) / self.count
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power > 0.8 * rough)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """Size of a drawing and position of its axes, in units of about a pixel."""

    kind: str
    width: int
    height: int
    x_ticks: int
    y_ticks: int
    left: int = 52
    top: int = 26

    @property
    def right(self) -> int:
        """Right end of the horizontal axis."""
        return self.width - 14

    @property
    def bottom(self) -> int:
        """Lower end of the vertical axis."""
        return self.height - 44

    def x_axis(self, values: Iterable[float], *, logarithmic: bool = False) -> Axis:
        """Return the horizontal axis for these values."""
        return Axis.around(values, self.left, self.right, self.x_ticks, logarithmic)

    def y_axis(self, values: Iterable[float], *, logarithmic: bool = False) -> Axis:
        """Return the vertical axis for these values."""
        return Axis.around(values, self.bottom, self.top, self.y_ticks, logarithmic)


FRAMES = (Frame("wide", 920, 380, 8, 6), Frame("narrow", 380, 320, 4, 5))

PALETTE = (
    ("#0067a5", "#56b4e9"), ("#b34700", "#ff9e4a"), ("#00704d", "#4fd1a1"), ("#96348a", "#ee9fdd"),
    ("#785a00", "#f0e04a"), ("#3b3fb5", "#a9b1ff"), ("#ad1235", "#ff8fa0"), ("#4b5563", "#c6cdd8"),
)  # fmt: skip
"""Colour of each strategy on light and dark pages, with a contrast of at least 4.5."""
_SHAPES = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0", "M-3.4-3.4H3.4V3.4H-3.4Z",
    "M0-4.4 4.2 3.4H-4.2Z", "M0-4.8 4.4 0 0 4.8-4.4 0Z", "M0 4.4 4.2-3.4H-4.2Z",
    "M-4-1.5H4V1.5H-4Z",
    "M-4.2-2.4-2.4-4.2 0-1.8 2.4-4.2 4.2-2.4 1.8 0 4.2 2.4 2.4 4.2 0 1.8-2.4 4.2-4.2 2.4-1.8 0Z",
    "M-1.4-4.4H1.4V4.4H-1.4Z",
)  # fmt: skip
_DASHES = ("", "", "", "", "7 3", "2 3", "9 3 2 3", "4 2")


def _look(number: int) -> tuple[str, str]:
    """Return shape and dash of strategy `number`; strategies of one colour differ in them."""
    again, index = divmod(number, len(PALETTE))
    look = (index + len(PALETTE) // 2 * again) % len(PALETTE)
    return _SHAPES[look], _DASHES[look]


@dataclass(frozen=True)
class Column:
    """One measure: a text for each strategy, "-" if missing, and the indices of the best."""

    label: str
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()


def page(template: str, **values: Any) -> str:
    """Return the page that a template beside this file makes of these values."""
    environment = templates(
        "thinwire.tools.report", px="{:.1f}".format, bytes=bytes_text, shown=value_text
    )
    environment.globals |= {"frames": FRAMES, "palette": PALETTE, "look": _look}
    return environment.get_template(template).render(**values)


def templates(package: str, **filters: Callable[..., str]) -> "Environment":
    """Return the environment of the templates in a package; what goes into HTML is escaped."""
    import jinja2  # torch brings it; not every command needs it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, ""),
        autoescape=jinja2.select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= filters
    return environment


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


def value_text(value: Any) -> str:
    """Format a setting."""
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value_text(entry)}" for key, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
