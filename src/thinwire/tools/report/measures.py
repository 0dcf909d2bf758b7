"""The content of the tables of a comparison: a row per strategy, a column per measure.

All numbers of a column have one unit and one precision.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Column", "Table", "bytes_text", "loss_text", "number", "tables"]

Value = float | None
_BYTE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


@dataclass(frozen=True)
class Column:
    """One measure of all strategies.

    Attributes:
        label: The measure, in the terms of the field.
        unit: Of every number in it; empty for counts and ratios.
        texts: One per strategy; "-" where nothing was measured or the loss was never reached.
        best: Rows that hold the best value, as it is shown; empty where none is better than
            another.
    """

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
    """Columns that are read together.

    Attributes:
        title: What they are about.
        columns: At least one.
    """

    title: str
    columns: tuple[Column, ...]


def _loss_unit(results: Mapping[str, Any]) -> str:
    return results["settings"].get("loss_unit") or ""


def _seeds(results: Mapping[str, Any]) -> int:
    return int(results["settings"].get("seeds", 1))


def tables(results: Mapping[str, Any]) -> tuple[Table, ...]:
    """The measures of all strategies that have finished; a measure that nobody has is left out."""
    runs = results["strategies"]
    by_steps = results["settings"]["seconds"] is None
    dense, common = results["dense_loss"], results["common_loss"]
    # the loss that all reached says no more where all reached dense's, and nothing where there is
    # one strategy
    all_reached = dense is not None and all(
        run["seconds_to_dense_loss"] is not None for run in runs
    )
    loss = (
        "held-out loss"
        if results["settings"]["loss_of"] == "the held-out part"
        else "loss on the validation part"
    )
    digits = _loss_digits([run["final_loss"] for run in runs])
    result = [
        _fixed("steps", "", runs, "steps", 0, None),
        _seconds("training time", runs, "seconds", min if by_steps else None),
        _seconds(
            "training time on the asked link",
            runs,
            "seconds_on_asked_link",
            min if by_steps else None,
        ),
        _fixed(f"{loss} at the end", _loss_unit(results), runs, "final_loss", digits, min),
        _fixed(
            f"its range over {_seeds(results)} seeds", "", runs, "final_loss_range", digits, None
        ),
        *(_until("dense", f"dense's loss ({loss_text(dense)})", runs) if dense is not None else ()),
        *(
            ()
            if all_reached or len(runs) == 1
            else _until("common", f"the loss that all reached ({loss_text(common)})", runs)
        ),
        _seconds("preparation", runs, "preparation_seconds", None),
    ]
    step = [
        _fixed("steady step, median", "ms", runs, "median_step_ms", 0, min),
        _fixed("compute-only step", "ms", runs, "median_bare_step_ms", 0, None),
        _fixed("step over compute-only step", "", runs, "step_ratio_to_bare", 2, min),
        _fixed("communication share", "%", runs, "exchange_share", 0, min, scale=100),
        _bytes("bytes per worker and step", runs, "library_bytes_per_step"),
        _bytes("the same, counted by the kernel", runs, "kernel_sent_bytes_per_step"),
        _fixed("times fewer bytes per step than dense", "", runs, "ratio_to_dense", 1, max),
    ]
    groups = (Table("Result", _present(result)), Table("One step", _present(step)))
    return tuple(group for group in groups if group.columns)


def bytes_text(count: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    size = count
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def loss_text(loss: float) -> str:
    """With three digits behind the point, and more where these were not three that say
    something.
    """
    return f"{loss:.{_loss_digits([loss])}f}"


def _loss_digits(losses: Sequence[float]) -> int:
    smallest = min((abs(loss) for loss in losses if loss), default=1.0)
    return min(9, max(3, 2 - math.floor(math.log10(smallest))))


def number(value: float, digits: int) -> str:
    """With commas between thousands; a share that vanishes has no sign."""
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


Choice = Callable[[Sequence[float]], float] | None


def _present(columns: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(column for column in columns if any(text != "-" for text in column.texts))


def _until(which: str, loss: str, runs: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [
        _seconds(f"time to {loss}", runs, f"seconds_to_{which}_loss", min),
        _bytes("bytes per worker to that loss", runs, f"bytes_to_{which}_loss"),
    ]


def _seconds(label: str, runs: Sequence[Mapping[str, Any]], key: str, choice: Choice) -> Column:
    return _fixed(label, "s", runs, key, 1, choice)


def _bytes(label: str, runs: Sequence[Mapping[str, Any]], key: str) -> Column:
    """In the largest unit that leaves the smallest number at 1 or more; about three digits of that
    one are shown.
    """
    values = [run.get(key) for run in runs]
    smallest = min((value for value in values if value), default=1.0)
    unit, size = next(((unit, size) for unit, size in _BYTE_UNITS if smallest >= size), ("B", 1.0))
    digits = 0 if unit == "B" or smallest >= 100 * size else 1 if smallest >= 10 * size else 2
    return _column(
        label, unit, [None if value is None else value / size for value in values], digits, min
    )


def _fixed(
    label: str,
    unit: str,
    runs: Sequence[Mapping[str, Any]],
    key: str,
    digits: int,
    choice: Choice,
    scale: float = 1.0,
) -> Column:
    values = [None if run.get(key) is None else scale * run[key] for run in runs]
    return _column(label, unit, values, digits, choice)


def _column(label: str, unit: str, values: Sequence[Value], digits: int, choice: Choice) -> Column:
    texts = tuple("-" if value is None else number(value, digits) for value in values)
    present = [value for value in values if value is not None]
    best: frozenset[int] = frozenset()
    if choice is not None and len(set(texts)) > 1 and len(present) > 0 and len(texts) > 1:
        mark = number(choice(present), digits)
        best = frozenset(row for row, text in enumerate(texts) if text == mark)
    return Column(label, unit, texts, best)
