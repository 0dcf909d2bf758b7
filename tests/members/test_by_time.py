"""Members that make unequal numbers of steps in a round, and one of them goes."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.api import Averaging
from tests.local.rounds import rounds_of
from tests.members.places import met
from tests.members.training import TIMEOUT_S, digest, faulty, model, wait_for
from tests.ranks import Lost, Pool

CONFIG = tw.LocalSGD(50, begin_step=0, round_seconds=1e9, compression=tw.Quantized(4))
MADE = (5, 1, 3)
"""Steps that each makes in a round; the one in the middle goes."""


def member(
    rank: int, size: int, address: str, flag: str, rounds: int, engine: bool = False
) -> dict[str, Any]:
    """What is held after each averaging, and by what its mean was divided."""
    joiner = bool(flag) and rank == 2
    wait_for(flag if joiner else "")
    net = model(rank)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    data = torch.Generator().manual_seed(rank)
    commit = Averaging.commit_
    shares: list[float] = []

    def committed(self: Averaging, pending: Any, *others: Any) -> None:
        shares.append(pending.share)
        commit(self, pending, *others)

    fault = {"rank": 1, "phase": "once sent", "at": 3}
    found: dict[int, tuple[str, int]] = {}
    with ExitStack() as stack:
        stack.enter_context(patch.object(Averaging, "commit_", committed))
        stack.enter_context(faulty(rank, None if flag else fault))
        stack.enter_context(rounds_of(MADE[rank]))
        joined = tw.join(address, run="t", start_members=2 if flag else 3, timeout=TIMEOUT_S)
        members = stack.enter_context(joined)
        trainer = None
        if engine:
            strategy = tw.DistributedStrategy(localsgd=CONFIG)
            trainer = strategy.prepare(net, optimizer, nn.functional.mse_loss, members=members)
            sync = trainer.sync
            assert sync is not None
        else:
            sync = stack.enter_context(tw.local_sgd(net, optimizer, CONFIG, members=members))
        entered = sync.step
        while sync.step < rounds * max(MADE):
            x = torch.randn(8, 24, generator=data)
            if trainer is not None:
                trainer.train_step(x, x.roll(1, 1), tokens=8)
            else:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), x.roll(1, 1)).backward()
                sync.observe(0.0, tokens=8)
                optimizer.step()
            if sync.synced:
                found[sync.step] = digest(sync), members.size
                if flag and rank == 0 and len(found) == 2:
                    Path(flag).touch()
                time.sleep(0.1 if flag else 0)
    return {"rounds": found, "shares": shares, "entered": entered}


@pytest.mark.fault
def test_mean_is_over_remaining_ranks(ranks: Pool) -> None:
    """The weights were agreed on with the one that went: 15/9, 3/9 and 9/9."""
    found = met(ranks, member, "", 8, size=3, errors=True)
    assert isinstance(found[1], Lost)
    first, other = found[0], found[2]
    assert first["rounds"] == other["rounds"]
    assert [size for _, size in first["rounds"].values()] == [3, 3, 2, 2, 2, 2, 2, 2]
    weights = [each * 3 / sum(MADE) for each in MADE]
    expected = [1.0, 1.0, (weights[0] + weights[2]) / 2, 1.0]
    assert first["shares"][:4] == pytest.approx(expected)
    assert other["shares"] == first["shares"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [False, True])
def test_a_joiner_has_the_bits_of_the_others(ranks: Pool, tmp_path: Any, engine: bool) -> None:
    found = met(ranks, member, str(tmp_path / "go"), 40, engine, size=3)
    assert found[2]["entered"] > 0
    assert len(found[2]["rounds"]) > 3
    for one in found[1:]:
        shared = {step: one["rounds"][step] for step in one["rounds"]}
        assert {step: found[0]["rounds"][step] for step in shared} == shared
