"""The loss of rounds that close without late members: late changes by residual, kept, or dropped.

python -m benchmarks.late

Eight workers train as in `benchmarks.law`, with Muon inside and one bit, an averaging every 16
steps after the first one. In a round each worker is late with a probability; of more than three
late ones some, drawn at random, answer too, since a list closes after more than half. Or one worker
is late in every second round, or in ten rounds in a row of every twenty. Tokens, batches and seeds
are those of the run without late workers. A run is a line of the results; what is there is not made
again.
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import Results, bare_parser, markdown
from benchmarks.gaps import Cell
from benchmarks.law import Training, alone, works_of

RESULTS = Path(__file__).parent / "results" / "late.jsonl"
WORKERS, INTERVAL, STEPS, RATE, SEEDS = 8, 16, 961, 0.024, (5, 6, 7)
FEWEST = WORKERS // 2 + 1
UNDISTURBED = "0", "residual", "list"
PATTERNS = ("0.05", "0.2", "0.5", "every second", "ten in a row")
WAYS = (
    ("residual", "list"),
    ("dropped", "list"),
    ("kept", "list"),
    ("residual", "work"),
)


@dataclass(frozen=True)
class Late:
    """One training; a line of the results begins with it."""

    late: str
    """Probability of each worker and round, or a pattern of the last worker."""
    change: Any
    """See `LocalRanks`, like `weight`."""
    weight: Any
    seed: int
    steps: int = STEPS
    lr: float = RATE


def late_ranks(late: str, seed: int, rounds: int) -> list[set[int]]:
    """Return the late workers of each round."""
    if late == "every second":
        return [{WORKERS - 1} if number % 2 else set() for number in range(rounds)]
    if late == "ten in a row":
        return [{WORKERS - 1} if number % 20 >= 10 else set() for number in range(rounds)]
    drawn = random.Random(seed)
    found = list[set[int]]()
    for _ in range(rounds):
        ranks = [rank for rank in range(WORKERS) if drawn.random() < float(late)]
        found.append(set(drawn.sample(ranks, min(len(ranks), WORKERS - FEWEST))))
    return found


def measured(cell: Late) -> dict[str, Any]:
    """Train a cell."""
    own = Cell(
        part="held_out",
        size="0.04M",
        workers=WORKERS,
        interval=INTERVAL,
        bits=1,
        optimizer="muon",
        steps=cell.steps,
        batch=1,
        lr=cell.lr,
        seed=cell.seed,
        data="",
    )
    # an averaging after the first step, in which nobody is late
    ranks = [set[int](), *late_ranks(cell.late, cell.seed, -(-(cell.steps - 1) // INTERVAL))]
    with tempfile.TemporaryDirectory() as folder, alone():
        works = works_of(own, "cpu", Path(folder))
        training = Training(own, works)
        sync = training.sync
        assert sync is not None, "it has an interval"
        sync.late, sync.late_change, sync.late_weight = ranks.__getitem__, cell.change, cell.weight
        training.train_together()
        training.run(None)
        # one on the list has the anchors also where late ones keep their changes
        on_list = next(rank for rank in range(WORKERS) if rank not in ranks[-1])
        loss = works[0].evaluate(training.models[on_list])
    share = fmean(len(some) / WORKERS for some in ranks[1:])
    return {"loss": round(float(loss), 5), "late_share": round(share, 4)}


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table: mean difference to the run without late workers, and its spread."""
    losses: dict[tuple[str, ...], dict[int, float]] = {}
    shares: dict[str, list[float]] = {}
    for line in lines:
        late, change, weight, seed = (line["cell"][k] for k in ("late", "change", "weight", "seed"))
        losses.setdefault((late, change, weight), {})[seed] = line["loss"]
        shares.setdefault(late, []).append(line["late_share"])
    base = losses[UNDISTURBED]
    rows = []
    for late, found in shares.items():
        row = [late, f"{100 * fmean(found):.1f} %"]
        for way in WAYS:
            own = losses.get((late, *way), {})
            gaps = [100 * (loss / base[seed] - 1) for seed, loss in own.items()]
            spread = f" ± {stdev(gaps):.2f}" if len(gaps) > 1 else ""
            row.append(f"{fmean(gaps):+.2f}{spread} %" if gaps else "")
        if late != UNDISTURBED[0]:
            rows.append(row)
    names = [f"{change}, by {weight}" for change, weight in WAYS]
    return markdown(["late", "of all changes", *names], rows)


def main() -> int:
    parser = bare_parser(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--late", nargs="+", default=PATTERNS)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    results = Results(given.results, measured)
    cells = [Late(*UNDISTURBED, seed, given.steps) for seed in given.seeds]
    for way in WAYS:
        for late in given.late:
            cells += [Late(late, *way, seed, given.steps) for seed in given.seeds]
    lines = [results.of(cell) for cell in cells]
    print("\n".join(table(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
