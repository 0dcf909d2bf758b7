"""Ranks that work for themselves keep telling the others, and work that hangs is an error on all of
them."""

import time

import pytest

from tests.ranks import Pool
from thinwire.comm import Group, while_busy
from thinwire.errors import Mismatch, ThinwireError


def slow(rank: int, size: int, seconds: float, limit_s: float | None) -> tuple[list[int], float]:
    group, begun = Group(), time.monotonic()
    group.gather_bytes(b"", what="warming up")

    def work() -> int:
        time.sleep(seconds if rank == 1 else 0)
        return rank

    try:
        return while_busy(group, "working", work, limit_s=limit_s), time.monotonic() - begun
    except ThinwireError as error:
        raise ThinwireError(
            f"{error} after {'few' if time.monotonic() - begun < 6 else 'many'} seconds"
        ) from error


def test_work_may_take_longer_than_the_time_out(ranks: Pool) -> None:
    for result, seconds in ranks.run(slow, 4.0, None, group_timeout_s=2):
        assert result == [0, 1]
        assert 3.5 < seconds < 12


def test_work_that_hangs_is_an_error_on_all_ranks(ranks: Pool) -> None:
    answers = ranks.run(slow, 30.0, 2.0, expect_errors=True)
    assert [a.text for a in answers] == [
        "working failed on rank 1: it did not end within 2 s after few seconds"
    ] * 2


class Stop(BaseException):
    """What `except Exception` lets pass."""


def fails(rank: int, size: int) -> None:
    def work() -> None:
        if rank == 1:
            raise Stop("no more")

    while_busy(Group(), "working", work)


def test_a_failure_of_any_kind_is_told_to_all(ranks: Pool) -> None:
    answers = ranks.run(fails, size=3, expect_errors=True)
    assert [a.text for a in answers] == ["working failed on rank 1: Stop: no more"] * 3


def test_alone_a_failure_is_the_same_error() -> None:
    with pytest.raises(ThinwireError, match="working failed on rank 0: KeyError: 'a'"):
        while_busy(Group(), "working", lambda: {}["a"])


def elsewhere(rank: int, size: int) -> None:
    while_busy(Group(), f"work {rank}", lambda: None)


def test_ranks_at_different_work_are_told(ranks: Pool) -> None:
    assert {a.type_name for a in ranks.run(elsewhere, expect_errors=True)} == {Mismatch.__name__}


def test_alone_a_limit_holds_too() -> None:
    begun = time.monotonic()
    with pytest.raises(ThinwireError, match=r"it did not end within 0\.2 s"):
        while_busy(Group(), "working", lambda: time.sleep(5), limit_s=0.2)
    assert time.monotonic() - begun < 4
