from pathlib import Path
from signal import SIGABRT, SIGKILL

from tests.api import explain


def error(rank: int, unix_s: float, message: str) -> dict[str, object]:
    return {"rank": rank, "unix_s": unix_s, "kind": "RuntimeError", "message": message}


def test_a_killed_worker_is_the_cause_and_its_peers_are_not(tmp_path: Path) -> None:
    told = explain([error(0, 1.0, "Connection reset by peer")], [1, -SIGKILL], tmp_path)
    assert told == "worker 1 was killed by SIGKILL"


def test_signal_without_a_name_is_reported_by_its_number(tmp_path: Path) -> None:
    assert explain([], [None, -40], tmp_path) == "worker 1 was killed by signal 40"


def test_a_worker_that_aborts_after_its_error_died_of_the_error(tmp_path: Path) -> None:
    told = explain([error(1, 1.0, "diverged")], [None, -SIGABRT], tmp_path)
    assert told == "worker 1 failed: RuntimeError: diverged"


def test_first_error_is_reported_in_a_few_lines(tmp_path: Path) -> None:
    errors = [error(0, 2.0, "late"), error(1, 1.0, "\n".join(["cause", *"abcdefgh"]))]
    told = explain(errors, [1, 1], tmp_path)
    assert told.splitlines() == ["worker 1 failed: RuntimeError: cause", "  a", "  b", "  c", "  d"]


def test_worker_that_says_nothing_is_reported_by_the_log(tmp_path: Path) -> None:
    (tmp_path / "worker0.log").write_text(
        "start\nModuleNotFoundError: No module named 'x'\nend\n", encoding="utf-8"
    )
    assert (
        explain([], [1, None], tmp_path) == "worker 0 ended with status 1, without a result\n"
        "  ModuleNotFoundError: No module named 'x'"
    )


def test_a_worker_that_ends_by_itself_is_the_cause_and_its_peers_are_not(tmp_path: Path) -> None:
    told = explain([error(0, 1.0, "Connection reset by peer")], [1, 9], tmp_path)
    assert told == "worker 1 ended with status 9, without a result"
