"""What stands in the directory already: links, damage, manifests that come and go."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.api import Group, load, plan, save, saving
from tests.checkpoint.states import fail, flip, rank_state, same
from thinwire.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch

GROUP = Group()


def saved(root: Path, *steps: int, keep: int = 2) -> Path:
    for step in steps:
        path = save(root, rank_state(0, step), step=step, group=GROUP, facts={}, keep=keep)
    return path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_link_to_a_checkpoint_in_another_folder_goes_as_a_link(tmp_path: Path) -> None:
    """Somebody moved an old one to a larger disk and left a link in its place."""
    root, archive = tmp_path / "run", tmp_path / "archive"
    saved(root, 1, 2)
    shutil.move(root / "step_0000000001", archive)
    (root / "step_0000000001").symlink_to(archive)
    for step in (3, 4, 5):
        saved(root, step)
        assert load(root, group=GROUP).step == step
    assert names(root) == ["step_0000000004", "step_0000000005"]
    assert (archive / "manifest.json").exists(), "what a link leads to is not ours to delete"


def test_leftover_does_not_stop_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".step_0000000009.tmp-0123abcd").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.warns(UserWarning, match=r"interrupted save .*could not be removed.*0123abcd"):
            saved(tmp_path, 1)
    assert load(tmp_path, group=GROUP).step == 1


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "rank_00000.json"])
def test_the_last_good_one_stays_while_a_newer_one_is_damaged(tmp_path: Path, file: str) -> None:
    damaged = saved(tmp_path, 1, 2)
    flip(damaged / file)
    newest = saved(tmp_path, 3)
    flip(newest / file)
    with pytest.warns(UserWarning, match="cannot be loaded"):
        loaded = load(tmp_path, group=GROUP)
    assert loaded.step == 1
    assert same(loaded.state, rank_state(0, 1))


def test_damage_does_not_pile_up(tmp_path: Path) -> None:
    """One that is damaged goes when there are as many good ones as are kept."""
    flip(saved(tmp_path, 1, 2) / "rank_00000.json")
    saved(tmp_path, 3, 4)
    assert names(tmp_path) == ["step_0000000003", "step_0000000004"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_that_stood_still_deletes_nothing_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """A machine was paused after it had named its checkpoint, and another run went on."""
    paused: list[Callable[[], object]] = []
    saved(tmp_path, 1, keep=keep)
    with monkeypatch.context() as patch:
        prune = saving.prune
        patch.setattr(saving, "prune", lambda *args: paused.append(partial(prune, *args)) or [])
        saved(tmp_path, 2, keep=keep)
    saved(tmp_path, 3, 4, 5, keep=keep)
    before = names(tmp_path)
    assert len(before) == keep
    paused[0]()
    assert names(tmp_path) == before


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "rank_00000.json"])
def test_checkpoint_without_its_files_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Another run in the same directory takes it for left behind, and removes it."""
    saved(tmp_path, 1, keep=1)
    complete = plan.SaveLayout.complete

    def removed(self: plan.SaveLayout, files: dict) -> None:
        (self.staging / file).unlink()
        complete(self, files)

    with monkeypatch.context() as patch:
        patch.setattr(plan.SaveLayout, "complete", removed)
        with pytest.raises(CheckpointError, match=f"{file}, which has just been written.*another"):
            saved(tmp_path, 2, keep=1)
    assert load(tmp_path, group=GROUP).step == 1
    assert names(tmp_path) == ["step_0000000001"]


def test_last_checkpoint_loads_after_its_manifest_was_away(tmp_path: Path) -> None:
    for trial in range(12):
        root = tmp_path / str(trial)
        saved(root, 1)
        newest = save(root, {"trial": trial}, step=2, group=GROUP, facts={}) / "manifest.json"
        newest.rename(tmp_path / "away")
        saved(root, 3)
        (tmp_path / "away").rename(newest)
        assert load(root, group=GROUP).step == 3


def test_clock_set_back_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr("time.time_ns", lambda: 10**9)
    for step in (2, 3):
        saved(tmp_path, step)
        assert load(tmp_path, group=GROUP).step == step


def test_missing_step_is_named_though_all_are_damaged(tmp_path: Path) -> None:
    """It must not pass for a directory without any, with which a run begins anew."""
    damaged = saved(tmp_path, 1)
    flip(damaged / "manifest.json")
    with pytest.raises(CheckpointMismatch, match="has checkpoints of step 1, but none of step 5"):
        load(tmp_path, group=GROUP, step=5)
    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
        load(tmp_path, group=GROUP, step=1)
