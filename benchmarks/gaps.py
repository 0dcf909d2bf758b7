"""Gaps between local and dense training that `benchmarks.law` measured: the fitted law, its
prediction intervals and the figure beside published laws.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.common import json_lines, markdown, student_t
from benchmarks.evidence import BATCH
from benchmarks.evidence import RESULTS as EVIDENCE
from thinwire.tools.planning.loss import (
    LossGap,
    beta,
    elasticity,
    loss_gap,
    steps_to_dense_loss,
)
from thinwire.tools.planning.plan import Row
from thinwire.tools.run.config import ModelSize

RESULTS = Path(__file__).parent / "results" / "law.jsonl"
CHECKS = RESULTS.with_name("law_check.jsonl")
"""Runs that the law is not fitted to."""
WIDE = RESULTS.with_name("law_wide.jsonl")
"""Runs of 24 workers and more."""
ENSEMBLE = RESULTS.with_name("ensemble.jsonl")
_TEXT_BYTES, _MOST_REPEATED = 8_264_673, 4
"""Bytes of the standard library's training part."""
SIZES = {
    "0.04M": ModelSize(32, 2),
    "0.14M": ModelSize(64, 2),
    "0.4M": ModelSize(96, 3),
    "0.87M": ModelSize(128, 4),
    "3.3M": ModelSize(256, 4),
    "10M": ModelSize(384, 6),
    "30M": ModelSize(448, 12),
    "124M": ModelSize(928, 12, context=1024),
    "350M": ModelSize(1024, 28, context=1024),
    "1B": ModelSize(1824, 25, context=1024),
}
FEWEST_ROUNDS = 50
_CHANCE = 0.005
"""The noise of log(1 + gap) is proportional to its value plus this."""
_NUMEL, _WORKERS, _INTERVAL, _ROUNDS = 1e6, 4, 16, 200
"""Where beta of a `Law` is its factor."""
_ITERATIONS = 100
_FEWEST_INTERVALS, _AVERAGING_STEPS = 3, (1, 4, 16)
_PUBLISHED = {
    "MuLoCo, 16 workers (arXiv 2505.23725)": {
        150e6: 3.222 / 3.124,
        416e6: 2.713 / 2.641,
        914e6: 2.448 / 2.402,
        1.76e9: 2.291 / 2.246,
        3.1e9: 2.165 / 2.128,
    },
    "DiLoCo, 16 workers (arXiv 2505.23725)": {
        150e6: 3.326 / 3.158,
        416e6: 2.808 / 2.682,
        914e6: 2.522 / 2.440,
        1.76e9: 2.348 / 2.266,
        3.1e9: 2.215 / 2.145,
    },
}
"""Loss over dense's by parameters."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training; a line of the results begins with these.

    Attributes:
        part: "validation", by which rates are chosen, or "held_out".
        size: A key of `SIZES`, or of the task whatever was named.
        workers: K.
        interval: Steps between two averagings; 0 for dense training.
        bits: Of a value of a change; 32 sends it as it is.
        optimizer: "muon" or "adamw".
        steps: Of each worker.
        batch: Sequences of a worker and step.
        lr: Peak rate.
        seed: Of parameters and batches.
        data: The file or folder of text, or the task; "" for the standard library of Python.
    """

    part: str
    size: str
    workers: int
    interval: int
    bits: int
    optimizer: str
    steps: int
    batch: int
    lr: float
    seed: int
    data: str

    def __str__(self) -> str:
        """For the log."""
        way = f"every {self.interval} steps, {self.bits} bits" if self.interval else "dense"
        return (
            f"{self.part} {self.size} K={self.workers} {way} {self.optimizer} lr {self.lr:g} seed "
            f"{self.seed}"
        )

    @property
    def tokens(self) -> int:
        """Of all workers."""
        return self.steps * self.workers * self.batch * SIZES[self.size].context

    @property
    def dense(self) -> "Cell":
        """Dense training of the same, at any rate."""
        return replace(self, interval=0, bits=32, lr=0.0)


_Run = tuple[Cell, Mapping[str, Any]]


class Gap(NamedTuple):
    """Loss of a run over that of dense training with the same K, tokens and seed, minus 1."""

    cell: Cell
    numel: int
    rounds: int
    gap: float


def gaps(lines: Iterable[Mapping[str, Any]]) -> list[Gap]:
    """Return the gaps of all runs with K > 1 that have a dense run beside them, at best rates."""
    held_out = [
        (Cell(**line["cell"]), line)
        for line in lines
        if line["cell"]["part"] == "held_out" and line["loss"] is not None
        if not line.get("options")
    ]
    held_out = [run for runs in _settings(held_out).values() for run in _at_best_rate(runs)]
    dense = {_key(cell): line["loss"] for cell, line in held_out if not cell.interval}
    return [
        Gap(cell, line["parameters"], line["rounds"], line["loss"] / dense[_key(cell.dense)] - 1)
        for cell, line in held_out
        if cell.interval and cell.workers > 1 and _key(cell.dense) in dense
    ]


def _settings(runs: Iterable[_Run]) -> dict[str, list[_Run]]:
    """Return the runs by setting: by all but rate and seed."""
    found: dict[str, list[_Run]] = defaultdict(list)
    for cell, line in runs:
        found[_key(replace(cell, seed=0))].append((cell, line))
    return found


def _at_best_rate(runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs of the rate with the least mean, over the seeds that all rates have."""
    by_rate: dict[float, dict[int, float]] = defaultdict(dict)
    for cell, line in runs:
        by_rate[cell.lr][cell.seed] = line["loss"]
    common = set.intersection(*(set(losses) for losses in by_rate.values()))
    if not common:
        return list(runs)
    best = min(by_rate, key=lambda rate: fmean(by_rate[rate][seed] for seed in common))
    return [(cell, line) for cell, line in runs if cell.lr == best]


def measured() -> list[Gap]:
    """Return the gaps that the law is fitted to: of `benchmarks.law`, of `benchmarks.ensemble`,
    and of real ranks. Runs that repeat their text more than four times are left out: there local
    training ends below dense training, which learns the text by heart.
    """
    # Source of four: Muennighoff et al., 2023, arXiv 2305.16264.
    found = {
        _key(gap.cell): gap for file in (RESULTS, WIDE, ENSEMBLE) for gap in gaps(json_lines(file))
    }
    return [
        *(gap for gap in found.values() if gap.cell.tokens <= _MOST_REPEATED * _TEXT_BYTES),
        *evidence_gaps(json_lines(EVIDENCE)),
    ]


def evidence_gaps(lines: Iterable[Mapping[str, Any]]) -> list[Gap]:
    """Return the gaps of local training on real ranks, from the lines of `benchmarks.evidence`."""
    named = {"tiny": "0.14M", "small": "0.87M", "medium": "3.3M"}
    trained = [line for line in lines if line["cell"]["kind"] == "training" and line["loss"]]
    dense: dict[tuple[Any, ...], float] = {}
    found = []
    for dense_first in (True, False):
        for line in trained:
            cell, options = line["cell"], line["cell"]["options"]
            key = tuple(cell[name] for name in ("size", "workers", "steps", "optimizer", "seed"))
            if dense_first and cell["strategy"] in ("dense", "dense-muon"):
                dense[key] = line["loss"]
            elif not dense_first and _is_plain_local(options) and key in dense:
                compression = options.get("compression", {"quantized": {"value_bits": 32}})
                local = Cell(
                    part="held_out",
                    size=named[cell["size"]],
                    workers=cell["workers"],
                    interval=options["k_steps"],
                    bits=compression["quantized"]["value_bits"],
                    optimizer=cell["optimizer"],
                    steps=cell["steps"],
                    batch=BATCH,
                    lr=cell["lr"],
                    seed=cell["seed"],
                    data="",
                )
                rounds = math.ceil((cell["steps"] - 1) / options["k_steps"]) + 1
                found.append(Gap(local, line["parameters"], rounds, line["loss"] / dense[key] - 1))
    return found


def _is_plain_local(options: Mapping[str, Any]) -> bool:
    """Return True for local updates whose change travels whole or in few bits."""
    only = options.keys() <= {"k_steps", "compression"} and "k_steps" in options
    return only and options.get("compression", {"quantized": {}}).keys() == {"quantized"}


def _key(cell: Cell) -> str:
    return json.dumps(asdict(replace(cell, lr=0.0)), sort_keys=True)


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return beta of gap = K^beta - 1 and half its 95 % interval; infinite for one point.

    Least squares of log(1 + gap) over log K, through 0.
    """
    xs = [math.log(workers) for workers, _ in points]
    ys = [math.log(1 + gap) for _, gap in points]
    square = sum(x * x for x in xs)
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / square
    free = len(points) - 1
    if not free:
        return slope, math.inf
    rest = sum((y - slope * x) ** 2 for x, y in zip(xs, ys, strict=True)) / free
    return slope, student_t(free, 0.975) * math.sqrt(rest / square)


@dataclass(frozen=True)
class Law:
    """log(1 + gap) = beta log K, with beta = c N^e (log K)^k H^a R^r for R averagings.

    Attributes:
        theta: Logarithm of beta at 1 million parameters, K = 4, H = 16 and R = 200; then e, k, a
            and r.
        covariance: Of `theta`.
        spread: Standard deviation of log(1 + gap), over its value plus half a percent.
        free: Degrees of freedom.
        identified: Whether the data tell the powers apart.
    """

    theta: Tensor
    covariance: Tensor
    spread: float
    free: int
    identified: bool

    @classmethod
    def of(cls, found: Sequence[Gap]) -> Self:
        """Fit by Gauss-Newton, weighted by the expected noise.

        What does not vary in the data, such as the size where there is one alone, has no effect.
        """
        x = torch.stack([_features(point) for point in found])
        x = x * torch.cat([torch.ones(1), (x[:, 1:].std(0) > 1e-9)]).double()
        logs = torch.tensor([math.log(point.cell.workers) for point in found], dtype=torch.float64)
        y = torch.tensor([math.log1p(point.gap) for point in found], dtype=torch.float64)
        theta = torch.zeros(x.shape[1], dtype=torch.float64)
        theta[0] = math.log(0.03)
        for _ in range(_ITERATIONS):
            expected = logs * torch.exp(x @ theta)
            weights = 1 / (expected + _CHANCE)
            slopes = (expected * weights)[:, None] * x
            change = torch.linalg.pinv(slopes) @ ((y - expected) * weights)
            theta = theta + change.clamp(-0.5, 0.5)
        used = int(torch.linalg.matrix_rank(slopes))
        free = max(1, len(found) - used)
        variance = float((((y - expected) * weights) ** 2).sum() / free)
        covariance = variance * torch.linalg.pinv(slopes.T @ slopes, hermitian=True)
        identified = used == int((x != 0).any(0).sum())
        return cls(theta, covariance, math.sqrt(variance), free, identified)

    def interval(self, point: Gap) -> tuple[float, float, float]:
        """Return the gap of one run: low, mid and high of a 95 % interval."""
        x = _features(point)
        mid = math.log(point.cell.workers) * math.exp(float(x @ self.theta))
        doubt = (mid + _CHANCE) ** 2 * self.spread**2
        doubt += mid**2 * float(x @ self.covariance @ x)
        half = student_t(self.free, 0.975) * math.sqrt(doubt)
        return math.expm1(mid - half), math.expm1(mid), math.expm1(mid + half)

    def __str__(self) -> str:
        """Coefficients with their 95 % intervals."""
        halves = (
            student_t(self.free, 0.975) * self.covariance.diagonal().clamp(min=0).sqrt()
        ).tolist()
        powers = [
            f"{name}^{power:.2f} (+- {half:.2f})"
            for name, power, half in zip(
                ("(N / 1M)", "(log K / log 4)", "(H / 16)", "(R / 200)"),
                self.theta[1:].tolist(),
                halves[1:],
                strict=True,
            )
            if half > 0
        ]
        factor = f"{math.exp(self.theta[0]):.3f} (within a factor of {math.exp(halves[0]):.2g})"
        return (
            f"beta = {' '.join([factor, *powers])}; a run lies {100 * self.spread:.0f} % of the "
            f"gap and {100 * _CHANCE * self.spread:.2g} % of the loss away ({self.free} degrees of "
            "freedom)"
            + ("" if self.identified else "; H and R vary together, so only their product counts")
        )


def _features(point: Gap) -> Tensor:
    cell = point.cell
    return torch.tensor(
        [
            1.0,
            math.log(point.numel / _NUMEL),
            math.log(math.log(cell.workers) / math.log(_WORKERS)),
            math.log(cell.interval / _INTERVAL),
            math.log(point.rounds / _ROUNDS),
        ],
        dtype=torch.float64,
    )


def _by_law(found: Iterable[Gap], fewest: int = 12) -> dict[tuple[str, str], list[Gap]]:
    """Return the gaps that follow one law: of an optimizer, with one bit, two, or more."""
    laws: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for point in found:
        bits = {1: "1 bit", 2: "2 bits"}.get(point.cell.bits, "4 bits and more")
        laws[point.cell.optimizer, bits].append(point)
    return {key: own for key, own in laws.items() if len(own) >= fewest}


def fit_table(found: Sequence[Gap]) -> list[str]:
    """Return Markdown: beta of settings of several runs beside the published, and fitted laws."""
    titles = ["parameters", "optimizer", "steps", "bits", "batch", "rounds", "beta", "law"]
    rows: list[list[object]] = []
    settings: dict[tuple[int, str, str, int, int, int], list[Gap]] = defaultdict(list)
    for point in found:
        cell = point.cell
        key = point.numel, cell.data, cell.optimizer, cell.interval, cell.bits, cell.batch
        settings[key].append(point)
    for (numel, data, optimizer, interval, bits, batch), own in sorted(settings.items()):
        if len(own) == 1 or max(point.rounds for point in own) < FEWEST_ROUNDS:
            continue
        slope, half = fitted([(point.cell.workers, point.gap) for point in own])
        of_k = defaultdict(list)
        for point in own:
            of_k[point.cell.workers].append(point.gap)
        rounds = [point.rounds for point in own]
        few = " (few)" if min(rounds) < FEWEST_ROUNDS else ""
        gaps_text = ", ".join(f"{k}: {fmean(values):+.1%}" for k, values in sorted(of_k.items()))
        span = f"{min(rounds)} to {max(rounds)}" if min(rounds) < max(rounds) else f"{rounds[0]}"
        cells = [f"{numel:,}{f' {data}' if data else ''}", optimizer, interval, bits, batch]
        cells += [
            f"{span}{few}",
            f"{slope:.4f} +- {half:.4f}",
            f"{beta(optimizer, numel):.4f}",
            gaps_text,
        ]
        rows.append(cells)
    text = markdown([*titles, "gap by workers"], rows)
    for (optimizer, words), own in sorted(_by_law(found).items()):
        text.append(f"\n- {optimizer}, {words}: {Law.of(own)}")
    return text


def check(known: Iterable[Gap], others: Iterable[Gap]) -> list[str]:
    """Return Markdown: `others` beside the 95 % intervals of a law that was fitted to `known` and
    to those on other text, and beside the intervals of `thinwire plan`.
    """
    known, others = list(known), list(others)
    laws = {}
    for data in {point.cell.data for point in others}:
        runs = [*known, *(point for point in others if point.cell.data != data)]
        laws[data] = {key: Law.of(own) for key, own in _by_law(runs).items()}
    titles = ["parameters", "text", "optimizer", "bits", "K", "H", "rounds", "seed", "gap"]
    rows: list[list[object]] = []
    inside: list[tuple[bool, bool]] = []
    for key, own in _by_law(others, fewest=1).items():
        for point in own:
            cell = point.cell
            if (law := laws[cell.data].get(key)) is None:
                continue
            low, _, high = law.interval(point)
            planned = _planned_gap(point)
            inside.append((low <= point.gap <= high, planned.low <= point.gap <= planned.high))
            cells = [
                f"{point.numel:,}",
                cell.data or "standard library",
                cell.optimizer,
                cell.bits,
                cell.workers,
                cell.interval,
                point.rounds,
                cell.seed,
                f"{point.gap:+.1%}",
                f"{low:+.1%} to {high:+.1%}",
                "yes" if inside[-1][0] else "no",
                f"{planned.low:+.1%} to {planned.high:+.1%}",
                "yes" if inside[-1][1] else "no",
            ]
            rows.append(cells)
    text = markdown([*titles, "law", "in", "plan", "in"], rows)
    for name, found in zip(("law", "plan"), zip(*inside, strict=True), strict=False):
        text.append(f"\n{name}: {sum(found)} of {len(found)} inside, {fmean(found):.0%}")
    return text


def local_strategy(interval: int, bits: int) -> tw.DistributedStrategy:
    """Return local updates with an interval and bits; 32 are no compression."""
    compression = tw.Quantized(bits) if bits < 32 else None
    return tw.DistributedStrategy(localsgd=tw.LocalSGD(interval, compression=compression))


def _planned_gap(point: Gap) -> LossGap:
    """Return the gap that `thinwire plan` expects of the settings of a run."""
    cell = point.cell
    strategy = local_strategy(cell.interval, cell.bits)
    return loss_gap("localsgd", strategy, cell.optimizer, point.numel, cell.workers)


def left_out(found: Iterable[Gap]) -> list[str]:
    """Return Markdown: each setting, with all seeds, beside a law fitted to the others alone."""
    titles = ["optimizer", "bits", "settings", "runs", "in their 95 % intervals", "median"]
    rows: list[list[object]] = []
    for (optimizer, words), own in sorted(_by_law(found).items()):
        settings = {_setting(point) for point in own}
        inside, halves = [], []
        for setting in settings:
            law = Law.of([point for point in own if _setting(point) != setting])
            for point in own:
                if _setting(point) == setting:
                    low, _, high = law.interval(point)
                    inside.append(low <= point.gap <= high)
                    halves.append((high - low) / 2)
        cells = [optimizer, words, len(settings), len(inside), f"{fmean(inside):.0%}"]
        rows.append([*cells, f"+- {100 * median(halves):.1f} % of the loss"])
    return markdown(titles, rows)


def regret(found: Iterable[Gap]) -> list[str]:
    """Return Markdown: what the interval that `plan` chooses costs beside the best of those that
    were measured, for local Muon at one bit.

    The seconds of a step are those of `plan`, on lines on which an averaging takes 1, 4 and 16
    steps. More steps close a measured gap as `plan` has it, so each interval has a time to dense's
    loss; the ratio of two times is a ratio of losses at equal time, by the same elasticity. Gaps
    are means over the seeds, since the best interval of one seed is partly chance.
    """
    runs: dict[tuple[int, int, str], dict[int, list[float]]]
    runs = defaultdict(lambda: defaultdict(list))
    for point in found:
        if point.cell.bits == 1 and point.cell.optimizer == "muon":
            own = runs[point.numel, point.cell.workers, point.cell.data]
            own[point.cell.interval].append(point.gap)
    rows: list[list[object]] = []
    costs: list[float] = []
    for (numel, workers, data), gaps_of in sorted(runs.items()):
        gap_of = {interval: fmean(several) for interval, several in gaps_of.items()}
        for ratio in _AVERAGING_STEPS:
            planned = _planned(numel, workers, ratio, tuple(gap_of))
            if len(planned) < _FEWEST_INTERVALS:
                continue
            chosen = min(planned, key=lambda k: planned[k].time_at_worst)
            seconds = {
                k: row.step_seconds[1] * steps_to_dense_loss(gap_of[k], numel)
                for k, row in planned.items()
            }
            best = min(seconds, key=seconds.__getitem__)
            costs.append((seconds[chosen] / seconds[best]) ** elasticity(numel) - 1)
            rows.append([f"{numel:,}", workers, data, ratio, chosen, best, f"{costs[-1]:.2%}"])
    titles = ["parameters", "K", "text", "averaging, steps", "plan", "best", "loss"]
    text = markdown(titles, rows)
    if costs:
        text.append(f"\nmean {fmean(costs):.2%}, largest {max(costs):.2%} of {len(costs)}")
    return text


def _planned(
    numel: int, workers: int, averaging_steps: float, intervals: Iterable[int]
) -> dict[int, Row]:
    """Return the rows of `plan` for local Muon at one bit, by interval."""
    step_s = (workers - 1) * numel / 1e6 / averaging_steps
    found = tw.plan(params=numel, step_seconds=step_s, workers=workers, link="1mbit")
    names = {k: "muon-local" if k == _INTERVAL else f"muon-local k{k}" for k in intervals}
    rows = {row.name: row for row in found.strategies}
    return {k: rows[name] for k, name in names.items() if name in rows}


def _setting(point: Gap) -> Cell:
    return replace(point.cell, seed=0, lr=0.0)


def draw(found: Iterable[Gap], path: Path) -> None:
    """Draw beta against parameters: the published laws, and ours by interval, of three runs."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "law", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5))
    sizes = [10 ** (4.5 + 0.25 * i) for i in range(26)]
    laws = {
        "muon": "law for Muon: 0.465 N^-0.198",
        "adamw": "law for AdamW: 0.413 N^-0.165",
    }
    for index, (optimizer, label) in enumerate(laws.items()):
        line = [beta(optimizer, round(numel)) for numel in sizes]
        axis.loglog(sizes, line, color=f"C{index}", linewidth=1, label=label)
    for index, (name, losses) in enumerate(_PUBLISHED.items()):
        betas = [math.log(ratio) / math.log(16) for ratio in losses.values()]
        axis.loglog([*losses], betas, "s", color=f"C{index}", markersize=5, label=name)
    settings: dict[tuple[str, int, int], dict[int, list[Gap]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for point in found:
        cell = point.cell
        few_bits = cell.optimizer == "adamw" or cell.bits == 1
        if few_bits and not cell.data and point.rounds >= FEWEST_ROUNDS:
            settings[cell.optimizer, cell.interval, cell.bits][point.numel].append(point)
    for index, ((optimizer, interval, bits), sizes_of) in enumerate(sorted(settings.items()), 2):
        numels, slopes, halves = [], [], []
        for numel, own in sorted(sizes_of.items()):
            slope, half = fitted([(point.cell.workers, point.gap) for point in own])
            if slope > 0 and len(own) > 2:
                numels.append(numel)
                slopes.append(slope)
                halves.append(half if half < slope else 0.9 * slope)
        if not numels:
            continue
        axis.errorbar(
            numels,
            slopes,
            halves,
            fmt="o",
            color=f"C{index}",
            capsize=3,
            label=f"ours: {optimizer}, every {interval} steps, {bits} bit",
        )
    axis.set_xlabel("parameters")
    axis.set_ylabel("beta of gap = K^beta - 1")
    ticks = (0.005, 0.01, 0.02, 0.05, 0.1)
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ylim(0.004, 0.15)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
