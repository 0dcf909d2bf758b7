"""Batch 1024 against 32 on handwritten digits: torchrun --nproc-per-node 2 examples/large_batch.py
[--tune].
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

# not after init_process_group: its default arguments keep the group and its threads alive
import torch.distributed.nn
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import thinwire as tw

SMALL, LARGE, EPOCHS, WARMUP_EPOCHS, SEEDS = 32, 1024, 30, 5, (0, 1, 2)
FIT, VALIDATION, TRAIN, TEST = slice(0, 1150), slice(1150, 1437), slice(0, 1437), slice(1437, 1797)
RANK, SIZE = (
    int(os.environ.get("RANK", "0")),
    int(os.environ.get("WORLD_SIZE", "1")),
)  # set by torchrun


class Method(NamedTuple):  # its fields say it
    make: Callable[..., torch.optim.Optimizer]
    power: float  # the rule: a batch b times as large takes b**power times the rate
    grid: tuple[float, ...]  # rates that --tune tries at the small batch, on the validation part
    rate: float  # the one it chose
    again: float  # the one it chose at the large batch among as many: rate * (1, 2, 4, 8, 16, 32)


METHODS = {  # with the rules of arXiv 1706.02677, 1708.03888 and 1904.00962; all three warm up
    "SGD": Method(
        partial(tw.optim.SGD, momentum=0.9), 1.0, (0.01, 0.02, 0.04, 0.08, 0.16, 0.32), 0.08, 0.64
    ),
    "LARS": Method(tw.optim.Lars, 1.0, (1, 2, 4, 8, 16, 32), 16, 16),
    "LAMB": Method(tw.optim.Lamb, 0.5, (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08), 0.005, 0.08),
}
torch.set_num_threads(1)
digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
X, Y = torch.tensor(digits.data, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
X = (X - X[TRAIN].mean(0)) / X[TRAIN].std(0).clamp(min=0.1)  # some pixels are always 0


def accuracy(
    method: Method, batch: int, rate: float, seed: int, train: slice, test: slice
) -> float:
    torch.manual_seed(seed)
    layers = [
        (torch.nn.Linear(*pair), torch.nn.ReLU()) for pair in itertools.pairwise((64, 128, 128, 10))
    ]
    model = torch.nn.Sequential(*itertools.chain(*layers))[:-1]
    samples = torch.cat([torch.randperm(len(Y[train])) for _ in range(EPOCHS)])
    batches = samples[: len(samples) // batch * batch].split(
        batch
    )  # all full: an epoch may end inside one
    warmup = len(batches) * WARMUP_EPOCHS // EPOCHS
    decay = tw.schedules.PolynomialDecay(rate, 0.0, len(batches) - warmup, power=1.0)
    optimizer = method.make(
        model.named_parameters(), lr=tw.schedules.WarmUp(rate, warmup).then(decay, at=warmup)
    )
    for indices in batches:
        optimizer.zero_grad()
        cross_entropy(model(X[train][indices]), Y[train][indices]).backward()
        optimizer.step()
    return 100 * (model(X[test]).argmax(1) == Y[test]).double().mean().item()


def over_seeds(method: Method, batch: int, rate: float, train: slice, test: slice) -> list[float]:
    """The accuracies of all seeds, in per cent; every rank trains its share of them."""
    found = torch.zeros(len(SEEDS))
    for i, seed in list(enumerate(SEEDS))[RANK::SIZE]:
        found[i] = accuracy(method, batch, rate, seed, train, test)
    if SIZE > 1:
        dist.all_reduce(found)
    return found.tolist()


def chosen(method: Method, batch: int, grid: tuple[float, ...]) -> float:
    """The rate with the best mean on the validation part, the smaller one of equals; the test part
    is not seen.
    """
    means = [statistics.mean(over_seeds(method, batch, rate, FIT, VALIDATION)) for rate in grid]
    if RANK == 0:
        print(
            f"batch {batch}:",
            ", ".join(f"{r:g}: {a:.1f} %" for r, a in zip(grid, means, strict=True)),
            flush=True,
        )
    return grid[means.index(max(means))]


def main() -> None:
    if SIZE > 1:
        dist.init_process_group("gloo")
    table = [
        f"| | batch {SMALL} | batch {LARGE}, by the rule | batch {LARGE}, tuned again |",
        "|---" * 4 + "|",
    ]
    for name, method in METHODS.items():
        rate, again = method.rate, method.again
        if "--tune" in sys.argv:
            rate = chosen(method, SMALL, method.grid)
            again = chosen(method, LARGE, tuple(rate * 2**i for i in range(6)))
        cells = []
        for batch, lr in (
            (SMALL, rate),
            (LARGE, rate * (LARGE / SMALL) ** method.power),
            (LARGE, again),
        ):
            found = over_seeds(method, batch, lr, TRAIN, TEST)
            cells.append(
                f"{statistics.mean(found):.1f} % ({min(found):.1f} to {max(found):.1f}), rate "
                f"{lr:.3g}"
            )
        table.append(" | ".join([f"| {name}", *cells]) + " |")
    if RANK == 0:
        print("\n".join(table))
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
