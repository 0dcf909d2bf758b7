"""Equal settings, data and ranks give the same bits through every frontend."""

import pytest

import thinwire as tw
from tests.laws.frontends import GRADIENTS, PARAMETERS, Case, Frontend, LocalBlock, trained
from tests.ranks import Pool

CASES = {
    "plain": Case(),
    "merge": Case(merge=2),
    "clip": Case(clip=tw.ClipByNorm(0.5)),
    "schedule": Case(lr=tw.schedules.CosineDecay(0.01, 0.2, 12)),
    "not finite": Case(nan_at=5),
    "resume": Case(resume_at=6),
    "resume within an interval, merged": Case(resume_at=8, merge=2),
}
COMPRESSED = {
    f"{name}, {how}": Case(compression=name, resume_at=at)
    for name in ("sparse", "quantized", "low rank")
    for how, at in (("plain", None), ("resume", 7))
}


def bits(ranks: Pool, frontends: tuple[type[Frontend], ...], case: Case) -> set[tuple[str, int]]:
    """Of all ranks and frontends."""
    answers = [ranks.run(trained, frontend, case) for frontend in frontends]
    return {(each.bits, each.dropped) for answer in answers for each in answer}


@pytest.mark.parametrize("name", CASES)
def test_all_frontends_of_dgc_give_the_same_bits(ranks: Pool, name: str) -> None:
    found = bits(ranks, GRADIENTS, CASES[name])
    assert len(found) == 1
    assert {dropped for _, dropped in found} == {int(CASES[name].nan_at is not None)}


@pytest.mark.parametrize("name", [*CASES, *COMPRESSED])
def test_all_frontends_of_local_updates_give_the_same_bits(ranks: Pool, name: str) -> None:
    case = {**CASES, **COMPRESSED}[name]
    ways = PARAMETERS
    if case.nan_at is not None:  # a loop of one's own makes that step: the averaging refuses it
        ways = tuple(way for way in PARAMETERS if way is not LocalBlock)
    found = bits(ranks, ways, case)
    assert len({each for each, _ in found}) == 1
