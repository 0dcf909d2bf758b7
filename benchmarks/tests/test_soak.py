"""Members under faults for a minute, and the replay that tells whether their bits were right."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import current_process
from pathlib import Path

import pytest

from benchmarks.ranks import host, on_ranks
from benchmarks.soak import Process, Soak
from benchmarks.soak_member import Part, live
from benchmarks.soak_replay import replay
from thinwire.tools.run.launch import EventReader

TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]


def test_leaving_member_is_replayed_with_its_residual(tmp_path: Path) -> None:
    with host(None) as (address, _):
        parts = [Part(n, str(tmp_path), address, "sparse", 3, TIMEOUT_S) for n in range(3)]
        seen = Soak(tmp_path, 0, 0, 0, TIMEOUT_S, "sparse", None, ending=True)
        seen.all = [Process(part, current_process(), part.number) for part in parts]
        seen.all[2].fate = "leaving"
        on_ranks(_lives, 3, parts, group=False)
        for one in seen.all:
            seen.read(one, 0.0)
        trace = seen.trace()
    assert not seen.problems
    assert [len(ids) for ids in trace.averagings.values()][-1] == 2
    ((inherited,),) = trace.inherited.values()
    first, second, left = (one.ids[0] for one in seen.all)
    assert inherited in [(first, left, 2 / 3), (second, left, 2 / 3)]
    assert replay(trace).digests == trace.digests


def _lives(rank: int, size: int, parts: list[Part]) -> None:
    folder = Path(parts[0].folder)

    def told(number: int, what: str) -> int:
        return [line["event"] for line in EventReader(folder, number).read()].count(what)

    def steer() -> None:
        while told(2, "averaged") < 3:
            time.sleep(0.05)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        while rank == 0 and not told(0, "inherited") + told(1, "inherited"):
            time.sleep(0.05)
        if rank == 0:
            (folder / "end.new").write_text(str(4 * told(0, "averaged") + 12))
            (folder / "end.new").rename(folder / "end")

    threading.Thread(target=steer, daemon=True).start()
    live(parts[rank])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "lost file", "kill, lost file"])
def test_two_members_reach_their_goal_under_three_kills(tmp_path: Path, kind: str) -> None:
    options = ["--members", "2", "--times", "3", "--every", "1", "--faults", kind]
    options += ["--timeout", "15", "--slack", "60"]
    command = [sys.executable, "-m", "benchmarks.soak", *options, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["faults"] == {kind: 3}
    assert found["generations"] == (7 if "kill" in kind else 1)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("THINWIRE_SOAK") != "required", reason="takes minutes: make test-soak"
)
def test_a_minute_of_faults(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "60", "--every", "3"]
    command += ["--seed", "5", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "summary.json").read_text())
    assert sum(found["faults"].values()) >= 3
    assert found["averagings"] == found["replayed alike"] > 20
