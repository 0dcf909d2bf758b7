"""Batches of members are a pure function of where the run is."""

from collections import Counter

import pytest

import thinwire as tw
from tests.members.places import meeting_place


def test_batches_depend_on_step_rank_and_generation_alone() -> None:
    with meeting_place(None) as address, tw.join(address, run="test") as members:
        first, second = (tw.MemberSampler(1000, members, 16, seed=s) for s in (1, 1))
        other = tw.MemberSampler(1000, members, 16, seed=2)
        assert first.batch(5, 1, 2) == second.batch(5, 1, 2)
        drawn = [first.batch(*at) for at in ((5, 1, 2), (6, 1, 2), (5, 0, 2), (5, 1, 3))]
        drawn.append(other.batch(5, 1, 2))
        assert len({tuple(batch) for batch in drawn}) == 5
        batches = iter(first)
        assert [next(batches) for _ in range(3)] == [first.batch(s, 0, 0) for s in range(3)]


def test_every_sample_is_as_likely() -> None:
    with meeting_place(None) as address, tw.join(address, run="test") as members:
        sampler = tw.MemberSampler(10, members, 100)
        seen = Counter(n for step in range(100) for n in sampler.batch(step, 0, 0))
        assert set(seen) == set(range(10))
        assert all(800 < count < 1200 for count in seen.values())


@pytest.mark.parametrize("name", ["length", "batch_size"])
def test_bad_numbers_are_refused(name: str) -> None:
    arguments = {"length": 10, "batch_size": 2, name: 0}
    with (
        meeting_place(None) as address,
        tw.join(address, run="test") as members,
        pytest.raises(ValueError, match=name),
    ):
        tw.MemberSampler(members=members, **arguments)
