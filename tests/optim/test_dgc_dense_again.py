"""`DGCMomentum` where a tensor is dense after it was compressed, or is not contiguous."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool

OPTIONS: dict[str, Any] = {"lr": 0.1, "min_numel": 1, "sparsity": (0.9,)}


def drawn(step: int, rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


def now_and_then(rank: int, size: int, what: str, momentum: float) -> list[Tensor]:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(40, 8))
    optimizer = tw.optim.DGCMomentum([param], momentum=momentum, digest_every=1, **OPTIONS)
    seen = []
    for step in range(9):
        param.grad = drawn(step, rank, 40, 8)
        if what == "row-sparse" and step % 3 == 2:
            rows = torch.tensor([[1, 4, 7]])
            param.grad = torch.sparse_coo_tensor(
                rows, drawn(step, rank, 3, 8), (40, 8), check_invariants=True
            )
        if what == "begins later" and step == 4:
            optimizer.param_groups[0]["rampup_begin_step"] = 7
        optimizer.step()
        seen.append(param.detach().clone())
    return seen


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("what", ["row-sparse", "begins later"])
def test_replicas_stay_equal(ranks: Pool, what: str, momentum: float) -> None:
    first, *others = ranks.run(now_and_then, what, momentum, size=3)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


def begins_later(rank: int, size: int, folder: str) -> list[Tensor]:
    for begin, first in ((0, True), (20, False)):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dgc = tw.DGC(rampup_begin_step=begin, min_numel=1, sparsity=(0.9,))
        engine = tw.DistributedStrategy(dgc=dgc).prepare(
            model, optimizer, nn.functional.mse_loss, digest_every=1
        )
        if not first:
            engine.load(folder)
        for step in range(4):
            engine.train_step(drawn(step, rank, 4, 16), drawn(step + 50, rank, 4, 16))
        if first:
            engine.save(folder)
            engine.close()
    return [p.detach() for p in model.parameters()]


def test_compression_that_begins_later_in_a_resumed_run(ranks: Pool, tmp_path: Any) -> None:
    first, second = ranks.run(begins_later, str(tmp_path), size=2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
