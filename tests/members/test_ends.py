"""Members that end at another step than the others leave the run with what they have trained."""

import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.members.places import met
from tests.members.training import TIMEOUT_S, die, digest, in_run, model
from tests.ranks import Lost, Pool, Raised
from tests.waiting import PATIENCE_S

NEVER_S = 4 * PATIENCE_S
CONFIGS = {
    "dense": tw.LocalSGD(4, begin_step=0),
    "one bit": tw.LocalSGD(4, begin_step=6, compression=tw.Quantized(1)),
    "sparse, late": tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9), delay=2),
    "three steps late": tw.LocalSGD(4, begin_step=1, delay=3),
    "one bit, five steps late": tw.LocalSGD(6, begin_step=1, compression=tw.Quantized(1), delay=5),
    "outer momentum, parts": tw.LocalSGD(
        4, begin_step=1, fragments=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    ),
    "parts, late": tw.LocalSGD(12, begin_step=1, fragments=2, delay=3),
    "rare": tw.LocalSGD(100, begin_step=0),
    "adaptive": tw.AdaptiveLocalSGD(init_k_steps=4, begin_step=1),
}


def ending(
    rank: int,
    size: int,
    address: str,
    config: Any,
    ends: list[int],
    how: str = "block",
    killed: int = -1,
) -> dict[str, Any]:
    """Train for `ends[rank]` steps of its own, and return the rounds and the state at the end."""
    net = model(rank)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    batches = torch.Generator().manual_seed(rank)
    rounds: dict[int, tuple[str, int]] = {}
    grace = 1.0 if how == "grace" else None
    timeout_s = TIMEOUT_S if killed < 0 else NEVER_S
    options: dict[str, Any] = {"timeout": timeout_s, "start_members": size, "grace_seconds": grace}
    engine = None
    with ExitStack() as stack:
        merge = tw.GradientMerge(2) if how == "merged" else None
        if how in ("block", "grace"):
            block = in_run(address, net, config, optimizer, **options)
            members, sync, _ = stack.enter_context(block)
        else:
            members = stack.enter_context(tw.join(address, run="test", **options))
            strategy = tw.DistributedStrategy(localsgd=config, gradient_merge=merge)
            engine = strategy.prepare(net, optimizer, nn.MSELoss(), members=members)
            stack.callback(engine.close)
            assert engine.sync is not None
            sync = engine.sync
        averagings = sync.stats()["averagings"]
        for _ in range(ends[rank]):
            x = torch.randn(8, 24, generator=batches)
            if engine is None:
                optimizer.zero_grad()
                loss = (net(x) - x.roll(1, 1)).square().mean()
                loss.backward()
                sync.observe(loss)
                optimizer.step()
            else:
                engine.train_step(x, x.roll(1, 1))
            applied, averagings = averagings, sync.stats()["averagings"]
            if averagings > applied:
                rounds[sync.step] = digest(sync), members.size
            time.sleep(0.02)
        if rank == killed:
            die()
        sync.flush() if engine is None else engine.flush()
        return {"step": sync.step, "state": digest(sync), "left": members.left, "rounds": rounds}


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "block") for name in CONFIGS]
    + [("dense", "engine"), ("one bit", "merged"), ("one bit", "grace")],
)
@pytest.mark.parametrize("ends", [[14, 30], [30, 30, 17], [9, 22, 30, 14, 30]])
def test_one_that_ends_before_the_others_leaves_after_their_round(
    ranks: Pool, name: str, how: str, ends: list[int]
) -> None:
    """It has the bits of the others after that round; these go on to their own last step."""
    found = met(ranks, ending, CONFIGS[name], ends, how, size=len(ends))
    last = found[max(range(len(ends)), key=ends.__getitem__)]
    steps = max(ends) // (2 if how == "merged" else 1)
    for end, one in zip(ends, found, strict=True):
        assert one["left"] == (end < max(ends))
        if not one["left"]:
            assert (one["step"], one["state"]) == (steps, last["state"])
            assert one["rounds"] == last["rounds"]
            continue
        assert end // (2 if how == "merged" else 1) < one["step"] <= steps
        assert one["rounds"].items() <= last["rounds"].items()
        states = {digest for digest, _ in last["rounds"].values()} | {last["state"]}
        assert one["state"] in states


def counted(rank: int, size: int, address: str, config: Any, ends: list[int]) -> float:
    """Let a step lower the only parameter by rank + 1; return the moves of all rounds."""
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    moved = 0.0
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with in_run(address, net, config, optimizer, **options) as (_, sync, _):
        [anchor] = sync.state_dict()["anchors"].values()
        for left in range(ends[rank], -1, -1):
            present = size * sync.stats()["batch_share"]
            if left:
                optimizer.zero_grad()
                ((rank + 1) * net.weight.sum()).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            else:
                sync.flush()
            [now] = sync.state_dict()["anchors"].values()
            moved += present * float(anchor - now)
            anchor = now
            time.sleep(0.02)
    return moved


@pytest.mark.parametrize("name", ["dense", "three steps late", "rare"])
def test_steps_of_one_that_ends_early_count(ranks: Pool, name: str) -> None:
    ends = [9, 22, 30, 14]
    moved = met(ranks, counted, CONFIGS[name], ends, size=len(ends))
    assert moved[2] == pytest.approx(9 + 2 * 22 + 3 * 30 + 4 * 14, abs=1e-3)


@pytest.mark.parametrize("how", ["block", "engine"])
@pytest.mark.parametrize("name", ["dense", "one bit"])
@pytest.mark.parametrize("ends", [[14, 30], [30, 30, 14]])
def test_one_that_is_killed_is_not_waited_for_until_the_time_out(
    ranks: Pool, name: str, how: str, ends: list[int]
) -> None:
    """Also by only one other, since its connection to the host ends with it, for good."""
    killed = ends.index(14)
    given = ranks, ending, CONFIGS[name], ends, how, killed
    found = met(*given, size=len(ends), errors=True)
    assert isinstance(found.pop(killed), Lost)
    assert {one["step"] for one in found} == {30}
    assert {one["state"] for one in found} == {found[0]["state"]}
    assert [*found[0]["rounds"].values()][-1][1] == len(found)


def with_other_calls(rank: int, size: int, address: str, odd: list[int], how: str) -> Any:
    """Train to step 30, while the `odd` ranks make another call than the others."""
    net = model(rank)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with in_run(address, net, CONFIGS[how], optimizer, **options) as (members, sync, _):
        while sync.step < 30:
            optimizer.zero_grad()
            net(torch.randn(8, 24)).square().mean().backward()
            optimizer.step()
            if rank in odd and sync.step == 10 + odd.index(rank) * (2 * len(odd) < size):
                sync.require_equal()
        return members.size, digest(sync)


@pytest.mark.parametrize("how", ["dense", "one bit", "one bit, five steps late"])
@pytest.mark.parametrize(("size", "odd"), [(2, [1]), (3, [1]), (4, [0, 2]), (5, [0]), (5, [3, 1])])
def test_call_unlike_that_of_more_than_half_is_an_error_of_its_member(
    ranks: Pool, size: int, odd: list[int], how: str
) -> None:
    found = met(ranks, with_other_calls, odd, how, size=size, errors=True)
    wrong = [*range(size)] if 2 * len(odd) >= size else odd
    for rank in wrong:
        assert isinstance(found[rank], Raised), found[rank]
        assert found[rank].type_name == "Mismatch", found[rank].text
    others = {one for rank, one in enumerate(found) if rank not in wrong}
    assert not any(isinstance(one, Raised) for one in others), others
    assert [members for members, _ in others] == [size - len(odd)] * (len(wrong) < size)
