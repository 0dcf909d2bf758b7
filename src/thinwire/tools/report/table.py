"""The tables of a comparison in the terminal: a row per strategy, the best of each column marked
with a star.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.tools.report.measures import Column, tables
from thinwire.tools.report.verdict import interruption

__all__ = ["print_table"]

_BLANKS, _EDGES = 3, 2
_HEADING = 11


def print_table(results: Mapping[str, Any]) -> None:
    """Print verdict, circumstances and tables to standard output; columns that do not fit come
    below the others.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for text in (results["verdict"], results["headline"], interruption(results)):
        if text:
            console.print(text, markup=False)
    names = [run["strategy"] for run in results["strategies"]]
    for group in tables(results):
        for columns in _side_by_side(names, group.columns, console.width):
            table = Table("", *(_heading(column) for column in columns), box=box.SIMPLE_HEAD)
            for heading in table.columns[1:]:
                heading.justify = "right"
            for row, name in enumerate(names):
                table.add_row(Text(name), *(_cell(column, row) for column in columns))
            console.print(table)
    console.print("* the best of its column", markup=False)
    for failure in results["failures"]:
        console.print(f"{failure['strategy']} failed: {failure['error']}", markup=False)


def _heading(column: Column) -> str:
    return "\n".join(_heading_lines(column))


def _heading_lines(column: Column) -> list[str]:
    whole = column.whole_label
    # each number has a place for a star behind it, and so has the heading
    return [
        f"{line} "
        for line in textwrap.wrap(whole, _HEADING, break_long_words=False, break_on_hyphens=False)
    ]


def _cell(column: Column, row: int) -> str:
    return column.texts[row] + ("*" if row in column.best else " ")


def _side_by_side(
    names: Sequence[str], columns: Sequence[Column], width: int
) -> list[list[Column]]:
    """Columns in groups whose tables fit the width, at least one a group; each column has two
    blanks around it.
    """
    room = width - _EDGES - _BLANKS - max(len(name) for name in names)
    groups: list[list[Column]] = []
    left = 0
    for column in columns:
        cells = [_cell(column, row) for row in range(len(names))]
        needed = _BLANKS + max(len(text) for text in (*_heading_lines(column), *cells))
        if not groups or needed > left:
            groups.append([])
            left = room
        groups[-1].append(column)
        left -= needed
    return groups
