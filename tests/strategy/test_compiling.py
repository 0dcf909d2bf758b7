"""Loops that take longer to compile than the group waits for anybody do not end a run, however it
is set up."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.api import warm
from thinwire.optim import DGCMomentum, Lamb

pytest.importorskip("numba")

WAIT_S, COMPILING_S = 5.0, 8.0


def small_model():
    torch.manual_seed(0)
    return nn.Linear(200, 100)


def rows():
    return torch.ones(4, 200) * (1 + dist.get_rank())


def with_engine():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = tw.DistributedStrategy(dgc=tw.DGC(sparsity=(0.99,)))
    engine = strategy.prepare(model, optimizer)
    yield
    for _ in range(2):
        engine.minimize(model(rows()).square().mean())
    engine.close()


def with_lamb():
    model = small_model()
    engine = tw.DistributedStrategy().prepare(model, Lamb(model.parameters()))
    yield
    engine.minimize(model(rows()).square().mean())
    engine.close()


def alone():
    model = small_model()
    optimizer = DGCMomentum(model.parameters(), 0.1, sparsity=(0.99,))
    yield
    for _ in range(2):
        optimizer.zero_grad()
        model(rows()).square().mean().backward()
        optimizer.step()


def attached():
    model = small_model()
    optimizer = DGCMomentum(model.parameters(), 0.1, sparsity=(0.99,))
    ddp = DistributedDataParallel(model)
    handle = optimizer.attach(ddp)
    yield
    for _ in range(2):
        optimizer.zero_grad()
        ddp(rows()).square().mean().backward()
        optimizer.step()
    handle.remove()


def with_local_updates(compression=tw.Sparse(0.99)):  # noqa: B008 (it cannot change)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(2, compression=compression)):
        yield
        for _ in range(2):
            optimizer.zero_grad()
            model(rows()).square().mean().backward()
            optimizer.step()


def with_quantized_changes():
    yield from with_local_updates(tw.Quantized(4))


WAYS = {
    way.__name__: way
    for way in (with_engine, with_lamb, alone, attached, with_local_updates, with_quantized_changes)
}


def trained_beside_a_slow_compiler(rank, size, way):
    compiled, compile_ = [], warm._compile

    def slowly(needs):
        compiled.append(needs)
        if rank == 1 and len(compiled) == 1:
            time.sleep(COMPILING_S)
        compile_(needs)

    warm._met.clear()
    warm._compile = slowly
    try:
        dist.barrier()  # ranks do not begin at the same moment
        begun = time.monotonic()
        steps = WAYS[way]()
        next(steps)
        ready_s = time.monotonic() - begun
        assert next(steps, None) is None
    finally:
        warm._compile = compile_
    return len(compiled), ready_s


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_compilation_longer_than_the_time_out_does_not_end_a_run(ranks, way):
    answers = ranks.run(trained_beside_a_slow_compiler, way, group_timeout_s=WAIT_S)
    assert all(count == 1 for count, _ in answers)
    if way != "alone":  # its construction is no place to wait for others; the first step is
        assert all(ready_s >= COMPILING_S for _, ready_s in answers), "not in the first step"
