"""A save that is killed at any point leaves the old state or the new one, on all ranks the same."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OLD, NEW = 2, 7


@pytest.mark.fault("SIGKILL at every operation of a save")
@pytest.mark.fault("two saves at once")
@pytest.mark.slow
def test_state_after_a_kill_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.killing", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    scenarios: list[dict[str, Any]] = json.loads(run.stdout)
    assert len(scenarios) >= 90
    seen: Counter[tuple[str, int]] = Counter()
    for scenario in scenarios:
        name = (
            f"{scenario['mode']}, rank {scenario['victim']} killed before {scenario['point']} "
            f"({scenario['what']})"
        )
        killed, survivor = (
            scenario["answers"][scenario["victim"]],
            scenario["answers"][1 - scenario["victim"]],
        )
        assert killed is None, f"{name}: the rank went on and said {killed}"
        finished = isinstance(survivor, list)
        assert finished or survivor["error"].startswith("PeerLost"), f"{name}: {survivor}"
        states = [state for state, _, _ in scenario["loaded"]]
        assert states in ([[OLD], [OLD]], [[NEW], [NEW]]), f"{name}: {scenario['loaded']}"
        assert states[0] == [NEW] or not finished, f"{name}: a rank was told that the save was done"
        assert all(rest == [True, []] for _, *rest in scenario["loaded"]), (
            f"{name}: the next save: {scenario['loaded']}"
        )
        seen[scenario["mode"], states[0][0]] += 1
    assert set(seen) == {
        (mode, state) for mode in ("next", "again", "apart") for state in (OLD, NEW)
    }
