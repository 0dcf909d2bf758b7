"""The simulation sends what the library sends: every byte that real ranks count."""

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.api import Entries, Method, simulate, switch
from tests.local.test_laws import Bag
from tests.ranks import Pool

SHAPES = {"a": (40, 30), "b": (70,), "c": (50, 50), "d": (3,), "e": (20, 11)}
NUMELS = tuple(int(np.prod(shape)) for shape in SHAPES.values())


def draw_gradients(model: torch.nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def sent_by_gradients(rank: int, size: int, options: dict[str, Any], steps: int) -> list[float]:
    model = Bag(SHAPES, torch.float32)
    optimizer = tw.optim.DGCMomentum(model.named_parameters(), lr=0.1, **options)
    counts = []
    for step in range(steps):
        draw_gradients(model, step, rank)
        optimizer.step()
        counts.append(optimizer.stats()["bytes_sent"])
    return counts


DENSE = {"rampup_begin_step": 10**6, "min_numel": 200}
ONE_BIT = {"sparsity": (0.9,), "min_numel": 200}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("options", "method"),
    [
        (DENSE, Method(NUMELS)),
        (ONE_BIT | {"exchange": "gather"}, Method(NUMELS, Entries(0.9, 1, "gather"), 200)),
        (ONE_BIT | {"exchange": "split"}, Method(NUMELS, Entries(0.9, 1, "split"), 200)),
        (
            ONE_BIT | {"exchange": "split", "node_size": 2},
            Method(NUMELS, Entries(0.9, 1, "split"), 200, node_size=2),
        ),
    ],
)
def test_real_ranks_send_the_simulated_bytes(
    ranks: Pool, options: dict[str, Any], method: Method, size: int
) -> None:
    """Every rank's own count; the first step says more in its agreement."""
    found = ranks.run(sent_by_gradients, options, 3, size=size)
    outcome = simulate(method, switch(size, 1e8, 1e-3), step_s=0.1, steps=1)
    assert outcome.sent.tolist() == [counts[2] - counts[1] for counts in found]
