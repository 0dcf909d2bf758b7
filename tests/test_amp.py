"""The owner of the loss scale: alone, and agreed over ranks."""

import math
import warnings
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


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_one_scale_serves_several_optimizers(bad: int | None) -> None:
    """Each divides by the scale of the step, which adapts once."""
    scaler = LossScaler(DynamicLossScale(8.0, 2.0, 2))
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    scales = []
    for step in range(4):
        for p in params:
            p.grad = None
        scaler.scaled(sum(p.sum() for p in params)).backward()
        if step == 1 and bad is not None:
            params[bad].grad[0] = math.inf
        for i, p in enumerate(params):
            overflow = step == 1 and i == bad
            assert scaler.unscale_([p]) != overflow
            assert overflow or p.grad.tolist() == [1.0, 1.0]
        scaler.update()
        scales.append(scaler.scale)
    assert scales == ([8.0, 16.0, 16.0, 32.0] if bad is None else [8.0, 4.0, 4.0, 8.0])
    assert scaler.dropped_steps == (bad is not None)


def test_the_same_gradients_are_unscaled_once() -> None:
    scaler = LossScaler(FixedLossScale(4.0))
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    for grads in (torch.ones(2), torch.tensor([math.inf, 1.0])):
        p.grad = grads.clone()
        q.grad = grads.clone()
        scaler.unscale_([p])
        before = [p.grad.clone(), q.grad.clone()]
        with pytest.raises(RuntimeError, match=r"unscale_.*update\(\)"):
            scaler.unscale_([q, p])
        assert same([p.grad, q.grad], before)
        scaler.unscale_([q])
        scaler.update()
    p.grad = torch.ones(2)
    assert scaler.unscale_([p])
    scaler.update()
    assert scaler.unscale_([p])
    assert p.grad.tolist() == [1 / 16, 1 / 16]
    scaler.load_state_dict(scaler.state_dict())  # another step begins
    assert scaler.unscale_([p])


def overflow_on_one_rank(
    rank: int, size: int, name: str, config: DynamicLossScale | FixedLossScale
) -> dict[str, Any]:
    # they are meant to be
    warnings.filterwarnings("ignore", message="the gradients of all ranks are equal")
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
    return {
        "values": values(net),
        "scales": scales,
        "updates": updates,
        "dropped": scaler.dropped_steps,
    }


@pytest.mark.fault("an overflow under a loss scale")
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
    for done in range(1100):
        p.grad = torch.tensor([1.0, math.nan if rank == 1 else 1.0])
        try:
            assert not scaler.unscale_([p])
        except RuntimeError as error:
            assert "1001 steps in a row" in str(error)
            return done, p.grad
    raise AssertionError("it never gave up")


@pytest.mark.fault("overflow in every step")
def test_endless_overflow_is_an_error_on_every_rank(ranks: Pool) -> None:
    for done, grad in ranks.run(endless_overflow):
        assert done == 1000
        assert grad[0] == 1.0


def test_the_parts_of_a_step_are_the_whole_of_it() -> None:
    """Note overflow per microstep, agree and adapt once: the scales that `unscale_` finds."""
    whole, parts = (LossScaler(DynamicLossScale(8.0, 2.0, 2)) for _ in range(2))
    for seed in range(6):
        grads = [
            torch.full((3,), float(seed + 1)),
            torch.tensor([[1.0, math.inf if seed == 3 else 2.0]]),
        ]
        before = [grad.clone() for grad in grads]
        overflow = parts.overflowed(grads[:1]) or parts.overflowed(grads[1:])
        scaled = [grad * parts.inverse_scale for grad in grads]
        parts.update(parts.agree(overflow))
        assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))
        held = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for p, grad in zip(held, grads, strict=True):
            p.grad = grad
        assert whole.unscale_(held) == (not overflow) == (seed != 3)
        assert whole.state_dict() == parts.state_dict()
        if not overflow:
            assert all(
                torch.equal(p.grad, g)
                for p, g in zip(held, scaled, strict=True)
                if p.grad is not None
            )
    assert not LossScaler(FixedLossScale(2.0, drop_overflow_update=False)).overflowed(
        [torch.tensor(math.nan)]
    )


def local_scales(rank: int, size: int) -> tuple[list[bool], list[float], int]:
    scaler = LossScaler(DynamicLossScale(64.0, 2.0, 2), local=True)
    p = torch.nn.Parameter(torch.ones(1))
    made = []
    for step in range(4 + rank):  # no rank waits for another
        p.grad = torch.full((1,), math.inf if rank == 1 and step == 2 else 1.0)
        made.append(scaler.unscale_([p]))
    return made, [scaler.scale], scaler.bytes_sent


def test_a_local_scale_talks_to_nobody(ranks: Pool) -> None:
    assert ranks.run(local_scales) == [
        ([True] * 4, [256.0], 0),
        ([True, True, False, True, True], [128.0], 0),
    ]
    with pytest.raises(ValueError, match="not both"):
        LossScaler(FixedLossScale(), process_group=object(), local=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="local"):
        LossScaler(FixedLossScale(), local=1)  # type: ignore[arg-type]


def test_taking_another_scale_begins_the_count_anew() -> None:
    scaler = LossScaler(DynamicLossScale(64.0, 2.0, 3))
    for _ in range(2):
        scaler.update(False)
    scaler.take_scale(64.0)
    assert scaler.state_dict()["good_updates"] == 2
    scaler.take_scale(16.0)
    assert (scaler.scale, scaler.state_dict()["good_updates"]) == (16.0, 0)
    for bad in (0.5, math.nan):
        with pytest.raises(ValueError, match="scale"):
            scaler.take_scale(bad)


def agreed_bytes(rank: int, size: int) -> tuple[bool, int]:
    scaler = LossScaler(FixedLossScale(2.0))
    return scaler.agree(rank == 1), scaler.bytes_sent


def test_an_agreement_is_counted_in_bytes(ranks: Pool) -> None:
    """24 bytes to compare; where answers differ a byte more, and a checksum of 4."""
    assert ranks.run(agreed_bytes) == [(True, 29), (True, 29)]


def test_gradients_that_share_storage_are_unscaled_once() -> None:
    a, b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(4))
    scaler = LossScaler(FixedLossScale(128.0))
    scaler.scaled(((a.view(-1) + b.view(-1)) * torch.arange(4.0)).sum()).backward()
    assert scaler.unscale_([a, b])
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.view(-1).tolist() == b.grad.tolist() == [0.0, 1.0, 2.0, 3.0]
