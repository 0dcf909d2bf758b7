"""The table of a comparison: one line per measure, one column per strategy; in the terminal and in the report alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Line", "bytes_text", "lines", "print_table"]

Line = tuple[str, list[str]]


def lines(results: Mapping[str, Any]) -> list[Line]:
    """Label and one text per strategy, for every measure that was taken."""
    common = f"{results['common_loss']:.2f}"
    measures: list[tuple[str, str, Callable[[Any], str]]] = [
        ("steps", "steps", str),
        ("held-out loss, nats per byte", "final_loss", "{:.3f}".format),
        ("training time", "seconds", _seconds_text),
        ("training time on the asked link", "seconds_on_asked_link", _seconds_text),
        (f"time to a loss of {common}", "seconds_to_common_loss", _seconds_text),
        (f"sent per worker to a loss of {common}", "bytes_to_common_loss", bytes_text),
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
    """Prints headline and table to standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("", *(run["strategy"] for run in results["strategies"]), box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, texts in lines(results):
        table.add_row(label, *texts)
    console.print(results["headline"])
    console.print(table)
