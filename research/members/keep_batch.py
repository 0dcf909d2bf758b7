"""Loss by microbatches of a run that loses half of its members and gets others, beside one that
does not.

    python -m research.members.keep_batch

Members are processes of this machine that train a small GPT on the text of the standard library,
with AdamW whose state is averaged. Two of four leave after a quarter of the microbatches; two
others join from five eighths on. What is measured is a line of keep_batch.jsonl and not made again.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import thinwire as tw
from benchmarks.common import Results, bare_parser, markdown
from benchmarks.ranks import host, on_ranks
from research.gpt import GPT, batch, loss_of, text

RESULTS = Path(__file__).with_suffix(".jsonl")
RUNS = {
    "4 members": "undisturbed",
    "4, 2, 4, `keep_batch`": "keep",
    "4, 2, 4, without": "change",
}
SEEDS = (1, 2, 3)
MEMBERS, K_STEPS, ROUNDS, POINTS = 4, 8, 32, 8
ROWS, LENGTH, RATE, HELD_OUT = 8, 64, 2e-3, 100_000


@dataclass(frozen=True)
class Cell:
    """One training; a line of the results begins with it."""

    run: str
    seed: int
    rounds: int = ROUNDS

    @property
    def microbatches(self) -> int:
        """Microbatches of all members together."""
        return self.rounds * K_STEPS * MEMBERS


def microbatches(data: torch.Tensor, seed: int, rank: int) -> Iterator[Any]:
    """Return the batches of a member without an end."""
    at = (10 * seed + rank) * 1_000_000
    while True:
        yield batch(data, at, ROWS, LENGTH)
        at += 1


def train(rank: int, size: int, cell: Cell, address: str, folder: str) -> list[list[float]]:
    """Train as a member; the first one returns what it saw."""
    flag, end_file = Path(folder, "go"), Path(folder, "end")
    while rank >= MEMBERS and not flag.exists():
        time.sleep(0.05)
    data = text()
    held_out = [batch(data[-HELD_OUT:], seed, 32, LENGTH) for seed in range(8)]
    batches = microbatches(data[:-HELD_OUT], cell.seed, rank)
    torch.manual_seed(cell.seed)
    net = GPT("tiny")
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    local = tw.LocalSGD(K_STEPS, begin_step=0, average_state=True)
    options: dict[str, Any] = {"start_members": MEMBERS, "keep_batch": cell.run == "keep"}
    seen, used = list[list[float]](), 0
    with tw.join(address, run="keep", **options) as members:
        strategy = tw.DistributedStrategy(localsgd=local)
        engine = strategy.prepare(net, optimizer, loss_of, members=members)
        end, before, merged = sys.maxsize, members.step, int(engine.stats()["merge_steps"])
        while members.step < end and not members.left:
            engine.train_step(*next(batches))
            if members.step - before < K_STEPS or members.left:
                continue
            before, share = members.step, cell.microbatches
            used += members.size * merged * K_STEPS
            now = engine.stats()
            merged = int(now["merge_steps"])
            due = rank == 0 and len(seen) < POINTS
            if due and used * POINTS >= (len(seen) + 1) * share:
                loss = fmean(float(engine.evaluate(*one)) for one in held_out)
                seen.append([used, round(loss, 4), members.size, merged, now["batch_share"]])
            if cell.run != "undisturbed" and 2 <= rank < MEMBERS and 4 * used >= share:
                members.leave()
            if rank == 0 and cell.run != "undisturbed" and 8 * used >= 5 * share:
                flag.touch()
                time.sleep(0.3 * (members.size < MEMBERS))  # a round takes less than a join
            if end_file.exists():
                end = int(end_file.read_text())
            elif rank == 0 and len(seen) == POINTS:
                end = members.step + 2 * K_STEPS
                end_file.with_suffix(".new").write_text(str(end))
                end_file.with_suffix(".new").rename(end_file)
    return seen


def measured(cell: Cell) -> dict[str, Any]:
    """Run a cell."""
    size = MEMBERS + 2 * (cell.run != "undisturbed")
    with tempfile.TemporaryDirectory() as folder, host(None) as (address, _):
        points, *_ = on_ranks(train, size, cell, address, folder, group=False)
    return {"loss": points[-1][1], "points": points}


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table: mean loss over the seeds, and the distance to the undisturbed run."""
    points = {(one["cell"]["run"], one["cell"]["seed"]): one["points"] for one in lines}
    seeds = sorted({seed for _, seed in points})
    rows = []
    for name, run in RUNS.items():
        losses = [[point[1] for point in points[run, seed]] for seed in seeds]
        base = [[point[1] for point in points["undisturbed", seed]] for seed in seeds]
        means = list(map(fmean, zip(*losses, strict=True)))
        gaps = [
            fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in zip(losses, base, strict=True)
        ]
        middle = points[run, seeds[0]][POINTS // 2]
        apart = "" if run == "undisturbed" else f"{fmean(gaps):.3f}"
        shares = f"{middle[2]:g} x {middle[3]:g}"
        rows.append([name, shares, *(f"{loss:.3f}" for loss in means), apart])
    at = [str(round(MEMBERS * K_STEPS * ROUNDS * n / POINTS)) for n in range(1, POINTS + 1)]
    return markdown(["run", "members x microbatches at half", *at, "mean distance"], rows)


def main() -> int:
    parser = bare_parser(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    results = Results(given.results, measured)
    cells = [Cell(run, seed, given.rounds) for seed in given.seeds for run in RUNS.values()]
    print("\n".join(table([results.of(cell) for cell in cells])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
