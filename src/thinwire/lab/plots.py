"""The two plots of the report as SVG text that takes its colours from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["PALETTE", "loss_plot"]

PALETTE = (
    ("#0b62c4", "#6db3ff"), ("#c2410c", "#ff9e64"), ("#15803d", "#7ee0a1"), ("#8b1fa9", "#e0a3f5"),
    ("#a16207", "#f2d06b"), ("#0e7490", "#67dcef"), ("#be123c", "#ff94ab"), ("#4b5563", "#c3cad5"),
)  # fmt: skip
"""Colour of each strategy on a light and on a dark page."""

_INK = "#010203"  # stands for the colour of the page's text; replaced below
_SERIES = "#0a0b{:02x}"
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "svg.fonttype": "none",
    "font.size": 11,
}


def loss_plot(results: Mapping[str, Any], axis: str, label: str) -> str:
    """Held-out loss against time or bytes, one line per strategy.

    Args:
        results: Content of `results.json`.
        axis: Key of the evaluations for the horizontal axis: "seconds", "library_bytes".
        label: Name of that axis.

    Returns:
        An `<svg>` element whose colours are CSS variables: `--ink`, `--series-0`, `--series-1`, ...
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(7.0, 4.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for number, run in enumerate(results["strategies"]):
            points = [point for point in run["evaluations"] if axis == "seconds" or point[axis] > 0]
            axes.plot(
                [point[axis] for point in points],
                [point["loss"] for point in points],
                color=_SERIES.format(number),
                marker=("o", "s", "^", "D", "v", "P", "X", "*")[number % 8],
                markersize=4,
                linewidth=1.8,
                label=run["strategy"],
            )
        if axis != "seconds":
            axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("held-out loss, nats per byte")
        axes.grid(alpha=0.2, color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(drawing.getvalue(), len(results["strategies"]), f"Held-out loss against {label}")


def _themed(svg: str, series: int, title: str) -> str:
    # Only the element itself: the prologue and the licence metadata name addresses on the web.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?)="[^"]*"', "", svg).replace("xlink:href", "href")
    for number in range(series):
        svg = svg.replace(_SERIES.format(number), f"var(--series-{number})")
    svg = svg.replace(_INK, "var(--ink)")
    size = re.search(r'viewBox="[^"]*"', svg)
    view = size.group() if size else ""
    return re.sub(r"<svg[^>]*>", f'<svg {view} role="img" aria-label="{title}">', svg, count=1)
