"""Ranks that work for themselves hear of failures of each other, of any kind."""

import threading

import pytest

from tests.api import Group, while_busy
from tests.ranks import Pool
from tests.waiting import PATIENCE_S
from thinwire.errors import Mismatch, ThinwireError


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
    with pytest.raises(ThinwireError, match=r"it made no progress for 0\.2 s"):
        while_busy(Group(), "working", lambda: over.wait(PATIENCE_S), limit_s=0.2)
    over.set()
