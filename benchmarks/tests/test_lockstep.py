"""K ranks in one process train as real ones do, to the bit."""

import hashlib

import pytest
import torch
from torch import nn

import thinwire as tw
from benchmarks.lockstep import LocalRanks
from benchmarks.ranks import on_ranks

STEPS = 11
CONFIGS = {
    "one bit": tw.LocalSGD(4, compression=tw.Quantized(1)),
    "split": tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(4, exchange="split")),
    "sparse": tw.LocalSGD(
        3,
        outer_lr=0.7,
        outer_momentum=0.5,
        outer_nesterov=True,
        compression=tw.Sparse(0.9, value_bits=2),
    ),
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 11))
    return model, tw.optim.Muon(tw.optim.muon_groups(model), lr=0.02, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    random = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = torch.randint(11, (2, 16), generator=random)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def bits(model: nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().numpy().tobytes())
    return found.hexdigest()


def on_real_ranks(rank: int, size: int) -> dict[str, tuple[str, float]]:
    found = {}
    for name, config in CONFIGS.items():
        model, optimizer = made()
        with tw.local_sgd(model, optimizer, config) as sync:
            for step in range(STEPS):
                train(model, optimizer, step, rank)
        found[name] = bits(model), sync.stats()["applied_share"]
    return found


def in_one_process(_: int, __: int, name: str, size: int) -> list[tuple[str, float]]:
    both = [made() for _ in range(size)]
    sync = LocalRanks([model for model, _ in both], CONFIGS[name])
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(both):
            train(model, optimizer, step, rank)
        sync.step()
    sync.flush()
    return [
        (bits(model), averaging.applied_share(sync.rounds))
        for (model, _), averaging in zip(both, sync.averagings, strict=True)
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_the_bits_of_real_ranks(size: int) -> None:
    real = on_ranks(on_real_ranks, size)
    for name in CONFIGS:
        (alone,) = on_ranks(in_one_process, 1, name, size, group=False)
        assert [digest for digest, _ in alone] == [ranks[name][0] for ranks in real], name
        assert alone[0][0] != bits(made()[0])
        for (_, ours), ranks in zip(alone, real, strict=True):
            assert ours == pytest.approx(ranks[name][1], rel=1e-5)
