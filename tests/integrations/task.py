"""The task that every framework trains, and the same loops without any framework."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import thinwire as tw

BATCH, STEPS, ACCUMULATED = 16, 24, 2
"""Samples of a batch, batches of each of two ranks in an epoch, batches of one update."""


def task(seed: int = 0) -> tuple[nn.Module, TensorDataset]:
    """A model initialized from `seed`, and data that are always the same."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4)
    )
    x = torch.randn(2 * BATCH * STEPS, 20, generator=torch.Generator().manual_seed(1))
    return model, TensorDataset(x, (x[:, :4] + x[:, 4:8]).argmax(1))


def dgc(model: nn.Module, **settings: Any) -> tw.optim.DGCMomentum:
    ramp = {"rampup_begin_step": 2, "rampup_step": 4, "sparsity": (0.9, 0.98), "min_numel": 1024}
    return tw.optim.DGCMomentum(model.named_parameters(), lr=0.05, **(ramp | settings))


def own_batches(
    data: TensorDataset, rank: int, *, of_batches: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches: every second batch (Accelerate), or of every second sample."""
    x, y = data.tensors
    for i in range(STEPS):
        if of_batches:
            part = slice((2 * i + rank) * BATCH, (2 * i + rank + 1) * BATCH)
        else:
            part = slice(2 * i * BATCH + rank, 2 * (i + 1) * BATCH + rank, 2)
        yield x[part][:BATCH], y[part][:BATCH]


def own_compressed(rank: int, epochs: int, *, of_batches: bool) -> list[Tensor]:
    """The parameters after a plain DDP loop with an attached optimizer."""
    model, data = task()
    ddp, optimizer = DistributedDataParallel(model), dgc(model)
    optimizer.attach(ddp)
    for _ in range(epochs):
        for i, (x, y) in enumerate(own_batches(data, rank, of_batches=of_batches), start=1):
            due = i % ACCUMULATED == 0
            with nullcontext() if due else ddp.no_sync():
                (cross_entropy(ddp(x), y) / ACCUMULATED).backward()
            if due:
                optimizer.step()
                optimizer.zero_grad()
    return parameters(model)


def own_local(
    rank: int,
    epochs: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    config: Any,
    *,
    of_batches: bool,
) -> list[Tensor]:
    """The parameters after a plain loop of local updates."""
    model, data = task()
    optimizer = make(model)
    with tw.local_sgd(model, optimizer, config) as sync:
        for _ in range(epochs):
            for x, y in own_batches(data, rank, of_batches=of_batches):
                loss = cross_entropy(model(x), y)
                loss.backward()
                sync.observe(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not of_batches:  # Lightning's callbacks average after every epoch
                sync.flush()
    return parameters(model)


STRATEGIES: dict[str, Any] = {
    "none": tw.DistributedStrategy(),
    "dgc": tw.DistributedStrategy(
        dgc=tw.DGC(rampup_begin_step=2, rampup_step=4, sparsity=(0.9, 0.98), min_numel=1024)
    ),
    "low_rank": tw.DistributedStrategy(low_rank=tw.LowRank(2, begin_step=2, min_numel=1024)),
    "lamb": tw.DistributedStrategy(lamb=tw.LAMB()),
    "recompute": tw.DistributedStrategy(recompute=tw.Recompute(("*2",))),
    "localsgd": tw.DistributedStrategy(
        localsgd=tw.LocalSGD(5, begin_step=2, compression=tw.Sparse(0.9))
    ),
    "adaptive_localsgd": tw.DistributedStrategy(
        adaptive_localsgd=tw.AdaptiveLocalSGD(init_k_steps=3, begin_step=2)
    ),
}
"""What goes into the loop of every framework."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


def own_engine(
    rank: int,
    epochs: int,
    strategy: str,
    *,
    clip: float | None = None,
    accumulated: int = ACCUMULATED,
    of_batches: bool,
) -> tuple[list[Tensor], list[float]]:
    """The parameters after a plain loop that the engine updates, and the loss of every batch."""
    model, data = task()
    limit = None if clip is None else tw.ClipByGlobalNorm(clip)
    engine = STRATEGIES[strategy].prepare(model, adamw(model), grad_clip=limit)
    losses: list[Tensor] = []
    for _ in range(epochs):
        for i, (x, y) in enumerate(own_batches(data, rank, of_batches=of_batches), start=1):
            loss = cross_entropy(model(x), y)
            (loss / accumulated).backward()
            losses.append(loss.detach())
            if i % accumulated == 0:
                engine.apply_gradients(torch.stack(losses[-accumulated:]).mean())
                model.zero_grad()
        if not of_batches:
            engine.flush()
    engine.flush()
    engine.close()
    return parameters(model), torch.stack(losses).tolist()


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def residuals(optimizer: tw.optim.DGCMomentum) -> list[Tensor]:
    return [
        entries["residual"].clone() for entries in optimizer.state.values() if "residual" in entries
    ]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all bits are."""
    assert first
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
