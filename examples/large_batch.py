"""Batch 32 against batch 1024 at equally many epochs: python examples/large_batch.py, or under torchrun; --tune.

scikit-learn's handwritten digits, a small network, SGD, LARS and LAMB. The ranks share the runs among them.
"""

import itertools
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import thinwire as tw

SMALL, LARGE, EPOCHS, WARMUP_EPOCHS, SEEDS = 32, 1024, 30, 5, (0, 1, 2)
FIT, VALIDATION, TRAIN, TEST = slice(0, 1150), slice(1150, 1437), slice(0, 1437), slice(1437, 1797)


class Method(NamedTuple):
    make: Callable[..., torch.optim.Optimizer]
    power: float  # the rule: a batch b times as large takes b**power times the rate
    grid: tuple[float, ...]  # rates that --tune tries at the small batch, on the validation part
    rate: float  # what it chose
    retuned: float  # what it chose at the large batch among as many: rate * (1, 2, 4, 8, 16, 32)


METHODS = {  # rules of arXiv 1706.02677, 1708.03888 and 1904.00962; each of them warms up
    "SGD": Method(partial(tw.optim.SGD, momentum=0.9), 1.0, (0.01, 0.02, 0.04, 0.08, 0.16, 0.32), 0.08, 0.64),
    "LARS": Method(tw.optim.Lars, 1.0, (1, 2, 4, 8, 16, 32), 8, 32),
    "LAMB": Method(tw.optim.Lamb, 0.5, (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08), 0.01, 0.08),
}

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets them
torch.set_num_threads(1)
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
X, Y = torch.tensor(digits.data, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
X = (X - X[TRAIN].mean(0)) / X[TRAIN].std(0).clamp(min=0.1)  # some pixels are always 0


def accuracy(method: Method, batch: int, rate: float, seed: int, train: slice, test: slice) -> float:
    torch.manual_seed(seed)
    widths = (64, 128, 128, 128, 10)
    layers = [m for pair in itertools.pairwise(widths) for m in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers[:-1])
    samples = torch.cat([torch.randperm(len(Y[train])) for _ in range(EPOCHS)])
    batches = samples[: len(samples) // batch * batch].split(batch)  # all full: an epoch may end inside one
    warmup = len(batches) * WARMUP_EPOCHS // EPOCHS
    decay = tw.schedules.PolynomialDecay(rate, 0.0, len(batches) - warmup, power=1.0)
    optimizer = method.make(model.named_parameters(), lr=tw.schedules.WarmUp(rate, warmup).then(decay, at=warmup))
    for indices in batches:
        optimizer.zero_grad()
        cross_entropy(model(X[train][indices]), Y[train][indices]).backward()
        optimizer.step()
    return 100 * (model(X[test]).argmax(1) == Y[test]).double().mean().item()


def over_seeds(settings: list[tuple[Method, int, float]], train: slice, test: slice) -> list[list[float]]:
    """Per setting the accuracies of all seeds, in per cent; every rank does its share of the runs."""
    runs = [(*setting, seed) for setting in settings for seed in SEEDS]
    parts = [[accuracy(*run, train, test) for run in runs[RANK::SIZE]]]
    if SIZE > 1:
        mine, parts = parts[0], [[]] * SIZE
        dist.all_gather_object(parts, mine)
    flat = [parts[i % SIZE][i // SIZE] for i in range(len(runs))]
    return [flat[i : i + len(SEEDS)] for i in range(0, len(flat), len(SEEDS))]


def chosen(method: Method, batch: int, grid: list[float]) -> float:
    """The rate with the best mean on the validation part, the smaller one of equals; the test part is not seen."""
    means = [statistics.mean(a) for a in over_seeds([(method, batch, rate) for rate in grid], FIT, VALIDATION)]
    if RANK == 0:
        print(f"batch {batch}:", ", ".join(f"{r:g}: {a:.1f} %" for r, a in zip(grid, means, strict=True)), flush=True)
    return grid[means.index(max(means))]


def tuned(method: Method) -> Method:
    rate = chosen(method, SMALL, list(method.grid))
    return method._replace(rate=rate, retuned=chosen(method, LARGE, [rate * 2**i for i in range(6)]))


def main() -> None:
    if SIZE > 1:
        dist.init_process_group("gloo")
    methods = {name: tuned(method) if "--tune" in sys.argv else method for name, method in METHODS.items()}
    by_rule = {name: m.rate * (LARGE / SMALL) ** m.power for name, m in methods.items()}
    columns = [[(m, SMALL, m.rate), (m, LARGE, by_rule[name]), (m, LARGE, m.retuned)] for name, m in methods.items()]
    results = over_seeds([setting for row in columns for setting in row], TRAIN, TEST)
    if RANK == 0:
        print(
            f"| | batch {SMALL} | batch {LARGE}, rate by the rule | batch {LARGE}, rate tuned again |\n|---|---|---|---|"
        )
        for i, (name, row) in enumerate(zip(methods, columns, strict=True)):
            cells = [
                f"{statistics.mean(a):.1f} % ({min(a):.1f} to {max(a):.1f}), rate {rate:.3g}"
                for (_, _, rate), a in zip(row, results[3 * i : 3 * i + 3], strict=True)
            ]
            print(f"| {name} | " + " | ".join(cells) + " |")
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
