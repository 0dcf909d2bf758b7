"""Fine-tuning of models that were pretrained dense and by local updates, to the same loss.

python -m research.fine_tuning.pretrained            # trains what is missing, prints the table
python -m research.fine_tuning.pretrained --quick    # a few steps, without results

A small transformer learns the next byte of Python's standard library, as in `benchmarks.law`, with
two workers. Local training takes `STEPS` steps; dense training takes as many steps as reach the
same loss on the validation part with the tuning seed. One worker then fine-tunes each model with
AdamW on C++ headers of torch: all parameters, or adapters of rank 8 (LoRA). The rate of each
fine-tuning is the best of its grid on the validation part; losses are those of held-out text.
"""

import copy
import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import thinwire as tw
from benchmarks.common import Results, bare_parser, markdown
from benchmarks.evidence import TUNING_SEED
from benchmarks.gaps import Cell
from benchmarks.law import Training, alone, works_of
from thinwire.tools.run.training import rate_factor

RESULTS = Path(__file__).with_suffix(".jsonl")
SIZE, WORKERS, BATCH, STEPS, SEEDS = "0.14M", 2, 8, 256, (5, 6, 7)
SHORTER = (0.6, 0.8)
"""Dense training with the tuning seed takes these parts of `STEPS`; the loss in between follows."""
RATES = {"adamw": 0.012, "muon": 0.024}
"""Of pretraining: the tuned rates of dense training at this size (`benchmarks.evidence`)."""
LOCAL = {
    "adamw": tw.LocalSGD(16, outer_lr=0.7, outer_momentum=0.3, outer_nesterov=True),
    "muon": tw.LocalSGD(16, compression=tw.Quantized(1)),
}
NAMES = {"adamw": ("dense AdamW", "DiLoCo, AdamW"), "muon": ("dense Muon", "local Muon, one bit")}
OTHER_TEXT = Path(torch.__file__).parent / "include" / "c10"
TUNING_STEPS, RANK = 100, 8
GRIDS = {"full": (3e-3, 6e-3), "lora": (1e-2, 2e-2)}


@dataclass(frozen=True)
class Pretraining:
    """One pretraining, and the fine-tunings of its model if `tuning_steps` is above 0."""

    optimizer: str
    local: bool
    steps: int
    seed: int
    tuning_steps: int


class Adapter(nn.Module):
    """Adds a product of two narrow matrices to a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(RANK, weight.shape[1]) / math.sqrt(weight.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight."""
        return weight + self.up @ self.down


def adapted_(model: nn.Module) -> None:
    """Freeze the model, and give each matrix of its blocks an adapter."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear) and module is not model.out:
            register_parametrization(module, "weight", Adapter(module.weight))


def measure(cell: Pretraining) -> dict[str, Any]:
    """Pretrain, then fine-tune; losses of both."""
    torch.set_num_threads(1)
    law_cell = Cell(
        part="held_out" if cell.tuning_steps else "validation",
        size=SIZE,
        workers=WORKERS,
        interval=LOCAL[cell.optimizer].k_steps if cell.local else 0,
        bits=32,
        optimizer=cell.optimizer,
        steps=cell.steps,
        batch=BATCH,
        lr=RATES[cell.optimizer],
        seed=cell.seed,
        data="",
    )
    with tempfile.TemporaryDirectory() as folder, alone():
        works = works_of(law_cell, "cpu", Path(folder))
        training = Training(law_cell, works, LOCAL[cell.optimizer])
        training.run(None)
        found: dict[str, Any] = {"loss": round(training.losses[-1][1], 5)}
        if cell.tuning_steps:
            model, first = training.models[0], works[0]
            found["tuned"] = {
                way: [tuned(model, first, law_cell, way, rate, cell.tuning_steps) for rate in rates]
                for way, rates in GRIDS.items()
            }
    return found


def tuned(
    model: nn.Module, first: Any, cell: Cell, way: str, rate: float, steps: int
) -> dict[str, float]:
    """Fine-tune a copy of a model on the other text; losses on its parts and on the first text."""
    other = replace(cell, workers=1, interval=0, data=str(OTHER_TEXT))
    with tempfile.TemporaryDirectory() as folder:
        (work,) = works_of(other, "cpu", Path(folder))
        (validation,) = works_of(replace(other, part="validation"), "cpu", Path(folder))
    model = copy.deepcopy(model)
    torch.manual_seed(cell.seed)
    if way == "lora":
        adapted_(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    train_(model, [work], optimizer, rate, range(steps), steps)
    losses = {"validation": validation, "held_out": work, "first_text": first}
    found = {name: round(each.evaluate(model), 5) for name, each in losses.items()}
    return {"rate": rate, **found}


def train_(
    model: nn.Module,
    works: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    rate: float,
    steps: range,
    whole: int,
) -> None:
    """Make these of `whole` steps, each from the mean gradient of a batch of every task."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_factor(step / whole)
        optimizer.zero_grad()
        for work in works:
            inputs, targets = work.next_batch()
            (work.loss_fn(model(inputs), targets) / len(works)).backward()
        optimizer.step()


def equal_steps(results: Results[Pretraining], optimizer: str) -> int:
    """Steps of dense training that reach the loss of local training, by the tuning seed."""

    def loss(local: bool, steps: int) -> float:
        return float(
            results.of(Pretraining(optimizer, local, steps, TUNING_SEED, tuning_steps=0))["loss"]
        )

    wanted = loss(True, STEPS)
    short, long = (round(part * STEPS) for part in SHORTER)
    slope = (loss(False, long) - loss(False, short)) / math.log(long / short)
    steps = round(short * math.exp((wanted - loss(False, short)) / slope))
    return max(1, steps)


def table(lines: dict[tuple[str, bool], list[dict[str, Any]]]) -> list[str]:
    """Return the means over the seeds, and the differences of local training by seed."""
    titles = ["pretrained by", "steps", "loss", "all parameters tuned", "LoRA"]
    found: list[list[object]] = []
    for optimizer, names in NAMES.items():
        for local in (False, True):
            rows = lines[optimizer, local]
            cells = [names[local], rows[0]["cell"]["steps"]]
            cells.append(f"{mean(row['loss'] for row in rows):.4f}")
            tuned = {way: [_best(row, way) for row in rows] for way in GRIDS}
            cells += [f"{mean(each['held_out'] for each in tuned[way]):.4f}" for way in GRIDS]
            after = (f"{mean(each['first_text'] for each in tuned[way]):.3f}" for way in GRIDS)
            found.append([*cells, ", ".join(after)])
    text = markdown([*titles, "first text after both"], found)
    for optimizer, names in NAMES.items():
        dense, local_ = lines[optimizer, False], lines[optimizer, True]
        parts = [_difference("pretrained", [r["loss"] for r in dense], [r["loss"] for r in local_])]
        for way in GRIDS:
            values = [[_best(row, way)["held_out"] for row in rows] for rows in (dense, local_)]
            parts.append(_difference(way, *values))
        text += ["", f"{names[1]} over {names[0]}, by seed: " + "; ".join(parts)]
    return text


def _best(row: dict[str, Any], way: str) -> dict[str, float]:
    found: dict[str, float] = min(row["tuned"][way], key=lambda each: each["validation"])
    return found


def _difference(name: str, dense: Sequence[float], local: Sequence[float]) -> str:
    parts = (f"{100 * (b / a - 1):+.2f} %" for a, b in zip(dense, local, strict=True))
    return f"{name} {', '.join(parts)}"


def arguments(description: str | None, results: Path) -> Namespace:
    """The options of this topic's commands."""
    parser = bare_parser(description)
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs")
    return parser.parse_args()


def main() -> None:
    """Make what is missing, and print the table."""
    given = arguments(__doc__, RESULTS)
    if given.quick:
        print(measure(Pretraining("muon", local=True, steps=4, seed=5, tuning_steps=2)))
        sys.exit()
    results: Results[Pretraining] = Results(given.results, measure)
    lines: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for optimizer in RATES:
        dense_steps = equal_steps(results, optimizer)
        for seed in SEEDS:
            for local, steps in ((False, dense_steps), (True, STEPS)):
                cell = Pretraining(optimizer, local, steps, seed, TUNING_STEPS)
                lines.setdefault((optimizer, local), []).append(results.of(cell))
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
