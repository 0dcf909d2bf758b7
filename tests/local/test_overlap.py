"""With a delay of three steps or more, local steps continue while ranks agree on an averaging."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.api import Group
from tests.local.test_laws import Bag, digest, set_gradients
from tests.ranks import Lost, Pool, Raised, say, wait_for_word
from tests.toys import arriving
from thinwire.errors import ThinwireError

FIRST, K, DELAY = 1, 8, 3
"""Step of the first averaging, interval, and delay."""
MEASURED = FIRST + K
"""Step after which the first delayed averaging is measured."""
CONFIGS = {
    "whole": tw.LocalSGD(K, delay=DELAY, outer_lr=0.7, outer_momentum=0.9),
    "one bit": tw.LocalSGD(K, delay=DELAY, compression=tw.Quantized(1)),
    "largest": tw.LocalSGD(
        K, delay=DELAY, compression=tw.Sparse(0.8, value_bits=32, exchange="gather")
    ),
    "with state": tw.LocalSGD(K, delay=DELAY, average_state=True),
}


def make(config: Any) -> tuple[Bag, torch.optim.Optimizer, Any]:
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return model, optimizer, tw.local_sgd(model, optimizer, config)


def ahead_of_the_others(rank: int, size: int, config: Any, after: int) -> str:
    """Every other rank begins step `after` only when the first one has made it."""
    model, optimizer, sync = make(config)
    with sync:
        for step in range(1, MEASURED + K):
            set_gradients(model, step, rank)
            if step == after and rank:
                wait_for_word("made")
            optimizer.step()
            if step == after and rank == 0:
                say("made")
    return digest(model)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_step_waits_for_a_rank_one_step_behind(ranks: Pool, name: str, size: int) -> None:
    """Neither where it is measured nor at its last agreement; the bits are the same."""
    found = [
        ranks.run(ahead_of_the_others, CONFIGS[name], after, size=size)
        for after in (0, MEASURED, MEASURED + DELAY - 1)
    ]
    assert len({bits for run in found for bits in run}) == 1


def kept(sync: Any) -> dict[str, Tensor]:
    state = sync.state_dict()
    return {
        f"{kind} {name}": tensor
        for kind in ("anchors", "outer_momentum", "residuals")
        for name, tensor in state[kind].items()
    }


def with_a_fault(rank: int, size: int, config: Any, way: str) -> tuple[int, str, bool]:
    """Return the step at which this rank raised, its error, and whether its state is untouched."""
    model, optimizer, sync = make(config)
    told, raised, hits = "", 0, int(rank == 1 and way == "damage")

    def came(rows: Tensor, _: str) -> Tensor:
        nonlocal hits
        if hits and sync.step >= MEASURED - 1:
            hits -= 1
            rows[-1, rows.shape[1] // 2] ^= 1
        return rows

    with arriving(Group, "all_gather", came), sync:
        for step in range(1, MEASURED + K):
            set_gradients(model, step, rank)
            try:
                if rank == 1 and step == MEASURED and way == "not finite":
                    with torch.no_grad():
                        model.c[1, 2] = float("nan")  # type: ignore[operator]
                elif rank == 1 and step == MEASURED and way == "another call":
                    sync.flush()
                optimizer.step()
            except ThinwireError as error:
                told, raised = str(error), step
                break
            if step == FIRST:
                before = kept(sync)
        assert sync.pending is None
        after = kept(sync)
        sync.close()
    return raised, told, all(torch.equal(before[name], after[name]) for name in before)


FAULTS = {
    "not finite": (
        (MEASURED + 1,) * 3,
        "rank 1: parameter c is not finite at the averaging of step 9",
    ),
    "another call": (
        (MEASURED + 1, MEASURED, MEASURED + 1),
        "rank 0 is at step 9 (averaging part 0), rank 1 at step 8 (flushing)",
    ),
    "damage": ((MEASURED + DELAY,) * 3, "rank 1 refused a message"),
}
"""By name the steps at which the ranks raise, and what their errors say."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("whole", "not finite"),
        ("whole", "another call"),
        ("one bit", "not finite"),
        ("one bit", "another call"),
        ("one bit", "damage"),
    ],
)
def test_averaging_that_fails_on_one_changes_nothing(ranks: Pool, name: str, way: str) -> None:
    steps, text = FAULTS[way]
    found = ranks.run(with_a_fault, CONFIGS[name], way, size=3)
    raised, texts, untouched = zip(*found, strict=True)
    assert raised == steps
    assert all(text in one for one in texts)
    assert all(untouched)


def mended(rank: int, size: int, config: Any, spoiled: bool) -> tuple[list[int], dict[str, Tensor]]:
    """Train on after an averaging that was refused, once its cause is gone."""
    model, optimizer, sync = make(config)
    averaged = []
    with sync:
        for step in range(1, MEASURED + K):
            set_gradients(model, step, rank)
            was = model.c.detach().clone()  # type: ignore[operator]
            if spoiled and rank == 1 and step == MEASURED:
                model.c.grad = torch.full_like(was, float("nan"))  # type: ignore[union-attr]
            try:
                optimizer.step()
            except ThinwireError:
                assert spoiled and step == MEASURED + 1
            if spoiled and rank == 1 and step == MEASURED + 1:
                optimizer.state.clear()
                with torch.no_grad():
                    model.c.copy_(was.nan_to_num())  # type: ignore[operator]
            if sync.synced:
                averaged.append(step)
        sync.flush()
        sync.require_equal()
    return averaged, kept(sync)


@pytest.mark.parametrize("name", ["whole", "one bit"])
def test_a_refused_averaging_is_made_again_by_the_next_step(ranks: Pool, name: str) -> None:
    for averaged, _ in ranks.run(mended, CONFIGS[name], True, size=2):
        assert averaged[:3] == [FIRST, MEASURED, MEASURED + 2]
    for averaged, _ in ranks.run(mended, CONFIGS[name], False, size=2):
        assert averaged[:2] == [FIRST, MEASURED]


def lost(rank: int, size: int, after: int) -> int:
    model, optimizer, sync = make(CONFIGS["one bit"])
    with sync:
        for step in range(1, MEASURED + K):
            set_gradients(model, step, rank)
            if rank == 1 and step == after:
                os._exit(3)
            optimizer.step()
    return step


@pytest.mark.parametrize("after", [MEASURED, MEASURED + 1, MEASURED + 2, MEASURED + 3])
def test_a_rank_that_dies_meanwhile_is_named(ranks: Pool, after: int) -> None:
    found = ranks.run(lost, after, size=2, expect_errors=True)
    assert isinstance(found[1], Lost)
    assert isinstance(found[0], Raised)
    assert found[0].type_name == "PeerLost"
    assert "rank 1" in found[0].text
