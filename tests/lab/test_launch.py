from pathlib import Path

from thinwire.lab.run.launch import explain

SUMMARY = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 17672)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 17673)  ({signal})
"""


def error(rank: int, unix_s: float, message: str) -> dict[str, object]:
    return {"rank": rank, "unix_s": unix_s, "kind": "RuntimeError", "message": message}


def test_a_killed_worker_is_the_cause_and_its_peers_are_not(tmp_path: Path) -> None:
    (tmp_path / "agent0.log").write_text(
        SUMMARY.format(code=-9, signal="SIGKILL"), encoding="utf-8"
    )
    assert (
        explain([error(0, 1.0, "Connection reset by peer")], tmp_path)
        == "worker 1 was killed by SIGKILL"
    )


def test_a_worker_that_aborts_after_its_error_died_of_the_error(tmp_path: Path) -> None:
    (tmp_path / "agent0.log").write_text(
        SUMMARY.format(code=-6, signal="SIGABRT"), encoding="utf-8"
    )
    assert (
        explain([error(1, 1.0, "diverged")], tmp_path) == "worker 1 failed: RuntimeError: diverged"
    )


def test_the_first_error_is_told_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "agent0.log").write_text(
        SUMMARY.format(code=-15, signal="SIGTERM"), encoding="utf-8"
    )
    told = explain(
        [error(0, 2.0, "late"), error(1, 1.0, "\n".join(["cause", *"abcdefgh"]))], tmp_path
    )
    assert told.splitlines() == ["worker 1 failed: RuntimeError: cause", "  a", "  b", "  c", "  d"]


def test_a_worker_that_says_nothing_is_told_by_the_log(tmp_path: Path) -> None:
    (tmp_path / "agent0.log").write_text(
        "start\nModuleNotFoundError: No module named 'x'\nend\n", encoding="utf-8"
    )
    assert (
        explain([], tmp_path)
        == "a worker ended without a result\n  ModuleNotFoundError: No module named 'x'"
    )
