"""Real ranks beside a plan: rate and waiting in `stats`, and one warning where they part."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.api import FRAMES, Link
from tests.lab.namespaces import needs_netns, result_over
from tests.ranks import Pool

PLAN = tw.plan(params="124M", step_seconds=100.0, link="1mbit")
"""Of steps that take minutes."""


def trained(rank: int, size: int, way: str, planned: bool) -> tuple[list[str], dict[str, float]]:
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan: Any = PLAN if planned else None
    x = torch.randn(4, 256)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "block":
            config = tw.LocalSGD(2)
            with tw.local_sgd(model, optimizer, config, plan=plan) as sync:
                for _ in range(60):
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            stats = sync.stats()
        else:
            local = tw.LocalSGD(2) if way == "local engine" else None
            engine = tw.DistributedStrategy(localsgd=local).prepare(
                model, optimizer, nn.functional.mse_loss, plan=plan
            )
            for _ in range(60):
                engine.train_step(x, x)
            stats = engine.stats()
            engine.close()
    told = [f"{each.message} {Path(each.filename).name}" for each in caught]
    return [text for text in told if "planned" in text], stats


@pytest.mark.parametrize("way", ["engine", "block", "local engine"])
def test_rank_0_warns_once_at_the_users_line(ranks: Pool, way: str) -> None:
    (told, stats), (others, _) = ranks.run(trained, way, True, size=2)
    assert len(told) == 1
    low, _, high = PLAN[PLAN.recommended].step_seconds
    assert f"{low:.3g} to {high:.3g} s were planned" in told[0]
    assert told[0].endswith("test_pace.py")
    assert others == []
    assert 0 < stats["waiting_share"] < 1
    assert stats["rate_bit_s"] > 0


def test_without_a_plan_nothing_is_reported(ranks: Pool) -> None:
    assert [told for told, _ in ranks.run(trained, "engine", False, size=2)] == [[], []]


def test_object_not_a_plan_is_refused_before_anything_is_sent() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="plan must be"):
        tw.DistributedStrategy().prepare(model, optimizer, plan="dgc")
    with pytest.raises(TypeError, match="plan must be"):
        tw.local_sgd(model, optimizer, tw.LocalSGD(2), plan=3)


@pytest.mark.slow
@needs_netns
def test_the_rate_is_that_of_the_line(tmp_path: Path) -> None:
    link = Link.parse("20mbit", "5ms")
    result = result_over(link, "tests.strategy.pacing:Pacing", tmp_path)
    # the latency, late ranks and the agreement are in it; a burst passes at once
    assert 10e6 < result["rate_bit_s"] / FRAMES < 26e6
    assert result["waiting_share"] > 0.7
