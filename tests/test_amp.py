"""The owner of the loss scale: alone, and agreed over ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.cases import ALL, EVERY, give_gradients, model, same, values
from tests.ranks import Pool
from thinwire.amp import DynamicLossScale, FixedLossScale, LossScaler


@pytest.mark.parametrize("name", ALL)
def test_a_scaled_step_is_the_plain_step_and_a_dropped_one_changes_nothing(name: str) -> None:
    net, twin = model(), model()
    a, b = ALL[name](net.named_parameters()), ALL[name](twin.named_parameters())
    scaler = LossScaler(DynamicLossScale(8.0, 2.0, 2))
    scales = []
    for seed in range(6):
        give_gradients(net, seed)
        give_gradients(twin, seed)
        for p in net.parameters():
            p.grad.mul_(scaler.scale)
        if seed == 2:
            net[1].bias.grad[0] = float("nan")
        if scaler.unscale_(net.parameters()):
            a.step()
            b.step()
        scales.append(scaler.scale)
        assert same(values(net), values(twin))
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0, 16.0]
    assert a.position == 5
    assert scaler.dropped_steps == 1


def test_a_fixed_scale_may_look_away() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    scaler = LossScaler(FixedLossScale(4.0, drop_overflow_update=False))
    p.grad = torch.tensor([4.0, math.inf])
    assert scaler.unscale_([p])
    assert p.grad.tolist() == [1.0, math.inf]
    assert scaler.scaled(torch.tensor(2.0)).item() == 8.0


def test_the_state_goes_on() -> None:
    scaler = LossScaler(DynamicLossScale(8.0, 2.0, 3))
    p = torch.nn.Parameter(torch.ones(1))
    for value in (1.0, math.nan, 1.0, 1.0):
        p.grad = torch.full((1,), value)
        scaler.unscale_([p])
    twin = LossScaler(DynamicLossScale(8.0, 2.0, 3))
    twin.load_state_dict(scaler.state_dict())
    for each in (scaler, twin):
        p.grad = torch.ones(1)
        each.unscale_([p])
    assert scaler.state_dict() == twin.state_dict()
    assert twin.scale == 8.0
    with pytest.raises(ValueError, match="keys"):
        twin.load_state_dict({"scale": 3.0})
    with pytest.raises(ValueError, match="good_updates"):
        twin.load_state_dict({**scaler.state_dict(), "good_updates": -1})


def overflow_on_one_rank(rank: int, size: int, name: str, config: DynamicLossScale | FixedLossScale) -> dict[str, Any]:
    net = model()
    optimizer = EVERY[name](net.named_parameters())
    scaler = LossScaler(config)
    scales, updates = [], []
    for seed in range(6):
        give_gradients(net, seed)
        for p in net.parameters():
            p.grad.mul_(scaler.scale)
        if rank == seed - 1:  # another rank at each of the steps 1, 2 and 3
            net[1].bias.grad[0] = math.inf
        before = [value.clone() for value in values(net)]
        if scaler.unscale_(net.parameters()):
            optimizer.step()
        updates.append(not same(before, values(net)))
        scales.append(scaler.scale)
    return {"values": values(net), "scales": scales, "updates": updates, "dropped": scaler.dropped_steps}


@pytest.mark.fault
@pytest.mark.parametrize("name", ["SGD", "Lamb", "DGCMomentum"])
def test_an_overflow_on_one_rank_drops_the_step_on_all(ranks: Pool, name: str) -> None:
    answers = ranks.run(overflow_on_one_rank, name, DynamicLossScale(64.0, 2.0, 2), size=3)
    for answer in answers:
        assert answer["updates"] == [True, False, False, False, True, True]
        assert answer["scales"] == [64.0, 32.0, 16.0, 8.0, 8.0, 16.0]
        assert answer["dropped"] == 3
        assert same(answer["values"], answers[0]["values"])


def endless_overflow(rank: int, size: int) -> tuple[int, Tensor]:
    p = torch.nn.Parameter(torch.ones(2))
    scaler = LossScaler(FixedLossScale(4.0))
    p.grad = torch.tensor([1.0, math.nan if rank == 1 else 1.0])
    for done in range(1100):
        try:
            assert not scaler.unscale_([p])
        except RuntimeError as error:
            assert "1001 steps in a row" in str(error)
            return done, p.grad
    raise AssertionError("it never gave up")


@pytest.mark.fault
def test_endless_overflow_is_an_error_on_every_rank(ranks: Pool) -> None:
    for done, grad in ranks.run(endless_overflow):
        assert done == 1000
        assert grad[0] == 1.0
