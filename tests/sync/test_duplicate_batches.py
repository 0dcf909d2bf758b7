"""A forgotten `attach`, or local updates inside DDP, is noticed; statistics claim no saving."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import batch, make_model
from tests.toys import descend, engine_of, warned

cross_entropy = nn.functional.cross_entropy
SPARSE: dict[str, Any] = {"sparsity": (0.99,), "min_numel": 64}


def told(
    rank: int, size: int, case: str, same_data: bool = False
) -> tuple[list[str], dict[str, float], list[float]]:
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
        if "wide" in case
        else make_model(plain=True)
    )
    ddp = DistributedDataParallel(model) if "ddp" in case else model
    dgc = tw.optim.DGCMomentum(model.parameters(), lr=0.1, **SPARSE)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with warned() as said:
        stats = trained(case, max(0, rank - same_data), model, ddp, dgc, sgd)
    values = [float(v) for p in model.parameters() for v in p.detach().reshape(-1)]
    return said, stats, values


def trained(
    case: str, part: int, model: nn.Module, ddp: nn.Module, dgc: Any, sgd: Any
) -> dict[str, float]:
    steps = [batch(step, part) for step in range(12)]
    if "local" in case:
        with tw.local_sgd(model, sgd, tw.LocalSGD(2, compression=tw.Sparse(0.99))) as sync:
            for x, y in steps:
                descend(sgd, cross_entropy(ddp(x), y))
            return sync.stats()
    if "engine" in case:
        engine = engine_of(model, optimizer=sgd, dgc=tw.DGC(**SPARSE))
        for x, y in steps:
            engine.minimize(cross_entropy(ddp(x), y))
        return engine.stats()
    if "attached" in case:
        dgc.attach(ddp)
    for x, y in steps:
        descend(dgc, cross_entropy(ddp(x), y))
    return dict(dgc.stats())


@pytest.mark.parametrize("case", ["ddp wide", "ddp engine wide", "ddp local wide"])
def test_a_dense_average_before_is_noticed_once_and_counted(case: str, ranks: Pool) -> None:
    for said, stats, values in (answers := ranks.run(told, case)):
        assert len(said) == 1
        assert "DistributedDataParallel averages" in said[0]
        assert ("ddp.module" if "local" in case else "optimizer.attach(ddp)") in said[0]
        assert stats["ratio"] < 2  # dense in nearly every step, and what is sparse besides
        assert values == answers[0][2]


@pytest.mark.parametrize("case", ["bare", "ddp attached", "engine", "local"])
def test_a_healthy_run_hears_nothing(case: str, ranks: Pool) -> None:
    for said, stats, _ in ranks.run(told, case):
        assert said == []
        assert stats["bytes_sent"] > 0


@pytest.mark.parametrize(("size", "who"), [(2, "all ranks"), (3, "ranks 0 and 1")])
@pytest.mark.parametrize("case", ["bare", "engine", "local"])
def test_ranks_with_same_data_are_named_once(case: str, size: int, who: str, ranks: Pool) -> None:
    for said, _, _ in ranks.run(told, case, True, size=size):
        assert len(said) == 1
        assert f"{who} are equal" in said[0] and "same batches" in said[0]


@pytest.mark.parametrize("case", ["bare", "engine", "local"])
def test_alone_nothing_is_compared(case: str) -> None:
    assert told(0, 1, case)[0] == []


def still(rank: int, size: int) -> list[str]:
    """Gradients of zero say nothing."""
    model = make_model(plain=True)
    optimizer = tw.optim.DGCMomentum(model.parameters(), lr=0.1, **SPARSE)
    with warned() as said:
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
    return said


def test_gradients_of_zero_are_no_reason(ranks: Pool) -> None:
    assert ranks.run(still) == [[], []]


class Averaging(torch.optim.Adam):
    """As distributed forms of Muon: each rank hears the others' gradients in `step`."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        return super().step(closure)


def averaging_in_step(
    rank: int, size: int, kind: type[torch.optim.Optimizer], fields: dict[str, Any]
) -> list[str]:
    model = make_model(plain=True)
    engine = engine_of(model, optimizer=kind(model.parameters()), **fields)
    with warned() as said:
        for step in range(6):
            x, y = batch(step, rank)
            engine.minimize(cross_entropy(model(x), y))
    return said


FIELDS: dict[str, dict[str, Any]] = {
    "none": {},
    "dgc": {"dgc": tw.DGC(**SPARSE)},
    "low_rank": {"low_rank": tw.LowRank(begin_step=0, min_numel=64)},
    "localsgd": {"localsgd": tw.LocalSGD(2)},
}


@pytest.mark.parametrize("case", FIELDS)
def test_an_optimizer_that_averages_in_its_step_is_noticed_once(case: str, ranks: Pool) -> None:
    for said in ranks.run(averaging_in_step, Averaging, FIELDS[case]):
        assert len(said) == 1
        assert "averages gradients" in said[0]
    for kind in (torch.optim.Adam, tw.optim.Lamb):
        assert ranks.run(averaging_in_step, kind, FIELDS[case]) == [[], []]
