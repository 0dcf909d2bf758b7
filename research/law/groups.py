"""Two levels of averaging: means inside groups often, averagings of all rarely.

    python -m research.law.groups

Eight workers in two groups train as in `benchmarks.law`, with Muon inside and one bit between all.
Between two averagings the workers of a group take the mean of their parameters, as
`LocalSGD(node_size=4, node_steps=...)` does. A run is a line of `groups.jsonl`; what is there is
not made again. The table has the loss over dense training of the same seeds.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import Results, bare_parser, json_lines, markdown
from benchmarks.gaps import Cell
from benchmarks.law import Training, alone, works_of

RESULTS = Path(__file__).with_name("groups.jsonl")
WORKERS, GROUP, STEPS, RATE, SEEDS = 8, 4, 1766, 0.024, (5, 6)
WAYS = ((0, 0), (0, 4), (0, 16), (4, 16), (0, 32), (8, 32), (4, 32), (1, 32), (0, 64), (4, 64))
"""Steps between means in a group, 0 for none, and between averagings of all, 0 for dense."""


@dataclass(frozen=True)
class Run:
    """One training; a line of the results begins with it."""

    node_steps: int
    interval: int
    seed: int


def measured(run: Run) -> dict[str, Any]:
    """Train, and return the held-out loss."""
    cell = Cell(
        part="held_out",
        size="0.04M",
        workers=WORKERS,
        interval=run.interval,
        bits=1 if run.interval else 32,
        optimizer="muon",
        steps=STEPS,
        batch=1,
        lr=RATE,
        seed=run.seed,
        data="",
    )
    with tempfile.TemporaryDirectory() as folder, alone():
        training = Training(cell, works_of(cell, "cpu", Path(folder)))
        if run.interval:
            training.train_together()
        update = training.update

        def step(rate: float) -> None:
            update(rate)
            done = training.done + 1
            # the first step ends with an averaging of all, and then every interval does
            if done % run.node_steps == 0 and (done - 1) % run.interval:
                for param in training.update_of_all.params.values():
                    groups = param.view(-1, GROUP, *param.shape[1:])
                    groups.copy_(groups.mean(1, keepdim=True).expand_as(groups))

        if run.node_steps:
            training.update = step
        training.run(None)
    return {"loss": round(training.losses[-1][1], 5)}


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Return Markdown: the loss over dense's, by the steps between averagings of all."""
    losses = {tuple(line["cell"].values()): line["loss"] for line in lines}
    rows = []
    for node_steps, interval in WAYS[1:]:
        seeds = [seed for seed in SEEDS if (node_steps, interval, seed) in losses]
        gaps = [losses[node_steps, interval, s] / losses[0, 0, s] - 1 for s in seeds]
        rows.append([interval, node_steps or "-", f"{100 * fmean(gaps):+.1f} %" if gaps else ""])
    return markdown(["steps between averagings of all", "inside a group", "over dense"], rows)


def main() -> int:
    bare_parser(__doc__).parse_args()
    results = Results(RESULTS, measured)
    for node_steps, interval in WAYS:
        for seed in SEEDS:
            results.of(Run(node_steps, interval, seed))
    print("\n".join(table(json_lines(RESULTS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
