"""Several ranks, in one directory or in several: what one does wrong all hear of, and all load the
same."""

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.api import Group, files, load, on_all_ranks, plan, save
from tests.checkpoint.states import fail, rank_state, same
from tests.ranks import Pool
from tests.waiting import PATIENCE_S, time_out, until

LIMIT_S = time_out(4.0)


def home(root: str, rank: int, machines: int) -> Path:
    """The directory of a rank where ranks are dealt out to machines in order."""
    return Path(root, f"machine{rank % machines}")


def save_and_load(rank: int, size: int, root: str, machines: int) -> list[str]:
    group, directory = Group(), home(root, rank, machines)
    for step in (1, 2, 3):
        save(directory, rank_state(rank, step), step=step, group=group, facts={"step": step})
    loaded = load(directory, group=group)
    assert (loaded.step, loaded.ranks, loaded.facts) == (3, size, {"step": 3})
    assert same(loaded.state, rank_state(rank, 3))
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_ranks_share_a_directory(ranks: Pool, tmp_path: Path) -> None:
    files = ranks.run(save_and_load, str(tmp_path), 1, size=3)[0]
    names = [
        "manifest.json",
        *(f"rank_0000{r}.{kind}" for r in range(3) for kind in ("json", "safetensors")),
    ]
    folders = ["step_0000000002", "step_0000000003"]
    assert files == sorted(
        [*folders, *(f"{folder}/{name}" for folder in folders for name in names)]
    )

    # what is the same on all ranks is written once
    sizes = [
        (tmp_path / f"machine0/step_0000000003/rank_0000{r}.safetensors").stat().st_size
        for r in range(3)
    ]
    assert sizes[1] == sizes[2] < sizes[0]


def test_machines_without_a_common_file_system(ranks: Pool, tmp_path: Path) -> None:
    first, second, third = ranks.run(save_and_load, str(tmp_path), 2, size=3)
    assert first == third != second
    assert [name for name in second if "rank_" in name and "3/" in name] == [
        "step_0000000003/rank_00001.json",
        "step_0000000003/rank_00001.safetensors",
    ]
    manifests = {
        path.read_bytes() for path in tmp_path.glob("machine*/step_0000000003/manifest.json")
    }
    assert len(manifests) == 1


def saves(rank: int, size: int, root: str, *steps: int) -> list[str]:
    for step in steps:
        save(home(root, rank, 2), rank_state(rank, step), step=step, group=Group(), facts={})
    return sorted(path.name for path in home(root, rank, 2).iterdir())


@pytest.mark.parametrize("harm", ["a file is damaged", "it was never named on one machine"])
def test_checkpoint_not_whole_on_all_counts_on_none(ranks: Pool, tmp_path: Path, harm: str) -> None:
    root = str(tmp_path)
    ranks.run(saves, root, 1, 2, size=2)
    second = home(root, 1, 2) / "step_0000000002"
    if harm == "a file is damaged":
        (second / "rank_00001.safetensors").write_bytes(b"")
    else:
        shutil.rmtree(second)
    for machine in ranks.run(saves, root, 3, size=2):
        assert {"step_0000000001", "step_0000000003"} <= set(machine)
    shutil.rmtree(home(root, 0, 2) / "step_0000000003")
    assert [step for step, _, _ in ranks.run(load_here, root, 2, size=2)] == [1, 1]
    first, second = ranks.run(saves, root, 4, 5, size=2)
    assert first == second == ["step_0000000004", "step_0000000005"]


def load_here(rank: int, size: int, root: str, machines: int) -> tuple[int, Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(home(root, rank, machines), group=Group())
    return loaded.step, loaded.state, [str(w.message) for w in caught if w.category is UserWarning]


def test_another_number_of_ranks_needs_files_of_all_machines(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_and_load, str(tmp_path), 2, size=2)
    facts = ["step_0000000003/rank_00001.json is not there", "copy the folders step_0000000003"]
    for size in (1, 3):
        ranks.raise_alike("CheckpointCorrupt", facts, load_here, str(tmp_path), 1, size=size)
    shutil.copytree(tmp_path / "machine1", tmp_path / "machine0", dirs_exist_ok=True)
    for step, state, told in ranks.run(load_here, str(tmp_path), 1, size=3):
        assert (step, told) == (3, [])
        assert state["residual"]["weight"].unique().tolist() == [153.0]


@pytest.mark.parametrize("harm", ["damaged", "not there"])
def test_damage_on_one_machine_sends_all_ranks_back(ranks: Pool, tmp_path: Path, harm: str) -> None:
    ranks.run(save_and_load, str(tmp_path), 2, size=2)
    file = tmp_path / "machine1/step_0000000003/rank_00001.safetensors"
    if harm == "damaged":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        text = f"rank 1: {file} is damaged"
    else:
        shutil.rmtree(file.parent)
        text = "lacks the checkpoint step_0000000003 that other ranks have: copy its folder there"
    answers = ranks.run(load_here, str(tmp_path), 2, size=2)
    assert [step for step, _, _ in answers] == [2, 2]
    assert all(same(state, rank_state(rank, 2)) for rank, (_, state, _) in enumerate(answers))
    for _, _, told in answers:
        assert len(told) == 1 and "rank 1: " in told[0] and text in told[0]


def go_on_after_a_step_back(rank: int, size: int, root: str) -> tuple[int, list[str]]:
    group, directory = Group(), home(root, rank, 2)
    step, _, _ = load_here(rank, size, root, 2)
    save(directory, rank_state(rank, 2.5), step=step, group=group, facts={}, keep=1)
    loaded = load(directory, group=group)
    assert same(loaded.state, rank_state(rank, 2.5))
    return loaded.step, sorted(path.name for path in directory.iterdir())


def test_step_back_does_not_meet_later_results(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_and_load, str(tmp_path), 2, size=2)
    shutil.rmtree(tmp_path / "machine1/step_0000000003")
    answers = ranks.run(go_on_after_a_step_back, str(tmp_path), size=2)
    assert answers == [(2, ["step_0000000002_2"])] * 2


def save_with_parts(rank: int, size: int, root: str, parts: list[int]) -> None:
    save(root, rank_state(rank, 1), step=1, group=Group(), facts={}, part=parts[rank])


def load_with_parts(rank: int, size: int, root: str, parts: list[int]) -> Any:
    return load(root, group=Group(), part=parts[rank]).state


def test_every_stage_gets_its_own_state_wherever_it_sits_now(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_with_parts, str(tmp_path), [0, 0, 1, 1], size=4)
    came = ranks.run(load_with_parts, str(tmp_path), [1, 0, 1, 0], size=4)
    assert all(
        same(state, rank_state(rank, 1)) for state, rank in zip(came, [2, 0, 3, 1], strict=True)
    )
    fewer = ranks.run(load_with_parts, str(tmp_path), [0, 1], size=2)
    assert [state["residual"]["weight"].unique().tolist() for state in fewer] == [[151.0], [351.0]]


@pytest.mark.parametrize("parts", [[0, 0], [0, 1, 2], [1, 2]])
def test_another_stage_count_is_an_error(ranks: Pool, tmp_path: Path, parts: list[int]) -> None:
    ranks.run(save_with_parts, str(tmp_path), [0, 1], size=2)
    fact, args = "pipeline stages [0, 1], but", (load_with_parts, str(tmp_path), parts)
    ranks.raise_alike("CheckpointMismatch", fact, *args, size=len(parts))


def disagree(rank: int, size: int, root: str, what: str) -> None:
    common = {"step": 1, "keep": 2, "facts": {"a": 1}}
    other = {"step": 2, "keep": 3, "facts": {"a": 2}}
    save(root, {}, group=Group(), **{**common, **({what: other[what]} if rank == 1 else {})})


@pytest.mark.parametrize("what", ["step", "keep", "facts"])
def test_ranks_must_agree(ranks: Pool, tmp_path: Path, what: str) -> None:
    answers = ranks.run(disagree, str(tmp_path), what, size=2, expect_errors=True)
    assert {(a.type_name, a.text) for a in answers} == {("Mismatch", answers[0].text)}
    assert f"saving a checkpoint: {what}" in answers[0].text
    assert list(tmp_path.iterdir()) == []


def fail_then_save(rank: int, size: int, root: str, victim: int, where: str) -> list[str]:
    """A save that cannot be, on one rank only, and one after it that can."""
    group, directory = Group(), home(root, rank, 2)
    save(directory, rank_state(rank, 1), step=1, group=group, facts={})
    state, undo = rank_state(rank, 2), lambda: None
    if rank == victim:
        state, undo = BROKEN[where](state, directory)
    group.gather_bytes(b"", action="waiting until it is broken")
    try:
        save(directory, state, step=2, group=group, facts={})
        text = "no error"
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    group.gather_bytes(b"", action="waiting until all have failed")
    undo()
    group.gather_bytes(b"", action="waiting until it is mended")
    left = sorted(path.name for path in directory.iterdir())
    assert same(load(directory, group=group).state, rank_state(rank, 1))
    save(directory, rank_state(rank, 3), step=3, group=group, facts={})
    assert same(load(directory, group=group).state, rank_state(rank, 3))
    return [text, *left]


def patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    return lambda: setattr(owner, name, original)


def broken_directory(state: Any, directory: Path) -> Any:
    directory.rename(directory.with_name("moved"))
    directory.write_text("a file where the directory was")

    def undo() -> None:
        directory.unlink()
        directory.with_name("moved").rename(directory)

    return state, undo


FULL = shutil._ntuple_diskusage(10, 10, 5)  # type: ignore[attr-defined]
BROKEN: dict[str, Callable[[Any, Path], Any]] = {
    "type": lambda state, _: ({**state, "odd": object()}, lambda: None),
    "sync": lambda state, _: (state, patched(os, "fsync", fail)),
    "rename": lambda state, _: (state, patched(Path, "rename", fail)),
    "directory": broken_directory,
    "space": lambda state, _: (state, patched(plan.shutil, "disk_usage", lambda _: FULL)),
}
CAUSES = {
    "type": "TypeError: state/odd is of type object",
    "sync": "PermissionError: [Errno 13] Permission denied",
    "rename": "PermissionError: [Errno 13] Permission denied",
    "directory": "FileExistsError",
    "space": "no space left: a checkpoint of",
}


@pytest.mark.fault("a full disk")
@pytest.mark.parametrize("where", BROKEN)
@pytest.mark.parametrize("victim", [0, 1])
def test_failure_on_one_is_of_all(ranks: Pool, tmp_path: Path, victim: int, where: str) -> None:
    answers = ranks.run(fail_then_save, str(tmp_path), victim, where, size=3)
    assert len({text for text, *_ in answers}) == 1
    # ranks 0 and 2 share a directory
    who = "ranks 0, 2" if (where, victim) == ("directory", 0) else f"rank {victim}"
    assert f"failed on {who}: {CAUSES[where]}" in answers[0][0]
    assert all(left == ["step_0000000001"] for _, *left in answers)


def slow(rank: int, size: int) -> list[int]:
    def work() -> int:
        for _ in range(6 if rank == 0 else 0):
            time.sleep(LIMIT_S / 4)
            files.note_progress()  # as everything here does that reads or writes a piece
        return rank

    return on_all_ranks(Group(timeout=LIMIT_S), "working", work)


def test_a_slow_disk_is_no_lost_rank(ranks: Pool) -> None:
    """The work takes longer than the time-out of the group, and goes on all the time."""
    assert ranks.run(slow, size=2) == [[0, 1]] * 2


def hung(rank: int, size: int, root: str, where: str) -> tuple[str, bool]:
    """A save while the disk of one rank hangs, and one when it works again."""
    group, directory, awake = Group(timeout=LIMIT_S), home(root, rank, 2), threading.Event()
    save(directory, rank_state(rank, 1), step=1, group=group, facts={})
    undo = lambda: None  # noqa: E731
    if rank == 1:
        owner, name = {
            "fsync": (os, "fsync"),
            "unlink": (Path, "unlink"),
            "rename": (Path, "rename"),
        }[where]
        original = getattr(owner, name)
        undo = patched(owner, name, lambda *a, **k: (awake.wait(PATIENCE_S), original(*a, **k))[1])
    group.gather_bytes(b"", action="waiting until it hangs")
    threads = set(threading.enumerate())
    try:
        save(directory, rank_state(rank, 2), step=2, group=group, facts={})
        text = "saved"
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    awake.set()
    undo()
    until(lambda: set(threading.enumerate()) <= threads, "the end of the save that hung")
    group.gather_bytes(b"", action="waiting until it works")
    save(directory, rank_state(rank, 3), step=3, group=group, facts={})
    return text, same(load(directory, group=group).state, rank_state(rank, 3))


@pytest.mark.fault("a directory that is read-only, vanishes or hangs")
@pytest.mark.parametrize("where", ["fsync", "rename"])
def test_disk_that_hangs_is_an_error_on_all(ranks: Pool, tmp_path: Path, where: str) -> None:
    for text, good in ranks.run(hung, str(tmp_path), where, size=2):
        assert f"failed on rank 1: it made no progress for {LIMIT_S:g} s" in text
        assert good


@pytest.mark.slow
def test_cleaning_up_on_a_disk_that_hangs_does_not_have_a_save(ranks: Pool, tmp_path: Path) -> None:
    for text, good in ranks.run(hung, str(tmp_path), "unlink", size=2):
        assert good
        assert text == "saved" or "no progress" in text


def late_files(rank: int, size: int, root: str, blind: list[int]) -> None:
    # a network file system that shows these ranks nothing of the others
    own = f"rank_{rank:05d}"
    with patch.object(Path, "exists", lambda path: rank not in blind or own in path.name):
        save(root, {}, step=1, group=Group(), facts={})


@pytest.mark.parametrize(
    ("blind", "says"),
    [
        ([1], "rank 0 sees files of the ranks [0, 1] in its directory, but rank 1 sees"),
        ([0, 1], "did not see each other's files"),
    ],
)
def test_ranks_that_see_different_things_in_one_directory_are_reported(
    ranks: Pool, tmp_path: Path, blind: list[int], says: str
) -> None:
    facts = [says, "network file system"]
    ranks.raise_alike("CheckpointError", facts, late_files, str(tmp_path), blind, size=2)


def load_late(rank: int, size: int, root: str, hidden: str) -> tuple[int, Any, list[str]]:
    """Load where the listing of rank 1 does not have what is hidden yet."""
    listed = Path.iterdir
    with patch.object(
        Path, "iterdir", lambda path: (p for p in listed(path) if not rank or p.name != hidden)
    ):
        return load_here(rank, size, root, 1)


def test_a_checkpoint_that_is_listed_late_is_loaded(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(save_and_load, str(tmp_path), 1, size=2)
    found = ranks.run(load_late, str(tmp_path), "step_0000000003", size=2)
    assert [(step, told) for step, _, told in found] == [(3, [])] * 2
