"""Processes that were given a wrong number of ranks, or the rank of another one."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import free_port
from tests.processes import running

ROOT = Path(__file__).parents[2]
TIMEOUT_S, AMPLE_S = 1.0, 10.0


def started(
    folder: Path, places: list[tuple[int, int]], timeout_s: float = AMPLE_S
) -> list[tuple[int, str, str]]:
    """Exit status, report and last words of a process for each rank and number of ranks."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with contextlib.ExitStack() as ends:
        processes = []
        for number, (rank, size) in enumerate(places):
            own = {**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": str(size)}
            words = ["-m", "tests.faults.numbered", str(folder / f"{number}"), str(timeout_s)]
            started = running([sys.executable, *words], env=own, **pipes)
            processes.append(ends.enter_context(started))
        # init_process_group waits for its store and then five time-outs for each connection; the
        # rest is what a process needs to begin
        limit_s = 6 * timeout_s + 60
        said = [process.communicate(timeout=limit_s)[1] for process in processes]
    reports = [folder / f"{number}" for number in range(len(places))]
    return [
        (process.returncode, report.read_text() if report.exists() else "", words)
        for process, report, words in zip(processes, reports, said, strict=True)
    ]


@pytest.mark.fault("a wrong number of ranks, or a rank twice")
@pytest.mark.slow
@pytest.mark.parametrize(
    "places", [[(0, 2), (1, 3)], [(0, 3), (1, 2)], [(0, 3), (1, 3), (1, 3)]], ids=str
)
def test_a_wrong_number_of_ranks_ends_all(tmp_path: Path, places: list[tuple[int, int]]) -> None:
    """And none of them has trained."""
    for status, report, words in started(tmp_path, places, TIMEOUT_S):
        assert status != 0
        assert not report
        assert "Error" in words


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two ranks report whom nobody disturbs."""
    found = started(tmp_path_factory.mktemp("right"), [(0, 2), (1, 2)])
    assert [status for status, *_ in found] == [0, 0]
    return sorted(report for _, report, _ in found)


@pytest.mark.fault("a wrong number of ranks, or a rank twice")
@pytest.mark.slow
@pytest.mark.parametrize("twice", [0, 1])
def test_of_two_with_the_same_rank_one_trains(tmp_path: Path, right: list[str], twice: int) -> None:
    """The job is that of as many ranks as were asked for, and the other process ends."""
    wrong = started(tmp_path, [(0, 2), (1, 2), (twice, 2)])
    ended = [each for each in wrong if each[0] != 0]
    assert len(ended) == 1
    assert not ended[0][1]
    assert "Error" in ended[0][2]
    assert sorted(report for status, report, _ in wrong if not status) == right
