"""K ranks in one process train as real ones do, to the bit."""

import hashlib
from collections.abc import Sequence
from typing import Any

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


class Late:
    """Ranks of one process, rank 2 late in some rounds."""

    def __init__(self, *rounds: int, change: Any = "residual", ranks: Sequence[int] = range(4)):
        self.ranks, self.both = ranks, [made() for _ in ranks]
        self.models = [model for model, _ in self.both]
        self.sync = LocalRanks(self.models, CONFIGS["one bit"])
        self.sync.late = lambda number: [2] * (number in rounds)
        self.sync.late_change = change

    def train(self) -> None:
        for rank, (model, optimizer) in zip(self.ranks, self.both, strict=True):
            train(model, optimizer, self.sync.steps, rank)

    def rounds(self, number: int) -> list[str]:
        while self.sync.rounds < number:
            self.train()
            self.sync.step()
        return [bits(model) for model in self.models]


def test_a_round_without_a_late_rank_is_that_of_the_others() -> None:
    first, second, late, last = Late(0, 1, 2, change="dropped").rounds(3)
    assert [first, second, last] == Late(ranks=(0, 1, 3)).rounds(3)
    assert late == first


@pytest.mark.parametrize(("change", "counted"), [("residual", 1), ("kept", 1), ("dropped", 0)])
def test_the_change_of_a_late_rank_is_what_it_sends_next(change: Any, counted: int) -> None:
    run = Late(1, change=change)
    run.rounds(1)
    for _ in range(3):
        run.train()
        run.sync.step()
    run.train()
    late, params = run.sync.averagings[2], dict(run.models[2].named_parameters())
    owed = {}
    for name, param in params.items():
        own = (late.anchors[name] - param).detach()
        assert own.any()
        owed[name] = counted * own + late.errors[name]
    run.sync.step()
    assert run.sync.rounds == 2
    for name, param in params.items():
        assert torch.equal(late.anchors[name], run.sync.averagings[0].anchors[name])
        now = (late.anchors[name] - param).detach() + late.errors[name]
        torch.testing.assert_close(now, owed[name], rtol=0, atol=1e-6)


def test_two_rounds_of_a_late_rank_weigh_two() -> None:
    by_list, by_work = Late(1), Late(1)
    by_work.sync.late_weight = "work"
    assert by_list.rounds(2) == by_work.rounds(2)
    before = by_list.sync.averagings[0].anchors["1.weight"].clone()
    assert by_list.rounds(3) != by_work.rounds(3)
    moved, less = (
        run.sync.averagings[0].anchors["1.weight"] - before for run in (by_list, by_work)
    )
    torch.testing.assert_close(less, moved * 4 / 5, rtol=0, atol=1e-6)
