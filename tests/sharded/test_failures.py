"""What goes wrong on one shard stops all of them, and bad input is one clear error."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import thinwire as tw
from tests.ranks import Pool
from tests.sharded.models import batch, mesh_of, plain_model, same, sharded_model, site_of
from tests.sharded.models import whole_values as values_of
from tests.toys import engine_of

DGC = tw.DGC(sparsity=(0.5,), min_numel=20)


RATE = {"lr": 0.05, "momentum": 0.9}


def one_bad_gradient(rank: int, size: int, compressed: bool) -> tuple[bool, dict[str, float]]:
    mesh = mesh_of(2, 2)
    model = sharded_model(mesh)
    fields = {"dgc": DGC} if compressed else {}
    engine = engine_of(model, **RATE, **fields, options={"mesh": mesh})
    engine.train_step(*batch(site_of(mesh), 0))
    before = values_of(model)
    (x, y), weight = batch(site_of(mesh), 1), model[0].weight
    with pytest.warns(UserWarning, match=r"dropped on every rank: the gradient of .*0\.weight"):
        loss = mse_loss(model(x), y)
        if rank == 3:  # its shard alone: the sum over the site does not carry it to the other one
            post = model[0]._get_fsdp_state()._fsdp_param_group.post_backward

            def spoiled(*args: Any) -> None:
                post(*args)
                weight.grad.to_local()[0] = float("nan")

            model[0]._get_fsdp_state()._fsdp_param_group.post_backward = spoiled
        engine.minimize(loss)
    after = values_of(model)
    return all(torch.equal(before[n], after[n]) for n in before), engine.stats()


@pytest.mark.parametrize("compressed", [False, True])
def test_gradient_that_is_not_finite_drops_the_step_of_all(ranks: Pool, compressed: bool) -> None:
    for unmoved, stats in ranks.run(one_bad_gradient, compressed, size=4):
        assert unmoved
        assert stats["dropped_steps"] == 1
        assert stats["step"] == 1


def clipped(rank: int, size: int, kind: str, scale: float = 1.0) -> dict[str, Tensor]:
    mesh, model = None, plain_model()
    if size == 4:
        mesh = mesh_of(2, 2)
        model = sharded_model(mesh)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5)
    clips = {"global": tw.ClipByGlobalNorm(0.3), "norm": tw.optim.ClipByNorm(0.2)}
    given, fields = clips.get(kind), {}
    if kind == "own":
        optimizer = tw.optim.SGD(model.parameters(), lr=0.5, grad_clip=tw.optim.ClipByNorm(0.2))
    if kind.startswith("local"):
        sparsity = tw.DGC(sparsity=(0.0,), value_bits=32, min_numel=1, local_grad_clip_norm=0.3)
        fields = {"dgc": sparsity}
    if kind == "local, Adagrad":
        optimizer = torch.optim.Adagrad(model.named_parameters(), lr=0.05)
    if kind.startswith("lars"):
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
        fields["lars"] = tw.LARS(lars_coeff=0.05, exclude_from_weight_decay=("*.bias",))
    if kind.startswith("lamb"):
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.05)
        fields["lamb"] = tw.LAMB(exclude_from_weight_decay=("*.bias",))
    if kind.endswith("averaged"):
        fields["localsgd"] = tw.LocalSGD(2)
    told = {"grad_clip": given, "mesh": mesh}
    loss_fn = lambda *given: mse_loss(*given) * scale  # noqa: E731
    engine = engine_of(model, loss_fn, optimizer=optimizer, options=told, **fields)
    for step in range(6):
        engine.train_step(*batch(site_of(mesh), step))
    engine.flush()
    if mesh is None:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    return values_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("global", "norm", "own", "local", "local, Adagrad", "local, averaged"),
        *("lars", "lamb", "lars, averaged", "lamb, averaged"),
    ],
)
def test_norms_are_over_all_shards(ranks: Pool, kind: str) -> None:
    whole = ranks.run(clipped, kind, size=2)[0]
    free = ranks.run(clipped, "none", size=2)[0]
    assert not torch.allclose(whole["0.weight"], free["0.weight"], rtol=1e-2)
    results = ranks.run(clipped, kind, size=4)
    for values in results:
        torch.testing.assert_close(values, whole, rtol=1e-5, atol=1e-6)
        same(values, results[0])


@pytest.mark.parametrize("kind", ["global", "norm", "local"])
def test_norms_over_shards_have_room_for_large_gradients(ranks: Pool, kind: str) -> None:
    large, larger = (ranks.run(clipped, kind, 2.0**power, size=4)[0] for power in (10, 70))
    torch.testing.assert_close(larger, large, rtol=1e-5, atol=1e-6)


def bytes_of(rank: int, size: int, field: str) -> float:
    mesh, model = None, plain_model()
    if size == 4:
        mesh = mesh_of(2, 2)
        model = sharded_model(mesh)
    fields: dict[str, Any] = {
        "dense": {},
        "dgc": {"dgc": tw.DGC(sparsity=(0.9,), min_numel=20)},
        "local": {"localsgd": tw.LocalSGD(2, compression=tw.Quantized(4))},
    }[field]
    engine = engine_of(model, **RATE, **fields, options={"mesh": mesh})
    for step in range(20):
        engine.train_step(*batch(site_of(mesh), step))
    stats = engine.stats()
    return stats["bytes_between_nodes" if mesh is not None else "bytes_sent"]


@pytest.mark.slow
@pytest.mark.parametrize("field", ["dense", "dgc", "local"])
def test_sites_exchange_as_much_as_whole_replicas(ranks: Pool, field: str) -> None:
    whole = ranks.run(bytes_of, field, size=2)[0]
    shards = ranks.run(bytes_of, field, size=4)
    of_site = shards[0] + shards[1]
    # agreements are not in one of them, and each shard's message has a header of its own
    assert abs(of_site - whole) <= 20 * 4 * 2 * 48 + 0.1 * whole


def check_refusals(rank: int, size: int) -> None:
    """One after the other on the same ranks: what is refused leaves the model as it was."""
    mesh = mesh_of(2, 2)
    one_site = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))
    whole, model = plain_model(), sharded_model(mesh)
    torchs = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    hybrid = plain_model()
    fully_shard(hybrid, mesh=mesh)
    partly, clip = plain_model(), tw.optim.ClipByNorm(1.0)
    fully_shard(partly[0], mesh=mesh["shard"])

    def prepare(model: nn.Module, mesh: Any, told: Any = None, **given: Any) -> None:
        engine_of(model, options={"mesh": mesh, **(told or {})}, **given)

    def local(model: nn.Module, mesh: Any, **given: Any) -> None:
        config = tw.LocalSGD(2, **given.pop("config", {}))
        tw.local_sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), config, mesh=mesh, **given)

    def momentum(model: nn.Module, mesh: Any, **given: Any) -> None:
        optimizer = tw.optim.DGCMomentum(model.named_parameters(), lr=0.1, mesh=mesh, **given)
        mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
        optimizer.step()

    world: Any = dist.group.WORLD
    refused: list[tuple[Any, str]] = [
        (lambda: prepare(model, "replicate"), "TypeError: mesh must be .*DeviceMesh, got str"),
        (lambda: prepare(model, one_site), r"ValueError: mesh has the dimensions \('shard',\)"),
        (lambda: prepare(model, three), "third dimension"),
        (lambda: prepare(whole, mesh), "parameter 0.weight is not sharded"),
        (lambda: local(partly, mesh), "parameter 2.weight is not sharded"),
        (lambda: momentum(hybrid, mesh), "averages over the sites in every backward pass"),
        *((lambda way=way: way(model, None), "mesh=mesh") for way in (prepare, local, momentum)),
        (lambda: prepare(model, mesh, low_rank=tw.LowRank()), "mesh= does not work with low_rank"),
        (lambda: prepare(model, mesh, pipeline=tw.Pipeline(2, 2)), "does not work with pipeline"),
        (lambda: prepare(model, mesh, dgc=tw.DGC(node_size=2)), "omit node_size"),
        (lambda: prepare(model, mesh, {"grad_clip": clip}, dgc=DGC), "use local_grad_clip_norm"),
        (lambda: prepare(model, mesh, optimizer=torchs), "give thinwire.optim.Muon"),
        (lambda: momentum(model, mesh, process_group=world), "omit process_group"),
        (lambda: momentum(model, mesh, grad_clip=clip), "use local_grad_clip_norm"),
        (lambda: local(model, mesh, config={"node_size": 2}), "omit node_size"),
        (lambda: local(model, mesh, process_group=world), "omit process_group"),
        (
            lambda: engine_of(model, options={"mesh": mesh}).join().__enter__(),
            "does not work with m",
        ),
    ]
    for act, fact in refused:
        try:
            act()
            told = "nothing"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        assert re.search(fact, told), (fact, told)


def test_wrong_mesh_or_setting_for_shards_is_refused(ranks: Pool) -> None:
    ranks.run(check_refusals, size=4)
