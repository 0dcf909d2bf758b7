"""The simulation sends what the library sends: every byte that real ranks count."""

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from benchmarks.ranks import on_ranks
from benchmarks.simulation import Entries, Method, simulate
from benchmarks.simulation_lines import switch

SHAPES = {"a": (40, 30), "b": (70,), "c": (50, 50), "d": (3,), "e": (20, 11)}
NUMELS = tuple(int(np.prod(shape)) for shape in SHAPES.values())


DENSE = {"rampup_begin_step": 10**6, "min_numel": 200}
ONE_BIT = {"sparsity": (0.9,), "min_numel": 200}
CASES: list[tuple[dict[str, Any], Method]] = [
    (DENSE, Method(NUMELS)),
    (ONE_BIT | {"exchange": "gather"}, Method(NUMELS, Entries(0.9, 1, "gather"), 200)),
    (ONE_BIT | {"exchange": "split"}, Method(NUMELS, Entries(0.9, 1, "split"), 200)),
    (
        ONE_BIT | {"exchange": "split", "node_size": 2},
        Method(NUMELS, Entries(0.9, 1, "split"), 200, node_size=2),
    ),
]


def sent_by_gradients(rank: int, size: int) -> list[list[float]]:
    """Bytes that this rank has sent after each of three steps, by case."""
    found = []
    for options, _ in CASES:
        generator = torch.Generator().manual_seed(rank)
        params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        optimizer = tw.optim.DGCMomentum(params.items(), lr=0.1, **options)
        counts = []
        for _ in range(3):
            for p in params.values():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
            counts.append(optimizer.stats()["bytes_sent"])
        found.append(counts)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_send_the_simulated_bytes(size: int) -> None:
    """Every rank's own count; the first step says more in its agreement."""
    found = on_ranks(sent_by_gradients, size)
    for number, (_, method) in enumerate(CASES):
        outcome = simulate(method, switch(size, 1e8, 1e-3), step_s=0.1, steps=1)
        assert outcome.sent.tolist() == [ranks[number][2] - ranks[number][1] for ranks in found]
