"""Write the files of a comparison: `results.json`, `report.html` and winning strategy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire._files import replace_file
from thinwire.tools.compare.record import Point, Results, Run
from thinwire.tools.compare.strategies import strategy_text
from thinwire.tools.compare.tables import further, summary
from thinwire.tools.report.page import (
    FRAMES,
    Frame,
    bytes_text,
    loss_text,
    page,
    value_text,
)

_ABOVE = "Lines that enter at the upper edge start at the loss before the first step."
_LOCAL = "A local method is evaluated right after an averaging."
_PLOTS = (
    (
        "Loss against time",
        "seconds",
        "training time in seconds, without evaluation",
        f"{_ABOVE} {_LOCAL}",
    ),
    (
        "Loss against bytes",
        "library_bytes",
        "bytes sent per worker, logarithmic",
        "Counted by the library, without the evaluation before the first step.",
    ),
    ("Loss against steps", "step", "steps", _ABOVE),
)
BEST = "best-strategy.yaml"
_FIRST_LINE = "# Written by thinwire compare: "


def render(results: Results) -> str:
    """Return the report as one HTML page."""
    runs = results.strategies
    winner = results.run_of(results.winner)
    unit = results.settings["loss_unit"]
    return page(
        "compare.html",
        results=results,
        summary=summary(results),
        further=further(results),
        plots=[
            (title, x_name, caption, drawings)
            for title, axis, x_name, caption in _PLOTS
            if (drawings := loss_plots(runs, axis))
        ],
        loss_name=f"held-out loss, {unit}" if unit else "held-out loss",
        use=None if winner is None else to_use(results, winner),
        strategies={
            run.strategy: f"{run.summary}. {value_text(run.settings)}. Bytes counted by: "
            f"{run.library_bytes_counted_by}."
            for run in runs
        },
        about={
            "settings": results.settings,
            "model": results.model,
            "text": results.text,
            "link": vars(results.link),
            "machine": results.machine,
        },
    )


def loss_plots(runs: Sequence[Run], axis: str) -> list[tuple[Any, ...]]:
    """Return drawings of the loss against "seconds", "step" or "library_bytes" (logarithmic)."""
    lines = []
    for run in runs:
        curves = [run.evaluations, *(seed.evaluations for seed in run.seeds if len(run.seeds) > 1)]
        if axis == "library_bytes":
            curves = [[point for point in curve if point.library_bytes > 0] for curve in curves]
        lines.append(curves)
    return [_drawing(frame, runs, lines, axis) for frame in FRAMES if any(map(any, lines))]


def _drawing(
    frame: Frame, runs: Sequence[Run], lines: Sequence[Sequence[Sequence[Point]]], axis: str
) -> tuple[Any, ...]:
    """Return frame, axes, and for each strategy paths (its seeds' behind its own) and marks."""
    points = [point for curves in lines for curve in curves for point in curve]
    # the loss before training is far above the rest: lines come in over the upper edge
    later = [point.loss for curves in lines for point in curves[0] if point.step > 0]
    x = frame.x_axis(
        (getattr(point, axis) for point in points), logarithmic=axis == "library_bytes"
    )
    y = frame.y_axis(later or [point.loss for point in points])

    def placed(point: Point) -> tuple[float, float]:
        return x.pixel(getattr(point, axis)), y.pixel(point.loss)

    drawn = []
    for run, curves in zip(runs, lines, strict=True):
        paths = ["L".join("{:.1f} {:.1f}".format(*placed(p)) for p in curve) for curve in curves]
        marks = [
            (
                *placed(point),
                f"{run.strategy}: loss {loss_text(point.loss)} at {point.seconds:,.1f} s, step "
                f"{point.step:,}, {bytes_text(point.library_bytes)} sent per worker",
            )
            for point in curves[0]
            if placed(point)[1] >= frame.top
        ]
        drawn.append((paths, marks))
    return frame, x, y, drawn


def to_use(results: Results, run: Run) -> tuple[str, str]:
    """Return instructions for a strategy, and the text to copy."""
    rate = f"{run.settings['optimizer']} and a peak learning rate of {run.settings['lr']:g}"
    if run.document is not None:
        how = (
            f"The strategy file, also beside this report as {BEST}: load it with "
            "thinwire.DistributedStrategy.load(path) and call prepare(model, optimizer, "
            f"loss_fn). Here it trained with {rate}."
        )
        head = f"{_FIRST_LINE}{results.headline}\n# It trained with {rate}.\n"
        return how, head + strategy_text(run.document)
    how = f"A communication hook of torch for DistributedDataParallel. Here it trained with {rate}."
    return how, run.code or ""


def _write_best(results: Results, folder: Path) -> None:
    """Write the winner's strategy file; without one remove an old file."""
    path = folder / BEST
    run = results.run_of(results.winner)
    if run is not None and run.document is not None:
        replace_file(path, to_use(results, run)[1].encode())
    elif path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(
        _FIRST_LINE
    ):
        path.unlink()


def write(results: Results, folder: Path) -> None:
    """Write the record, the page and the winner's strategy file: readers see old or new ones."""
    text = json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n"
    replace_file(folder / "results.json", text.encode())
    # a file's name need not be text
    replace_file(folder / "report.html", render(results).encode("utf-8", "backslashreplace"))
    _write_best(results, folder)
