"""Sums by shares: who owns what, what has room, and that nothing gets lost on the way."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api import Layout, Slot, add_up, shares, split_plan
from tests.api import message_pack as pack
from tests.api import message_unpack as unpack

SLOTS = st.lists(
    st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    min_size=1,
    max_size=6,
)


def layout_of(slots: list[tuple[int, int]], bits: int = 32) -> Layout:
    return Layout(tuple(Slot(n, k) for n, k in slots), bits)


@settings(max_examples=60, deadline=None)
@given(SLOTS, st.integers(1, 40))
def test_shares_cover_everything_once_with_room(slots: list[tuple[int, int]], sources: int) -> None:
    plan = split_plan(layout_of(slots), sources)
    owners = {}
    for owner, (mine, first, second) in enumerate(
        zip(plan.pieces, plan.first, plan.second, strict=True)
    ):
        assert len(mine) == len(first.slots) == len(second.slots)
        for piece, one, two in zip(mine, first.slots, second.slots, strict=True):
            n, k = slots[piece.slot]
            for at in range(piece.start, piece.start + piece.numel):
                assert (piece.slot, at) not in owners
                owners[piece.slot, at] = owner
            assert one.numel == two.numel == piece.numel
            assert one.k == min(piece.numel, math.ceil(2 * k * piece.numel / n - 1e-9))
            assert 1 <= two.k <= piece.numel
            assert two.k <= max(1, k * piece.numel / n + 1)
    assert len(owners) == sum(n for n, _ in slots)
    assert list(owners.values()) == sorted(owners.values())
    total = sum(n for n, _ in slots)
    sizes = [sum(p.numel for p in mine) for mine in plan.pieces]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == total
    assert sum(len(mine) for mine in plan.pieces) <= len(slots) + sources - 1


@pytest.mark.parametrize("sources", [1, 2, 3, 7, 64])
def test_round_two_carries_k_in_all(sources: int) -> None:
    slots = [(100_000, 100), (7_777, 8), (50_000, 50)]
    plan = split_plan(layout_of(slots), sources)
    for number, (_, k) in enumerate(slots):
        carried = [
            slot.k
            for mine, layout in zip(plan.pieces, plan.second, strict=True)
            for piece, slot in zip(mine, layout.slots, strict=True)
            if piece.slot == number
        ]
        assert k <= sum(carried) <= k + sum(c == 1 for c in carried)


def test_of_too_many_entries_in_a_piece_the_largest_are_sent() -> None:
    layout = layout_of([(100, 10)])
    plan = split_plan(layout, 10)
    values = torch.tensor([3.0, -9, 4, 1, 8, -2, 7, 5, 6, -10])
    first, *others = shares(plan, [(torch.arange(10), values)])
    assert first[0][0].tolist() == [1, 9]
    assert first[0][1].tolist() == [-9, -10]
    assert all(entries[0].numel() == 0 for mine in others for entries in mine)


def test_the_largest_sums_go_on() -> None:
    plan = split_plan(layout_of([(40, 4)]), 2)
    one = (torch.tensor([1, 2, 5]), torch.tensor([1.0, 4.0, -3.0]))
    two = (torch.tensor([2, 5, 7]), torch.tensor([-4.0, -3.0, 2.5]))
    (sums,) = add_up(plan.second[0], [[one], [two]], [torch.float32])
    assert sums.indices.tolist() == [1, 2, 5, 7]
    assert sums.totals.tolist() == [1.0, 0.0, -6.0, 2.5]
    assert sums.passed_on[0].tolist() == [5, 7]
    assert sums.left_over(torch.tensor([-5.0, 2.5])).tolist() == [1.0, 0.0, -1.0, 0.0]


def test_over_senders_means_of_the_largest_sums_go_on_and_means_over_all_stay() -> None:
    plan = split_plan(layout_of([(40, 4)]), 2)
    one = (torch.tensor([1, 2, 5]), torch.tensor([3.5, 4.0, -3.0]))
    two = (torch.tensor([2, 5, 7]), torch.tensor([-4.0, -3.0, 2.5]))
    (sums,) = add_up(plan.second[0], [[one], [two]], [torch.float32], over_senders=True)
    assert sums.passed_on[0].tolist() == [1, 5]  # 3.5 is the larger mean, -6 the larger sum
    assert sums.passed_on[1].tolist() == [3.5, -3.0]
    assert sums.left_over(torch.tensor([3.0, -2.5])).tolist() == [0.5, 0.0, -0.5, 1.25]


def test_one_bit_of_a_half_full_part_is_the_mean_of_arrivals() -> None:
    """A part has room for twice the usual number: values must not arrive at half their size."""
    indices, values = torch.tensor([3, 9]), torch.tensor([2.0, -4.0])
    part = Layout((Slot(50, 8),), 1, ";to 0")
    message, (sent,) = pack(part, 0, 0, [(indices, values)])
    assert message.numel() == part.nbytes
    assert sent.tolist() == [3.0, -3.0]
    ((got, decoded),) = unpack(part, message, step=0, bucket=0, source=0).parts
    assert torch.equal(got, indices) and torch.equal(decoded, sent)
    _, (whole,) = pack(Layout((Slot(50, 8),), 1), 0, 0, [(indices, values)])
    assert whole.tolist() == [0.75, -0.75]


def test_a_part_for_another_owner_is_refused() -> None:
    plan = split_plan(layout_of([(100, 10)]), 2)
    message, _ = pack(plan.first[0], 0, 0, [(torch.tensor([3]), torch.ones(1))])
    with pytest.raises(RuntimeError, match="layout"):
        unpack(plan.first[1], message, step=0, bucket=0, source=1)
