"""Disks that are full or cannot be written, real ones: a tmpfs in a mount namespace of a process of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, shutil, subprocess, sys
import torch
from thinwire.checkpoint import load, save
from thinwire.comm import Group

root, group, said, honest = sys.argv[1], Group(), [], shutil.disk_usage

def attempt(step, numel):
    try:
        save(root, {"w": torch.full((numel,), float(step))}, step=step, group=group, facts={})
        said.append("saved")
    except RuntimeError as error:
        said.append(f"{type(error).__name__}: {error}")
    loaded = load(root, group=group)
    assert loaded.state["w"].unique().tolist() == [float(loaded.step)]
    said.append([loaded.step, honest(root).free])

attempt(1, 10)
attempt(2, 2**20)
shutil.disk_usage = lambda path: honest(path)._replace(free=2**60)
attempt(3, 2**20)
subprocess.run(["mount", "-o", "remount,ro", root], check=True)
attempt(4, 10)
subprocess.run(["mount", "-o", "remount,rw", root], check=True)
attempt(5, 10)
print(json.dumps(said))
"""


def can_mount() -> bool:
    tools = ("unshare", "mount")
    return all(map(shutil.which, tools)) and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@pytest.mark.fault
@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace: root, or user namespaces")
def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=3m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, PROGRAM]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, small, early, after_early, late, after_late, read_only, after, last, end = json.loads(run.stdout)
    assert (first, last) == ("saved", "saved")
    assert "no space left: a checkpoint of 4.0 MiB does not fit into the " in early
    assert "OSError: [Errno 28] No space left on device" in late
    assert "Read-only file system" in read_only
    assert all(text.startswith("CheckpointError: ") for text in (early, late, read_only))
    assert [step for step, _ in (small, after_early, after_late, after, end)] == [1, 1, 1, 1, 5]
    assert small[1] == after_early[1] == after_late[1] == after[1], "the torso still takes space"
