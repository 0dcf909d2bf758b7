"""Plot of the landing page: loss against seconds at 20 Mbit/s, from benchmarks/results.

`PYTHONPATH=src:. python docs/site/figure.py` writes it to docs/pictures/loss.svg, for README.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import fmean

from benchmarks.choosing import Row, Scope, evidence, rows

LINK = "20mbit"
NAMES = {"dense": "dense AdamW", "dense-muon": "dense Muon", "muon-local": "local Muon, 1 bit"}
"""Strategies of the plot, the slowest first."""
SECONDS, LOSSES = (8.0, 3500.0), (1.2, 2.6)
SECOND_TICKS, LOSS_TICKS = (10, 30, 100, 300, 1000, 3000), (1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6)
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 48
LABELS = {
    "dense": (3400.0, 2.42, "end"),
    "dense-muon": (390.0, 1.86, "end"),
    "muon-local": (20.0, 2.2, "start"),
}
"""Seconds, loss and anchor of the name beside each curve."""
PICTURE = Path(__file__).parents[1] / "pictures" / "loss.svg"
COLOURS = {
    "light": {"dense": "#57606a", "dense-muon": "#0969da", "muon-local": "#bc4c00"},
    "dark": {"dense": "#a8b1bb", "dense-muon": "#6cb6ff", "muon-local": "#ff9d5c"},
}
"""Colours of the strategies on a light and a dark page."""
PAPER = {"light": ("#1f2328", "#d1d9e0"), "dark": ("#e6edf3", "#3d444d")}
"""Colours of words and grid of a picture alone."""
SIZES = {"wide": (736, 420), "narrow": (366, 360)}
"""Width and height in pixels, by the width of the page."""


def measured() -> dict[str, Row]:
    """Rows of the strategies of the plot: two ranks, the small model."""
    found = {row.name: row for row in rows(evidence(), Scope(2, "small"))}
    return {name: found[name] for name in NAMES}


def steps_to_dense(row: Row, dense: Row) -> float:
    """Steps until dense AdamW's final loss."""
    steps = dense.curves[0][-1][0] if row is dense else row.steps_to(dense.loss)
    if steps is None:
        raise SystemExit(f"{row.name} does not reach {dense.loss:.3f}: it cannot be in the plot")
    return steps


def seconds_to_dense(row: Row, dense: Row) -> float:
    """Seconds until dense AdamW's final loss."""
    return steps_to_dense(row, dense) * row.step_s[LINK]


@dataclass(frozen=True)
class Axes:
    """Seconds and losses as pixels of a plot of one size."""

    width: int
    height: int

    @property
    def right(self) -> int:
        """Right edge of the plotted area."""
        return self.width - RIGHT

    @property
    def floor(self) -> int:
        """Lower edge of the plotted area."""
        return self.height - BOTTOM

    def x(self, seconds: float) -> float:
        """Position of a time, on a logarithmic scale."""
        low, high = map(log, SECONDS)
        return LEFT + (self.right - LEFT) * (log(seconds) - low) / (high - low)

    def y(self, loss: float) -> float:
        """Position of a loss."""
        low, high = LOSSES
        return TOP + (self.floor - TOP) * (high - loss) / (high - low)

    def points(self, times: Sequence[float], losses: Sequence[float]) -> str:
        """Coordinates of a curve."""
        pairs = zip(times, losses, strict=True)
        return " ".join(f"{self.x(seconds):.1f},{self.y(loss):.1f}" for seconds, loss in pairs)


def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    """Words at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}</text>'


def grid(axes: Axes) -> Iterator[str]:
    """Lines, numbers and titles of the axes."""
    for tick in LOSS_TICKS:
        yield f'<path class="grid" d="M{LEFT} {axes.y(tick):.1f}H{axes.right}"/>'
        yield text(LEFT - 6, axes.y(tick) + 4, f"{tick:.1f}", "end")
    for tick in SECOND_TICKS:
        yield f'<path class="grid" d="M{axes.x(tick):.1f} {TOP}V{axes.floor}"/>'
        yield text(axes.x(tick), axes.floor + 17, f"{tick:,}")
    title = "seconds of training at 20 Mbit/s (log scale)"
    yield text((LEFT + axes.right) / 2, axes.height - 8, title)
    middle = (TOP + axes.floor) / 2
    turned = f' transform="rotate(-90 12 {middle:.1f})"'
    yield text(12, middle, "held-out loss, nats per byte", more=turned)


def curves(axes: Axes, found: Mapping[str, Row]) -> Iterator[str]:
    """Mean and range of the seeds of each strategy, with its name."""
    for name, row in found.items():
        times = [step * row.step_s[LINK] for step, _ in row.curves[0]][1:]
        seeds = zip(*([loss for _, loss in curve][1:] for curve in row.curves), strict=True)
        lowest, mean, highest = zip(*((min(s), fmean(s), max(s)) for s in seeds), strict=True)
        around = axes.points(times + times[::-1], lowest + highest[::-1])
        yield f'<polygon class="{name}" points="{around}"/>'
        yield f'<polyline class="{name}" points="{axes.points(times, mean)}"/>'
        seconds, loss, anchor = LABELS[name]
        yield text(axes.x(seconds), axes.y(loss), NAMES[name], anchor, f' class="{name}"')


def factors(axes: Axes, found: Mapping[str, Row]) -> Iterator[str]:
    """Dense AdamW's final loss, where each strategy reaches it, and the factors between them."""
    dense, local = found["dense"], found["muon-local"]
    level = axes.y(dense.loss)
    yield f'<path class="level" d="M{LEFT} {level:.1f}H{axes.right}"/>'
    yield text(LEFT + 4, level + 17, "dense AdamW's", "start")
    yield text(LEFT + 4, level + 32, f"final loss, {dense.loss:.3f}", "start")
    reached = {name: seconds_to_dense(row, dense) for name, row in found.items()}
    soonest = reached["muon-local"]
    last = local.curves[0][-1][0] * local.step_s[LINK]
    for name, below, begin, end in (
        ("dense", -24, soonest, 0.65 * reached["dense-muon"]),
        ("dense-muon", 17, last, reached["dense-muon"]),
    ):
        between = (axes.x(begin) + axes.x(end)) / 2
        times = f"{reached[name] / soonest:.0f} times sooner"
        yield text(between, level + below, times, more=' class="times"')
        yield text(between, level + below + 15, f"than {NAMES[name]}")
    for name, seconds in reached.items():
        yield f'<circle class="{name}" cx="{axes.x(seconds):.1f}" cy="{level:.1f}" r="4.5"/>'


def svg(kind: str) -> str:
    """Plot as an SVG element whose colours come from the style sheet."""
    axes, found = Axes(*SIZES[kind]), measured()
    parts = [*grid(axes), *curves(axes, found), *factors(axes, found)]
    dense = found["dense"]
    label = f"Loss against seconds at 20 Mbit/s, until dense AdamW's final loss {dense.loss:.3f}: "
    label += "; ".join(
        f"{NAMES[name]} {seconds_to_dense(row, dense):,.0f} s" for name, row in found.items()
    )
    return (
        f'<svg class="figure {kind}" role="img" aria-label="{label}" '
        f'viewBox="0 0 {axes.width} {axes.height}" width="{axes.width}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def table() -> str:
    """Markdown: the numbers behind the factors of the plot."""
    found = measured()
    dense = found["dense"]
    soonest = seconds_to_dense(found["muon-local"], dense)
    lines = [
        f"| | seconds a step | steps to loss {dense.loss:.3f} | seconds | local Muon sooner by |",
        "|---|---|---|---|---|",
    ]
    for name, row in found.items():
        seconds = seconds_to_dense(row, dense)
        times = "" if name == "muon-local" else f"{seconds / soonest:.0f} x"
        lines.append(
            f"| {NAMES[name]} | {row.step_s[LINK]:.3f} | {steps_to_dense(row, dense):,.0f} "
            f"| {seconds:,.0f} | {times} |"
        )
    return "\n".join(lines)


def figure() -> str:
    """Plot and table as Markdown; the style sheet shows the plot that fits the page."""
    drawn = "\n".join(svg(kind) for kind in SIZES)
    return f"```{{raw}} html\n{drawn}\n```\n\n{table()}"


def alone() -> str:
    """Plot as a file of its own, on a light or dark page."""
    rules = [
        "text { font: 13px sans-serif; } .times { font-size: 15px; }",
        ":is(.times, text[class]) { font-weight: bold; }",
        ".level { stroke-dasharray: 5 4; } polyline { fill: none; stroke-width: 2.5; }",
        "polygon { opacity: 0.2; }",
    ]
    for scheme, (words, lines) in PAPER.items():
        own = [f"text {{ fill: {words}; }} .level {{ stroke: {words}; }}"]
        own.append(f".grid {{ stroke: {lines}; }}")
        for name, colour in COLOURS[scheme].items():
            own.append(f"polyline.{name} {{ stroke: {colour}; }}")
            own.append(f":is(text, polygon, circle).{name} {{ fill: {colour}; }}")
        rules.append(f"@media (prefers-color-scheme: {scheme}) {{ {' '.join(own)} }}")
    style = "\n".join(rules)
    drawn = svg("wide").replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return drawn.replace("\n", f"\n<style>\n{style}\n</style>\n", 1) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(alone(), encoding="utf-8")
