"""The pool of processes that the tests run on."""

import pytest

from tests.ranks import Pool


def number(rank: int, size: int, base: int) -> int:
    return base + rank


class Interrupted(BaseException):
    """As a test's time-out, which is no `Exception`."""


def test_interrupted_test_leaves_no_answers(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(count: int, timeout_s: float) -> list[int]:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "_collect", interrupted)
        with pytest.raises(Interrupted):
            ranks.run(number, 10)
    assert ranks.run(number, 20) == [20, 21]
