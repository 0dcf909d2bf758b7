"""Checkpoints of sharded runs: the same bits again, other numbers of sites and of shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.ranks import Pool
from tests.sharded.models import IN, batch, mesh_of, plain_model, same, sharded_model, site_of
from tests.sharded.models import whole_values as values_of
from tests.sharded.test_equal_to_whole import ENGINES
from tests.toys import engine_of

AT, STEPS = 6, 12
CASES = ["no field", "merge", "scaled", "dgc of an SGD", "dgc of AdamW", "local", "local, dgc"]
EXACT_ELSEWHERE = ["no field", "merge", "scaled"]
"""Whose updates do not depend on how many shards there are."""


def made(sites: int, shards: int, name: str) -> tuple[Any, nn.Module, tw.Engine]:
    """An engine; of whole models where there are no shards."""
    fields, make = ENGINES[name]
    mesh = mesh_of(sites, shards) if shards else None
    model = plain_model() if mesh is None else sharded_model(mesh)
    return mesh, model, engine_of(model, optimizer=make(model), options={"mesh": mesh}, **fields)


def whole(model: nn.Module, mesh: Any) -> dict[str, Tensor]:
    if mesh is None:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    return values_of(model)


def train(
    rank: int, size: int, place: tuple[int, int], name: str, folder: str, first: int, last: int
) -> tuple[dict[str, Tensor], float]:
    mesh, model, engine = made(*place, name)
    if first:
        engine.load(folder)
        assert engine.step == first // (3 if name == "merge" else 1) or name == "scaled"
    for step in range(first, last):
        engine.train_step(*batch(site_of(mesh), step))
    if last == AT:
        engine.save(folder)
    return whole(model, mesh), engine.stats()["step"]


@pytest.mark.slow
@pytest.mark.parametrize("place", [(2, 1), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_another_number_of_shards(
    ranks: Pool, name: str, place: tuple[int, int], tmp_path: Path
) -> None:
    if place != (2, 1) and name not in ("no field", "dgc of an SGD", "local, dgc"):
        pytest.skip("two cuts are enough for these")
    folder = str(tmp_path)
    before = ranks.run(train, (2, 2), name, folder, 0, AT, size=4)
    size = place[0] * max(place[1], 1)
    at_once = ranks.run(load_only, place, name, folder, size=size)
    if not name.startswith("local"):  # ranks hold their own parameters between two averagings
        for values in at_once:
            same(values, before[0][0])
    resumed = ranks.run(train, place, name, folder, AT, STEPS, size=size)
    if name in EXACT_ELSEWHERE:
        through = ranks.run(train, (2, 2), name, str(tmp_path / "no"), 0, STEPS, size=4)
        for values, _ in resumed:
            if place[1] != 3:  # a third of three equal gradients is not exact
                same(values, through[0][0])
            torch.testing.assert_close(values, through[0][0])
    for values, _ in resumed:
        assert all(bool(value.isfinite().all()) for value in values.values())


def load_only(
    rank: int, size: int, place: tuple[int, int], name: str, folder: str
) -> dict[str, Tensor]:
    mesh, model, engine = made(*place, name)
    engine.load(folder)
    return whole(model, mesh)


@pytest.mark.slow
def test_from_whole_models_to_shards(ranks: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks.run(train, (2, 0), "no field", folder, 0, AT, size=2)
    resumed = ranks.run(train, (2, 2), "no field", folder, AT, STEPS, size=4)
    through = ranks.run(train, (2, 0), "no field", str(tmp_path / "no"), 0, STEPS, size=2)
    for values, _ in resumed:
        same(values, through[0][0])


def pending(rank: int, size: int, place: tuple[int, int], folder: str) -> dict[str, Tensor]:
    """The mean over the sites of what is pending, of whole parameters."""
    mesh, _, engine = made(*place, "dgc of an SGD")
    engine.load(folder)
    optimizer = engine.optimizer
    means = {}
    for name, param in engine.model.named_parameters():
        residual = optimizer.state[param].get("residual")
        here = torch.zeros(param.to_local().shape) if residual is None else residual.clone()
        torch.distributed.all_reduce(here, group=mesh.get_group("replicate"))
        parts: list[Any] = [None] * mesh["shard"].size()
        torch.distributed.all_gather_object(
            parts, here / mesh["replicate"].size(), group=mesh.get_group("shard")
        )
        means[name] = torch.cat(parts)
    return means


@pytest.mark.slow
@pytest.mark.parametrize("place", [(3, 2), (1, 2), (2, 1)], ids=str)
def test_mean_of_pending_updates_stays(ranks: Pool, place: tuple[int, int], tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks.run(train, (2, 2), "dgc of an SGD", folder, 0, AT, size=4)
    before = ranks.run(pending, (2, 2), folder, size=4)[0]
    after = ranks.run(pending, place, folder, size=place[0] * place[1])
    assert any(bool(value.any()) for value in before.values())
    for means in after:
        for name, value in before.items():
            torch.testing.assert_close(means[name], value, rtol=1e-6, atol=1e-8)


def parameters_alone(rank: int, size: int, folder: str) -> dict[str, Tensor]:
    mesh = mesh_of(1, 2)
    model = sharded_model(mesh, seed=11)
    engine_of(model, options={"mesh": mesh}).load_parameters(folder)
    return values_of(model)


def test_parameters_alone(ranks: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = ranks.run(train, (2, 0), "dgc of an SGD", folder, 0, AT, size=2)
    for values in ranks.run(parameters_alone, folder, size=2):
        same(values, before[0][0])


def from_file(rank: int, size: int, path: str) -> dict[str, Tensor]:
    mesh = mesh_of(2, 2) if size == 4 else None
    model = plain_model(11) if mesh is None else sharded_model(mesh, seed=11)
    engine = engine_of(model, options={"mesh": mesh}, localsgd=tw.LocalSGD(2))
    engine.load_parameters(path, torch_checkpoint=not path.endswith(".safetensors"))
    return whole(model, mesh)


@pytest.mark.slow
def test_one_file_of_the_whole_model_and_back(ranks: Pool, tmp_path: Path) -> None:
    before = ranks.run(train, (2, 2), "dgc of AdamW", str(tmp_path), 0, AT, size=4)
    file = tmp_path / "model.safetensors"
    tw.checkpoint.export(tmp_path, file)
    plain = plain_model(5)
    plain.load_state_dict(load_file(file))
    same({name: p.detach() for name, p in plain.named_parameters()}, before[0][0])
    for size in (2, 4):
        for values in ranks.run(from_file, str(file), size=size):
            same(values, before[0][0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["pickled", "of torch"])
def test_from_file_or_folder_of_torch(ranks: Pool, kind: str, nested: bool, tmp_path: Path) -> None:
    values, place = plain_model(21).state_dict(), tmp_path / "model.pt"
    state = {"model": values, "epoch": 3} if nested else values
    if kind == "pickled":
        torch.save(state, place)
    else:
        torch.distributed.checkpoint.save(state, checkpoint_id=str(place), no_dist=True)
    for size in (2, 4):
        for loaded in ranks.run(from_file, str(place), size=size):
            same(loaded, values)


def to_torch(rank: int, size: int, folder: str) -> dict[str, Tensor]:
    mesh, model, engine = made(2, 2, "dgc of AdamW")
    for step in range(AT):
        engine.train_step(*batch(site_of(mesh), step))
    torch.distributed.checkpoint.save({"model": engine.model.state_dict()}, checkpoint_id=folder)
    return values_of(model)


@pytest.mark.slow
def test_torch_saves_the_trained_state_of_an_engine(ranks: Pool, tmp_path: Path) -> None:
    before = ranks.run(to_torch, str(tmp_path), size=4)[0]
    for loaded in ranks.run(from_file, str(tmp_path), size=2):
        same(loaded, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shape", "lacks", "strange", "damaged"])
def test_a_file_of_another_model_is_refused(ranks: Pool, kind: str, tmp_path: Path) -> None:
    values, file = plain_model(21).state_dict(), tmp_path / "model.safetensors"
    if kind == "lacks":
        del values["2.bias"]
    else:
        values["9.bias" if kind == "strange" else "2.bias"] = torch.zeros(7)
    save_file(values, file)
    if kind == "damaged":
        file.write_bytes(b"no safetensors")
    fact = {
        "shape": "2.bias has shape (7,) in the file and (3,) in this model",
        "lacks": "it lacks 2.bias",
        "strange": "the model has no 9.bias",
        "damaged": "cannot be read",
    }[kind]
    error = "CheckpointCorrupt" if kind == "damaged" else "CheckpointMismatch"
    ranks.raise_alike(error, fact, from_file, str(file), size=4)


def rows(rank: int, size: int, shards: int, out: int, folder: str, save: bool) -> None:
    mesh = mesh_of(1, shards) if shards else None
    model = nn.Linear(4, out, bias=False)
    if mesh is not None:
        fully_shard(model, mesh=mesh["shard"])
    engine = engine_of(model, options={"mesh": mesh})
    if save:
        engine.save(folder)
    else:
        engine.load_parameters(folder)


@pytest.mark.parametrize(("before", "now"), [((2, 10), (0, 5)), ((0, 5), (2, 10))])
def test_parameters_of_another_model_with_fitting_rows_are_refused(
    ranks: Pool, before: tuple[int, int], now: tuple[int, int], tmp_path: Path
) -> None:
    ranks.run(rows, *before, str(tmp_path), True, size=before[0] or 1)
    ranks.raise_alike(
        "CheckpointMismatch",
        f"shape [{before[1]}, 4] in the checkpoint and [{now[1]}, 4] in this model",
        rows,
        *now,
        str(tmp_path),
        False,
        size=now[0] or 1,
    )


def low_rank(
    rank: int, size: int, place: tuple[int, int], folder: str, first: int, last: int
) -> list[bool]:
    """Whether the first averaging of this part moved the anchor of each compressed matrix."""
    mesh = mesh_of(*place)
    config = tw.LocalSGD(4, compression=tw.LowRank(2, begin_step=1, min_numel=40))
    model = sharded_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = engine_of(model, optimizer=optimizer, options={"mesh": mesh}, localsgd=config)
    if first:
        engine.load(folder)
    before = engine.state_dict()["exchange"]
    for step in range(first, last):
        engine.train_step(*batch(site_of(mesh), step))
    if not first:
        engine.save(folder)
    after = engine.state_dict()["exchange"]["anchors"]
    return [not torch.equal(before["anchors"][name], after[name]) for name in before["factors"]]


@pytest.mark.slow
def test_a_matrix_that_is_compressed_only_since_the_new_cut(ranks: Pool, tmp_path: Path) -> None:
    """Its factor is drawn, not zero, which would make its first averaging nothing."""
    ranks.run(low_rank, (1, 2), str(tmp_path), 0, 5, size=2)
    for moved in ranks.run(low_rank, (2, 1), str(tmp_path), 5, 10, size=2):
        assert moved == [True, True]
    for moved in ranks.run(low_rank, (1, 2), str(tmp_path), 5, 10, size=2):  # factors go: no error
        assert moved == [True]


def moving_buffers(rank: int, size: int, folder: str) -> Tensor:
    mesh = mesh_of(1, 2)
    model = nn.Sequential(nn.Linear(IN, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    fully_shard(model, mesh=mesh["shard"])
    engine = engine_of(model, lr=0.01, options={"mesh": mesh}, localsgd=tw.LocalSGD(8))
    for step in range(3):
        engine.train_step(*batch(rank, step))
    engine.save(folder)
    return model.get_buffer("1.running_mean").clone()


def test_a_file_has_the_buffers_of_the_first_shard(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(moving_buffers, str(tmp_path), size=2)
    assert not torch.equal(first, second)
    tw.checkpoint.export(tmp_path, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["1.running_mean"], first)
