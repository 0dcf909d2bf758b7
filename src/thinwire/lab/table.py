"""The table of a comparison: one line per measure, one column per strategy; in the terminal and in the report alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Line", "bytes_text", "lines", "print_table"]

Line = tuple[str, list[str]]
_EDGES, _BLANKS = 4, 2


def lines(results: Mapping[str, Any]) -> list[Line]:
    """Label and one text per strategy, for every measure that was taken."""
    loss = "held-out loss" if results["settings"]["loss_of"] == "the held-out part" else "loss on the validation part"
    common = f"{results['common_loss']:.2f}"
    measures: list[tuple[str, str, Callable[[Any], str]]] = [
        ("steps", "steps", str),
        (f"{loss}, nats per byte", "final_loss", "{:.3f}".format),
        ("training time", "seconds", _seconds_text),
        ("training time on the asked link", "seconds_on_asked_link", _seconds_text),
        (f"time to a loss of {common}", "seconds_to_common_loss", _seconds_text),
        (f"sent per worker to a loss of {common}", "bytes_to_common_loss", bytes_text),
        ("time to the loss dense ends with", "seconds_to_dense_loss", _seconds_text),
        ("sent per worker until then", "bytes_to_dense_loss", bytes_text),
        ("sent per step, by the library", "library_bytes_per_step", bytes_text),
        ("sent per step, by the kernel", "kernel_sent_bytes_per_step", bytes_text),
        ("times less than dense", "ratio_to_dense", "{:.4g}".format),
        ("steady step, median", "median_step_ms", "{:.0f} ms".format),
        ("same step without exchange", "median_bare_step_ms", "{:.0f} ms".format),
        ("steady step / without exchange", "step_ratio_to_bare", "{:.2f}".format),
        ("share of a step for the wire", "exchange_share", "{:.0%}".format),
    ]
    runs = results["strategies"]
    return [
        (label, ["-" if run.get(key) is None else form(run[key]) for run in runs])
        for label, key, form in measures
        if any(run.get(key) is not None for run in runs)
    ]


def bytes_text(count: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    size = count
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:.0f} s"


def print_table(results: Mapping[str, Any]) -> None:
    """Prints headline and table to standard output; strategies that do not fit beside the others come below them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(results["headline"])
    rows = lines(results)
    names = [run["strategy"] for run in results["strategies"]]
    for columns in _side_by_side(names, rows, console.width):
        table = Table("", *(names[column] for column in columns), box=box.SIMPLE_HEAD)
        for heading in table.columns[1:]:
            heading.justify = "right"
        for label, texts in rows:
            table.add_row(label, *(texts[column] for column in columns))
        console.print(table)


def _side_by_side(names: Sequence[str], rows: Sequence[Line], width: int) -> list[list[int]]:
    """Columns in groups whose tables fit the width, at least one a group; each column has two blanks around it."""
    room = width - _EDGES - max((len(label) for label, _ in rows), default=0)
    groups: list[list[int]] = []
    left = 0
    for column, name in enumerate(names):
        needed = _BLANKS + max(len(text) for text in (name, *(texts[column] for _, texts in rows)))
        if not groups or needed > left:
            groups.append([])
            left = room
        groups[-1].append(column)
        left -= needed
    return groups
