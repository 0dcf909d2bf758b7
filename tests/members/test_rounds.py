"""A member that goes, in whatever moment, costs the others a part of one averaging."""

from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.members.places import meeting_place
from tests.members.training import PHASES, TIMEOUT_S, member
from tests.ranks import Lost, Pool

SPARSE = tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9))
CONFIGS = {
    "sparse": SPARSE,
    "whole": tw.LocalSGD(4, begin_step=0),
    "one bit, late": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=2),
    "outer momentum, parts": tw.LocalSGD(
        4, begin_step=1, fragments=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    ),
    "low rank, with state": tw.LocalSGD(
        4,
        begin_step=1,
        average_state=True,
        compression=tw.LowRank(2, begin_step=0, min_numel=16),
    ),
    "split": tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9, exchange="split")),
}


def _alike(found: list[dict[str, Any]], steps: int = 24) -> dict[int, tuple[str, int, int]]:
    """That all who went on to the end hold the same after every averaging."""
    for one in found:
        assert one["step"] == steps
    first, *others = (one["rounds"] for one in found)
    assert first
    for other in others:
        assert {step: first[step] for step in other} == other
    return first


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 2])
def test_whoever_is_killed_the_others_make_the_round_again(
    ranks: Pool, phase: str, rank: int
) -> None:
    fault = {"rank": rank, "phase": phase, "at": 3, "how": "kill"}
    with meeting_place(None) as address:
        found = ranks.run(
            _member_with, address, SPARSE, {"fault": fault}, size=3, expect_errors=True, group=False
        )
    assert isinstance(found[rank], Lost)
    survivors = [one for n, one in enumerate(found) if n != rank]
    rounds = _alike(survivors)
    assert set(rounds) == {1, 5, 9, 13, 17, 21}
    assert [size for _, size, _ in rounds.values()][-1] == 2
    for one in survivors:
        assert one["longest_s"] < TIMEOUT_S + 2
        assert one["changes"] == [(1, 2)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_method_goes_on_without_a_member_that_was_killed(ranks: Pool, name: str) -> None:
    fault = {"rank": 1, "phase": "before the last agreement", "at": 3, "how": "kill"}
    with meeting_place(None) as address:
        found = ranks.run(
            _member_with,
            address,
            CONFIGS[name],
            {"fault": fault},
            size=3,
            expect_errors=True,
            group=False,
        )
    assert isinstance(found[1], Lost)
    _alike([found[0], found[2]])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_newcomer_has_the_bits_of_the_others(ranks: Pool, tmp_path: Path, name: str) -> None:
    options = {"founders": 2, "flag": str(tmp_path / "go"), "step_s": 0.05, "steps": 80}
    with meeting_place(None) as address:
        found = ranks.run(_member_with, address, CONFIGS[name], options, size=3, group=False)
    first, newcomer = found[0], found[2]
    assert newcomer["entered"] > 1
    assert len(newcomer["rounds"]) > 3
    rounds = _alike(found, 80)
    assert [size for _, size, _ in rounds.values()][-1] == 3
    assert all(step > newcomer["entered"] for step in newcomer["rounds"])
    assert first["changes"] == [(1, 3)]
    assert max(one["longest_s"] for one in found[:2]) < 1 + TIMEOUT_S / 3


def _member_with(rank: int, size: int, address: str, config: Any, options: Any) -> Any:
    return member(rank, size, address, config, **options)
