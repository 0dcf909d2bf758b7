"""The planner beside real runs: seconds of a step, predicted from a probe and then measured.

    python -m research.plan.check measure      # hours; goes on where it was interrupted
    python -m research.plan.check table        # check.md beside this file
    python -m research.plan.check memory --size 34M --out research/plan/memory.json

Needs root. On every link the ranks are probed first, as `thinwire probe` does it on real machines,
and the plan is made from that probe. Then every strategy of `thinwire compare` trains for a few
rounds on the same link. Nothing of the planner is fitted to these runs.

`memory` trains on two ranks of this machine with one short sequence a step, so that activations are
small: the peak of resident memory in two rounds and in a save that waits, less that of the process
before, after the same steps of a tiny model. Intervals are two steps: memory does not depend on
them.
"""

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
import thinwire.__main__
from benchmarks.choosing import LINES, SIZE
from benchmarks.common import Results, bare_parser, json_lines
from benchmarks.evidence import NAMES, Cell, as_it_is, measured
from benchmarks.memory import reset_peak, resident_bytes
from benchmarks.ranks import on_ranks
from thinwire.tools.compare.strategies import STRATEGIES
from thinwire.tools.planning.grid import LEFT_OUT
from thinwire.tools.planning.plan import Plan
from thinwire.tools.run.built_in import ByteTransformer
from thinwire.tools.run.config import ModelSize
from thinwire.tools.run.trainers import Prepared, Setup, build_trainer

RATES = ("10mbit", "20mbit", "100mbit", "1gbit")
LATENCIES = ("0ms", "20ms", "100ms")
WORKERS = (2, 4)
NAMED = tuple(name for name in NAMES if name not in LEFT_OUT)
LR = 0.003
SIZES = {"16M": (256, 20), "34M": (448, 14), "124M": (928, 12)}
"""Width and layers of the models whose memory is measured."""
_FEWEST_STEPS, _ROUNDS = 10, 3
_WITHIN = 1.1
Case = tuple[int, str, str]
"""Ranks, rate and latency of a link."""


@dataclass(frozen=True)
class Point:
    """A probe or the steps of a strategy on one link; a line of the results begins with it."""

    workers: int
    rate: str
    latency: str
    kind: str


def cases() -> list[Case]:
    """Workers, rate and latency, mixed, so that an interrupted run has seen some of each kind."""
    every = [(w, rate, latency) for w in WORKERS for rate in RATES for latency in LATENCIES]
    return random.Random(0).sample(every, len(every))


def probed(workers: int, rate: str, latency: str, folder: Path) -> dict[str, Any]:
    """Return the file of `thinwire probe` on this link."""
    out = folder / "probe.json"
    command = [sys.executable, "-m", "thinwire", "run", "--link", rate, "--latency", latency]
    command += ["--workers", str(workers), "--quiet", "--", str(thinwire.__main__.__file__)]
    command += ["probe", "--out", str(out), "--size", SIZE, "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def predicted(probe: Mapping[str, Any]) -> Plan:
    """Return the plan of a probe."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.json"
        path.write_text(json.dumps(probe))
        return tw.plan(probe=path)


def measured_point(point: Point) -> dict[str, Any]:
    """Return a probe, or a few rounds of a strategy, on this link."""
    if point.kind == "probe":
        with tempfile.TemporaryDirectory() as folder:
            found = {"probe": probed(point.workers, point.rate, point.latency, Path(folder))}
    else:
        about = as_it_is(point.kind)
        cell = Cell(
            kind="link",
            workers=point.workers,
            size=SIZE,
            steps=max(_FEWEST_STEPS, _ROUNDS * about["options"].get("k_steps", 1)),
            lr=LR,
            seed=1,
            link=f"{point.rate} + {point.latency}",
            **about,
        )
        found = measured(cell)
    return {**found, "load": round(os.getloadavg()[0], 1)}


def measure(lines: Path, chosen: Sequence[Case]) -> None:
    """Make what is missing."""
    results = Results(lines, measured_point)
    for case in chosen:
        for kind in ("probe", *NAMED):
            results.of(Point(*case, kind))


def compared(lines: Path) -> list[dict[str, Any]]:
    """Every step that was measured, beside what the plan expects from the probe."""
    known = [line["cell"] | line for line in json_lines(lines)]
    plans = {_case(line): predicted(line["probe"]) for line in known if line["kind"] == "probe"}
    found = []
    for line in known:
        if line["kind"] == "probe" or _case(line) not in plans:
            continue
        seconds = line["step_ms"] / 1e3
        low, mid, high = plans[_case(line)][line["kind"]].step_seconds
        found.append(
            {
                "place": _case(line),
                "strategy": line["kind"],
                "predicted_s": mid,
                "measured_s": seconds,
                "error": mid / seconds - 1,
                "inside": low <= seconds <= high,
            }
        )
    return found


def _case(line: Mapping[str, Any]) -> Case:
    return line["workers"], line["rate"], line["latency"]


def table(lines: Path) -> str:
    """The errors by strategy and by link, as Markdown."""
    rows = compared(lines)
    errors = sorted(abs(row["error"]) for row in rows)
    cells = {row["place"] for row in rows}
    whole = [c for c in cells if len(_of(rows, c)) == len(NAMED)]
    good = [c for c in whole if _fastest_is_fast(_of(rows, c))]
    text = [
        "# The planner beside real runs",
        "",
        "Seconds of a step: what `thinwire plan` expects from a probe of the same link, over what "
        "was measured, minus 1. Written by `python -m research.plan.check table` from "
        f"`plan_check.jsonl`: {len(rows)} steps on {len(cells)} of "
        f"{len(WORKERS) * len(RATES) * len(LATENCIES)} links.",
        "",
        f"- error, without its sign: median {_percent(statistics.median(errors))}, 90th percentile "
        f"{_percent(errors[int(0.9 * (len(errors) - 1))])}",
        f"- inside the interval that the plan gives: "
        f"{_percent(sum(row['inside'] for row in rows) / len(rows))}",
        f"- the fastest step by the plan is the measured fastest, or within 10 % of it: "
        f"{len(good)} of {len(whole)} links",
        "",
        "| ranks | link | latency | " + " | ".join(NAMED) + " |",
        "|---" * (3 + len(NAMED)) + "|",
    ]
    for case in sorted(cells, key=lambda c: (c[0], RATES.index(c[1]), LATENCIES.index(c[2]))):
        of = {row["strategy"]: row for row in _of(rows, case)}
        shown = [f"{100 * of[name]['error']:+.0f} %" if name in of else "" for name in NAMED]
        text.append(f"| {case[0]} | {case[1]} | {case[2]} | " + " | ".join(shown) + " |")
    medians = []
    for name in NAMED:
        errors = [abs(row["error"]) for row in rows if row["strategy"] == name]
        medians.append(_percent(statistics.median(errors)) if errors else "")
    text.append("| median | | | " + " | ".join(medians) + " |")
    return "\n".join([*text, ""])


def _of(rows: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    return [row for row in rows if row["place"] == case]


def _fastest_is_fast(rows: list[dict[str, Any]]) -> bool:
    chosen = min(rows, key=lambda row: row["predicted_s"])
    best = min(row["measured_s"] for row in rows)
    return bool(chosen["measured_s"] <= _WITHIN * best)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _trained(name: str, size: ModelSize, warm_steps: int, folder: str) -> tuple[int, int]:
    """Train a few steps and save; return the parameters, and the resident bytes at the peak."""
    recipe = STRATEGIES[name]
    model, setup = ByteTransformer(size), Setup(recipe.optimizer or "adamw")
    arguments = recipe.arguments(1)
    local = arguments.get("document", {}).get("localsgd")
    if local is not None:
        local |= {"k_steps": 2, "begin_step": 0}
    trainer = build_trainer(recipe.trainer, arguments, model, setup)
    inputs, targets = torch.randint(256, (2, 1, 8))
    for _ in range(warm_steps):
        trainer.train_step(inputs, targets)
    gc.collect()
    reset_peak()
    for _ in range(2 if local else 1):
        trainer.train_step(inputs, targets)
    if isinstance(trainer, Prepared):
        trainer.engine.save(Path(folder) / "checkpoint")
    return sum(p.numel() for p in model.parameters()), resident_bytes("VmHWM")


def memory_of_a_rank(
    rank: int, size: int, name: str, shape: tuple[int, int], folder: str
) -> dict[str, Any]:
    """Return the parameters, and the bytes of this rank beyond those of a tiny model."""
    warm_steps = 6 if name == "powersgd" else 2
    _trained(name, ModelSize(64, 1), warm_steps, folder)
    gc.collect()
    before = resident_bytes("VmRSS")
    numel, peak = _trained(name, ModelSize(*shape), warm_steps, folder)
    return {"strategy": name, "parameters": numel, "measured_bytes": peak - before}


def memory(size: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the peak memory of strategies beside the plan's."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            line = on_ranks(memory_of_a_rank, 2, name, SIZES[size], folder)[0]
        plan = tw.plan(params=line["parameters"], step_seconds=1.0, workers=2)
        line["predicted_bytes"] = plan[name].memory_bytes
        line["error"] = round(line["predicted_bytes"] / line["measured_bytes"] - 1, 3)
        print(json.dumps(line), flush=True)
        found.append(line)
    return found


def main() -> None:
    """Measure, or write the table."""
    parser = bare_parser(__doc__)
    parser.add_argument("part", choices=("measure", "table", "memory"))
    parser.add_argument("--lines", type=Path, default=LINES)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--latencies", nargs="+", default=LATENCIES)
    parser.add_argument("--size", choices=SIZES, default="34M")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=NAMED)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.part == "memory":
        lines = memory(given.size, given.strategies)
        if given.out:
            old = json.loads(given.out.read_text()) if given.out.exists() else []
            new = {(line["parameters"], line["strategy"]): line for line in [*old, *lines]}
            given.out.write_text(json.dumps([*new.values()], indent=1) + "\n")
    elif given.part == "measure":
        chosen = [
            (w, rate, latency)
            for w, rate, latency in cases()
            if w in given.workers and rate in given.rates and latency in given.latencies
        ]
        measure(given.lines, chosen)
    else:
        text = table(given.lines)
        Path(__file__).with_suffix(".md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
