"""Members that join, leave and die while frameworks train: with the real packages."""

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.member_loops import EVERY, LOOPS, STEPS, Ended, Events
from tests.integrations.packages import needs
from tests.integrations.task import equal
from tests.members.places import meeting_place
from tests.ranks import Lost, Pool

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(240)]
FRAMEWORKS = [pytest.param(name, marks=needs(name)) for name in LOOPS]


def member(
    rank: int, size: int, address: str, framework: str, folder: Path, founders: int, events: Any
) -> Ended:
    return LOOPS[framework](Events(folder, rank, **events), address, founders)


def trained(
    ranks: Pool, framework: str, folder: Path, size: int, founders: int = 3, **events: Any
) -> list[Any]:
    folder.mkdir()
    options = {"size": size, "group": False, "expect_errors": True, "timeout_s": 150}
    with meeting_place(None) as address:
        return ranks.run(member, address, framework, folder, founders, events, **options)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_dies_and_another_joins(ranks: Pool, tmp_path: Path, framework: str) -> None:
    calm = trained(ranks, framework, tmp_path / "calm", 3)
    found = trained(ranks, framework, tmp_path / "run", 4, killed=0, joins=3)
    [joiner] = found[3:]
    others = [one for one in found if isinstance(one, Ended)]
    assert [isinstance(one, Lost) for one in found].count(True) == 1
    assert len(others) == 3, found
    for run in (calm, others):
        assert all(equal(run[0].parameters, one.parameters) for one in run)
        assert all(one.held_out == run[0].held_out for one in run)
        assert [one.saved for one in run].count(True) == 1
        assert [bool(one.evaluated) for one in run].count(True) == 1
    assert 26 < joiner.entered < STEPS
    assert joiner.steps == [*range(joiner.entered, joiner.steps[-1] + 1)]
    fell, undisturbed_fell = (calm[0].at_first - run[0].held_out for run in (others, calm))
    assert fell > 0.8 * undisturbed_fell
    # the first one evaluates; after its death the next one
    (undisturbed,) = (one.evaluated for one in calm if one.saved)
    (second,) = (one.evaluated for one in others if one.saved)
    assert undisturbed == [*range(EVERY, STEPS + 1, EVERY)]
    assert second == [*range(2 * EVERY, STEPS + 1, EVERY)]
    print("LOSS", framework, calm[0].at_first, calm[0].held_out, others[0].held_out, joiner.entered)
