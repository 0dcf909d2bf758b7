"""LoRA over two homes: what is lost since the mean of A and of B is not the mean of B A.

python -m research.fine_tuning.lora            # trains what the results lack, then prints the table
python -m research.fine_tuning.lora --quick    # a few steps, without results

A small transformer, pretrained on Python's standard library with Muon, gets adapters of rank 8.
Two homes with texts of their own train them with AdamW and average every `interval` steps, dense:

- both: A and B train and are averaged, each for itself;
- alternating: B trains and is averaged in one round, A in the next, so the mean of B A is exact;
- B alone: A stays as it was drawn (arXiv 2403.12313);
- dense: gradients are averaged in every step, the reference.

The rate is the best of four on the validation parts with seed 1; losses are the means of both
homes' held-out text, of the other seeds. `error` is the distance of the averaged product from the
mean of the products over the mean's change in the round, a mean over rounds and matrices.
"""

import copy
import math
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Results, markdown
from benchmarks.gaps import Cell
from benchmarks.law import alone, works_of
from research.fine_tuning.pretrained import RATES as PRETRAINING_RATES
from research.fine_tuning.pretrained import Adapter, adapted_, arguments, train_
from thinwire.optim import Muon, muon_groups

RESULTS = Path(__file__).with_suffix(".jsonl")
INCLUDE = Path(torch.__file__).parent / "include"
HOMES = (INCLUDE / "c10", INCLUDE / "torch" / "csrc" / "jit")
METHODS, INTERVALS = ("both", "alternating", "B alone"), (16, 64)
RATES = 0.01, 0.02, 0.04, 0.08
TUNING_SEED, SEEDS, STEPS = 1, (5, 6, 7), 256
_SOURCE = Cell(
    part="held_out",
    size="0.14M",
    workers=1,
    interval=0,
    bits=32,
    optimizer="muon",
    steps=180,
    batch=8,
    lr=PRETRAINING_RATES["muon"],
    seed=1,
    data="",
)
"""Pretraining of the base model."""


@dataclass(frozen=True)
class Run:
    """One fine-tuning; interval 1 for gradients that are averaged in every step."""

    method: str
    interval: int
    rate: float
    seed: int
    steps: int


@cache
def pretrained() -> nn.Module:
    """Return the base model."""
    with tempfile.TemporaryDirectory() as folder:
        (work,) = works_of(_SOURCE, "cpu", Path(folder))
        model: nn.Module = work.model
        optimizer = Muon(muon_groups(model), lr=_SOURCE.lr)
        train_(model, [work], optimizer, _SOURCE.lr, range(_SOURCE.steps), _SOURCE.steps)
    return model


def measure(run: Run) -> dict[str, Any]:
    """Fine-tune at both homes; loss, and how far the mean of factors is from that of products."""
    torch.set_num_threads(1)
    part = "validation" if run.seed == TUNING_SEED else "held_out"
    first = copy.deepcopy(pretrained())
    torch.manual_seed(run.seed)  # of the adapters: making the base model draws too
    adapted_(first)
    models = [first, *(copy.deepcopy(first) for _ in HOMES[1:])]
    adapters = [[m for m in model.modules() if isinstance(m, Adapter)] for model in models]
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], weight_decay=0.0)
        for m in models
    ]
    works = []
    with tempfile.TemporaryDirectory() as folder, alone():
        for home, text in enumerate(HOMES):
            cell = replace(_SOURCE, part=part, seed=10 * run.seed + home, data=str(text))
            (own := Path(folder, str(home))).mkdir()  # texts are read from their files
            works += works_of(cell, "cpu", own)
        errors: list[float] = []
        if run.method == "dense":
            train_(models[0], works, optimizers[0], run.rate, range(run.steps), run.steps)
        else:
            for start in range(0, run.steps, run.interval):
                in_round = start // run.interval
                for of_home in adapters:
                    for adapter in of_home:
                        once = in_round % 2 == 0
                        adapter.up.requires_grad_(run.method != "alternating" or once)
                        trains = run.method == "both" or (run.method == "alternating" and not once)
                        adapter.down.requires_grad_(trains)
                steps = range(start, min(start + run.interval, run.steps))
                before = [one.up.detach() @ one.down.detach() for one in adapters[0]]
                for model, work, optimizer in zip(models, works, optimizers, strict=True):
                    train_(model, [work], optimizer, run.rate, steps, run.steps)
                errors += _average_(adapters, before)
        losses = [float(work.evaluate(models[0])) for work in works]
    found = {"loss": round(mean(losses), 5)}
    return found | ({"error": round(mean(errors), 5)} if errors else {})


@torch.no_grad()
def _average_(adapters: list[list[Adapter]], before: list[Tensor]) -> list[float]:
    """Average both factors over the homes in place; the errors of the products."""
    errors = []
    for same, old in zip(zip(*adapters, strict=True), before, strict=True):
        wanted = torch.stack([one.up @ one.down for one in same]).mean(0)
        for name in ("up", "down"):
            average = torch.stack([getattr(one, name) for one in same]).mean(0)
            for one in same:
                getattr(one, name).copy_(average)
        change = (wanted - old).norm()
        errors.append(float((same[0].up @ same[0].down - wanted).norm() / change))
    return errors


def table(results: Results[Run]) -> list[str]:
    """Return a row for each method and interval."""
    rows: list[list[object]] = []
    cells = [("dense", 1), *((method, k) for k in INTERVALS for method in METHODS)]
    for method, interval in cells:
        tuned = {r: results.of(Run(method, interval, r, TUNING_SEED, STEPS)) for r in RATES}
        rate = min(tuned, key=lambda each: tuned[each].get("loss") or math.inf)
        found = [results.of(Run(method, interval, rate, seed, STEPS)) for seed in SEEDS]
        losses = [float(one["loss"]) for one in found]
        error = f"{mean(one['error'] for one in found):.3f}" if "error" in found[0] else "0"
        rows.append([method, interval, rate, f"{mean(losses):.4f}", f"{stdev(losses):.4f}", error])
    return markdown(["trained", "interval", "rate", "loss", "std", "error"], rows)


def main() -> None:
    """Make what is missing, and print the table."""
    given = arguments(__doc__, RESULTS)
    if given.quick:
        for method in ("dense", *METHODS):
            print(measure(Run(method, 2, 0.01, 5, 4)))
        return
    print("\n".join(table(Results(given.results, measure))))


if __name__ == "__main__":
    main()
