"""Local updates beside the sparsity of gradient compression and a loss scale for every rank."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import thinwire as tw
from tests.api import LocalUpdates
from tests.local.test_laws import bag, set_gradients, values
from tests.ranks import Pool
from thinwire.amp import LossScaler


def train_scaled(rank: int, size: int, delay: int) -> list[tuple[bool, float, float]]:
    """Rank 1 overflows in steps 3 and 5, rank 2 in step 6; the window makes scales grow again."""
    model, optimizer = bag()
    scaler = LossScaler(tw.DynamicLossScale(64.0, 2.0, 3), local=True)
    found = []
    with LocalUpdates(
        model, optimizer, tw.LocalSGD(4, begin_step=0, delay=delay), scaler=scaler
    ) as sync:
        for step in range(1, 11):
            set_gradients(model, step, rank)
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(scaler.scale)
            if (rank, step) in {(1, 3), (1, 5), (2, 6)}:
                model.b.grad[0] = float("inf")  # type: ignore[union-attr,index]
            before = values(model)
            if scaler.unscale_(model.parameters()):
                optimizer.step()
            else:
                sync.skip_step()
                assert (
                    sync.synced
                    or delay
                    or all((values(model)[name] == p).all() for name, p in before.items())
                )
            assert sync.step == step
            found.append((sync.synced, scaler.scale, float(scaler.dropped_steps)))
    return [*found, (True, scaler.scale, 0.0)]


@pytest.mark.parametrize("delay", [0, 1])
def test_all_ranks_take_the_smallest_scale_when_they_average(ranks: Pool, delay: int) -> None:
    a, b, c = ranks.run(train_scaled, delay, size=3)
    # 3 good updates let a scale grow; a rank that takes another's scale begins to count anew
    assert [scale for _, scale, _ in a] == [64, 64, 128, 32, 32, 32, 64, 16, 16, 16, 16]
    assert [scale for _, scale, _ in b] == [64, 64, 32, 32, 16, 16, 16, 16, 16, 16, 16]
    assert [scale for _, scale, _ in c] == [64, 64, 128, 32, 32, 16, 16, 16, 32, 32, 16]
    assert [synced for synced, _, _ in a] == [step in {4, 8, 11} for step in range(1, 12)]
    assert [found[-2][2] for found in (a, b, c)] == [0, 2, 1]


def scaled_by_torch(rank: int, size: int, config: Any, how: str) -> tuple[str, int]:
    """A scaler of torch, and in step 2 an overflow on the last rank: what the first step that
    raised said, whether parameters stayed, and which it was; else the local steps."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=how == "fused")
    kind = ShardedGradScaler if how == "agreeing" else torch.amp.GradScaler
    spoiled = None if how == "disabled" else (2, max(size, 1) - 1)
    scaler = kind("cpu", init_scale=2.0**10, enabled=how != "disabled")
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, 9):
            optimizer.zero_grad()
            factor = float("inf") if (step, rank) == spoiled else 1.0
            x = torch.full((2, 4), float(step + rank))
            scaler.scale(model(x).square().mean() * factor).backward()
            before = [p.detach().clone() for p in model.parameters()]
            try:
                scaler.step(optimizer)
            except RuntimeError as error:
                unmoved = all(map(torch.equal, model.parameters(), before))
                sync.close()
                return f"{error} {unmoved}", step
            scaler.update()
    return "", sync.step


@pytest.mark.parametrize("k_steps", [1, 4])
def test_grad_scaler_that_may_omit_a_step_of_one_is_refused(ranks: Pool, k_steps: int) -> None:
    for text, step in ranks.run(scaled_by_torch, tw.LocalSGD(k_steps), "plain"):
        assert "amp=AMP(...)" in text and text.endswith("True")
        assert step == 1


@pytest.mark.parametrize(("how", "steps"), [("disabled", 8), ("fused", 8), ("agreeing", 7)])
def test_a_grad_scaler_that_leaves_out_no_step_of_one_rank_alone_works(
    ranks: Pool, how: str, steps: int
) -> None:
    """One that is off, one whose optimizer is called at an overflow too, one that all share."""
    assert ranks.run(scaled_by_torch, tw.LocalSGD(3), how) == [("", steps)] * 2


def test_a_grad_scaler_works_where_ranks_make_unequal_steps_and_alone(ranks: Pool) -> None:
    by_time = tw.LocalSGD(3, round_seconds=1e9)
    assert ranks.run(scaled_by_torch, by_time, "plain") == [("", 8)] * 2
    assert ranks.run(scaled_by_torch, tw.LocalSGD(3), "plain", size=0) == [("", 7)]
