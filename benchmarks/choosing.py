"""Tables of what to use on which link: from the lines that `benchmarks.evidence` and
`research.plan.check` have written, and from the planner. `research.pages` puts them into the pages.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import thinwire as tw
from benchmarks.common import json_lines, markdown
from benchmarks.evidence import (
    LINKS,
    NAMES,
    OUTER,
    RESULTS,
    ROWS,
    SCREENING,
    STEPS,
    Variant,
    as_it_is,
)
from thinwire.tools.compare.record import first_reached
from thinwire.tools.compare.strategies import STRATEGIES
from thinwire.tools.report.page import bytes_text

LINES, SIZE = RESULTS.with_name("plan_check.jsonl"), "small"
"""Steps on links that `research.plan.check` timed, and the model that it trained."""
SHORT_LINKS = ("20mbit", "1gbit")
PLANNED_LINKS = ("5mbit", "20mbit", "100mbit", "1gbit", "10gbit")


@dataclass(frozen=True)
class Row:
    """One strategy with a number of workers and a size of the model.

    Attributes:
        variant: What was trained.
        lr: The rate that its tuning chose.
        by_seed: Loss at the end.
        curves: (step, loss) of each seed.
        bytes_per_step: What its interface counts on the fastest link, headers included; None where
            no link was measured.
        step_s: Seconds of a step, by link.
    """

    variant: Variant
    lr: float
    by_seed: Mapping[int, float]
    curves: Sequence[Sequence[tuple[int, float]]]
    bytes_per_step: float | None
    step_s: Mapping[str, float]

    @property
    def name(self) -> str:
        """Name of a strategy as it is, or with what differs."""
        return str(self.variant).replace("`", "")

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return fmean(self.by_seed.values())

    def over(self, other: "Row") -> float:
        """By what fraction the loss is above another's, over the seeds that both have."""
        seeds = self.by_seed.keys() & other.by_seed.keys()
        own, others = (fmean(row.by_seed[seed] for seed in seeds) for row in (self, other))
        return own / others - 1

    def steps_to(self, loss: float) -> float | None:
        """Mean over the seeds; None where one of them never has this loss."""
        found = [first_reached(curve, loss) for curve in self.curves]
        return None if None in found else fmean(step for step in found if step is not None)


@dataclass(frozen=True)
class Scope:
    """Workers, model size and steps of a table."""

    workers: int
    size: str
    steps: int = STEPS

    def holds(self, cell: Mapping[str, Any]) -> bool:
        """True if a cell belongs to this table; timed cells stand for any number of steps."""
        steps = self.steps if cell["kind"] == "link" else cell["steps"]
        return (cell["workers"], cell["size"], steps) == (self.workers, self.size, self.steps)


def rows(lines: Iterable[Mapping[str, Any]], scope: Scope) -> list[Row]:
    """Of every row whose loss was measured, in the order of the evidence."""
    held = [line for line in lines if scope.holds(line["cell"])]
    found = [row for variant in ROWS if (row := _row(variant, held)) is not None]
    for name in NAMES:
        if any(_trained(line["cell"], name) for line in held) and not any(
            row.variant.name == name for row in found
        ):
            raise ValueError(
                f"{name} was measured, but not as it is now: {as_it_is(name)}. Measure it again, "
                "or keep its options"
            )
    return found


def _row(variant: Variant, held: Sequence[Mapping[str, Any]]) -> Row | None:
    """Return the row of a variant; None where it was not trained."""
    today = variant.setting
    of_it = [line for line in held if {key: line["cell"][key] for key in today} == today]
    trained = [line for line in of_it if line["cell"]["kind"] == "training"]
    if not trained:
        return None
    links = [line for line in of_it if line["cell"]["kind"] == "link"]
    return Row(
        variant,
        trained[0]["cell"]["lr"],
        {line["cell"]["seed"]: line["loss"] for line in trained},
        [line["losses"] for line in trained],
        _counted(links),
        {line["cell"]["link"]: _step_s(line, held) for line in links},
    )


def _step_s(line: Mapping[str, Any], held: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds of a step on a link: the exchange of this run, and the fastest step
    without one that was measured with its optimizer, since other work slowed some runs.
    """
    if "bare_step_ms" not in line:
        return float(line["step_ms"]) / 1e3
    optimizer = line["cell"]["optimizer"]
    quiet_ms = min(
        other["bare_step_ms"]
        for other in held
        if "bare_step_ms" in other and other["cell"]["optimizer"] == optimizer
    )
    return float(quiet_ms + max(0.0, line["step_ms"] - line["bare_step_ms"])) / 1e3


def _trained(cell: Mapping[str, Any], name: str) -> bool:
    """Return whether a cell is a training of this strategy, with any options."""
    return (cell["kind"], cell["strategy"]) == ("training", name)


def _counted(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Bytes of a step by the kernel, which counts all strategies alike; slow links resend."""
    counted = {
        line["cell"]["link"]: line["kernel_bytes_per_step"]
        for line in lines
        if line.get("kernel_bytes_per_step")
    }
    return next((counted[link] for link in reversed(LINKS) if link in counted), None)


def table(lines: Iterable[Mapping[str, Any]], scope: Scope) -> list[str]:
    """Markdown: losses and bytes at equal steps; on every link the time to dense's last loss."""
    lines = list(lines)
    found = rows(lines, scope)
    dense = next(row for row in found if row.name == "dense")
    links = [link for link in LINKS if link in dense.step_s]
    titles = ["", "tuned by", "peak rate", f"loss after {scope.steps:,} steps", "over dense"]
    titles += ["bytes a step", "fewer by"] if dense.bytes_per_step else []
    titles += [f"time at {link}" for link in links]
    shown = []
    for row in found:
        low, high = min(row.by_seed.values()), max(row.by_seed.values())
        seeds = len(row.by_seed)
        spread = f"{low:.3f} to {high:.3f}" if seeds > 1 else "1 seed"
        few = f", {seeds} seeds" if 1 < seeds < len(dense.by_seed) else ""
        cells = [
            str(row.variant),
            _tuned_by(row.variant, lines, scope),
            f"{row.lr:g}",
            f"{row.loss:.3f} ({spread}{few})",
            f"{100 * row.over(dense):+.1f} %",
        ]
        if dense.bytes_per_step:
            sent = row.bytes_per_step
            fewer = f"{dense.bytes_per_step / sent:,.0f}" if sent else "-"
            cells += [bytes_text(sent) if sent else "-", fewer]
        shown.append([*cells, *(_time(row, dense, link, scope.steps) for link in links)])
    return markdown(titles, shown)


def _tuned_by(variant: Variant, lines: Sequence[Mapping[str, Any]], scope: Scope) -> str:
    """How many trainings the settings and the rate were chosen from; shorter or smaller ones are
    told apart. Settings that were given were not chosen: then those of the rate count.
    """
    setting = variant.setting
    chosen = variant.options is None
    alike = ("strategy", "optimizer") if chosen else ("strategy", "optimizer", "options")
    whole, short = (
        [
            cell
            for cell in (line["cell"] for line in tried)
            if cell["kind"] == "tuning" and cell["workers"] == scope.workers
            if all(cell[key] == setting[key] for key in alike)
        ]
        for tried in ([*lines, *json_lines(OUTER)], json_lines(SCREENING))
    )
    here = sum(scope.holds(cell) for cell in whole)
    return f"{here} + {len(short)}" if short else str(here)


def _seconds(row: Row, dense: Row, link: str, dense_steps: int) -> float | None:
    """Return the seconds until a strategy has dense's last loss, if it ever has."""
    steps = dense_steps if row is dense else row.steps_to(dense.loss)
    return None if steps is None or link not in row.step_s else steps * row.step_s[link]


def _time(row: Row, dense: Row, link: str, dense_steps: int) -> str:
    """Show these seconds, and how many times sooner than dense that is."""
    seconds = _seconds(row, dense, link, dense_steps)
    if seconds is None:
        return "-"
    sooner = dense_steps * dense.step_s[link] / seconds
    return f"{seconds:,.0f} s" + ("" if row is dense else f", {_times(sooner)}")


def short(lines: Iterable[Mapping[str, Any]], scope: Scope) -> list[str]:
    """Markdown: the columns of `table` that users choose by, the soonest on a slow link first;
    without variants that never have dense's last loss.
    """
    found = rows(lines, scope)
    dense = next(row for row in found if row.name == "dense")
    seconds = {row.name: _seconds(row, dense, SHORT_LINKS[0], scope.steps) for row in found}
    shown = []
    for row in sorted(found, key=lambda row: (seconds[row.name] or math.inf, row.loss)):
        if row.variant.note and seconds[row.name] is None:
            continue
        sent, dense_sent = row.bytes_per_step, dense.bytes_per_step
        cells = [
            str(row.variant),
            f"{row.loss:.3f}",
            f"{100 * row.over(dense):+.1f} %",
            f"{dense_sent / sent:,.0f}" if sent and dense_sent else "-",
        ]
        shown.append([*cells, *(_time(row, dense, link, scope.steps) for link in SHORT_LINKS)])
    times = (f"time at {_rate(link)}" for link in SHORT_LINKS)
    return markdown(["", "loss", "over dense", "bytes fewer by", *times], shown)


def _rate(link: str) -> str:
    """Return a rate in words that a narrow column breaks."""
    return link.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def whole(lines: Iterable[Mapping[str, Any]], scope: Scope) -> list[str]:
    """Markdown: trainings on a link from the first to the last step, beside the loss without a link
    and the seconds that few steps promise; and what it took to have the loss that dense ends with.
    """
    held = [line for line in lines if scope.holds(line["cell"])]
    text = ["| | link | loss | without a link | seconds | from few steps | to dense's | bytes |"]
    text.append("|" + "---|" * 8)
    for line in held:
        cell = line["cell"]
        if cell["kind"] != "whole":
            continue
        same = {key: cell[key] for key in ("strategy", "options", "optimizer")}
        alone = _only(held, kind="training", seed=cell["seed"], lr=cell["lr"], **same)
        few = _only(held, kind="link", link=cell["link"], **same)
        dense = _only(held, kind="whole", seed=cell["seed"], link=cell["link"], strategy="dense")
        seconds, sent = (_until(line, key, dense) for key in ("seconds", "sent"))
        cells = [
            f"`{cell['strategy']}`",
            cell["link"],
            f"{line['loss']:.5f}",
            f"{alone['loss']:.5f}" if alone else "-",
            f"{line['seconds'][-1]:,.1f} s",
            f"{scope.steps * few['step_ms'] / 1e3:,.1f} s" if few else "-",
            "-" if seconds is None else f"{seconds:,.1f} s",
            "-" if sent is None else bytes_text(sent),
        ]
        text.append("| " + " | ".join(cells) + " |")
    return text


def _only(lines: Sequence[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    """The last line whose cell has these values."""
    fits = [line for line in lines if wanted.items() <= line["cell"].items()]
    return fits[-1] if fits else None


def _until(line: Mapping[str, Any], measure: str, dense: Mapping[str, Any] | None) -> float | None:
    """Seconds or bytes until a training has the loss that dense ends with."""
    if dense is None:
        return None
    losses = [loss for _, loss in line["losses"]]
    return first_reached(zip(line[measure], losses, strict=True), dense["loss"])


def settings(lines: Iterable[Mapping[str, Any]], scope: Scope) -> list[str]:
    """Markdown: one line on each strategy."""
    text = ["| | what it is |", "|---|---|"]
    for row in rows(lines, scope):
        if not row.variant.note:
            text.append(f"| {row.variant} | {STRATEGIES[row.name].summary} |")
    return text


def _times(factor: float) -> str:
    """To two digits."""
    return f"{float(f'{factor:.2g}'):,g} x"


def planned(params: str, step_seconds: float, workers: int, latency: str) -> list[str]:
    """Markdown: what the planner recommends on each link, and how much sooner than dense the best
    setting of each strategy has dense's last loss.
    """
    plans = [
        tw.plan(
            params=params, step_seconds=step_seconds, workers=workers, link=link, latency=latency
        )
        for link in PLANNED_LINKS
    ]
    best = [{row.strategy: row for row in plan.best()} for plan in plans]
    shown = [["advice", *(plan.recommended for plan in plans)]]
    for name in best[0]:
        if name != "dense":
            cells = (_planned_times(on_link[name].times_sooner) for on_link in best)
            shown.append([f"`{name}`", *cells])
    return markdown(["", *map(_rate, PLANNED_LINKS)], shown)


def _planned_times(text: str) -> str:
    return text if text == "never" else f"{text} x"


def evidence(path: Path = RESULTS, steps: Path = LINES) -> list[dict[str, Any]]:
    """Return what was measured and did not diverge; first `steps`, on links without latency."""
    found = []
    for line in json_lines(steps):
        cell = line["cell"]
        if cell["kind"] != "probe" and cell["latency"] == "0ms":
            of = {"kind": "link", "workers": cell["workers"], "size": SIZE, "link": cell["rate"]}
            found.append({"cell": {**as_it_is(cell["kind"]), **of}, "step_ms": line["step_ms"]})
    return found + [line for line in json_lines(path) if line.get("loss", 0.0) is not None]
