"""Disks that are full or cannot be written: a tmpfs in a mount namespace of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.api import Group, load, save
from tests.checkpoint.states import fail
from thinwire.errors import CheckpointError

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
    return (
        all(map(shutil.which, tools))
        and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.fault("a full disk")
@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace: root, or user namespaces")
def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=3m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, PROGRAM]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, small, early, after_early, late, after_late, read_only, after, last, end = json.loads(
        run.stdout
    )
    assert (first, last) == ("saved", "saved")
    assert "no space left: a checkpoint of 4.0 MiB does not fit into the " in early
    assert "OSError: [Errno 28] No space left on device" in late
    assert "Read-only file system" in read_only
    assert all(text.startswith("CheckpointError: ") for text in (early, late, read_only))
    assert [step for step, _ in (small, after_early, after_late, after, end)] == [1, 1, 1, 1, 5]
    assert small[1] == after_early[1] == after_late[1] == after[1], (
        "the staging folder still takes space"
    )


@pytest.mark.fault("a directory that is read-only, vanishes or hangs")
def test_directory_that_vanishes_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, group = tmp_path / "runs" / "first", Group()
    root.mkdir(parents=True)

    def vanish(*_: object) -> None:
        shutil.rmtree(root.parent)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", vanish)
        with pytest.raises(
            CheckpointError, match=r"writing a checkpoint failed on rank 0: FileNotFoundError"
        ):
            save(root, {"a": torch.ones(2)}, step=1, group=group, facts={})
    save(root, {"a": torch.ones(2)}, step=2, group=group, facts={})
    assert load(root, group=group).step == 2


def test_older_one_that_stays_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    for step in (1, 2):
        save(tmp_path, {"a": step}, step=step, group=group, facts={})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.warns(UserWarning, match="an older checkpoint could not be deleted"):
            save(tmp_path, {"a": 3}, step=3, group=group, facts={})
    assert load(tmp_path, group=group).state == {"a": 3}
    save(tmp_path, {"a": 4}, step=4, group=group, facts={})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_0000000003",
        "step_0000000004",
    ]


def test_leftovers_of_interrupted_saves_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step_0000000009.tmp-0123abcd").mkdir()
    (tmp_path / ".step_0000000009.tmp-0123abcd" / "rank_00000.json").touch()
    (tmp_path / ".rank_00003.token-0123abcd").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".step_0000000008.tmp-0123abcd").symlink_to(tmp_path / ".hidden")
    (tmp_path / ".step_0000000007.tmp-0123abcd").symlink_to(tmp_path / "nowhere")
    save(tmp_path, {}, step=1, group=Group(), facts={})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "step_0000000001"]
