"""Engines publish what the model of all ranks holds, whatever ranks, members and storages do."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.members.places import met
from tests.members.training import TIMEOUT_S, wait_for
from tests.processes import running
from tests.ranks import Lost, Pool
from tests.sharded.models import mesh_of
from tests.stream.models import Bits, Running, contents
from tests.stream.storages import Faults
from tests.toys import engine_of, warned
from tests.waiting import PATIENCE_S
from thinwire.errors import StreamError

LOCAL = tw.LocalSGD(k_steps=4, begin_step=1)
FIELDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dgc": {"dgc": tw.DGC(sparsity=(0.5,), min_numel=8)},
    "localsgd": {"localsgd": LOCAL},
    "one bit": {"localsgd": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1))},
    "shards": {},
    "shards, localsgd": {"localsgd": LOCAL},
}
"""By name the fields of a strategy."""
NEVER_S = 4 * PATIENCE_S
"""A time-out for which nobody can have waited, since the test would have failed."""


def engine_for(kind: str, model: nn.Module) -> tw.Engine:
    told: dict[str, Any] = {}
    if kind.startswith("shards"):
        told["mesh"] = mesh = mesh_of(*((2, 2) if "localsgd" in kind else (1, 2)))
        fully_shard(model, mesh=mesh["shard"])
    momentum = 0.9 if kind == "dgc" else 0.0
    return engine_of(model, momentum=momentum, options=told, **FIELDS[kind])


def size_of(kind: str) -> int:
    return 4 if kind == "shards, localsgd" else 2


def model_of(seed: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return Running()


def train(engine: tw.Engine, rank: int, step: int) -> None:
    torch.manual_seed(100 * step + rank)
    engine.train_step(torch.randn(8, 5), torch.randn(8, 5))


def held(model: nn.Module) -> Bits:
    """Return what a model holds, whole."""
    return contents({name: getattr(t, "full_tensor", lambda t=t: t)()
                     for name, t in model.state_dict().items()})  # fmt: skip


def read_all(where: str | Path) -> dict[int, Bits]:
    """Read all versions that are kept, until the end; return what they hold, by step."""
    versions = tw.follow(where, poll=0.01)
    return {each.step: contents(each.state_dict()) for each in versions}


def read_last(where: str | Path) -> Bits:
    return contents(tw.follow(where).latest().state_dict())


def has_ended(where: str | Path) -> bool:
    """Return True if the end was said, and say it if not."""
    thread = threading.Thread(target=read_all, args=(where,))
    thread.start()
    thread.join(0.5)
    if not (ended := not thread.is_alive()):
        with tw.publish(where, tw.follow(where).latest().state_dict()) as publisher:
            publisher.update(0)
        thread.join()
    return ended


def of_now(rank: int, size: int, kind: str, folder: str) -> tuple[dict[int, Bits], int]:
    model = model_of()
    engine, found = engine_for(kind, model), dict[int, Bits]()
    publisher = engine.publish(folder, every=4, keep=9)
    for step in range(1, 10):
        if "shards" not in kind:
            model.layer.weight.data = model.layer.weight.data.clone()
        train(engine, rank, step)
        if engine.sync is None or engine.sync.synced:
            found[step] = held(model)
        publisher.wait()
    published_step = engine.stats()["published_step"]
    engine.close()
    return found, published_step


@pytest.mark.parametrize("kind", FIELDS)
def test_engine_publishes_the_current_state_of_its_model(
    ranks: Pool, tmp_path: Path, kind: str
) -> None:
    (wanted, published_step), *_ = ranks.run(of_now, kind, str(tmp_path), size=size_of(kind))
    assert published_step == 9
    found = read_all(tmp_path)
    assert found.keys() == wanted.keys()
    assert [step for step in found if found[step] != wanted[step]] == []


def of_rollback(
    rank: int, size: int, kind: str, folder: str, further: int
) -> tuple[list[Bits], Bits]:
    model, found = model_of(), list[Bits]()
    engine = engine_for(kind, model)
    publisher = engine.publish(folder + "/versions")
    for step in range(1, 10):
        train(engine, rank, step)
        if step == 2:
            engine.save(folder + "/checkpoints")
        publisher.wait()
    engine.load(folder + "/checkpoints")
    for step in range(3, 3 + further):
        train(engine, rank + 10, step)
        publisher.wait()
        if engine.sync is None or engine.sync.synced:
            found.append(held(model))
    with_all = held(model)
    engine.close()
    return found, with_all


@pytest.mark.parametrize("further", [0, 1, 4])
@pytest.mark.parametrize("kind", ["dense", "localsgd", "shards"])
def test_versions_go_on_after_an_older_checkpoint_was_loaded(
    ranks: Pool, tmp_path: Path, kind: str, further: int
) -> None:
    (found, last), *_ = ranks.run(of_rollback, kind, str(tmp_path), further, size=size_of(kind))
    follower, read = tw.follow(tmp_path / "versions", poll=0.01), list[Bits]()
    for version in follower:
        read.append(contents(version.state_dict()))
    for wanted in found:
        assert wanted in read
    if kind == "localsgd":  # what the last averaging left
        last = found[-1] if found else read[0]
    assert read[-1]["layer.weight"] == last["layer.weight"]


def of_edit(rank: int, size: int, kind: str, folder: str) -> Bits:
    model = model_of()
    engine = engine_for(kind, model)
    engine.publish(folder)
    for step in range(1, 4):
        train(engine, rank, step)
    with torch.no_grad():
        model.layer.bias.fill_(7.0)
        model.mean = torch.full((5,), 8.0)
    wanted = held(model)
    engine.close()
    return wanted


@pytest.mark.parametrize("kind", ["dense", "dgc", "shards"])
def test_weights_put_in_by_hand_are_the_last_version(
    ranks: Pool, tmp_path: Path, kind: str
) -> None:
    wanted, *_ = ranks.run(of_edit, kind, str(tmp_path), size=size_of(kind))
    assert read_last(tmp_path) == wanted
    assert has_ended(tmp_path)


_SCRIPT = """
import sys, torch, thinwire as tw
folder, end = sys.argv[1:]
model = torch.nn.Linear(5, 5)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
engine = tw.DistributedStrategy().prepare(model, optimizer, torch.nn.functional.mse_loss)
engine.publish(folder)
for _ in range(3):
    engine.train_step(torch.randn(8, 5), torch.randn(8, 5))
exec(end)
"""
ENDS = {"raise KeyError('data')": 1, "sys.exit(3)": 3, "pass": 0}
"""Last lines of a script, and its status."""


def test_only_a_script_that_ends_well_says_the_end(tmp_path: Path) -> None:
    for number, (line, status) in enumerate(ENDS.items()):
        folder = tmp_path / str(number)
        command = [sys.executable, "-c", _SCRIPT, str(folder), line]
        with running(command, stderr=-3) as process:
            assert process.wait() == status, line
        if status == 0:
            assert tw.follow(folder).latest().step == 3, line
        assert has_ended(folder) == (status == 0), line


def of_collected(rank: int, size: int, kind: str, folder: str) -> None:
    engine = engine_for(kind, model_of())
    publisher = engine.publish(folder)
    train(engine, rank, 1)
    publisher.wait()
    if rank == 0:  # a collective of this rank alone would not end
        del engine, publisher
        gc.collect()
    dist.barrier()


@pytest.mark.parametrize("kind", ["dense", "shards"])
def test_engine_that_is_collected_says_nothing(ranks: Pool, tmp_path: Path, kind: str) -> None:
    ranks.run(of_collected, kind, str(tmp_path))
    assert not has_ended(tmp_path)


def of_a_bad_storage(
    rank: int, size: int, kind: str, folder: str, fault: str
) -> tuple[int, bool, Bits]:
    faults, failed = Faults(Path(folder)), False
    model = model_of()
    engine = engine_for(kind, model)
    with warned():
        engine.publish(faults.address, timeout=0.5 if fault == "fail" else NEVER_S)
        train(engine, rank, 1)
        if rank == 0:
            faults.fail("no service") if fault == "fail" else faults.hang()
        dist.barrier()
        for step in range(2, 14):
            train(engine, rank, step)
        wanted, step = held(model), engine.stats()["step"]
        dist.barrier()
        if fault == "hang":
            faults.end()
        try:
            engine.close()
        except StreamError:
            failed = True
    return step, failed, wanted


@pytest.mark.parametrize("fault", ["fail", "hang"])
@pytest.mark.parametrize("kind", FIELDS)
def test_storage_that_fails_or_hangs_keeps_no_step_waiting(
    ranks: Pool, tmp_path: Path, kind: str, fault: str
) -> None:
    folder = str(tmp_path / "versions")
    found = ranks.run(of_a_bad_storage, kind, folder, fault, size=size_of(kind))
    assert {step for step, *_ in found} == {13}
    failed = [failed for _, failed, _ in found]
    if fault == "fail":
        assert failed[0]
    else:
        assert not any(failed)
        assert read_last(f"faulty://{folder}") == found[0][2]


CONFIG = tw.LocalSGD(4, begin_step=1)
LAST = 24


@contextmanager
def member_engine(
    rank: int, address: str, **how: Any
) -> Iterator[tuple[tw.Members, nn.Module, tw.Engine]]:
    torch.manual_seed(rank)
    net = nn.Linear(5, 5)
    options = {"run": "test", "timeout": TIMEOUT_S, **how}
    with tw.join(address, **options) as members:
        engine = engine_of(net, localsgd=CONFIG, options={"members": members})
        yield members, net, engine


def of_a_folder(rank: int, size: int, address: str, folder: str) -> str:
    with member_engine(rank, address) as (_, _, engine):
        with pytest.raises((StreamError, ValueError), match="shared=True"):
            engine.publish(folder)
        engine.publish(folder, shared=True)
        engine.close()
    return "refused"


def test_folder_of_members_without_shared_is_refused(ranks: Pool, tmp_path: Path) -> None:
    assert met(ranks, of_a_folder, str(tmp_path), size=1) == ["refused"]


def of_members(
    rank: int, size: int, address: str, folder: str, how: str
) -> tuple[dict[int, Bits], bool, list[str]]:
    """Train until `LAST`; whoever is the first member at step 9 dies or leaves then."""
    rounds, was_first = dict[int, Bits](), False
    with (
        warned() as texts,
        member_engine(rank, address, start_members=size) as (members, net, engine),
    ):
        publisher = engine.publish(folder, shared=True)
        while members.step < LAST and not members.left:
            train(engine, rank, members.step)
            assert engine.sync is not None
            if engine.sync.synced and not members.left:
                rounds[members.step] = held(net)
                publisher.wait()
            if members.step == 10 and members.rank == 0:
                was_first = True
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                members.leave()
        engine.close()
    return rounds, was_first, texts


@pytest.mark.fault("the member that publishes is lost")
@pytest.mark.parametrize("how", ["die", "leave"])
def test_next_member_publishes_after_the_first_one(ranks: Pool, tmp_path: Path, how: str) -> None:
    found = met(ranks, of_members, str(tmp_path), how, size=3, errors=True)
    if how == "die":
        assert sum(isinstance(one, Lost) for one in found) == 1
    rounds = [one[0] for one in found if not isinstance(one, Lost) and not one[1]]
    assert len(rounds) == 2, found
    assert max(rounds[0]) == 21
    versions = read_all(tmp_path)
    assert {1, 5, 9, 21} <= versions.keys() <= rounds[0].keys()
    for wanted in rounds:
        assert [step for step in versions if versions[step] != wanted[step]] == []


def of_a_joiner(
    rank: int, size: int, address: str, folder: str, flag: str
) -> tuple[dict[int, Bits], list[str]]:
    rounds = dict[int, Bits]()
    wait_for(flag if rank == 2 else "")
    with (
        warned() as texts,
        member_engine(rank, address, start_members=2) as (members, net, engine),
    ):
        engine.publish(folder, shared=True, keep=99)
        end = 4000
        while members.step < end:
            train(engine, rank, members.step)
            time.sleep(0.02)
            assert engine.sync is not None
            if engine.sync.synced:
                rounds[members.step] = held(net)
                if members.size == 3:
                    end = min(end, members.step + 8)
            if members.step == 6 and rank == 0:
                Path(flag).touch()
        engine.close()
    return rounds, [text for text in texts if "publish" in text]


def test_joiner_publishes_nothing_before_it_is_admitted(ranks: Pool, tmp_path: Path) -> None:
    folder, flag = tmp_path / "versions", tmp_path / "go"
    found = met(ranks, of_a_joiner, str(folder), str(flag), size=3)
    (rounds, _), (others, _), (late, _) = found
    assert [texts for _, texts in found] == [[], [], []]
    assert late
    assert rounds == others
    versions = read_all(folder)
    assert max(versions) == max(rounds)
    assert [step for step in versions if versions[step] != rounds[step]] == []
