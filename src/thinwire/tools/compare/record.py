"""Record of a comparison: the source of its tables, verdict, page and `results.json`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Self

from thinwire._version import __version__

_STRATEGY_KEYS = {
    "final_loss": "final held-out loss, on the same data for every strategy",
    "final_loss_range": "highest minus lowest of these over the seeds; null with one",
    "seeds[]": "seed and evaluations of every run; the other keys are means over them",
    "best_loss": "lowest held-out loss of all evaluations",
    "seconds": "training time, without evaluation and preparation",
    "preparation_seconds": "from the start of the processes to the first step: imports, kernels, "
    "a trial of the strategy on a copy of the model, and the first evaluation",
    "seconds_to_common_loss": "training time until then, interpolated between evaluations",
    "seconds_to_dense_loss": "training time until dense's final loss; null if never reached",
    "bytes_to_dense_loss": "bytes that a worker had sent by then, as the library counts them",
    "library_bytes_per_step": "what a worker sends in a steady step, once for every receiver",
    "library_bytes_counted_by": "method of that count",
    "kernel_sent_bytes_per_step": "the same by the counters of the interface, mean over the "
    "workers; null on loopback, which everything on the machine shares",
    "ratio_to_dense": "bytes of a dense ring all-reduce divided by library_bytes_per_step",
    "median_step_ms": "median over the steady steps, from steady_from_step on; for local updates "
    "over the means of steps that hold one averaging each",
    "median_bare_step_ms": "the same without any exchange, measured in the same run",
    "exchange_share": "1 - median_bare_step_ms / median_step_ms: network and coding of messages",
    "seconds_on_asked_link": "only on loopback: training time plus the time of the bytes on the "
    "requested link, without overlap and latency",
    "evaluations[]": "step, seconds, loss, and bytes that a worker has sent, by the library",
    "step_ms[]": "every step of rank 0, in milliseconds",
    "alike": "true if all ranks of a task started with the same batch",
    "settings": "learning rate and the method's own settings",
    "document": "the content of its strategy file; null for torch's own hooks",
    "code": "Python that sets up torch's own hook; null for strategies of thinwire",
}
KEYS = {
    "format": "version of this file's layout",
    "headline": "workers and network of the run; says first if the link was not emulated",
    "verdict": "outcome of the comparison, in a sentence or a few",
    "winner": "the recommended strategy on this link; null if the comparison does not show one",
    "command": "the command line that repeats the comparison",
    "link": "the requested link, whether it was emulated, and why not",
    "settings": "arguments of the command, and settings that all strategies share",
    "model": "name, shape and number of parameters",
    "text": "source, size and SHA-256 of the training data",
    "machine": "processor, cores, memory, versions",
    "failures": "every strategy that failed, and its error",
    "interrupted": "null, or the cause ('by'; null while it runs, or if it was killed), the "
    "strategy that was running and its progress, and those that had not started",
    "common_loss": "the lowest held-out loss that every strategy reached, in settings.loss_unit",
    "dense_loss": "dense's final held-out loss; null if dense was not compared",
    "strategies[]": "one entry per strategy, in the order of the command line, with the keys below",
    **{f"strategies[].{key}": meaning for key, meaning in _STRATEGY_KEYS.items()},
}


@dataclass
class Point:
    """One evaluation, with the bytes that one worker has sent so far."""

    step: float
    seconds: float
    loss: float
    library_bytes: float


@dataclass
class Seed:
    """One of several runs of a strategy."""

    seed: int
    evaluations: list[Point]


@dataclass(kw_only=True)
class Run:
    """One strategy; `KEYS` describes each field. The second half is derived from the first."""

    strategy: str
    steps: int
    seconds: float
    preparation_seconds: float
    parameters: int
    gradient_bytes: float
    evaluations: list[Point]
    alike: bool
    steady_from_step: int
    step_ms: list[float]
    median_step_ms: float
    median_bare_step_ms: float
    library_bytes_per_step: float
    kernel_sent_bytes_per_step: float | None
    settings: Mapping[str, Any]
    seeds: list[Seed] = field(default_factory=list)
    summary: str = ""
    document: dict[str, Any] | None = None
    code: str | None = None
    final_loss: float = 0.0
    final_loss_range: float | None = None
    best_loss: float = 0.0
    seconds_to_common_loss: float | None = None
    bytes_to_common_loss: float | None = None
    seconds_to_dense_loss: float | None = None
    bytes_to_dense_loss: float | None = None
    library_bytes_counted_by: str = ""
    ratio_to_dense: float | None = None
    exchange_share: float = 0.0
    seconds_on_asked_link: float | None = None

    @classmethod
    def of(cls, seed: int, report: Mapping[str, Any]) -> Self:
        """Build a run from a worker's report."""
        points = [Point(**point) for point in report["evaluations"]]
        return cls(**{**report, "evaluations": points}, seeds=[Seed(seed, points)])

    def reaching(self, common: float, dense: float | None) -> "Run":
        """Return a copy with both target losses, and the time and bytes to reach each."""
        points = self.evaluations
        losses = [point.loss for point in points]
        finals = [seed.evaluations[-1].loss for seed in self.seeds]
        reached: dict[str, Any] = {
            f"{unit}_to_{which}_loss": first_reached(zip(costs, losses, strict=True), loss)
            for unit, costs in (
                ("seconds", [point.seconds for point in points]),
                ("bytes", [point.library_bytes for point in points]),
            )
            for which, loss in (("common", common), ("dense", dense))
            if loss is not None
        }
        return replace(
            self,
            final_loss=losses[-1],
            final_loss_range=max(finals) - min(finals) if len(finals) > 1 else None,
            best_loss=min(losses),
            **reached,
        )


@dataclass
class Failure:
    """A strategy that failed."""

    strategy: str
    error: str


@dataclass
class Interruption:
    """Cause of an early end of a comparison, and the strategies that are missing."""

    by: str | None
    during: str | None
    progress: float | None
    not_begun: list[str]

    def __str__(self) -> str:
        """Return the interruption as a sentence."""
        not_over = "was still running when this was written"
        by = f"was interrupted by {self.by}" if self.by else not_over
        during = f" during {self.during} (at {self.progress:.0%})" if self.during else ""
        later = f"; {', '.join(self.not_begun)} had not started" if self.not_begun else ""
        return f"The comparison {by}{during}{later}."


@dataclass
class Asked:
    """The requested link."""

    asked: str
    rate_bit_s: float | None
    latency_s: float
    emulated: bool
    reason: str | None


@dataclass(kw_only=True)
class Results:
    """One comparison; `KEYS` describes each field."""

    format: int = 1
    thinwire: str = __version__
    started: str
    headline: str
    verdict: str = ""
    winner: str | None = None
    command: str
    link: Asked
    settings: Mapping[str, Any]
    """Arguments of the command, and settings that all strategies share."""
    model: Mapping[str, Any]
    text: Mapping[str, Any]
    machine: Mapping[str, Any]
    failures: list[Failure]
    interrupted: Interruption | None
    common_loss: float
    dense_loss: float | None
    strategies: list[Run]

    def run_of(self, name: str | None) -> Run | None:
        """Return the run of a strategy, or None."""
        return next((run for run in self.strategies if run.strategy == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `results.json`."""
        whole = asdict(self) | {"keys": KEYS}
        for run in whole["strategies"]:
            if run["seconds_on_asked_link"] is None:
                del run["seconds_on_asked_link"]
        return whole


def first_reached(curve: Iterable[tuple[float, float]], loss: float) -> float | None:
    """Return the first abscissa at which a curve reaches a loss, or None."""
    points = list(curve)
    for (begin, before), (end, after) in pairwise(points):
        if after <= loss < before:
            return begin + (before - loss) / (before - after) * (end - begin)
    return 0.0 if points and points[0][1] <= loss else None


def common_loss(curves: Sequence[Sequence[Point]]) -> float:
    """Return the lowest loss that every curve reached."""
    return max(min(point.loss for point in curve) for curve in curves)


_MEANS = (
    *("seconds", "preparation_seconds", "median_step_ms", "median_bare_step_ms"),
    *("library_bytes_per_step", "kernel_sent_bytes_per_step"),
)


def mean_of(runs: Sequence[Run]) -> Run:
    """Return the first run with means over all; each run's own curve is under `seeds`."""
    figures: dict[str, Any] = {
        key: fmean(float(getattr(run, key)) for run in runs)
        for key in _MEANS
        if getattr(runs[0], key) is not None
    }
    return replace(
        runs[0],
        **figures,
        steps=round(fmean(run.steps for run in runs)),
        evaluations=_mean_curve([run.evaluations for run in runs]),
        seeds=[seed for run in runs for seed in run.seeds],
    )


def _mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Average curves point by point; a longer curve keeps its last point."""
    length = min(len(curve) for curve in curves)
    rows = [[*curve[: length - 1], curve[-1]] for curve in curves]
    figures = ([astuple(point) for point in points] for points in zip(*rows, strict=True))
    return [Point(*map(fmean, zip(*point, strict=True))) for point in figures]
