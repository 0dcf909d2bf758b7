"""Many trainings of `benchmarks.law` as one batch of models: hundreds at a time on one GPU.

python -m benchmarks.ensemble optimizers below_one_bit --seconds 400
python -m benchmarks.ensemble --device cpu --size 0.04M --workers 4 8 --interval 0 16 --lr 0.024
python -m benchmarks.ensemble table

The models of all runs are stacked: a weight has the shape (layers, models, rows, columns), and one
batched product serves them all. The runs of a batch have the same size, workers, batch and steps;
rates, seeds, intervals, codes and inner optimizers may differ. Parameters, batches and the held-out
part are those of `benchmarks.law` with the same seed. Names are grids of `settings/ensemble.json`.
A run is a line of the results, and what is there is not made again.

Options of a run, in JSON:

- "adam_lr_scale", "adam_beta2": of the parameters that AdamW trains;
- "rows": decay of row moments (NorMuon, arXiv 2510.05491); "soap": steps between two bases (SOAP,
  arXiv 2409.11321), in Muon's place;
- "top": share of the entries that travels, its mean over "all" or "senders" by "mean"; "group":
  entries that share one sign; "rank": the matrix as factors, of this share of its entries;
- "decay" of the kept error; "split": sums in shares or not; "outer": rate and Nesterov momentum;
- "pairs": means of pairs, drawn anew each round, in full, with momentum "gamma";
- "state": Muon's momentum is averaged too; "correction": adds to a gradient the mean gradient of
  all in the last round minus its own (SCAFFOLD, arXiv 1910.06378); both in full;
- "folders": each worker has the modules of folders of its own.
"""

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import bare_parser, json_lines, markdown
from benchmarks.ensemble_averaging import Run
from benchmarks.ensemble_models import Ensemble
from benchmarks.ensemble_texts import Texts, write
from benchmarks.gaps import SIZES, Cell
from benchmarks.law import steps_of

HERE = Path(__file__).parent
RESULTS, GRIDS = HERE / "results" / "ensemble.jsonl", HERE / "settings" / "ensemble.json"
TOKENS = 20.0
"""A parameter, over all workers."""
BATCHES = {"0.04M": 1, "0.14M": 4, "0.4M": 4, "0.87M": 8, "3.3M": 16, "10M": 16}
"""Sequences of a worker and step, unless a grid says so."""


def runs_of(grid: Mapping[str, Any]) -> Iterator[Run]:
    """Return the runs of a grid: of every size, workers, interval, bits, rate, option and seed."""
    keys = ("size", "workers", "interval", "bits", "options", "lr", "seeds")
    usual: dict[str, Any] = {"bits": [1], "options": [{}], "seeds": [5, 6, 7]}
    for size, workers, interval, bits, options, lr, seed in product(
        *(grid.get(key, usual.get(key)) for key in keys)
    ):
        batch = grid.get("batch", BATCHES[size])
        cell = Cell(
            part=grid.get("part", "held_out"),
            size=size,
            workers=workers,
            interval=interval,
            bits=bits if interval else 32,
            optimizer="muon",
            steps=grid.get("steps") or steps_of(size, workers, batch, TOKENS),
            batch=batch,
            lr=lr,
            seed=seed,
            data=grid.get("data", ""),
        )
        yield Run(cell, options)


def batches(runs: Iterable[Run], most: int) -> list[list[Run]]:
    """Return runs that train together, of at most so many models, in their order."""
    found: dict[Any, list[list[Run]]] = defaultdict(lambda: [[]])
    for run in runs:
        cell, soap = run.cell, run.options.get("soap", 0)
        several = found[cell.part, cell.size, cell.workers, cell.batch, cell.steps, soap]
        if (len(several[-1]) + 1) * cell.workers > most:
            several.append([])
        several[-1].append(run)
    return [batch for several in found.values() for batch in several if batch]


def key_of(cell: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps([dict(cell), dict(options)], sort_keys=True)


def train(batch: list[Run], texts: Path, device: str, until_s: float) -> list[dict[str, Any]]:
    """Train runs together; return their lines, or none if the time is over before."""
    begin_s, cell = time.monotonic(), batch[0].cell
    ensemble = Ensemble(batch, Texts(texts, cell.part), device)
    whole = ensemble.run(until_s)
    taken_s = time.monotonic() - begin_s
    words = f"{cell.size} K={cell.workers} batch {cell.batch}, {len(batch)} runs"
    steps = f"{ensemble.done} of {cell.steps} steps"
    print(f"{words}: {steps} in {taken_s:.1f} s", file=sys.stderr, flush=True)
    return ensemble.lines(taken_s) if whole else []


def table(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return Markdown: the losses of every setting, means over its seeds."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for line in lines:
        cell = line["cell"]
        names = ("part", "size", "workers", "batch", "interval", "bits", "lr")
        key = *(cell[name] for name in names), json.dumps(line["options"], sort_keys=True)
        found[key].append(math.nan if line["loss"] is None else line["loss"])
    titles = ["part", "size", "K", "batch", "H", "bits", "rate", "options", "loss", "seeds"]
    rows = [
        [*key, f"{fmean(losses):.4f}", len(losses)]
        for key, losses in sorted(found.items(), key=str)
    ]
    return markdown(titles, rows)


def main() -> None:
    grids = json.loads(GRIDS.read_text())
    parser = bare_parser(__doc__)
    parser.add_argument("names", nargs="*", help=f"table, or of {', '.join(grids)}")
    for name in ("size", "interval", "workers", "bits", "lr", "seeds", "options"):
        kind: Any = {"size": str, "lr": float, "options": json.loads}.get(name, int)
        parser.add_argument(f"--{name}", nargs="+", type=kind)
    parser.add_argument("--batch", type=int)
    parser.add_argument(
        "--steps", type=int, help="of each worker, instead of 20 tokens a parameter"
    )
    parser.add_argument("--part", choices=("held_out", "validation"), default="held_out")
    parser.add_argument("--texts", type=Path, default=Path("runs/texts"), help="made if missing")
    parser.add_argument("--source", type=Path, help="folder of the text, else Python's library")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--models", type=int, default=96, help="at most, in one batch")
    given = parser.parse_args()
    if given.names == ["table"]:
        print("\n".join(table(json_lines(given.results))))
        return
    if unknown := [name for name in given.names if name not in grids]:
        parser.error(f"{unknown[0]}: choose from table, {', '.join(grids)}")
    chosen = [grid for name in given.names for grid in grids[name]]
    if given.size:
        if wrong := [size for size in given.size if size not in SIZES]:
            parser.error(f"--size {wrong[0]}: choose from {', '.join(SIZES)}")
        own = {name: value for name, value in vars(given).items() if value is not None}
        chosen.append({"workers": [4], "interval": [16], "lr": [0.024], **own})
    until_s = time.monotonic() + given.seconds
    if not given.texts.exists():
        write(given.texts, given.source)
    known = {key_of(line["cell"], line["options"]) for line in json_lines(given.results)}
    missing = {key_of(asdict(run.cell), run.options): run for g in chosen for run in runs_of(g)}
    left = [run for key, run in missing.items() if key not in known]
    for batch in batches(left, given.models):
        if time.monotonic() > until_s:
            break
        with given.results.open("a") as file:
            for line in train(batch, given.texts, given.device, until_s):
                print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
