"""State of the parts by themselves, and what an engine of shards does not do."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import thinwire as tw
from tests.ranks import Pool
from tests.sharded.models import HIDDEN, IN, batch, mesh_of, same, sharded_model, site_of
from tests.sharded.models import whole_values as values_of
from tests.sharded.test_checkpoints import made
from tests.toys import descend, engine_of

AT, STEPS = 5, 10


def scaled_by_torch(rank: int, size: int) -> dict[str, Tensor]:
    mesh = mesh_of(2, 2)
    model = sharded_model(mesh)
    optimizer = tw.optim.DGCMomentum(
        model.named_parameters(), lr=0.05, min_numel=20, sparsity=(0.8,), mesh=mesh
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        x, y = batch(site_of(mesh), step)
        loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values_of(model)


def test_a_grad_scaler_of_torch(ranks: Pool) -> None:
    results = ranks.run(scaled_by_torch, size=4)
    for values in results:
        same(values, results[0])
        assert all(bool(value.isfinite().all()) for value in values.values())


def frozen(rank: int, size: int) -> str:
    mesh = mesh_of(2, 2)
    model = sharded_model(mesh)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    config = tw.LocalSGD(1, begin_step=0)
    sync = tw.local_sgd(model, optimizer, config, mesh=mesh, digest_every=1)
    with pytest.raises(tw.errors.Diverged) as caught, sync:
        for step in range(3):
            x, y = batch(site_of(mesh), step)
            descend(optimizer, mse_loss(model(x), y))
            if step == 0 and rank == 0:
                with torch.no_grad():
                    model[0].weight.to_local().add_(1.0)
    return str(caught.value)


def test_a_frozen_shard_that_was_changed_is_found(ranks: Pool) -> None:
    for text in ranks.run(frozen, size=4):
        assert "0.weight" in text
        assert "sites 0 and 1 hold different values" in text


def one_site_evaluates(rank: int, size: int, folder: str) -> tuple[bool, float, float]:
    mesh, model, engine = made(2, 2, "local")
    for step in range(3):
        engine.train_step(*batch(site_of(mesh), step))
    if site_of(mesh) == 0:
        engine.evaluate(*batch(7, 7))
    sharded = all(hasattr(p, "full_tensor") for p in model.parameters())
    before = engine.stats()["bytes_sent"]
    engine.save(folder)
    return sharded, before, engine.stats()["bytes_sent"]


@pytest.mark.slow
def test_an_evaluation_and_a_save_leave_no_trace(ranks: Pool, tmp_path: Path) -> None:
    for sharded, before, after in ranks.run(one_site_evaluates, str(tmp_path), size=4):
        assert sharded
        assert before == after


def at_one_site(rank: int, size: int, name: str) -> dict[str, float]:
    _, _, engine = made(1, 4, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            engine.train_step(*batch(rank, step))
        engine.flush()
    return engine.stats()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no field", "dgc of an SGD", "local"])
def test_one_site_sends_nothing_and_warns_of_nothing(ranks: Pool, name: str) -> None:
    for stats in ranks.run(at_one_site, name, size=4):
        assert stats["bytes_between_nodes"] == 0


def other_values(rank: int, size: int) -> dict[str, float]:
    mesh = mesh_of(2, 2)
    model = sharded_model(mesh, seed=site_of(mesh))
    engine = engine_of(model, lr=0.05, options={"mesh": mesh})
    engine.train_step(*batch(site_of(mesh), 0))
    return engine.stats()


def test_the_copy_at_the_start_is_not_counted(ranks: Pool) -> None:
    for stats in ranks.run(other_values, size=4):
        assert 0 < stats["bytes_between_nodes"] < stats["bytes_sent"]


def random_numbers(rank: int, size: int, folder: str, shards: int) -> list[float]:
    _, _, engine = made(4 // shards, shards, "no field")
    if shards == 2:
        torch.manual_seed(rank)
        engine.train_step(*batch(0, 0))
        whole = torch.full((HIDDEN, IN), float(rank))
        engine.save(folder, extra={"teacher": {"0.weight": whole}})
    else:
        engine.load(folder)
        assert engine.extra["teacher"]["0.weight"].shape == (HIDDEN, IN)
    return torch.rand(3).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4])
def test_every_rank_goes_on_with_its_own_random_numbers(
    ranks: Pool, shards: int, tmp_path: Path
) -> None:
    before = ranks.run(random_numbers, str(tmp_path), 2, size=4)
    assert ranks.run(random_numbers, str(tmp_path), shards, size=4) == before


def shards_in_extra(rank: int, size: int, folder: str) -> str:
    _, model, engine = made(2, 2, "no field")
    with pytest.raises(tw.errors.CheckpointError) as caught:
        engine.save(folder, extra={"ema": {n: p.detach() for n, p in model.named_parameters()}})
    return str(caught.value)


def test_sharded_tensors_in_extra_are_refused(ranks: Pool, tmp_path: Path) -> None:
    for text in ranks.run(shards_in_extra, str(tmp_path), size=4):
        assert "of a DTensor, save to_local()" in text


def residuals(rank: int, size: int, folder: str, shards: int, name: str) -> str:
    mesh = mesh_of(4 // shards, shards)
    model = sharded_model(mesh)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "dgc of AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fields = {"dgc": tw.DGC(sparsity=(0.5,), min_numel=60)} if name != "none" else {}
    engine = tw.DistributedStrategy(**fields).prepare(model, optimizer, mse_loss, mesh=mesh)
    if shards == 2:
        for step in range(3):
            engine.train_step(*batch(site_of(mesh), step))
        engine.save(folder)
        return ""
    with pytest.raises(tw.errors.CheckpointMismatch) as caught:
        engine.load(folder)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dgc of SGD", "dgc of AdamW"])
def test_pending_updates_are_not_lost(ranks: Pool, name: str, tmp_path: Path) -> None:
    ranks.run(residuals, str(tmp_path), 2, name, size=4)
    for text in ranks.run(residuals, str(tmp_path), 4, name, size=4):
        assert "of 0.weight belongs to shards that are now too small" in text
        assert "lower min_numel" in text
    if name == "dgc of AdamW":
        return
    for text in ranks.run(residuals, str(tmp_path), 4, "none", size=4):
        assert "strategy.dgc was" in text


def saved_by_torch(rank: int, size: int, folder: str) -> bool:
    mesh = mesh_of(1, 2)
    model = torch.nn.Linear(IN, 32, bias=False)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = tw.optim.DGCMomentum(
        model.named_parameters(), lr=0.1, min_numel=10, sparsity=(0.8,), mesh=mesh
    )
    for step in range(3):
        descend(optimizer, model(batch(rank, step)[0]).square().mean())
    before = optimizer.state[model.weight]["residual"].clone()
    state = get_optimizer_state_dict(model, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state)
    assert bool(before.any())
    return torch.equal(optimizer.state[model.weight]["residual"], before)


@pytest.mark.slow
def test_torch_saves_the_residuals_of_every_shard(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(saved_by_torch, str(tmp_path)) == [True, True]
