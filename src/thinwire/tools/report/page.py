"""The report as one HTML file that needs nothing else: style and script are inside, and nothing is
loaded.
"""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from thinwire._files import replace_file
from thinwire.tools.report.measures import Table, tables
from thinwire.tools.report.plots import PALETTE, loss_plots, sample
from thinwire.tools.report.verdict import interruption
from thinwire.tools.report.winner import to_use

__all__ = [
    "cell",
    "copied",
    "definitions",
    "render",
    "resource",
    "series_colours",
    "table_of",
    "table_row",
    "write_page",
    "write_report",
]

_ABOVE = "Lines that come in over the upper edge begin at the loss before the first step."
_PLOTS = (
    ("Loss against time", "seconds", "training time in seconds, evaluation not counted", _ABOVE),
    (
        "Loss against bytes",
        "library_bytes",
        "bytes sent per worker, logarithmic",
        "Counted by the library; the evaluation before the first step is left out.",
    ),
    ("Loss against steps", "step", "steps", _ABOVE),
)
_STEP_NOTE = (
    "A steady step is one after the ramp of the method. The compute-only step is the same step "
    "without any exchange, on a copy of the model, measured in between. The communication share is "
    "the part of a steady step beyond it: waiting for the wire, and coding what is sent."
)
_RESULT_NOTE = (
    "★ marks the best of its column. Times to a loss are read off the curves by straight lines "
    "between evaluations, for all strategies alike; evaluation and preparation are not part of "
    "them. Preparation is what comes before the clock starts: processes, imports, compilation of "
    "kernels, and each part of the strategy used once on a copy of the model."
)


def render(results: Mapping[str, Any]) -> str:
    """The whole page for the content of `results.json`."""
    runs = results["strategies"]
    result, *others = tables(results)
    first, _, rest = results["verdict"].partition(". ")
    warn = "" if results["link"]["emulated"] or results["link"]["reason"] is None else " warn"
    missing = interruption(results)
    summaries = {run["strategy"]: _strategy_text(run) for run in runs}
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>thinwire compare: "
            f"{escape(', '.join(run['strategy'] for run in runs))}</title>",
            f"<style>{series_colours(len(runs))}{resource('report.css')}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(first if not rest else first + '.')}</h1>",
            f'<p class="lead">{escape(rest)}</p>' if rest else "",
            f'<p class="headline{warn}">{escape(results["headline"])} {_runs_text(results)}</p>',
            f'<p class="headline warn">{escape(missing)}</p>' if missing else "",
            _table(result, results),
            *(_plot(results, *plot) for plot in _PLOTS),
            *_to_use(results, results["winner"]),
            "<h2>Make it again</h2>",
            copied("command", results["command"]),
            *(_table(table, results) for table in others),
            "<h2>Strategies</h2>",
            definitions(summaries),
            *(
                f"<details><summary>{key.capitalize()}</summary>\n{definitions(results[key])}</details>"
                for key in ("settings", "model", "text", "link", "machine")
            ),
            f'<p class="note">thinwire {escape(results["thinwire"])}, '
            f"{escape(results['started'])}. Every figure and every evaluation is in results.json "
            "beside this file.</p>\n</main>",
            f"<script>{resource('report.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _runs_text(results: Mapping[str, Any]) -> str:
    first, count = results["settings"]["seed"], results["settings"].get("seeds", 1)
    if count == 1:
        return f"One run of each strategy, seed {first}."
    return (
        f"Means over {count} runs of each strategy, seeds {first} to {first + count - 1}; thin "
        "lines are single runs."
    )


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """Write the page in one piece."""
    write_page(render(results), path)


def write_page(page: str, path: Path) -> None:
    """Write a file in one piece."""
    # a file's name need not be text
    replace_file(path, page.encode("utf-8", "backslashreplace"))


def resource(name: str) -> str:
    """The style `report.css` or the script `report.js`."""
    return "\n" + files("thinwire.tools.report").joinpath(name).read_text(encoding="utf-8")


def series_colours(count: int) -> str:
    """CSS variables `--series-0`, `--series-1`, ... for light and dark pages."""
    light, dark = (
        " ".join(
            f"--series-{number}: {PALETTE[number % len(PALETTE)][shade]};"
            for number in range(count)
        )
        for shade in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _table(table: Table, results: Mapping[str, Any]) -> str:
    heads = [f"{escape(column.label)}{_unit(column.unit)}" for column in table.columns]
    rows = [
        table_row(f"{sample(row)}{escape(run['strategy'])}", _cells(table, row))
        for row, run in enumerate(results["strategies"])
    ]
    note = _STEP_NOTE
    if table.title == "Result":
        note = _RESULT_NOTE
        rows += [
            table_row(
                escape(failure["strategy"]),
                f'<td role="cell" class="failure" colspan="{len(table.columns)}">failed: '
                f"{escape(failure['error'])}</td>",
                ' class="failed"',
            )
            for failure in results["failures"]
        ]
    whole = table_of(table.title, heads, rows)
    return f'<h2>{table.title}</h2>\n{whole}\n<p class="note">{note}</p>'


# the roles are those of the elements, which narrow pages lay out as blocks and thereby take from
# them
def table_of(label: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table of strategies: the heads of its columns, and rows by `table_row`."""
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
    """A cell of a table, with the head of its column for narrow pages."""
    return (
        f'<td role="cell"{more} data-label="{escape(label)}">'
        f'<span class="value">{escape(text)}</span></td>'
    )


def table_row(head: str, cells: str, more: str = "") -> str:
    """A row of a table, with more attributes of the row if need be."""
    return f'<tr role="row"{more}><th scope="row" role="rowheader">{head}</th>{cells}</tr>'


def _cells(table: Table, row: int) -> str:
    return "".join(
        cell(column.whole_label, column.texts[row], _best(row in column.best))
        for column in table.columns
    )


def _best(best: bool) -> str:
    return ' class="best" title="the best of its column"' if best else ""


def _unit(unit: str) -> str:
    return f', <span class="unit">{escape(unit)}</span>' if unit else ""


def _plot(results: Mapping[str, Any], title: str, axis: str, label: str, caption: str) -> str:
    drawings = loss_plots(results, axis, label)
    if not drawings:
        return ""
    names = "".join(
        f"<li>{sample(number)}{escape(run['strategy'])}</li>"
        for number, run in enumerate(results["strategies"])
    )
    note = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<h2>{title}</h2>\n<figure><ul class="legend">{names}</ul>\n{drawings}\n{note}</figure>'


def _to_use(results: Mapping[str, Any], winner: str | None) -> list[str]:
    """The winner's strategy file, or the lines of torch that make it."""
    use = to_use(results, winner)
    if use is None:
        return []
    return [
        f"<h2>To train with {escape(use.strategy)}</h2>",
        f"<p>{escape(use.how)}</p>",
        copied("use", use.text),
    ]


def copied(name: str, text: str) -> str:
    """A text with a button that copies it."""
    button = f'<button type="button" data-copy="{name}">copy</button>'
    return f'{button}\n<pre id="{name}">{escape(text)}</pre>'


def _strategy_text(run: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key} {_value_text(value)}" for key, value in run["settings"].items())
    return f"{run['summary']}. {settings}. Bytes counted by: {run['library_bytes_counted_by']}."


def definitions(entries: Mapping[str, Any]) -> str:
    """Names and values below each other; without those that are None."""
    items = "\n".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_value_text(value))}</dd>"
        for key, value in entries.items()
        if value is not None
    )
    return f"<dl>\n{items}\n</dl>"


def _value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_value_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(entry)}" for key, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
