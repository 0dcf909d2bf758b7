"""A rank in a process of its own, over a TCPStore, that trains until something happens; for faults
from outside.

`python -m tests.comm.trainee KIND RANK SIZE ADDRESS PORT TIMEOUT_S` prints one JSON line when it
trains and one when it has ended.
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from tests.api import Group
from tests.toys import engine_of


def votes(rank: int) -> None:
    """The smallest exchange there is."""
    group = Group()
    for step in range(10**9):
        group.gather_bytes(b"", action=f"agreeing on step {step}")
        yield_line(step)


def engine(rank: int) -> None:
    """A strategy with all that it exchanges."""
    prepared = engine_of(normed(), **UNDER_DGC)
    x = torch.randn(8, 64)
    for step in range(10**9):
        prepared.train_step(x, x)
        yield_line(step)


def streams(rank: int) -> None:
    """Local updates whose messages travel on several connections."""
    model = torch.nn.Linear(1000, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(1, begin_step=0), streams=4):
        for step in range(10**9):
            model(torch.randn(8, 1000)).square().mean().backward()
            optimizer.step()
            yield_line(step)


def normed() -> torch.nn.Module:
    """A model with buffers, the same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 64)
    )


UNDER_DGC: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "dgc": tw.DGC()}


def again(rank: int) -> None:
    """What goes on with the same model over a new process group, once the first one failed."""
    model = normed()
    first = engine_of(model, **UNDER_DGC)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    try:
        for step in range(10**9):
            first.train_step(x, x)
            yield_line(step)
    except tw.errors.ThinwireError as error:
        print(json.dumps({"type": type(error).__name__}), flush=True)
    first.close()
    dist.destroy_process_group()
    sys.stdin.readline()
    meet(port_after=1)
    second = engine_of(model, **UNDER_DGC)
    for _ in range(6):
        second.train_step(x, x)
    values = [float(p.double().sum()) for p in model.parameters()]
    print(json.dumps({"step": second.step, "values": values}), flush=True)


def busy(rank: int) -> None:
    """Rank 0, or `BUSY_RANK`, evaluates for long after some steps, and says so."""
    torch.manual_seed(0)
    prepared, x = engine_of(torch.nn.Linear(64, 64), lr=0.01), torch.randn(8, 64)
    for step in range(10**9):
        prepared.train_step(x, x)
        yield_line(step)
        if rank == int(os.environ.get("BUSY_RANK", "0")) and step == 5:
            with tw.busy(600):
                time.sleep(600)


def yield_line(step: int) -> None:
    """Say once that training has begun."""
    if step == 5:
        print(json.dumps({"trains": True}), flush=True)


def meet(*, port_after: int = 0) -> None:
    """Make the process group, at a port that many after the one that was given."""
    _, rank, size, address, port, timeout_s = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{int(port) + port_after}",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=float(timeout_s)),
    )


def main() -> None:
    kind, rank = sys.argv[1:3]
    torch.set_num_threads(1)
    meet()
    kinds = {"votes": votes, "engine": engine, "streams": streams, "busy": busy, "again": again}
    try:
        kinds[kind](int(rank))
    except Exception as error:
        print(
            json.dumps({"type": type(error).__name__, "text": str(error), "at": time.time()}),
            flush=True,
        )
        raise


if __name__ == "__main__":
    main()
