"""A rank in a process of its own, over a TCPStore, that trains until something happens; for attacks
from outside.

`python trainee.py KIND RANK SIZE ADDRESS PORT TIMEOUT_S` prints one JSON line when it trains and
one when it has ended.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.comm import Group


def votes(rank: int) -> None:
    """The smallest exchange there is."""
    group = Group()
    for step in range(10**9):
        group.gather_bytes(b"", what=f"agreeing on step {step}")
        yield_line(step)


def engine(rank: int) -> None:
    """A strategy with all that it exchanges."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 64)
    )
    strategy = tw.DistributedStrategy(dgc=tw.DGC())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    prepared = strategy.prepare(model, optimizer, torch.nn.functional.mse_loss)
    x = torch.randn(8, 64)
    for step in range(10**9):
        prepared.train_step(x, x)
        yield_line(step)


def busy(rank: int) -> None:
    """Rank 0, or `BUSY_RANK`, evaluates for long after some steps, and says so."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared = tw.DistributedStrategy().prepare(model, optimizer, torch.nn.functional.mse_loss)
    for step in range(10**9):
        prepared.train_step(x, x)
        yield_line(step)
        if rank == int(os.environ.get("BUSY_RANK", "0")) and step == 5:
            with tw.busy(600):
                time.sleep(600)


def local(rank: int) -> None:
    """Local updates, which are averaged at every second step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(k_steps=2)):
        for step in range(10**9):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield_line(step)


def yield_line(step: int) -> None:
    """Say once that training has begun."""
    if step == 5:
        print(json.dumps({"trains": True}), flush=True)


def main() -> None:
    kind, rank, size, address, port, timeout_s = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=float(timeout_s)),
    )
    try:
        {"votes": votes, "engine": engine, "local": local, "busy": busy}[kind](int(rank))
    except Exception as error:
        print(
            json.dumps({"type": type(error).__name__, "text": str(error), "at": time.time()}),
            flush=True,
        )
        raise


if __name__ == "__main__":
    main()
