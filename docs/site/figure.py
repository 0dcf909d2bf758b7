"""Plot of the landing page: loss against seconds at 20 Mbit/s, from benchmarks/results."""

from math import log
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


def svg(kind: str) -> str:
    """Plot as an SVG element whose colours come from the style sheet."""
    width, height = SIZES[kind]

    def x(seconds: float) -> float:
        low, high = map(log, SECONDS)
        return LEFT + (width - LEFT - RIGHT) * (log(seconds) - low) / (high - low)

    def y(loss: float) -> float:
        low, high = LOSSES
        return TOP + (height - TOP - BOTTOM) * (high - loss) / (high - low)

    def text(at_x: float, at_y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"{more}>{words}</text>'

    def points(pairs: list[tuple[float, float]]) -> str:
        return " ".join(f"{x(seconds):.1f},{y(loss):.1f}" for seconds, loss in pairs)

    found = measured()
    dense = found["dense"]
    reached = {name: seconds_to_dense(row, dense) for name, row in found.items()}
    right, floor = width - RIGHT, height - BOTTOM
    parts = []
    for tick in LOSS_TICKS:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{right}"/>')
        parts.append(text(LEFT - 6, y(tick) + 4, f"{tick:.1f}", "end"))
    for tick in SECOND_TICKS:
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {TOP}V{floor}"/>')
        parts.append(text(x(tick), floor + 17, f"{tick:,}"))
    parts.append(
        text((LEFT + right) / 2, height - 8, "seconds of training at 20 Mbit/s (log scale)")
    )
    middle = f"{(TOP + floor) / 2:.1f}"
    turn = f' transform="rotate(-90 12 {middle})"'
    parts.append(text(12, float(middle), "held-out loss, nats per byte", more=turn))
    for name, row in found.items():
        step_s = row.step_s[LINK]
        curves = [[loss for _, loss in curve][1:] for curve in row.curves]
        times = [step * step_s for step, _ in row.curves[0]][1:]
        lowest, mean, highest = (
            list(zip(times, map(of, zip(*curves, strict=True)), strict=True))
            for of in (min, fmean, max)
        )
        parts.append(f'<polygon class="{name}" points="{points(lowest + highest[::-1])}"/>')
        parts.append(f'<polyline class="{name}" points="{points(mean)}"/>')
        seconds, loss, anchor = LABELS[name]
        label = f' class="{name}"'
        parts.append(text(x(seconds), y(loss), NAMES[name], anchor, label))
    level = y(dense.loss)
    parts.append(f'<path class="level" d="M{LEFT} {level:.1f}H{right}"/>')
    parts.append(text(LEFT + 4, level + 17, "dense AdamW's", "start"))
    parts.append(text(LEFT + 4, level + 32, f"final loss, {dense.loss:.3f}", "start"))
    soonest = reached["muon-local"]
    last = found["muon-local"].curves[0][-1][0] * found["muon-local"].step_s[LINK]
    for name, below, begin, end in (
        ("dense", -24, soonest, 0.65 * reached["dense-muon"]),
        ("dense-muon", 17, last, reached["dense-muon"]),
    ):
        between = (x(begin) + x(end)) / 2
        times = f"{reached[name] / soonest:.0f} times sooner"
        parts.append(text(between, level + below, times, more=' class="times"'))
        parts.append(text(between, level + below + 15, f"than {NAMES[name]}"))
    for name, seconds in reached.items():
        parts.append(f'<circle class="{name}" cx="{x(seconds):.1f}" cy="{level:.1f}" r="4.5"/>')
    label = (
        "Loss against seconds at 20 Mbit/s. "
        + "; ".join(f"{NAMES[name]} needs {s:,.0f} s" for name, s in reached.items())
        + f" for a loss of {dense.loss:.3f}."
    )
    return (
        f'<svg class="figure {kind}" role="img" aria-label="{label}" '
        f'viewBox="0 0 {width} {height}" width="{width}">\n' + "\n".join(parts) + "\n</svg>"
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
