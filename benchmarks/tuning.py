"""Peak learning rates and settings of the strategies of `thinwire compare`, chosen on the
validation part of the text.

python -m benchmarks.tuning --folder runs/tuning --out benchmarks/results/strategies_tuning.json

May run several times at once on the same folder: each run of the grid is made by whoever comes
first.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.tools.compare.compare import compare
from thinwire.tools.compare.settings import Settings
from thinwire.tools.compare.strategies import STRATEGIES
from thinwire.tools.report.progress import Display

SEED = 1  # the reported runs take another
EVALUATIONS = 4


@dataclass(frozen=True)
class Run:
    """One point of the grid."""

    strategy: str
    steps: int
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    size: str = "medium"

    @property
    def name(self) -> str:
        """Names the run's file too."""
        words = json.dumps(dict(self.options), sort_keys=True)
        kept = "".join(c if c.isalnum() or c in ".-_" else "_" for c in words)
        return (
            f"{self.strategy}-{self.size}-{self.steps}-lr{self.lr:g}{kept if self.options else ''}"
        )


def sparse(k_steps: int, sparsity: float) -> dict[str, Any]:
    return {"k_steps": k_steps, "compression": {"sparse": {"sparsity": sparsity, "value_bits": 2}}}


def diloco(k_steps: int, outer_lr: float, outer_momentum: float) -> dict[str, Any]:
    outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "outer_nesterov": True}
    return {"k_steps": k_steps, "begin_step": 0, **outer}


# Steps: dense makes 57 in 300 s at 20 Mbit/s. The others make 350 to 570 there with two workers on
# one core; they are tuned at a third of that, less for those whose averagings wait for the wire.
LOCAL = {
    "sparse-local": (190, sparse(16, 0.9)),
    "localsgd": (145, {"k_steps": 32}),
    "diloco": (145, diloco(32, 0.7, 0.9)),
    "adaptive-localsgd": (145, {"init_k_steps": 64, "max_k_steps": 64}),
}
RATES = (0.1, 0.15, 0.07)
GRID = [
    *(Run("dense", 57, lr) for lr in (0.05, 0.07, 0.1, 0.15, 0.2)),
    *(
        run
        for lr in RATES
        for run in (
            Run("dense", 57, lr, size="small"),
            *(Run(name, steps, lr, options, "small") for name, (steps, options) in LOCAL.items()),
            Run("dgc", 190, lr, size="small"),
        )
    ),
    *(
        Run("sparse-local", 190, 0.1, sparse(k, sparsity), "small")
        for k, sparsity in ((8, 0.9), (16, 0.97))
    ),
    *(Run("localsgd", steps, 0.1, {"k_steps": k}, "small") for k, steps in ((16, 117), (64, 166))),
    *(Run("diloco", 145, 0.1, diloco(32, *outer), "small") for outer in ((0.7, 0.5), (0.4, 0.9))),
    *(
        Run("adaptive-localsgd", 145, 0.1, {"init_k_steps": k, "max_k_steps": k}, "small")
        for k in (32, 128)
    ),
    *(Run("dgc", 190, lr, size="small") for lr in (0.2, 0.25)),
    *(Run("dense", 57, lr, size="small") for lr in (0.2, 0.05)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--grid",
        type=Path,
        help="JSON list of {strategy, steps, lr, options} instead of the own one",
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    grid = (
        [Run(**one) for one in json.loads(arguments.grid.read_text())] if arguments.grid else GRID
    )
    for run in grid:
        result = arguments.folder / f"{run.name}.json"
        try:
            result.touch(exist_ok=False)
        except FileExistsError:
            continue
        result.write_text(json.dumps(measure(run, arguments.folder / run.name)))
        print(run.name, json.loads(result.read_text())["losses"], flush=True)
    if arguments.out:
        done = [
            json.loads(path.read_text())
            for path in sorted(arguments.folder.glob("*.json"))
            if path.stat().st_size
        ]
        arguments.out.write_text(json.dumps(done, indent=1) + "\n")


def measure(run: Run, folder: Path) -> dict[str, Any]:
    recipe = STRATEGIES[run.strategy]
    options = run.options or recipe.options
    typed: dict[str, Any] = {
        "workers": 2,
        "link": "none",
        "latency": "0ms",
        "size": run.size,
        "batch": 8,
    }
    rest: dict[str, Any] = {
        "seconds": None,
        "text": None,
        "out": folder,
        "seed": SEED,
        "lr": run.lr,
        "tune": True,
    }
    settings = Settings.check(**typed, **rest, strategies=[run.strategy], steps=run.steps)
    varied = (replace(recipe, options=options),)
    measured = compare(replace(settings, strategies=varied, evaluations=EVALUATIONS), Display())
    (one,) = measured.strategies
    losses = {str(point.step): round(point.loss, 4) for point in one.evaluations}
    kept = {
        "strategy": run.strategy,
        "size": run.size,
        "steps": run.steps,
        "lr": run.lr,
        "options": dict(options),
        "losses": losses,
    }
    return {**kept, "library_bytes_per_step": one.library_bytes_per_step}


if __name__ == "__main__":
    main()
