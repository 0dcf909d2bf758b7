"""Members under faults for a minute, and the replay that tells whether their bits were right."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak_replay import Trace, replay, undisturbed

ROOT = Path(__file__).parents[2]
AVERAGINGS = {1: ["ann", "bob"], 5: ["ann", "bob", "eve"], 9: ["bob", "eve"]}


def _trace(**changes: Any) -> Trace:
    about: dict[str, Any] = {
        "config": "sparse",
        "seeds": {"ann": 1, "bob": 2, "eve": 3},
        "entered": {"ann": 0, "bob": 0, "eve": 1},
        "averagings": AVERAGINGS,
    }
    return Trace(**{**about, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": {"ann": 1, "bob": 2, "eve": 4}},
        {"averagings": {**AVERAGINGS, 5: ["ann", "bob"]}},
        {"inherited": {5: [("bob", "ann", 2 / 3)]}},
        {"config": "momentum"},
    ],
)
def test_a_replay_tells_other_members_from_the_same(changes: dict[str, Any]) -> None:
    whole = replay(_trace())
    assert list(whole.digests) == [1, 5, 9]
    assert replay(_trace()) == whole
    assert replay(_trace(**changes)).digests != whole.digests


def test_a_run_that_nobody_disturbs_has_as_many_averagings_of_those_who_began() -> None:
    calm = undisturbed(_trace(averagings={**AVERAGINGS, 5: ["ann", "bob"]}))
    assert list(calm.averagings.values()) == [["ann", "bob"]] * 3
    assert not calm.inherited
    assert 0 < replay(calm).loss < 2


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
