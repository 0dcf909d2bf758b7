"""The simulation sends what the library sends: the collectives of its generators, and every byte
that real ranks count."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.api import (
    ERRORS,
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Context,
    Deal,
    Entries,
    Gather,
    Method,
    Reduce,
    Sending,
    Whole,
    combined,
    dense_sum,
    send_dense,
    simulate,
    switch,
)
from tests.ranks import Pool

SHAPES = {"a": (40, 30), "b": (70,), "c": (50, 50), "d": (3,), "e": (20, 11)}
NUMELS = tuple(int(np.prod(shape)) for shape in SHAPES.values())


def length_of(collective: Collective) -> Gather | Deal | Reduce:
    if isinstance(collective, AllGather):
        return Gather(collective.message.nbytes)
    if isinstance(collective, AllToAll):
        return Deal(tuple(collective.lengths))
    assert isinstance(collective, AllReduce)
    return Reduce(collective.buffer.nbytes)


def answers(yielded: Sequence[Collective], rank: int) -> Tensor:
    """Of one collective that all sources have yielded, to one of them."""
    first = yielded[0]
    if isinstance(first, AllGather):
        return torch.stack([each.message for each in yielded])
    if isinstance(first, AllToAll):
        strings = [torch.split(each.messages, list(each.lengths))[rank] for each in yielded]
        return torch.stack(strings)
    return torch.stack([each.buffer for each in yielded]).sum(0)


def run_together(sendings: list[Any]) -> list[list[list[Collective]]]:
    """Several sources in one process, in step: by source the rounds of what it yields."""
    rounds: list[list[list[Collective]]] = [[] for _ in sendings]
    waiting = [next(sending) for sending in sendings]
    while waiting:
        for source, yielded in enumerate(waiting):
            rounds[source].append(list(yielded))
        results = [
            [answers([each[place] for each in waiting], source) for place in range(len(waiting[0]))]
            for source in range(len(sendings))
        ]
        following = []
        for sending, result in zip(sendings, results, strict=True):
            with contextlib.suppress(StopIteration):
                following.append(sending.send(result))
        waiting = following
    return rounds


def changes(source: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(source)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("sources", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("exchange", ["auto", "gather", "split"])
@pytest.mark.parametrize(
    ("make", "of"),
    [
        (lambda e: tw.Sparse(0.9, exchange=e), lambda e: Entries(0.9, 2, e)),
        (lambda e: tw.Sparse(0.75, 32, exchange=e), lambda e: Entries(0.75, 32, e)),
        (lambda e: tw.Quantized(exchange=e), lambda e: Whole(4, e)),
        (lambda e: tw.Quantized(1, exchange=e), lambda e: Whole(1, e)),
    ],
)
def test_generators_yield_the_simulated_bytes(
    make: Any, of: Any, exchange: str, sources: int
) -> None:
    """Of every source, in order, kind and length: of changes, with a dense sum beside them."""
    compression, sendings = make(exchange), []
    for source in range(sources):
        context, folded = Context(5, 0, source, sources), changes(source)
        kept = {ERRORS: {name: torch.zeros_like(tensor) for name, tensor in folded.items()}}
        sending: Sending = compression.send(context, folded, kept)
        sendings.append(combined([sending, send_dense(context, {"more": torch.zeros(64)})]))
    expected = [*Method(NUMELS, of(exchange)).rounds(NUMELS, sources)]
    expected[0] = [*expected[0], dense_sum(256, sources)]
    for rounds in run_together(sendings):
        assert [[length_of(each) for each in one] for one in rounds] == expected


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
