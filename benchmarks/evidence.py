"""Loss against steps of every strategy, and seconds and bytes of a step on every link.

python -m benchmarks.evidence tune train links
python -m benchmarks.evidence whole --workers 2 --strategies muon-local --links 20mbit --seeds 5
python -m research.pages       # puts the tables that both give together into the pages

Loss per step does not depend on the link, nor the time of a step on the seed: so the loss is
measured on real ranks without a limit on the link, once per seed, and the time in few steps on
every link. "whole" trains all steps on a link, which shows whether both may be put
together. Each measurement is one line of a file beside the results; what is there already is not
made again, so the command goes on where it was interrupted.

Rates come from the validation part, by one rule for all: 0.003, 0.006 and 0.012 (for SGD 0.2, 0.4
and 0.8) with the same number of steps, and one further to the side as long as the best is at the
edge. Tuning takes seed 1, the training others. With --near 2 the first three are, for every
strategy, the best rate that two workers had and its neighbours, which saves a run or two of each.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import AnyCell, Results
from thinwire.tools.compare.strategies import STRATEGIES
from thinwire.tools.network.netns import Link, network
from thinwire.tools.run.config import (
    ConvolutionSize,
    Job,
    ModelSize,
    Recipe,
    RunConfig,
    size_of,
)
from thinwire.tools.run.launch import WorkerError, release, run_workers
from thinwire.tools.run.text import read_digits, read_standard_library

RESULTS = Path(__file__).parent / "results" / "evidence.jsonl"
OUTER = RESULTS.with_name("evidence_outer.jsonl")
"""Tunings of local Muon with other outer rules and intervals."""
SCREENING = RESULTS.with_name("evidence_screening.jsonl")
"""Short or small trainings, from which settings and rates of the larger ones were chosen."""


@dataclass(frozen=True)
class Variant:
    """A row of the tables: a strategy of `thinwire compare`, or a change of one.

    Attributes:
        name: Of the strategy.
        optimizer: Of a strategy without one of its own.
        options: Instead of the strategy's own.
        note: Says in a table what differs.
    """

    name: str
    optimizer: str = "adamw"
    options: Mapping[str, Any] | None = None
    note: str = ""

    @property
    def setting(self) -> dict[str, Any]:
        """Strategy, options and optimizer, as a cell has them."""
        own = as_it_is(self.name, self.optimizer)
        return own if self.options is None else {**own, "options": dict(self.options)}

    def __str__(self) -> str:
        return f"`{self.name}`, {self.note}" if self.note else f"`{self.name}`"


NAMES = (
    "dense",
    "dense-muon",
    "muon-local",
    "sparse-local",
    "quantized-local",
    "powersgd",
    "low-rank",
    "localsgd",
    "diloco",
    "fp16",
    "fp16-muon",
    "dgc",
)
LONG_RUNS = {
    "k_steps": 32,
    "begin_step": 0,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "outer_nesterov": True,
}
"""DiLoCo with the outer step of its paper, which is for hundreds of averagings."""
EIGHT_STEPS = {"k_steps": 8, "compression": {"quantized": {"value_bits": 1}}}
ROWS = (
    Variant("dense"),
    Variant("dense", "sgd", note="SGD"),
    Variant("dense-muon"),
    Variant("muon-local"),
    Variant("muon-local", options=EIGHT_STEPS, note="8 steps"),
    Variant("sparse-local"),
    Variant("quantized-local"),
    Variant("powersgd"),
    Variant("powersgd", "sgd", note="SGD"),
    Variant("powersgd", "muon", note="Muon"),
    Variant("low-rank"),
    Variant("low-rank", "sgd", note="SGD"),
    Variant("low-rank", "muon", note="Muon"),
    Variant("localsgd"),
    Variant("localsgd", options={"k_steps": 16}, note="16 steps"),
    Variant("diloco"),
    Variant("diloco", options=LONG_RUNS, note="32 steps, 0.7 and 0.9"),
    Variant("fp16"),
    Variant("fp16-muon"),
    Variant("dgc"),
)
"""Of the tables, in their order; what was not measured is left out."""
LINKS = ("5mbit", "20mbit", "100mbit", "1gbit")
STEPS, BATCH, EVALUATIONS, HELD_OUT_SEQUENCES = 1500, 8, 15, 256
RATES, SGD_RATES, TUNING_SEED, SEEDS = (0.003, 0.006, 0.012), (0.2, 0.4, 0.8), 1, (5, 6, 7)
_TIMED_ROUNDS, _FEWEST_TIMED_STEPS = 4, 16
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement; a line of the results begins with these.

    Attributes:
        kind: "tuning" (loss on the validation part), "training" (on the held-out part), "link" (a
            few steps on it) or "whole" (the training on a link).
        strategy: Name of the strategy.
        workers: Ranks.
        size: Of the model.
        steps: Updates.
        lr: Peak learning rate.
        seed: Of parameters and batches.
        link: "loopback" where the loss is measured; else a rate, or "20mbit + 20ms".
        options: Of the strategy.
        optimizer: "adamw", "muon" or "sgd".
    """

    kind: str
    strategy: str
    workers: int
    size: str
    steps: int
    lr: float
    seed: int
    link: str = "loopback"
    options: Mapping[str, Any]
    optimizer: str

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.strategy} x{self.workers} {self.size} lr {self.lr:g} "
            f"seed {self.seed} {self.link} {self.optimizer} {json.dumps(self.options)}"
        )

    def recipe(self) -> Recipe:
        """The strategy with the options and the optimizer of the cell."""
        recipe = STRATEGIES[self.strategy]
        return replace(recipe, options=dict(self.options), optimizer=self.optimizer)


def as_it_is(name: str, optimizer: str = "adamw") -> dict[str, Any]:
    """Return the cell fields of a strategy of `thinwire compare`; `optimizer` if it has none."""
    recipe = STRATEGIES[name]
    return {
        "strategy": name,
        "options": dict(recipe.options),
        "optimizer": recipe.optimizer or optimizer,
    }


def measured(cell: Cell) -> dict[str, Any]:
    """Train one cell on real ranks."""
    try:
        result = _trained(cell)
    except WorkerError as error:
        if "diverged" not in str(error):
            raise
        return {"loss": None, "error": str(error).splitlines()[0]}
    if cell.kind == "link":
        return {
            "step_ms": round(result["median_step_ms"], 3),
            "bare_step_ms": round(result["median_bare_step_ms"], 3),
            "kernel_bytes_per_step": result["kernel_sent_bytes_per_step"],
        }
    found = {
        "loss": round(result["evaluations"][-1]["loss"], 5),
        "losses": [[point["step"], round(point["loss"], 5)] for point in result["evaluations"]],
        "parameters": result["parameters"],
        "bytes_per_step": round(result["library_bytes_per_step"], 1),
        "bytes": round(result["evaluations"][-1]["library_bytes"]),
    }
    if cell.kind == "whole":
        points = result["evaluations"]
        found["seconds"] = [round(point["seconds"], 3) for point in points]
        found["sent"] = [round(point["library_bytes"]) for point in points]
    return found


def model_of(size: str) -> ModelSize | ConvolutionSize:
    """The transformer of a size; after "convolution-" the net on digits."""
    model, _, of_it = size.rpartition("-")
    return size_of(model or "transformer", of_it)


def configured(cell: Cell, folder: Path, interface: str | None = None) -> RunConfig:
    """The run of a cell, whose texts are written into a folder."""
    model = model_of(cell.size)
    digits = isinstance(model, ConvolutionSize)
    corpus = read_digits() if digits else read_standard_library()
    held_out = corpus.validation if cell.kind == "tuning" else corpus.held_out
    (folder / "train.bin").write_bytes(corpus.train)
    (folder / "held_out.bin").write_bytes(held_out)
    return RunConfig(
        recipe=cell.recipe(),
        optimizer="adamw",
        lr=cell.lr,
        task=None,
        device="cpu",
        model=model,
        seed=cell.seed,
        steps=cell.steps,
        seconds=None,
        evaluations=1 if cell.kind == "link" else EVALUATIONS,
        ramp_steps=max(1, min(100, cell.steps // 4)),
        train_file=str(folder / "train.bin"),
        held_out_file=str(folder / "held_out.bin"),
        held_out_sequences=HELD_OUT_SEQUENCES,
        batch=BATCH,
        interface=interface,
        launched_unix_s=time.time(),
    )


def _trained(cell: Cell) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, _link(cell) as emulated:
        work = Path(folder)
        config = configured(cell, work, None if emulated is None else emulated.interface)
        job = Job(
            task="thinwire.tools.run.training:TrainingRun",
            config=asdict(config),
            timeout_s=_TIMEOUT_S,
        )
        result: dict[str, Any] = {}
        with contextlib.closing(run_workers(job, cell.workers, emulated, work / "run")) as news:
            for event in news:
                if event["event"] == "prepared":
                    if emulated is not None:
                        emulated.limit()
                    release(work / "run")
                elif event["event"] == "result":
                    result = event
        return result


@contextlib.contextmanager
def _link(cell: Cell) -> Iterator[Any]:
    if cell.link == "loopback":
        yield None
        return
    rate, _, latency = cell.link.partition(" + ")
    with network(cell.workers, Link.parse(rate, latency or "0ms")) as emulated:
        yield emulated


def tuned(results: Results[AnyCell], base: AnyCell, grid: Sequence[float]) -> float:
    """The best rate of the grid, which goes on by factors of two while the best is at its edge.

    Args:
        results: Where losses are, or come to.
        base: The cell, with any `lr`.
        grid: Rates to begin with.
    """
    losses: dict[float, float] = {}

    def loss(rate: float) -> float:
        found = results.of(replace(base, lr=rate))["loss"]
        return float("inf") if found is None else found

    for rate in grid:
        losses[rate] = loss(rate)
    while True:
        best = min(losses, key=losses.__getitem__)
        if best == min(losses):
            losses[best / 2] = loss(best / 2)
        elif best == max(losses):
            losses[best * 2] = loss(best * 2)
        else:
            return best
        if min(losses, key=losses.__getitem__) == best:
            return best


def near(results: Results[AnyCell], base: Cell, workers: int) -> tuple[float, float, float]:
    """The best rate that so many workers had on the validation part, and half and twice of it."""
    wanted = asdict(replace(base, workers=workers))
    losses = {
        line["cell"]["lr"]: line["loss"]
        for line in results.lines.values()
        if line["cell"] == {**wanted, "lr": line["cell"]["lr"]} and line["loss"] is not None
    }
    if not losses:
        raise SystemExit(f"--near {workers}: nothing was tuned with {workers} workers of {base}")
    best = min(losses, key=losses.__getitem__)
    return best / 2, best, best * 2


def timed(cell: Cell) -> Cell:
    """The few steps whose time and bytes stand for all of a strategy on a link."""
    options = cell.recipe().options
    round_steps = options.get("max_k_steps", options.get("k_steps", 1))
    return replace(cell, kind="link", steps=max(_FEWEST_TIMED_STEPS, _TIMED_ROUNDS * round_steps))


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=("tune", "train", "links", "whole"))
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--strategies", nargs="+", default=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument(
        "--optimizer", choices=("adamw", "sgd"), default="adamw", help="of strategies without one"
    )
    parser.add_argument(
        "--near", type=int, metavar="WORKERS", help="begin at the best rate of so many workers"
    )
    parser.add_argument("--lr", type=float, help="the rate of all, which are not tuned")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--settings",
        type=Path,
        help="JSON list of {strategy, options, optimizer} to try, instead of --strategies",
    )
    arguments = parser.parse_args()
    results = Results(arguments.results, measured)
    tried = [as_it_is(name, arguments.optimizer) for name in arguments.strategies]
    if arguments.settings is not None:
        settings = json.loads(arguments.settings.read_text())
        tried = [{**as_it_is(one["strategy"], arguments.optimizer), **one} for one in settings]
    for workers in arguments.workers:
        for one in tried:
            base = Cell(
                kind="tuning",
                workers=workers,
                lr=0.0,
                seed=TUNING_SEED,
                size=arguments.size,
                steps=arguments.steps,
                **one,
            )
            if {"tune", "train", "whole"} & set(arguments.parts):
                grid = SGD_RATES if base.optimizer == "sgd" else RATES
                if arguments.near is not None:
                    grid = near(results, base, arguments.near)
                rate = arguments.lr or tuned(results, base, grid)
                if "tune" in arguments.parts:
                    results.of(replace(base, lr=rate))
            if "train" in arguments.parts:
                for seed in arguments.seeds:
                    results.of(replace(base, kind="training", lr=rate, seed=seed))
            if "links" in arguments.parts:
                for link in arguments.links:
                    results.of(replace(timed(base), lr=RATES[0], link=link))
            if "whole" in arguments.parts:
                for link, seed in product(arguments.links, arguments.seeds):
                    results.of(replace(base, kind="whole", lr=rate, seed=seed, link=link))


if __name__ == "__main__":
    main()
