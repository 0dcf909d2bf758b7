"""Measurements as plain data: the content of `results.json`, and the figures that follow from
them.
"""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire._files import replace_file
from thinwire._version import __version__
from thinwire.tools.compare.settings import Settings
from thinwire.tools.report.verdict import verdict
from thinwire.tools.run.config import OPTIMIZERS
from thinwire.tools.run.text import Corpus

__all__ = [
    "FORMAT",
    "KEYS",
    "Ledger",
    "common_loss",
    "describe_machine",
    "mean_of",
    "seconds_to_loss",
    "write_json",
]

FORMAT = 1
_LOSS_UNITS = {"transformer": "nats per byte", "convolution": "nats"}
_SCHEDULE = "rate: linear warm-up over a tenth, cosine to a tenth"

KEYS = {
    "format": "version of this file's layout",
    "headline": "where the run took place; says first of all if the link was not emulated",
    "verdict": "what the comparison has shown, in a sentence or a few",
    "winner": "the strategy to take on this link, as far as the comparison shows it, or null",
    "command": "the command line that makes the comparison again",
    "link": "the link asked for, whether it was emulated, and why not",
    "settings": "what the command was told, and what all strategies share",
    "model": "which one, its shape and number of parameters",
    "text": "source, size and SHA-256 of the data that come with the command",
    "machine": "processor, cores, memory, versions",
    "failed": "the first strategy that failed and its error, or null",
    "failures": "every strategy that failed, and its error",
    "interrupted": "null, or what interrupted the comparison ('by'; null while it runs, or where "
    "it was killed), the strategy that was at work and its progress, and those that had not begun",
    "common_loss": "the lowest held-out loss that every strategy reached, in settings.loss_unit",
    "dense_loss": "the held-out loss that dense ended with; null where dense was not compared",
    "strategies[]": "one entry per strategy, in the order of the command line, with the keys below",
    "strategies[].final_loss": "held-out loss at the end, of the same data for every strategy",
    "strategies[].final_loss_range": "highest less lowest of these over the seeds; null with one",
    "strategies[].seeds[]": "seed and evaluations of every run; the other keys are means over them",
    "strategies[].best_loss": "lowest held-out loss of all evaluations",
    "strategies[].seconds": "training time; evaluation and preparation are not part of it",
    "strategies[].preparation_seconds": "from the start of the processes until the clock of the "
    "training started: imports, compilation of kernels, and every part of the strategy used once "
    "on a copy of the model",
    "strategies[].seconds_to_common_loss": "training time until the common loss, interpolated "
    "between evaluations",
    "strategies[].seconds_to_dense_loss": "likewise until the loss that dense ended with; null if "
    "never",
    "strategies[].bytes_to_dense_loss": "bytes that a worker had sent by then, as the library "
    "counts them",
    "strategies[].library_bytes_per_step": "bytes that a worker sends in a steady step, as the "
    "library counts them: a message once for every worker that it goes to",
    "strategies[].library_bytes_counted_by": "how that count comes about",
    "strategies[].kernel_sent_bytes_per_step": "the same by the kernel's interface counters, mean "
    "over the workers; null on loopback, whose counters are shared with everything else on the "
    "machine",
    "strategies[].kernel_received_bytes_per_step": "bytes received, likewise",
    "strategies[].ratio_to_dense": "bytes of a dense ring all-reduce over library_bytes_per_step",
    "strategies[].median_step_ms": "median over the steady steps, from steady_from_step on; for "
    "local updates over the means of steps that hold one averaging each",
    "strategies[].median_bare_step_ms": "median of the same step without any exchange, measured in "
    "the same run",
    "strategies[].step_ratio_to_bare": "median_step_ms over median_bare_step_ms",
    "strategies[].exchange_share": "1 - median_bare_step_ms / median_step_ms: the share of a "
    "steady step that goes into waiting for the wire, and into coding what is sent",
    "strategies[].seconds_on_asked_link": "only on loopback: training time plus the time that the "
    "bytes would have taken on the asked link, without any overlap and without latency",
    "strategies[].evaluations[]": "step, seconds, loss, and the bytes that one worker has sent so "
    "far by both counts",
    "strategies[].step_ms[]": "every step of rank 0, in milliseconds",
    "strategies[].alike": "whether all ranks of a task began with the very same batch",
    "strategies[].settings": "learning rate and the method's own settings",
    "strategies[].document": "the content of its strategy file; null for torch's own hooks",
    "strategies[].code": "lines of Python that set up torch's own hook; null for strategies of "
    "thinwire",
}


def seconds_to_loss(
    evaluations: Sequence[Mapping[str, float]], loss: float, axis: str = "seconds"
) -> float | None:
    """Where a curve first reaches `loss`, by straight lines between its points; None where it never
    does.
    """
    for before, after in pairwise(evaluations):
        if after["loss"] <= loss < before["loss"]:
            part = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before[axis] + part * (after[axis] - before[axis])
    return 0.0 if evaluations and evaluations[0]["loss"] <= loss else None


def common_loss(runs: Sequence[Mapping[str, Any]]) -> float:
    """The lowest loss that every run reached."""
    return max(min(float(point["loss"]) for point in run["evaluations"]) for run in runs)


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and versions; no host name, no user name."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


@dataclass(kw_only=True)
class Ledger:
    """The strategies that have finished, that failed, and the one that is at work.

    Attributes:
        settings: What is compared.
        corpus: What is trained on; None for a task of the user's.
        emulated: Whether the link is emulated.
        reason: Why not.
        started_s: Unix time of the start.
        common: Settings of all strategies, for the report.
        runs: What was measured of those that finished.
        machine: On which it trains.
        failures: Name and error of those that failed.
        current: The one at work.
        progress: Share of it that is over, in [0, 1].
    """

    settings: Settings
    corpus: Corpus | None
    emulated: bool
    reason: str | None
    started_s: float
    common: Mapping[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=describe_machine)
    failures: list[dict[str, str]] = field(default_factory=list)
    current: str | None = None
    progress: float = 0.0

    @property
    def missing(self) -> list[str]:
        """Those that have neither finished nor failed, in the order of the command line."""
        over = {entry["strategy"] for entry in (*self.runs, *self.failures)}
        return [recipe.name for recipe in self.settings.strategies if recipe.name not in over]

    def begin(self, name: str) -> None:
        """Note that the strategy `name` is at work from here on."""
        self.current, self.progress = name, 0.0

    def finish(self, run: dict[str, Any]) -> None:
        """Note that it has finished."""
        self.runs.append(run)
        self.current = None

    def fail(self, error: str) -> None:
        """Note that it has failed."""
        assert self.current is not None, "a strategy had begun"
        self.failures.append({"strategy": self.current, "error": error})
        self.current = None

    def results(self, by: str | None = None) -> dict[str, Any]:
        """The content of `results.json`, with what follows from the runs, of which there is one.

        Args:
            by: What interrupts the comparison; None where nothing does.
        """
        settings, runs, task = self.settings, self.runs, self.settings.task
        joined = settings.joined_rank is not None
        target = common_loss(runs)
        dense = next(
            (run["evaluations"][-1]["loss"] for run in runs if run["strategy"] == "dense"), None
        )
        own = "" if task is None else "the task's own, else "
        optimizer = f"{own}{OPTIMIZERS[settings.optimizer]}"
        results = {
            "format": FORMAT,
            "thinwire": __version__,
            "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started_s)),
            "headline": _headline(settings, self.emulated, self.reason),
            "verdict": "",
            "winner": None,
            "command": settings.command,
            "link": {
                "asked": "the network between the ranks" if joined else str(settings.link),
                "rate_bit_s": settings.link.rate_bit_s,
                "latency_s": settings.link.latency_s,
                "emulated": self.emulated,
                "reason": self.reason,
                "joined": joined,
            },
            "settings": {
                "workers": settings.workers,
                "steps": settings.steps,
                "seconds": settings.seconds,
                "batch_per_worker": settings.batch if task is None else None,
                "seed": settings.seed,
                "seeds": settings.seeds,
                "loss_of": "the validation part" if settings.tune else "the held-out part",
                "optimizer": f"{optimizer}; {_SCHEDULE}",
                "task": task,
                "loss_unit": _LOSS_UNITS[settings.model.kind] if task is None else None,
                "device": settings.device,
                **self.common,
            },
            "model": {
                **(asdict(settings.model) if task is None else {"task": task}),
                "parameters": runs[0]["parameters"],
            },
            "text": _about(self.corpus),
            "machine": dict(self.machine),
            "failed": dict(self.failures[0]) if self.failures else None,
            "failures": [dict(failure) for failure in self.failures],
            "interrupted": self._interrupted(by),
            "common_loss": target,
            "dense_loss": dense,
            "strategies": [self._derived(run, target, dense) for run in runs],
            "keys": KEYS,
        }
        outcome = verdict(results)
        return {**results, "verdict": outcome.text, "winner": outcome.winner}

    def _interrupted(self, by: str | None) -> dict[str, Any] | None:
        if not self.missing:
            return None
        begun = self.current in self.missing
        return {
            "by": by,
            "during": self.current,
            "progress": self.progress if begun else None,
            "not_begun": [name for name in self.missing if name != self.current],
        }

    def _derived(
        self, run: dict[str, Any], target: float, dense_target: float | None
    ) -> dict[str, Any]:
        settings, points = self.settings, run["evaluations"]
        recipe = next(recipe for recipe in settings.strategies if recipe.name == run["strategy"])
        dense_bytes = 2 * (settings.workers - 1) / settings.workers * run["gradient_bytes"]
        sent = run["library_bytes_per_step"]
        finals = [run["evaluations"][-1]["loss"] for run in run["seeds"]]
        derived = {
            "summary": recipe.summary,
            "document": recipe.document(self.common["ramp_steps"]),
            "code": recipe.code,
            "final_loss": points[-1]["loss"],
            "final_loss_range": max(finals) - min(finals) if len(finals) > 1 else None,
            "best_loss": min(point["loss"] for point in points),
        }
        for which, loss in (("common", target), ("dense", dense_target)):
            for name, axis in (("seconds", "seconds"), ("bytes", "library_bytes")):
                reached = None if loss is None else seconds_to_loss(points, loss, axis)
                derived[f"{name}_to_{which}_loss"] = reached
        derived |= {
            "library_bytes_counted_by": recipe.counted_by,
            "ratio_to_dense": dense_bytes / sent if sent and dense_bytes else None,
            "step_ratio_to_bare": run["median_step_ms"] / run["median_bare_step_ms"],
            "exchange_share": max(0.0, 1 - run["median_bare_step_ms"] / run["median_step_ms"]),
        }
        if not self.emulated and settings.link.rate_bit_s is not None:
            derived["seconds_on_asked_link"] = run["seconds"] + settings.link.seconds(
                points[-1]["library_bytes"]
            )
        return {**run, **derived}


def _about(corpus: Corpus | None) -> dict[str, Any]:
    if corpus is None:
        return {"source": "the task's own data"}
    return {
        "source": corpus.source,
        "files": corpus.files,
        "train_bytes": len(corpus.train),
        "validation_bytes": len(corpus.validation),
        "held_out_bytes": len(corpus.held_out),
        "sha256": corpus.digest,
    }


def write_json(results: Mapping[str, Any], path: Path) -> None:
    """Write the results in one piece: readers see the old file or the new one."""
    replace_file(path, (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())


def _headline(settings: Settings, emulated: bool, reason: str | None) -> str:
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    tuning = (
        " Losses are of the part of the data that is kept for choosing settings."
        if settings.tune
        else ""
    )
    if emulated:
        return (
            f"{workers}, each in a network namespace of its own, over an emulated link of "
            f"{settings.link} in each direction.{tuning}"
        )
    if settings.joined_rank is not None:
        return f"{workers}, started by a launcher, over the network between them.{tuning}"
    if reason is None:
        return f"{workers} over this machine's loopback, as asked: no link was emulated.{tuning}"
    return (
        f"The link of {settings.link} was NOT emulated ({reason}): {workers} over this machine's "
        "loopback; the time that the bytes would have taken on that link, without its latency, is "
        f"added in a column of its own.{tuning}"
    )


_MEANS = (
    "seconds",
    "preparation_seconds",
    "median_step_ms",
    "median_bare_step_ms",
    "library_bytes_per_step",
    "kernel_sent_bytes_per_step",
    "kernel_received_bytes_per_step",
)


def mean_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first run, with means over all of them in its figures and its curve, and each run's own
    curve under `seeds`.
    """
    first = dict(runs[0])
    for key in _MEANS:
        first[key] = None if first[key] is None else fmean(float(run[key]) for run in runs)
    first["steps"] = round(fmean(run["steps"] for run in runs))
    first["evaluations"] = _mean_curve([run["evaluations"] for run in runs])
    first["seeds"] = [
        {"seed": run["seed"], "evaluations": list(run["evaluations"])} for run in runs
    ]
    return first


def _mean_curve(curves: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """Point by point; a curve with more points than another one keeps its last."""
    length = min(len(curve) for curve in curves)
    rows = [[*curve[: length - 1], curve[-1]] for curve in curves]
    return [
        {key: fmean(float(point[key]) for point in points) for key in points[0]}
        for points in zip(*rows, strict=True)
    ]
