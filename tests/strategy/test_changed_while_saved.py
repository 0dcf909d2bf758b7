"""A thread that changes a tensor during a save: the values of its begin, or an error on all ranks
that names the tensor, and the checkpoint before.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.api import read_rank_file, write_rank_file
from tests.ranks import Pool
from tests.sharded.models import mesh_of
from tests.strategy.test_module_state import Root
from tests.strategy.training import make_model, prepared, train
from thinwire.errors import CheckpointError

WRITTEN = {"weight": "parameters/3.weight", "momentum": "momentum_buffer", "mean": "buffers/mean"}
"""Tensors that are not copied, and what an error names them."""
OPTIONS = {"all": {}, "model": {"only": "model"}, "trained": {"frozen": False}}
OPTIONS["beside"] = {"wait": False}
_changing: dict[str, Tensor] = {}
"""A tensor to change as soon as a file of tensors is opened below a folder."""


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _changing and ".safetensors" in (path := str(arguments[0])):
        for folder in [folder for folder in _changing if path.startswith(folder)]:
            _changing.pop(folder).add_(1)


sys.addaudithook(_on_event)


def made(mesh: Any, fields: dict[str, Any]) -> Any:
    model = Root(*make_model(plain=True))
    model.register_buffer("mean", torch.zeros(5))
    model.kept = torch.zeros(5)
    model[1].requires_grad_(False)
    if mesh is not None:
        fully_shard(model, mesh=mesh["shard"])
    return prepared(model, options={"mesh": mesh} if mesh else {}, **fields)


def tensors(engine: Any, extra: Tensor) -> dict[str, Tensor]:
    weight = engine.model[3].weight
    momentum = engine.optimizer.state[weight].get("momentum_buffer", torch.zeros(()))
    found = {"weight": weight, "momentum": momentum, "mean": engine.model.mean}
    found |= {"own": engine.model.kept, "extra": extra}
    return {name: getattr(t, "_local_tensor", t).detach() for name, t in found.items()}


def saved(
    rank: int, size: int, folder: str, kind: str, how: str, who: int, fields: Any, shards: int
) -> list[tuple[str, int, bool]]:
    """For two saves during a change on one rank: the error, the step that loads, and its values."""
    mesh = mesh_of(size // shards, shards) if shards else None
    engine, extra, found = made(mesh, fields), torch.zeros(5), []
    train(engine, (), 0, 1)
    engine.save(folder, extra, **{**OPTIONS[how], "wait": True})
    for step in (1, 2):
        train(engine, (), step, step + 1)
        before = {name: tensor.clone() for name, tensor in tensors(engine, extra).items()}
        target, problem = tensors(engine, extra)[kind], ""
        _changing.update({folder: target} if rank == who else {})
        try:
            engine.save(folder, extra, **OPTIONS[how])
            engine.wait_for_save()
        except CheckpointError as error:
            problem = str(error)
        assert not _changing and torch.equal(target, before[kind]) == (rank != who)
        with torch.no_grad():
            target.copy_(before[kind])
        other, names = made(mesh, fields), list(before)
        path = (other.load_parameters if how == "model" else other.load)(folder)
        names = ["weight", "mean"] if how == "model" else names
        loaded = tensors(other, extra if how == "model" else other.extra)
        alike = all(torch.equal(loaded[name], before[name]) for name in names)
        found.append((problem, int(path.name.removeprefix("step_")), alike))
        other.close()
    engine.close()
    return found


LOCAL = {"localsgd": tw.LocalSGD(8)}


@pytest.mark.parametrize(
    ("kind", "how", "size", "who", "fields", "shards"),
    [
        *((kind, how, 0, 0, {}, 0) for kind in (*WRITTEN, "own", "extra") for how in OPTIONS),
        ("weight", "all", 2, 0, {}, 0),
        ("weight", "all", 2, 1, LOCAL, 0),
        ("momentum", "trained", 2, 1, LOCAL, 0),
        ("extra", "all", 2, 1, {}, 0),
        ("weight", "all", 2, 1, {}, 2),
        ("momentum", "beside", 2, 1, {}, 2),
    ],
)
def test_change_during_a_save_is_left_out_or_named(
    ranks: Pool, tmp_path: Path, kind: str, how: str, size: int, who: int, fields: Any, shards: int
) -> None:
    answers = ranks.run(saved, str(tmp_path), kind, how, who, fields, shards, size=size)
    fails = kind in WRITTEN and how != "beside" and (kind, how) != ("momentum", "model")
    for turn in (0, 1):
        for problem, step, alike in (answer[turn] for answer in answers):
            assert problem == answers[0][turn][0]
            assert not fails or (WRITTEN[kind] in problem and step == 1)
            assert fails or (problem, step, alike) == ("", 2 + turn, True)


def test_change_while_a_file_of_a_rank_is_written_is_named(tmp_path: Path) -> None:
    file, state = tmp_path / "a.safetensors", {"first": torch.ones(3), "last": torch.zeros(9)}
    before = write_rank_file(file, state)
    _changing[str(tmp_path)] = state["last"]
    with pytest.raises(CheckpointError, match="last was changed"):
        write_rank_file(file, state)
    assert torch.equal(read_rank_file(file, before)["last"], torch.zeros(9))
    assert list(tmp_path.iterdir()) == [file]
