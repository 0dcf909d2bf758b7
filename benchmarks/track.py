"""The track for low communication: anyone's method as one file, by fixed rules, as a row.

    python -m benchmarks.track benchmarks/entries/muloco.py
    python -m benchmarks.track

A file has

- `INSIDE`: "adamw" or "muon", the optimizer of a worker;
- `local(workers)`: a `thinwire.LocalSGD`, or None for dense training. Its `compression` may be a
  class of the file, by the protocol of `thinwire.Compression` (examples in
  `thinwire.compress`);
- `SOURCE`: where the settings are from. The docstring is the name of the row.

Rules: `benchmarks.law` trains the byte transformer of 45,216 parameters on the source of Python's
standard library, one sequence a worker and step, 1,920 steps for each of 4, 8 and 24 workers, in
one process with the sums of real ranks. Rates are chosen on the validation part with seed 1, each
for its own number of workers, from a grid that goes on while the best is at its edge. Seeds 5, 6
and 7 are held out, and nothing is chosen with them. Nothing else is tuned. A run is a line of the
results, with the digest of its file; what is there is not made again. Without files it prints the
table of all entries.
"""

import argparse
import hashlib
import importlib.util
import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

from benchmarks.common import Results, json_lines, markdown, student_t
from benchmarks.evidence import TUNING_SEED, tuned
from benchmarks.gaps import Cell
from benchmarks.law import RATES, Training, alone, works_of

RESULTS = Path(__file__).parent / "results" / "track.jsonl"
ENTRIES = Path(__file__).parent / "entries"
SIZE, STEPS, SEEDS, WORKERS = "0.04M", 1920, (5, 6, 7), (4, 8, 24)


@dataclass(frozen=True)
class Run:
    """One training; a line of the results begins with it."""

    entry: str
    """Path of the file, with the digest of its text."""
    part: str
    workers: int
    lr: float
    seed: int


@cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"entry_{path.stem}", path)
    assert spec is not None, "it is a file"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look for it
    spec.loader.exec_module(module)
    for name in ("INSIDE", "local", "SOURCE", "__doc__"):
        if getattr(module, name, None) is None:
            raise ValueError(f"{path} has no {name}: see python -m benchmarks.track --help")
    if module.INSIDE not in RATES:
        raise ValueError(f"{path}: INSIDE must be one of {', '.join(RATES)}, got {module.INSIDE!r}")
    return module


def _entry(path: Path) -> str:
    return f"{path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def measured(run: Run, path: Path) -> dict[str, Any]:
    """Train, and return the held-out loss and the bits that a worker sends a parameter and step."""
    module = _module(path)
    local = module.local(run.workers)
    cell = Cell(
        part=run.part,
        size=SIZE,
        workers=run.workers,
        interval=0 if local is None else local.k_steps,
        bits=32,
        optimizer=module.INSIDE,
        steps=STEPS,
        batch=1,
        lr=run.lr,
        seed=run.seed,
        data="",
    )
    with tempfile.TemporaryDirectory() as folder, alone():
        training = Training(cell, works_of(cell, "cpu", Path(folder)), local)
        if local is not None:
            training.train_together()
        try:
            training.run(None)
        except FloatingPointError as error:
            return {"loss": None, "error": str(error)}
    numel = sum(p.numel() for p in training.models[0].parameters())
    bits = 32.0
    if training.sync is not None:
        bits = 8 * training.sync.ranks[0].bytes_sent / numel / STEPS
    return {"loss": round(training.losses[-1][1], 5), "bits": round(bits, 4)}


def enter(path: Path, results: Path, workers: Iterable[int]) -> None:
    """Make the runs of an entry that are missing."""
    found = Results[Run](results, lambda run: measured(run, path))
    for count in workers:
        base = Run(_entry(path), "validation", count, 0.0, TUNING_SEED)
        rate = tuned(found, base, RATES[_module(path).INSIDE])
        for seed in SEEDS:
            found.of(replace(base, part="held_out", lr=rate, seed=seed))


def table(lines: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    """Return Markdown: a row for each entry, with losses by workers; `names` is by entry.

    A star: the best of its column, or not worse than it with p < 0.01 (one-sided, Welch's t-test).
    """
    losses: dict[str, dict[int, list[float]]] = {}
    bits: dict[str, float] = {}
    for line in lines:
        run = Run(**line["cell"])
        if run.part == "held_out" and run.entry in names and line["loss"] is not None:
            losses.setdefault(run.entry, {}).setdefault(run.workers, []).append(line["loss"])
            bits[run.entry] = max(bits.get(run.entry, 0.0), line["bits"])
    rows = []
    for entry in sorted(losses, key=bits.__getitem__, reverse=True):
        row: list[object] = [names[entry], f"{bits[entry]:.3g}"]
        for workers in WORKERS:
            column = [own[workers] for own in losses.values() if len(own.get(workers, ())) > 1]
            own = losses[entry].get(workers, [])
            best = min(column, key=fmean, default=[])
            if len(own) < 2:  # not finished: neither a mean nor a star
                row.append("")
                continue
            star = "" if _is_worse(own, best) else " *"
            row.append(f"{fmean(own):.3f} ± {stdev(own):.3f}{star}")
        rows.append(row)
    return markdown(["method", "bits", *(f"{workers} workers" for workers in WORKERS)], rows)


def entries(more: Iterable[Path] = ()) -> dict[str, str]:
    """Return the names of the entries here, and of more files."""
    paths = {*ENTRIES.glob("*.py"), *more}
    return {_entry(path): (_module(path).__doc__ or "").strip(" .\n") for path in sorted(paths)}


def _is_worse(own: Sequence[float], best: Sequence[float]) -> bool:
    """Return True if losses are higher with p < 0.01."""
    squares = [stdev(some) ** 2 / len(some) for some in (own, best)]
    if (noise := sum(squares)) == 0:
        return fmean(own) > fmean(best)
    free = noise**2 / sum(part**2 / (len(own) - 1) for part in squares)
    return (fmean(own) - fmean(best)) / math.sqrt(noise) > student_t(max(1, int(free)), 0.99)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    for path in given.files:
        enter(path, given.results, given.workers)
    print("\n".join(table(json_lines(given.results), entries(given.files))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
