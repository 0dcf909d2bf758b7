"""State of the parts by themselves, and what an engine of shards does not do."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import thinwire as tw
from tests.ranks import Pool
from tests.sharded.models import batch, mesh_of, same, sharded_model, site_of
from tests.sharded.models import whole_values as values_of
from tests.sharded.test_checkpoints import CASES, made

AT, STEPS = 5, 10


def through_state_dict(rank: int, size: int, name: str) -> bool:
    mesh, model, engine = made(2, 2, name)
    for step in range(AT):
        engine.train_step(*batch(site_of(mesh), step))
    state = copy.deepcopy(engine.state_dict())
    for step in range(AT, STEPS):
        engine.train_step(*batch(site_of(mesh), step))
    one = values_of(model)
    engine.load_state_dict(state)
    for step in range(AT, STEPS):
        engine.train_step(*batch(site_of(mesh), step))
    same(one, values_of(model))
    return True


@pytest.mark.parametrize("name", CASES)
def test_an_engine_goes_on_from_its_state(ranks: Pool, name: str) -> None:
    assert all(ranks.run(through_state_dict, name, size=4))


def optimizer_and_updates(rank: int, size: int, local: bool) -> bool:
    mesh = mesh_of(2, 2)
    results: list[dict[str, Tensor]] = []
    saved: list[Any] = []
    for again in (False, True):
        model = sharded_model(mesh)
        if local:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            config = tw.LocalSGD(2, compression=tw.Sparse(0.5))
            sync = tw.local_sgd(model, optimizer, config, mesh=mesh).__enter__()
            parts: list[Any] = [sync]
        else:
            optimizer = tw.optim.DGCMomentum(
                model.named_parameters(), lr=0.05, min_numel=20, sparsity=(0.8,), mesh=mesh
            )
            parts = [optimizer]
        if again:
            with torch.no_grad():
                for p, value in zip(model.parameters(), saved[0], strict=True):
                    p.to_local().copy_(value)
            for part, state in zip(parts, saved[1], strict=True):
                part.load_state_dict(state)
        for step in range(AT if again else 0, STEPS):
            if step == AT and not again:
                saved += [
                    [p.to_local().detach().clone() for p in model.parameters()],
                    [copy.deepcopy(part.state_dict()) for part in parts],
                ]
            x, y = batch(site_of(mesh), step)
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if local:
            sync.close()
        results.append(values_of(model))
    same(*results)
    return True


@pytest.mark.parametrize("local", [False, True])
def test_the_parts_go_on_from_their_states(ranks: Pool, local: bool) -> None:
    assert all(ranks.run(optimizer_and_updates, local, size=4))


def explained(rank: int, size: int) -> tuple[str, str]:
    mesh = mesh_of(2, 2)
    model = sharded_model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = tw.DistributedStrategy(dgc=tw.DGC(min_numel=20))
    text = strategy.explain(model, optimizer)
    engine = strategy.prepare(model, optimizer, mse_loss, mesh=mesh)
    with pytest.raises(RuntimeError, match="does not work with mesh=") as caught, engine.join():
        pass
    return text, str(caught.value)


def test_explain_and_join(ranks: Pool) -> None:
    for text, _ in ranks.run(explained, size=4):
        assert "DGCMomentum" in text


def scaled_by_torch(rank: int, size: int) -> dict[str, Tensor]:
    mesh = mesh_of(2, 2)
    model = sharded_model(mesh)
    optimizer = tw.optim.DGCMomentum(
        model.named_parameters(), lr=0.05, min_numel=20, sparsity=(0.8,), mesh=mesh
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if rank >= 0 and size == 4 else None
    for step in range(STEPS):
        x, y = batch(site_of(mesh), step)
        loss = mse_loss(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
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
