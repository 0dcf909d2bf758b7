"""Several runs of one strategy, which differ in their seed, as one."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

__all__ = ["mean_of"]

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
