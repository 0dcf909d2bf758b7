"""Tables of a comparison: a row per strategy, a column per measure."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.tools.compare.record import Results, Run
from thinwire.tools.report.page import loss_digits, loss_text, number

Value = float | None
_BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


@dataclass(frozen=True)
class Column:
    """One measure: a text for each strategy, "-" if missing, and the indices of the best."""

    label: str
    unit: str
    texts: tuple[str, ...]
    best: frozenset[int]

    @property
    def whole_label(self) -> str:
        """The measure with its unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label


@dataclass(frozen=True)
class Table:
    """Columns that are read together."""

    title: str
    columns: tuple[Column, ...]


def tables(results: Results) -> tuple[Table, ...]:
    """Return tables of all finished strategies; a measure without any value is left out."""
    runs, shared = results.strategies, results.settings
    by_steps, sender = shared.seconds is None, "worker" if shared.shard == 1 else "site"
    dense, common = results.dense_loss, results.common_loss
    # the loss that all reached says no more where all reached dense's, and nothing where there is
    # one strategy
    all_reached = dense is not None and all(run.seconds_to_dense_loss is not None for run in runs)
    loss = (
        "held-out loss" if shared.loss_of == "the held-out part" else "loss on the validation part"
    )
    digits = loss_digits([run.final_loss for run in runs])
    result = [
        _fixed("steps", "", runs, "steps", 0, None),
        _seconds("training time", runs, "seconds", min if by_steps else None),
        _seconds(
            "training time on the requested link",
            runs,
            "seconds_on_asked_link",
            min if by_steps else None,
        ),
        _fixed(f"{loss} at the end", shared.loss_unit or "", runs, "final_loss", digits, min),
        _fixed(f"its range over {shared.seeds} seeds", "", runs, "final_loss_range", digits, None),
        *(
            ()
            if dense is None
            else _until("dense", f"dense's loss ({loss_text(dense)})", runs, sender)
        ),
        *(
            ()
            if all_reached or len(runs) == 1
            else _until("common", f"the common loss ({loss_text(common)})", runs, sender)
        ),
        _seconds("preparation", runs, "preparation_seconds", None),
    ]
    step = [
        _fixed("steady step, median", "ms", runs, "median_step_ms", 0, min),
        _fixed("compute-only step", "ms", runs, "median_bare_step_ms", 0, None),
        _fixed("communication share", "%", runs, "exchange_share", 0, min, scale=100),
        _bytes(f"bytes per {sender} and step", runs, "library_bytes_per_step"),
        _bytes("the same, counted by the kernel", runs, "kernel_sent_bytes_per_step"),
        _fixed("times fewer bytes per step than dense", "", runs, "ratio_to_dense", 1, max),
    ]
    groups = (Table("Result", _present(result)), Table("One step", _present(step)))
    return tuple(group for group in groups if group.columns)


Choice = Callable[[Sequence[float]], float] | None


def _present(columns: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(column for column in columns if any(text != "-" for text in column.texts))


def _until(which: str, loss: str, runs: Sequence[Run], sender: str) -> list[Column]:
    return [
        _seconds(f"time to {loss}", runs, f"seconds_to_{which}_loss", min),
        _bytes(f"bytes per {sender} to that loss", runs, f"bytes_to_{which}_loss"),
    ]


def _seconds(label: str, runs: Sequence[Run], key: str, choice: Choice) -> Column:
    return _fixed(label, "s", runs, key, 1, choice)


def _bytes(label: str, runs: Sequence[Run], key: str) -> Column:
    """Return a column of bytes, in the largest unit in which the smallest value is at least 1."""
    values = [getattr(run, key) for run in runs]
    smallest = min((value for value in values if value), default=1.0)
    unit, size = next(((unit, size) for unit, size in _BYTE_UNITS if smallest >= size), ("B", 1.0))
    digits = 0 if unit == "B" or smallest >= 100 * size else 1 if smallest >= 10 * size else 2
    return _column(
        label, unit, [None if value is None else value / size for value in values], digits, min
    )


def _fixed(
    label: str,
    unit: str,
    runs: Sequence[Run],
    key: str,
    digits: int,
    choice: Choice,
    scale: float = 1.0,
) -> Column:
    values = [getattr(run, key) for run in runs]
    scaled = [None if value is None else scale * value for value in values]
    return _column(label, unit, scaled, digits, choice)


def _column(label: str, unit: str, values: Sequence[Value], digits: int, choice: Choice) -> Column:
    texts = tuple("-" if value is None else number(value, digits) for value in values)
    present = [value for value in values if value is not None]
    best: frozenset[int] = frozenset()
    if choice is not None and len(set(texts)) > 1 and len(present) > 0 and len(texts) > 1:
        mark = number(choice(present), digits)
        best = frozenset(row for row, text in enumerate(texts) if text == mark)
    return Column(label, unit, texts, best)


_BLANKS, _EDGES = 3, 2
_HEADING = 11


def print_table(results: Results) -> None:
    """Print verdict, headline and tables; columns that do not fit wrap below the others."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for text in (results.verdict, results.headline, results.interrupted):
        if text:
            console.print(str(text), markup=False)
    names = [run.strategy for run in results.strategies]
    for group in tables(results):
        for columns in _side_by_side(names, group.columns, console.width):
            table = Table(
                "", *("\n".join(_heading_lines(column)) for column in columns), box=box.SIMPLE_HEAD
            )
            for heading in table.columns[1:]:
                heading.justify = "right"
            for row, name in enumerate(names):
                table.add_row(Text(name), *(_cell(column, row) for column in columns))
            console.print(table)
    console.print("* best of its column", markup=False)
    for failure in results.failures:
        console.print(f"{failure.strategy} failed: {failure.error}", markup=False)


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
    """Split columns, each with two blanks around it, into tables that fit the width."""
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
