"""Tables of a comparison: a row per strategy, a column per measure."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from thinwire.tools.compare.record import Results, Run
from thinwire.tools.report.page import Column, loss_digits, loss_text, number

if TYPE_CHECKING:
    from rich.table import Table

Choice = Callable[[Sequence[float]], float] | None
_BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_WIDTH, _NAME_WIDTH, _AT_ONCE = 80, 18, 3
"""Characters of a line and of a name, and strategies beside each other among all figures."""


def summary(results: Results) -> list[Column]:
    """Return the columns to look at first; with the names they fit 80 characters."""
    runs = results.strategies
    which = "common" if results.dense_loss is None else "dense"
    target = "dense's loss" if which == "dense" else "the common loss"
    reached = runs if which == "dense" or len(runs) > 1 else []
    return _present(
        _fixed("loss", runs, "final_loss", _digits(runs), min),
        _fixed(f"to {target}, s", reached, f"seconds_to_{which}_loss", 1, min),
        _fixed("a step, ms", runs, "median_step_ms", 0, min),
        _fixed("waits, %", runs, "exchange_share", 0, min, 100),
        _bytes("sent a step", runs, "library_bytes_per_step"),
        _fixed("times fewer", runs, "ratio_to_dense", 1, max),
        _fixed("set-up, s", runs, "preparation_seconds", 1),
    )


def further(results: Results) -> list[Column]:
    """Return the columns beside those of the summary; a measure without any value is left out."""
    runs, shared = results.strategies, results.settings
    dense, common = results.dense_loss, results.common_loss
    sender = "worker" if shared["shard"] == 1 else "site"
    fastest = min if shared["seconds"] is None else None
    # the loss that all reached says no more where all reached dense's, and nothing where there is
    # one strategy
    all_reached = dense is not None and all(run.seconds_to_dense_loss is not None for run in runs)
    targets = [] if dense is None else [("dense", f"dense's loss ({loss_text(dense)})")]
    if len(runs) > 1 and not all_reached:
        targets.append(("common", f"the common loss ({loss_text(common)})"))
    return _present(
        _fixed("steps", runs, "steps", 0),
        _fixed("training time, s", runs, "seconds", 1, fastest),
        _fixed("training time on the requested link, s", runs, "seconds_on_asked_link", 1, fastest),
        _fixed(
            f"range of the loss over {shared['seeds']} seeds",
            runs,
            "final_loss_range",
            _digits(runs),
        ),
        *(
            column
            for which, loss in targets
            for column in (
                _fixed(f"time to {loss}, s", runs, f"seconds_to_{which}_loss", 1, min),
                _bytes(f"bytes per {sender} to that loss", runs, f"bytes_to_{which}_loss"),
            )
        ),
        _fixed("compute-only step, ms", runs, "median_bare_step_ms", 0),
        _bytes(f"bytes per {sender} and step, by the kernel", runs, "kernel_sent_bytes_per_step"),
    )


def _present(*columns: Column) -> list[Column]:
    return [column for column in columns if any(text != "-" for text in column.texts)]


def _digits(runs: Sequence[Run]) -> int:
    return loss_digits([run.final_loss for run in runs])


def _bytes(label: str, runs: Sequence[Run], key: str) -> Column:
    """Return a column of bytes, in the largest unit in which the smallest value is at least 1."""
    least = min((value for run in runs if (value := getattr(run, key))), default=1.0)
    unit, size = next((row for row in _BYTE_UNITS if least >= row[1]), ("B", 1.0))
    digits = 0 if unit == "B" or least >= 10 * size else 1
    return _fixed(f"{label}, {unit}", runs, key, digits, min, 1 / size)


def _fixed(
    label: str,
    runs: Sequence[Run],
    key: str,
    digits: int,
    choice: Choice = None,
    scale: float = 1.0,
) -> Column:
    values = [getattr(run, key) for run in runs]
    present = [scale * value for value in values if value is not None]
    texts = tuple("-" if value is None else number(scale * value, digits) for value in values)
    mark = number(choice(present), digits) if choice and present and len(set(texts)) > 1 else None
    return Column(label, texts, frozenset(row for row, text in enumerate(texts) if text == mark))


def print_table(results: Results, *, every: bool = False) -> None:
    """Print verdict, headline and one table of at most 80 characters; with `every` all figures."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.width = min(_WIDTH, console.width)
    for text in (results.verdict, results.headline, results.interrupted):
        if text:
            console.print(str(text))
    names = [run.strategy for run in results.strategies]
    columns = summary(results)
    rows = zip(names, *map(_cells, columns), strict=True)
    console.print(drawn([column.label for column in columns], rows))
    for begin in range(0, len(names), _AT_ONCE) if every else ():
        some = slice(begin, begin + _AT_ONCE)
        lines = [[column.label, *_cells(column)[some]] for column in further(results)]
        console.print(drawn(names[some], lines))
    more = "" if every else " More figures: --all."
    console.print(f"* best. waits: of a step. set-up: before the training.{more}")
    for failure in results.failures:
        console.print(f"{failure.strategy} failed: {failure.error}")


def drawn(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """Return a table for a terminal; the first entry of a row is its name."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    lines = [*rows]
    longest = max((len(line[0]) for line in lines), default=0)
    table.columns[0].overflow = "fold"
    table.columns[0].min_width = min(longest, _NAME_WIDTH)
    for index, head in enumerate(heads, 1):  # heads wrap between words, values do not
        width = max(map(len, [*head.split(), *(line[index] for line in lines)]))
        table.add_column(Text(head), justify="right", overflow="fold", width=width)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _cells(column: Column) -> list[str]:
    return [text + " *"[row in column.best] for row, text in enumerate(column.texts)]
