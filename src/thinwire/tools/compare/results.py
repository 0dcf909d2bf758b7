"""Measurements as plain data: the content of `results.json`, and the figures that follow from
them.
"""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire._files import replace_file
from thinwire._version import __version__
from thinwire.tools.compare.settings import Settings
from thinwire.tools.report.verdict import verdict
from thinwire.tools.report.winner import document_of
from thinwire.tools.run.config import OPTIMIZERS
from thinwire.tools.run.size import ConvolutionSize, ModelSize
from thinwire.tools.run.text import Corpus

__all__ = [
    "FORMAT",
    "KEYS",
    "common_loss",
    "describe_machine",
    "mean_of",
    "seconds_to_loss",
    "summarise",
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


def summarise(
    runs: Sequence[dict[str, Any]],
    *,
    settings: Settings,
    model: ModelSize | ConvolutionSize,
    corpus: Corpus | None,
    machine: Mapping[str, Any],
    emulated: bool,
    reason: str | None,
    failures: Sequence[Mapping[str, str]],
    interrupted: Mapping[str, Any] | None,
    started_s: float,
    common: Mapping[str, Any],
) -> dict[str, Any]:
    """Add to the raw runs what follows from them, and under which circumstances they came
    about.
    """
    common_target = common_loss(runs)
    dense_target = next(
        (run["evaluations"][-1]["loss"] for run in runs if run["strategy"] == "dense"), None
    )
    joined = settings.joined_rank
    results = {
        "format": FORMAT,
        "thinwire": __version__,
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started_s)),
        "headline": _headline(settings, emulated, reason),
        "verdict": "",
        "winner": None,
        "command": settings.command,
        "link": {
            "asked": str(settings.link) if joined is None else "the network between the ranks",
            "rate_bit_s": settings.link.rate_bit_s,
            "latency_s": settings.link.latency_s,
            "emulated": emulated,
            "reason": reason,
            "joined": joined is not None,
        },
        "settings": {
            "workers": settings.workers,
            "steps": settings.steps,
            "seconds": settings.seconds,
            "batch_per_worker": settings.batch if settings.task is None else None,
            "seed": settings.seed,
            "seeds": settings.seeds,
            "loss_of": "the validation part" if settings.tune else "the held-out part",
            "optimizer": f"{OPTIMIZERS[settings.optimizer]}; {_SCHEDULE}"
            if settings.task is None
            else f"the task's own, else {OPTIMIZERS[settings.optimizer]}; {_SCHEDULE}",
            "task": settings.task,
            "loss_unit": _LOSS_UNITS[model.kind] if settings.task is None else None,
            "device": settings.device,
            **common,
        },
        "model": {
            **(asdict(model) if settings.task is None else {"task": settings.task}),
            "parameters": runs[0]["parameters"],
        },
        "text": {"source": "the task's own data"} if corpus is None else _about(corpus),
        "machine": dict(machine),
        "failed": dict(failures[0]) if failures else None,
        "failures": [dict(failure) for failure in failures],
        "interrupted": interrupted,
        "common_loss": common_target,
        "dense_loss": dense_target,
        "strategies": [
            _derive(run, settings, common_target, dense_target, emulated, common) for run in runs
        ],
        "keys": KEYS,
    }
    outcome = verdict(results)
    return {**results, "verdict": outcome.text, "winner": outcome.winner}


def _about(corpus: Corpus) -> dict[str, Any]:
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


def _derive(
    run: dict[str, Any],
    settings: Settings,
    target: float,
    dense_target: float | None,
    emulated: bool,
    common: Mapping[str, Any],
) -> dict[str, Any]:
    recipe = next(recipe for recipe in settings.strategies if recipe.name == run["strategy"])
    points = run["evaluations"]
    dense_bytes = 2 * (settings.workers - 1) / settings.workers * run["gradient_bytes"]
    sent = run["library_bytes_per_step"]
    derived = {
        "summary": recipe.summary,
        "document": document_of(recipe, common["ramp_steps"]),
        "code": recipe.code,
        "final_loss": points[-1]["loss"],
        "final_loss_range": _range([run["evaluations"][-1]["loss"] for run in run["seeds"]]),
        "best_loss": min(point["loss"] for point in points),
        "seconds_to_common_loss": seconds_to_loss(points, target),
        "bytes_to_common_loss": seconds_to_loss(points, target, "library_bytes"),
        "seconds_to_dense_loss": None
        if dense_target is None
        else seconds_to_loss(points, dense_target),
        "bytes_to_dense_loss": None
        if dense_target is None
        else seconds_to_loss(points, dense_target, "library_bytes"),
        "library_bytes_counted_by": recipe.counted_by,
        "ratio_to_dense": dense_bytes / sent if sent and dense_bytes else None,
        "step_ratio_to_bare": run["median_step_ms"] / run["median_bare_step_ms"],
        "exchange_share": max(0.0, 1 - run["median_bare_step_ms"] / run["median_step_ms"]),
    }
    if not emulated and settings.link.rate_bit_s is not None:
        derived["seconds_on_asked_link"] = run["seconds"] + settings.link.seconds(
            points[-1]["library_bytes"]
        )
    return {**run, **derived}


def _range(losses: Sequence[float]) -> float | None:
    return max(losses) - min(losses) if len(losses) > 1 else None


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

    Args:
        runs: What was measured, each with its `seed`; at least one.
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
