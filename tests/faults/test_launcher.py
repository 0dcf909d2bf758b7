"""The launcher is told to end, ends without a word, or starts its workers again."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.preempted import EVERY
from tests.processes import torchrun
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("preempted.py")
STEPS = 40


@contextlib.contextmanager
def launched(folder: Path, step_s: float, restarts: int = 0) -> Iterator["subprocess.Popen[bytes]"]:
    """torchrun with two workers."""
    folder.mkdir(exist_ok=True)
    agent = ["--monitor-interval", "0.2", "--max-restarts", str(restarts)]
    command = torchrun(*agent, str(SCRIPT), str(folder), str(STEPS), str(step_s))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield process
        finally:
            for pid in [process.pid, *(worker[0] for worker in workers(folder))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def workers(folder: Path) -> list[tuple[int, int]]:
    """Process and last step of each worker that has begun."""
    texts = [file.read_text().split() for file in folder.glob("pid*")]
    return [(int(text[0]), int(text[1])) for text in texts if text]


def wait_until_both_train(folder: Path) -> None:
    until(lambda: sum(step >= 5 for _, step in workers(folder)) == 2, "training")


def digests(folder: Path) -> list[str]:
    return [(folder / f"end{rank}").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("whole")
    with launched(folder, 0.0) as whole:
        assert whole.wait(PATIENCE_S) == 0, (folder / "log").read_text()
    return digests(folder)


@pytest.mark.fault("SIGTERM to torchrun (preemption)")
@pytest.mark.slow
def test_job_that_is_reported_to_end_goes_on_later_as_if_it_had_not_been(
    undisturbed: list[str], tmp_path: Path
) -> None:
    """By SIGTERM to torchrun, which all workers hear at different moments."""
    folder = tmp_path / "told"
    with launched(folder, 0.1) as first:
        wait_until_both_train(folder)
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE_S) != 0
    reached = {step for _, step in workers(folder)}
    assert len(reached) == 1
    assert reached < set(range(STEPS))
    (saved,) = (folder / "checkpoints").glob("step_*")
    assert int(saved.name.removeprefix("step_")) in reached
    with launched(folder, 0.0) as second:
        assert second.wait(PATIENCE_S) == 0, (folder / "log").read_text()
    assert digests(folder) == undisturbed


@pytest.mark.fault("SIGKILL of a rank, and a restart by torchrun")
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_job_with_a_killed_worker_is_started_again_and_ends_as_undisturbed(
    victim: int, undisturbed: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    with launched(folder, 0.1, restarts=2) as launcher:
        wait_until_both_train(folder)
        before = dict(workers(folder))
        os.kill(int((folder / f"pid{victim}").read_text().split()[0]), signal.SIGKILL)
        assert launcher.wait(PATIENCE_S) == 0, (folder / "log").read_text()
    assert not before.keys() & dict(workers(folder)).keys()
    begun = {int((folder / f"begin{rank}").read_text()) for rank in (0, 1)}
    assert len(begun) == 1
    assert begun < set(range(EVERY, STEPS, EVERY))
    assert digests(folder) == undisturbed


@pytest.mark.fault("SIGKILL of torchrun")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process of this end")
def test_no_worker_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """torchrun's would train on; the line of docs/resume.md ends them."""
    folder = tmp_path / "orphans"
    with launched(folder, 0.1) as launcher:
        wait_until_both_train(folder)
        launcher.kill()
        begun = time.monotonic()
        while any(Path(f"/proc/{pid}").exists() for pid, _ in workers(folder)):
            assert time.monotonic() - begun < 5
            time.sleep(0.02)
