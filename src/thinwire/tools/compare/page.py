"""Write the files of a comparison: `results.json`, `report.html` and winning strategy."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thinwire._files import replace_file
from thinwire.tools.compare.record import Point, Results, Run
from thinwire.tools.compare.strategies import strategy_text
from thinwire.tools.compare.tables import Table, tables
from thinwire.tools.report.page import (
    FRAMES,
    Frame,
    bytes_text,
    cell,
    copied,
    definitions,
    grid,
    legend,
    loss_text,
    mark,
    named,
    page_of,
    stroke,
    svg,
    table_of,
    table_row,
    value_text,
    write_page,
)

_ABOVE = "Lines that enter at the upper edge start at the loss before the first step."
_PLOTS = (
    ("Loss against time", "seconds", "training time in seconds, without evaluation", _ABOVE),
    (
        "Loss against bytes",
        "library_bytes",
        "bytes sent per worker, logarithmic",
        "Counted by the library, without the evaluation before the first step.",
    ),
    ("Loss against steps", "step", "steps", _ABOVE),
)
_STEP_NOTE = (
    "A steady step comes after the ramp of the method. The compute-only step is the same step "
    "without an exchange, on a copy of the model, measured in between. The communication share "
    "is the rest of a steady step: waiting for the network and coding messages."
)
_RESULT_NOTE = (
    "★ marks the best of its column. Times to a loss are interpolated linearly between "
    "evaluations, for all strategies alike, without evaluation and preparation. Preparation "
    "comes before the clock starts: processes, imports, compilation of kernels, and a trial of "
    "each part of the strategy on a copy of the model."
)


def render(results: Results) -> str:
    """Return the report as one HTML page."""
    runs = results.strategies
    result, *others = tables(results)
    first, _, rest = results.verdict.partition(". ")
    warn = "" if results.link.emulated or results.link.reason is None else " warn"
    missing = results.interrupted
    about = {
        "settings": results.settings.to_dict(),
        "model": results.model,
        "text": results.text,
        "link": vars(results.link),
        "machine": results.machine,
    }
    return page_of(
        f"thinwire compare: {', '.join(run.strategy for run in runs)}",
        len(runs),
        [
            f"<h1>{escape(first if not rest else first + '.')}</h1>",
            f'<p class="lead">{escape(rest)}</p>' if rest else "",
            f'<p class="headline{warn}">{escape(results.headline)} {_runs_text(results)}</p>',
            f'<p class="headline warn">{escape(str(missing))}</p>' if missing else "",
            _table(result, results),
            *(_plot(results, *plot) for plot in _PLOTS),
            *_to_use(results),
            "<h2>Make it again</h2>",
            copied("command", results.command),
            *(_table(table, results) for table in others),
            "<h2>Strategies</h2>",
            definitions({run.strategy: _strategy_text(run) for run in runs}),
            *(
                f"<details><summary>{key.capitalize()}</summary>\n{definitions(entries)}</details>"
                for key, entries in about.items()
            ),
            f'<p class="note">thinwire {escape(results.thinwire)}, '
            f"{escape(results.started)}. Every figure and every evaluation is in results.json "
            "beside this file.</p>",
        ],
    )


def _runs_text(results: Results) -> str:
    first, count = results.settings.seed, results.settings.seeds
    if count == 1:
        return f"One run of each strategy, seed {first}."
    return (
        f"Means over {count} runs of each strategy, seeds {first} to {first + count - 1}; thin "
        "lines are single runs."
    )


def _table(table: Table, results: Results) -> str:
    heads = [
        escape(column.label)
        + (f', <span class="unit">{escape(column.unit)}</span>' if column.unit else "")
        for column in table.columns
    ]
    rows = []
    for row, run in enumerate(results.strategies):
        cells = [
            cell(column.whole_label, column.texts[row], _BEST if row in column.best else "")
            for column in table.columns
        ]
        rows.append(table_row(named(row, run.strategy), "".join(cells)))
    note = _STEP_NOTE
    if table.title == "Result":
        note = _RESULT_NOTE
        rows += [
            table_row(
                escape(failure.strategy),
                f'<td role="cell" class="failure" colspan="{len(table.columns)}">failed: '
                f"{escape(failure.error)}</td>",
                ' class="failed"',
            )
            for failure in results.failures
        ]
    whole = table_of(table.title, heads, rows)
    return f'<h2>{table.title}</h2>\n{whole}\n<p class="note">{note}</p>'


def _plot(results: Results, title: str, axis: str, label: str, caption: str) -> str:
    drawings = loss_plots(results, axis, label)
    if not drawings:
        return ""
    names = legend(run.strategy for run in results.strategies)
    note = f"<figcaption>{caption}</figcaption>"
    return f"<h2>{title}</h2>\n<figure>{names}\n{drawings}\n{note}</figure>"


def _to_use(results: Results) -> list[str]:
    """Return HTML with the winner's strategy file, or with equivalent torch code."""
    use = to_use(results, results.winner)
    if use is None:
        return []
    return [
        f"<h2>To train with {escape(use.strategy)}</h2>",
        f"<p>{escape(use.how)}</p>",
        copied("use", use.text),
    ]


def _strategy_text(run: Run) -> str:
    settings = ", ".join(f"{key} {value_text(value)}" for key, value in run.settings.items())
    return f"{run.summary}. {settings}. Bytes counted by: {run.library_bytes_counted_by}."


def loss_plots(results: Results, axis: str, label: str) -> str:
    """Plot held-out loss against a field of `Point`: "seconds", "step" or "library_bytes"
    (logarithmic).
    """

    def curve(points: Sequence[Point]) -> list[Point]:
        return [p for p in points if axis != "library_bytes" or p.library_bytes > 0]

    lines = {run.strategy: curve(run.evaluations) for run in results.strategies}
    single = [
        [curve(seed.evaluations) for seed in run.seeds] if len(run.seeds) > 1 else []
        for run in results.strategies
    ]
    if not any(lines.values()):
        return ""
    unit = results.settings.loss_unit
    loss = f"held-out loss, {unit}" if unit else "held-out loss"
    return "\n".join(_drawing(frame, lines, single, axis, label, loss) for frame in FRAMES)


def _drawing(
    frame: Frame,
    lines: Mapping[str, Sequence[Point]],
    single: Sequence[Sequence[Sequence[Point]]],
    axis: str,
    label: str,
    loss: str,
) -> str:
    drawn = [*lines.values(), *(curve for curves in single for curve in curves)]
    points = [point for line in drawn for point in line]
    logarithmic = axis == "library_bytes"
    x = frame.x_axis([getattr(point, axis) for point in points], logarithmic=logarithmic)
    # the loss before training is far above the rest: lines come in over the upper edge
    later = [point.loss for line in lines.values() for point in line if point.step > 0]
    losses = later or [point.loss for point in points]
    y = frame.y_axis(losses, margin=0.06)

    def placed(line: Sequence[Point]) -> list[tuple[float, float]]:
        return [(x.pixel(getattr(point, axis)), y.pixel(point.loss)) for point in line]

    form: Callable[[float], str] = bytes_text if logarithmic else "{:,g}".format
    parts = [
        *grid(frame, x, y, form, label, loss),
        *(
            _thin(number, placed(line), y.end)
            for number, curves in enumerate(single)
            for line in curves
        ),
        *(
            _series(number, name, line, placed(line), y.end)
            for number, (name, line) in enumerate(lines.items())
        ),
    ]
    title = f"Held-out loss against {label}, one line per strategy: {', '.join(lines)}"
    return svg(frame, title, parts)


def _series(
    number: int, name: str, line: Sequence[Point], pixels: list[tuple[float, float]], top: float
) -> str:
    if not pixels:
        return ""
    path = "L".join(f"{px:.1f} {py:.1f}" for px, py in _below(pixels, top))
    marks = "".join(
        mark(
            number,
            px,
            py,
            f"{name}: loss {loss_text(point.loss)} at {point.seconds:,.1f} s, "
            f"step {point.step:,}, {bytes_text(point.library_bytes)} sent per worker",
        )
        for (px, py), point in zip(pixels, line, strict=True)
        if py >= top
    )
    return f'<path d="M{path}"{stroke(number)}/><g fill="var(--series-{number})">{marks}</g>'


def _thin(number: int, pixels: list[tuple[float, float]], top: float) -> str:
    """Return a thin SVG curve for one seed."""
    inside = [(px, py) for px, py in _below(pixels, top) if py >= top]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in inside)
    return (
        f'<path d="{path}" fill="none" stroke="var(--series-{number})" stroke-width="0.8" '
        'stroke-opacity="0.45"/>'
        if inside
        else ""
    )


def _below(line: list[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """Return the line, clipped where its first segment crosses the upper edge."""
    if len(line) > 1 and line[0][1] < top <= line[1][1]:
        (x0, y0), (x1, y1) = line[:2]
        return [(x0 + (top - y0) / (y1 - y0) * (x1 - x0), top), *line[1:]]
    return line


BEST = "best-strategy.yaml"
_BEST = ' class="best" title="the best of its column"'
_FIRST_LINE = "# Written by thinwire compare: "


@dataclass(frozen=True)
class ToUse:
    """Text to copy, with instructions."""

    strategy: str
    how: str
    text: str
    is_file: bool


def to_use(results: Results, winner: str | None) -> ToUse | None:
    """Return the text to copy for a strategy; None if the strategy is unknown."""
    run = results.run_of(winner)
    if run is None:
        return None
    optimizer = run.settings.get("optimizer", results.settings.optimizer.split(";")[0])
    name, rate = (run.strategy, f"{optimizer} and a peak learning rate of {run.settings['lr']:g}")
    if run.document is not None:
        how = (
            f"The strategy file, also beside this report as {BEST}: load it with "
            "thinwire.DistributedStrategy.load(path) and call prepare(model, optimizer, "
            f"loss_fn). Here it trained with {rate}."
        )
        head = f"{_FIRST_LINE}{results.headline}\n# It trained with {rate}.\n"
        return ToUse(name, how, head + strategy_text(run.document), True)
    if run.code is not None:
        how = (
            "A communication hook of torch for DistributedDataParallel. Here it trained with "
            f"{rate}."
        )
        return ToUse(name, how, run.code, False)
    return None


def write_best(results: Results, winner: str | None, folder: Path) -> Path | None:
    """Write the winner's strategy file and return its path; without a winner remove an old file."""
    path = folder / BEST
    use = to_use(results, winner)
    if use is not None and use.is_file:
        replace_file(path, use.text.encode())
        return path
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(
        _FIRST_LINE
    ):
        path.unlink()
    return None


def write(results: Results, folder: Path) -> None:
    """Write the record, the page and the winner's strategy file: readers see old or new ones."""
    text = json.dumps(results.to_dict(), indent=1, allow_nan=False) + "\n"
    replace_file(folder / "results.json", text.encode())
    write_page(render(results), folder / "report.html")
    write_best(results, results.winner, folder)
