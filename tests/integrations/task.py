"""The task that frameworks train, and the same loop without any."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import thinwire as tw

BATCH, STEPS = 16, 24
"""Samples of a batch, batches of each of two ranks in an epoch."""


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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return tw.optim.Lamb(model.named_parameters(), lr=tw.schedules.WarmUp(0.01, 20))


@dataclass(frozen=True)
class Plan:
    """What a framework trains, and how."""

    method: Any
    """A name of `STRATEGIES`; "compressed" for `DGCMomentum`, or a config of local updates."""
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    epochs: int = 2
    accumulated: int = 1
    clip: float | None = None
    narrow: bool = False
    """In mixed precision."""
    seed: int = 0


@dataclass
class Trained:
    """What came of it on one rank."""

    losses: list[float]
    parameters: list[Tensor]
    states: list[Tensor]
    stats: dict[str, Any]
    held_out: float = 0.0


class Framework(Protocol):
    """Trains as a plan says, saves on the way, and begins from there where it resumes."""

    def train(self, rank: int, size: int, plan: Plan, folder: Path, resumes: bool) -> Trained: ...

    def own(self, rank: int, size: int, plan: Plan, folder: Path) -> Trained:
        """The same loop without the framework."""


@contextmanager
def started(plan: Plan, model: nn.Module, optimizer: Any) -> Iterator[Any]:
    """The part of ours that `plan` names: an attached optimizer, local updates or an engine."""
    if plan.method == "compressed":
        optimizer.attach(model)
        yield optimizer
    elif isinstance(plan.method, str):
        limit = None if plan.clip is None else tw.ClipByGlobalNorm(plan.clip)
        engine = STRATEGIES[plan.method].prepare(model, optimizer, grad_clip=limit)
        yield engine
        engine.flush()
        engine.close()
    else:
        with tw.local_sgd(model, optimizer, plan.method) as sync:
            yield sync


def own_loop(rank: int, plan: Plan, *, of_batches: bool) -> Trained:
    """Train by torch alone, with our part; Lightning's callbacks average after every epoch."""
    model, data = task(plan.seed)
    optimizer, losses = plan.make(model), list[Tensor]()
    called = DistributedDataParallel(model) if plan.method == "compressed" else model
    with started(plan, called, optimizer) as part:
        for _ in range(plan.epochs):
            for i, (x, y) in enumerate(own_batches(data, rank, of_batches=of_batches), start=1):
                due = i % plan.accumulated == 0
                with nullcontext() if due or called is model else called.no_sync():
                    loss = cross_entropy(called(x), y)
                    (loss / plan.accumulated).backward()
                losses.append(loss.detach())
                if isinstance(part, tw.LocalUpdates):
                    part.observe(loss)
                if due and isinstance(part, tw.Engine):
                    part.apply_gradients(torch.stack(losses[-plan.accumulated :]).mean())
                elif due:
                    optimizer.step()
                if due:
                    optimizer.zero_grad()
            if not of_batches and part is not optimizer:
                part.flush()
    return result(model, optimizer, losses, part.stats())


def result(model: nn.Module, optimizer: Any, losses: list[Any], stats: Any) -> Trained:
    return Trained(
        [float(loss) for loss in losses],
        parameters(model),
        [value.clone() for entries in optimizer.state.values() for value in entries.values()],
        stats,
    )


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
