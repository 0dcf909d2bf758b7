"""Ceilings of the structure only fall, whatever was committed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).parents[1]
COUNT = "tokens of comm"


def committed(path: Path, ceilings: dict[str, object]) -> None:
    path.write_text(json.dumps(ceilings))
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", path.name], [*author, "commit", "-qm", "ceilings"]):
        subprocess.run(["git", *command], cwd=path.parent, check=True, timeout=60)


@pytest.mark.parametrize("later", [2, 12], ids=["between two ceilings", "above both"])
def test_ceiling_raised_in_a_commit_fails_until_it_has_a_reason(tmp_path: Path, later: int) -> None:
    path = tmp_path / "ceilings.json"
    check = [sys.executable, "-m", "benchmarks.structure", "--history", str(path)]
    for value in (10, 1):
        committed(path, {COUNT: value})
    assert ran(check, cwd=ROOT).returncode == 0
    committed(path, {COUNT: later})
    committed(path, {COUNT: later, "files": 3})  # the raise is not in the last commit
    assert f"{COUNT}: its ceiling is {later}, and was 1" in ran(check, cwd=ROOT).stderr
    committed(path, {COUNT: later, "raised": {COUNT: "sums in rank order"}})
    assert f"raised: {COUNT}: 1 -> {later}: sums in rank order" in ran(check, cwd=ROOT).stdout
