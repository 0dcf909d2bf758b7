"""What is counted is what travels; and what the choice between the two exchanges rests on."""

import math

import pytest

from tests.api import Layout, Messages, Slot, chosen_split, first_split, messages, split_plan

MILLION = 1_000_000


def layout_of(numel: int, tensors: int, density: float = 0.001) -> Layout:
    return Layout((Slot(numel // tensors, max(1, round(numel // tensors * density))),) * tensors, 1)


def received(each: Messages, source: int, sources: int) -> int:
    own = each.to_owners[source] if each.to_owners else 0
    return (sources - 1) * (own + each.to_all)


def elias_fano_bytes(n: int, k: int) -> int:
    low = math.floor(math.log2(n / k))
    return math.ceil(k * low / 8) + math.ceil((k + ((n - 1) >> low) + 1) / 8)


def test_a_gathered_message_goes_to_all_others() -> None:
    layout = layout_of(MILLION, 4)
    nbytes = 32 + 4 * (elias_fano_bytes(250_000, 250) + 4 + math.ceil(250 / 8))
    each = messages(layout, "gather", 7)
    assert (each.sent(3, 7), received(each, 3, 7)) == (6 * nbytes, 6 * nbytes)


def test_two_sources_deal_one_another_a_half() -> None:
    """100 of 1,000 numbers are sent: a half has room for 100 in round one, then for 50."""
    layout = Layout((Slot(1000, 100),), 32)
    part, sums = (32 + elias_fano_bytes(500, k) + 4 * k for k in (100, 50))
    for source in (0, 1):
        each = messages(layout, "split", 2)
        assert (each.sent(source, 2), received(each, source, 2)) == (part + sums, part + sums)


@pytest.mark.parametrize("sources", [2, 16, 128, 1024])
@pytest.mark.parametrize("tensors", [1, 160])
def test_split_stays_within_six_k_entries_however_many_sources(sources: int, tensors: int) -> None:
    layout = layout_of(25 * MILLION, tensors)
    plan = split_plan(layout, sources)
    k, first, second = (
        [sum(slot.k for slot in part.slots) for part in parts]
        for parts in ([layout], plan.first, plan.second)
    )
    for dealt in first[::7]:
        sent_and_received = sum(first) + (sources - 2) * dealt + sum(second)
        assert sent_and_received <= 6 * k[0]


def test_auto_gathers_up_to_eight_and_splits_from_nine_sources() -> None:
    """It counts a message to all as sent once."""
    layout = layout_of(25 * MILLION, 160)
    split = [chosen_split("auto", layout, w) is not None for w in (1, 2, 8, 9, 1024)]
    assert split == [False] * 3 + [True] * 2
    assert first_split(layout) == 9
    for sources in (8, 9):
        gather, split = (
            max(each.sent(i, sources) + received(each, i, sources) for i in range(sources))
            - (sources - 2) * each.to_all
            for each in (messages(layout, way, sources) for way in ("gather", "split"))
        )
        ratio = gather / split
        assert (ratio >= 2) == (sources == 9)


def test_one_source_gathers_whatever_is_asked_for() -> None:
    layout = layout_of(1000, 1, 0.1)
    assert chosen_split("split", layout, 1) is None
    assert messages(layout, "split", 1) == messages(layout, "gather", 1) == ((), layout.nbytes, ())


def test_a_short_message_is_not_split_for_its_headers() -> None:
    tiny = Layout((Slot(16384, 16),), 1)
    assert chosen_split("auto", tiny, 9) is None
