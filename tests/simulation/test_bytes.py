"""The simulation sends what the library sends: every byte that real ranks count."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.api import (
    Entries,
    Method,
    Whole,
    simulate,
    switch,
)
from tests.ranks import Pool

SHAPES = {"a": (40, 30), "b": (70,), "c": (50, 50), "d": (3,), "e": (20, 11)}
NUMELS = tuple(int(np.prod(shape)) for shape in SHAPES.values())


class Bag(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for place, shape in enumerate(SHAPES.values()):
            self.register_parameter(f"p{place}", torch.nn.Parameter(torch.full(shape, 0.1 + place)))


def draw_gradients(model: torch.nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def sent_by_gradients(rank: int, size: int, options: dict[str, Any], steps: int) -> list[float]:
    model = Bag()
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
    assert outcome.given.tolist() == [counts[2] - counts[1] for counts in found]


def sent_by_changes(rank: int, size: int, config: tw.LocalSGD, steps: int) -> list[float]:
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(steps):
            draw_gradients(model, step, rank)
            optimizer.step()
            counts.append(sync.stats()["bytes_sent"])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("config", "method"),
    [
        (tw.LocalSGD(4), Method(NUMELS, k_steps=4)),
        (
            tw.LocalSGD(4, compression=tw.Sparse(0.9)),
            Method(NUMELS, Entries(0.9, 2, sketch=True), k_steps=4),
        ),
        (
            tw.LocalSGD(4, fragments=2, delay=1, compression=tw.Sparse(0.9, exchange="split")),
            Method(NUMELS, Entries(0.9, 2, "split", sketch=True), k_steps=4, fragments=2, delay=1),
        ),
        (tw.LocalSGD(4, compression=tw.Quantized(1)), Method(NUMELS, Whole(1), k_steps=4)),
        (
            tw.LocalSGD(6, fragments=3, compression=tw.Quantized(exchange="split")),
            Method(NUMELS, Whole(4, "split"), k_steps=6, fragments=3),
        ),
    ],
)
@pytest.mark.parametrize("node_size", [1, 2])
def test_real_ranks_send_the_simulated_bytes_in_local_updates(
    ranks: Pool, config: tw.LocalSGD, method: Method, size: int, node_size: int
) -> None:
    """A whole round after the first one, with a delay as it arrives."""
    config, method = (replace(each, node_size=node_size) for each in (config, method))
    k = config.k_steps
    first = config.begin_step + k + config.delay
    found = ranks.run(sent_by_changes, config, first + k, size=size)
    outcome = simulate(method, switch(size, 1e8, 1e-3), step_s=0.1, steps=k)
    assert outcome.given.tolist() == [counts[first + k - 1] - counts[first - 1] for counts in found]
