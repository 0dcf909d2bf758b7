from pathlib import Path
from signal import SIGABRT, SIGKILL

import pytest

from tests.api import failure_of


def error(rank: int, unix_s: float, message: str) -> dict[str, object]:
    return {"rank": rank, "unix_s": unix_s, "kind": "RuntimeError", "message": message}


RESET = error(0, 1.0, "Connection reset by peer")
LONG = [error(0, 2.0, "late"), error(1, 1.0, "\n".join(["cause", *"abcdefgh"]))]


@pytest.mark.parametrize(
    ("errors", "statuses", "told"),
    [
        ([RESET], [1, -SIGKILL], "worker 1 was killed by SIGKILL"),
        ([RESET], [1, 9], "worker 1 ended with status 9, without a result"),
        ([], [None, -40], "worker 1 was killed by signal 40"),
        ([error(1, 1.0, "diverged")], [None, -SIGABRT], "worker 1 failed: RuntimeError: diverged"),
        (LONG, [1, 1], "worker 1 failed: RuntimeError: cause\n  a\n  b\n  c\n  d"),
    ],
)
def test_the_first_cause_is_named_in_a_few_lines(
    errors: list[dict[str, object]], statuses: list[int | None], told: str, tmp_path: Path
) -> None:
    assert str(failure_of(errors, statuses, tmp_path)) == told


def test_worker_that_says_nothing_is_reported_by_the_log(tmp_path: Path) -> None:
    (tmp_path / "worker0.log").write_text(
        "start\nModuleNotFoundError: No module named 'x'\nend\n", encoding="utf-8"
    )
    assert str(failure_of([], [1, None], tmp_path)) == (
        "worker 0 ended with status 1, without a result\n  ModuleNotFoundError: No module named 'x'"
    )
