"""Ranks that work for themselves keep telling the others, and work that hangs is an error on all of
them."""

import threading
import time

import pytest

from tests.api import Group, while_busy
from tests.ranks import Pool
from tests.waiting import PATIENCE_S, time_out
from thinwire.errors import Mismatch, ThinwireError

LIMIT_S = time_out(2.0)


def slow(rank: int, size: int) -> list[int]:
    group = Group(timeout=LIMIT_S)
    group.gather_bytes(b"", action="warming up")

    def work() -> int:
        time.sleep(2 * LIMIT_S if rank == 1 else 0)
        return rank

    return while_busy(group, "working", work)


def test_work_may_take_longer_than_the_time_out(ranks: Pool) -> None:
    assert ranks.run(slow) == [[0, 1]] * 2


def hangs(rank: int, size: int) -> None:
    over = threading.Event()
    try:
        while_busy(Group(), "working", lambda: over.wait(PATIENCE_S * rank), limit_s=LIMIT_S)
    finally:
        over.set()


def test_work_that_hangs_is_an_error_on_all_ranks(ranks: Pool) -> None:
    answers = ranks.run(hangs, expect_errors=True)
    told = f"working failed on rank 1: it did not end within {LIMIT_S:g} s"
    assert [a.text for a in answers] == [told] * 2


class Stop(BaseException):
    """What `except Exception` lets pass."""


def fails(rank: int, size: int) -> None:
    def work() -> None:
        if rank == 1:
            raise Stop("no more")

    while_busy(Group(), "working", work)


def test_failure_of_any_kind_is_reported_to_all(ranks: Pool) -> None:
    answers = ranks.run(fails, size=3, expect_errors=True)
    assert [a.text for a in answers] == ["working failed on rank 1: Stop: no more"] * 3


def test_alone_a_failure_is_the_same_error() -> None:
    with pytest.raises(ThinwireError, match="working failed on rank 0: KeyError: 'a'"):
        while_busy(Group(), "working", lambda: {}["a"])


def elsewhere(rank: int, size: int) -> None:
    while_busy(Group(), f"work {rank}", lambda: None)


def test_ranks_at_different_work_are_reported(ranks: Pool) -> None:
    assert {a.type_name for a in ranks.run(elsewhere, expect_errors=True)} == {Mismatch.__name__}


def test_alone_a_limit_holds_too() -> None:
    over = threading.Event()
    with pytest.raises(ThinwireError, match=r"it did not end within 0\.2 s"):
        while_busy(Group(), "working", lambda: over.wait(PATIENCE_S), limit_s=0.2)
    over.set()
