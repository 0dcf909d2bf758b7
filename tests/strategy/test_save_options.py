"""Checkpoints without frozen parameters, and checkpoints that are written beside training."""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.allocations import Allocations
from tests.api import export
from tests.launched import free_port
from tests.processes import ran, running
from tests.ranks import Lost, Pool
from tests.strategy.training import batch, digest, flat, make_model, prepared, settings, train
from tests.waiting import PATIENCE_S
from thinwire.errors import CheckpointError, CheckpointMismatch


def tuned(fields: tuple[str, ...] = ()) -> Any:
    """An engine that trains the last layer only."""
    model = make_model(plain=True)
    for param in model[:-1].parameters():
        param.requires_grad_(False)
    return prepared(model, torch.optim.AdamW(model[-1].parameters(), 0.01), **settings(fields))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("fields", [(), ("localsgd",), ("dgc", "gradient_merge")], ids=str)
def test_a_save_that_waits_copies_no_tensor(fields: tuple[str, ...], tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 20000), torch.nn.Linear(20000, 5))
    engine = prepared(model, torch.optim.SGD(model.parameters(), 0.01, 0.9), **settings(fields))
    train(engine, fields, 0, 5)
    with Allocations() as waiting:
        folder = engine.save(tmp_path)
    with Allocations() as beside:
        engine.save(tmp_path / "beside", wait=False)
    engine.wait_for_save()
    assert waiting.total < 0.01 * size_of(folder) < 0.9 * size_of(folder) < beside.total


def without_frozen(rank: int, size: int, folder: str, fields: tuple[str, ...]) -> list[Any]:
    engine = tuned(fields)
    train(engine, fields, 0, 4)
    whole = engine.save(f"{folder}/whole")
    part = engine.save(f"{folder}/part", frozen=False)
    train(engine, fields, 4, 8)
    again = tuned(fields)
    again.load(f"{folder}/part")
    train(again, fields, 4, 8)
    return [digest(engine), digest(again), size_of(whole), size_of(part)]


@pytest.mark.parametrize("fields", [(), ("localsgd",)], ids=str)
def test_frozen_parameters_may_be_left_out(
    fields: tuple[str, ...], ranks: Pool, tmp_path: Path
) -> None:
    for first, second, whole, part in ranks.run(without_frozen, str(tmp_path), fields):
        assert first == second
        assert part < whole - 1500


def model_alone(rank: int, size: int, folder: str) -> list[Any]:
    fields = ("localsgd",)
    engine = tuned(fields)
    train(engine, fields, 0, 5)
    engine.flush()
    sizes = [size_of(engine.save(f"{folder}/all")), size_of(engine.save(folder, only="model"))]
    with pytest.raises(CheckpointError, match=r"only=None.*only='model'"):
        engine.save(f"{folder}/all", only="model")
    with pytest.raises(CheckpointError, match=r"only='model'.*only=None"):
        engine.save(folder)
    other = prepared(make_model(plain=True))
    with pytest.raises(CheckpointMismatch, match=r"only='model'.*load_parameters"):
        other.load(folder)
    other.load_parameters(folder)
    return [sizes, flat(engine.model), flat(other.model)]


def test_the_model_may_be_saved_alone(ranks: Pool, tmp_path: Path) -> None:
    for (whole, alone), before, after in ranks.run(model_alone, str(tmp_path)):
        assert alone < whole
        assert before == after
    file = tmp_path / "model.safetensors"
    export(tmp_path, file)
    assert load_file(file).keys() == make_model(plain=True).state_dict().keys()


def test_frozen_parameters_that_have_changed_are_refused(tmp_path: Path) -> None:
    engine = tuned()
    train(engine, (), 0, 2)
    engine.save(tmp_path, frozen=False)
    other = tuned()
    with torch.no_grad():
        other.model[1][0].weight[3, 4] += 1
    before = digest(other)
    with pytest.raises(
        CheckpointMismatch, match=r"frozen=False.*1\.0\.weight has different values now"
    ):
        other.load(tmp_path)
    assert digest(other) == before
    with pytest.raises(CheckpointMismatch, match=r"1\.0\.weight has different values now"):
        other.load_parameters(tmp_path)
    again = tuned()
    again.load_parameters(tmp_path)
    assert digest(again) == digest(engine)


def beside(rank: int, size: int, folder: str) -> list[Any]:
    engine = prepared()
    found = []
    for step in range(6):
        engine.train_step(*batch(step, rank))
        if step % 2 == 1:
            found.append(engine.save(folder, extra=step, keep=None, wait=False))
    last = engine.wait_for_save()
    assert last == found[-1] and engine.wait_for_save() is None
    told = [digest(engine)]
    again = prepared()
    assert again.load(folder) == last and again.extra == 5
    told.append(digest(again))
    again.load(folder, step=2)
    assert again.extra == 1 and again.step == 2
    engine.save(folder, keep=1, wait=False)
    engine.close()
    return [*told, len(list(Path(folder).iterdir()))]


def test_a_save_beside_training_is_that_of_its_moment(ranks: Pool, tmp_path: Path) -> None:
    for saved, loaded, folders in ranks.run(beside, str(tmp_path / "run")):
        assert saved == loaded
        assert folders == 1, "closing waits for the last one, which keeps itself only"


def refused(rank: int, size: int, folder: str) -> str:
    engine = tuned()
    train(engine, (), 0, 1)
    engine.save(f"{folder}/{'run' if rank == 0 else 'file/run'}", wait=False)
    try:
        engine.wait_for_save()
    except CheckpointError as error:
        train(engine, (), 1, 2)
        return str(error)
    return "nothing"


def test_failure_is_raised_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    first, second = ranks.run(refused, str(tmp_path))
    assert first == second
    assert "rank 1" in first


def killed(rank: int, size: int, folder: str) -> None:
    """While the files of the second checkpoint are written: the disk does not answer any more."""
    engine = tuned()
    train(engine, (), 0, 1)
    engine.save(folder)
    train(engine, (), 1, 2)
    writing = threading.Event()

    def fsync(file: int) -> None:
        writing.set()
        threading.Event().wait()

    os.fsync = fsync
    engine.save(folder, extra=torch.zeros(1 << 20), wait=False)
    train(engine, (), 2, 3)
    assert writing.wait(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.fault
def test_kill_while_it_is_written_leaves_one_before(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(killed, str(tmp_path), expect_errors=True)
    assert all(isinstance(each, Lost) for each in found)
    assert size_of(tmp_path) > 1 << 22, "part of the second one is on the disk"
    engine = tuned()
    engine.load(tmp_path)
    assert engine.step == 1
    engine.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "what was left is removed"


ENDS = """
import os, sys, threading
import torch, torch.distributed as dist
import thinwire as tw

def main(last, how):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = tw.DistributedStrategy().prepare(model, optimizer, torch.nn.functional.mse_loss)
    for step in range(3):
        engine.train_step(torch.ones(2, 4), torch.ones(2, 4))
        if step == 2:
            engine.wait_for_save()
            fsync, main_thread = os.fsync, threading.main_thread()
            os.fsync = lambda file: (main_thread.join(), fsync(file))  # not before the script ends
        engine.save(last if step == 2 else "run", wait=False)
    if how == "destroy":
        dist.destroy_process_group()
    return engine if how == "keep" else None

engine = main(*sys.argv[1:])
"""
"""A script that ends without waiting for its third save, which the disk delays until then."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "how"),
    [("run", "keep"), ("run", "destroy"), ("file/run", "destroy"), ("file/run", "drop")],
)
def test_script_that_ends_in_a_save_has_a_checkpoint(tmp_path: Path, last: str, how: str) -> None:
    (tmp_path / "file").write_text("no folder")
    command, port = [sys.executable, "-c", ENDS, last, how], str(free_port())
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places: Any = [{"cwd": tmp_path, "env": {**shared, "RANK": rank}} for rank in "01"]
    with running(command, **places[1], stderr=subprocess.PIPE, text=True) as second:
        first = ran(command, **places[0])
        said = second.communicate()[1]
    fits = last == "run"
    for status, text in ((first.returncode, first.stderr), (second.returncode, said)):
        assert (status == 0) == fits, text
        assert fits or ("CheckpointError" in text and "file/run" in text)
    there = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert there == [f"step_000000000{step}" for step in ((2, 3) if fits else (1, 2))]


def held(rank: int, size: int, folder: str) -> list[tuple[int, ...]]:
    """Descriptors and threads after each of four engines: two are closed, two are dropped."""
    counts = []
    for turn in range(4):
        engine = tuned()
        train(engine, (), 0, 1)
        engine.save(folder, wait=turn == 0)
        engine.wait_for_save()
        if turn < 2:
            engine.close()
        del engine
        gc.collect()
        counts.append(tuple(len(list(Path("/proc/self", of).iterdir())) for of in ("fd", "task")))
    return counts


def test_a_save_beside_training_leaves_no_thread_behind(ranks: Pool, tmp_path: Path) -> None:
    assert all(len(set(counts)) == 1 for counts in ranks.run(held, str(tmp_path)))
