"""Two sites of two shards train to the bits of two processes that hold the shards as tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool
from tests.sharded.models import Split, batch, mesh_of, same, sharded_model, site_of, whole_values
from tests.toys import descend, engine_of

STEPS = 12
RAMP = {"sparsity": (0.5, 0.9), "rampup_begin_step": 2, "rampup_step": 6, "min_numel": 20}
MOMENTUM = {"lr": 0.05, "momentum": 0.9}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), **MOMENTUM)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    first = [(name, p) for name, p in named if name.startswith("0.")]
    rest = [(name, p) for name, p in named if not name.startswith("0.")]
    return [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(rest, **MOMENTUM)]


ENGINES: dict[str, tuple[dict[str, Any], Any]] = {
    "no field": ({}, adamw),
    "merge": ({"gradient_merge": tw.GradientMerge(3)}, adamw),
    "amp": ({"amp": tw.AMP("bfloat16")}, adamw),
    "scaled": ({"amp": tw.AMP("float16", tw.DynamicLossScale(2.0**8, 2.0, 4))}, sgd),
    "two optimizers": ({}, two),
    "two optimizers, dgc": ({"dgc": tw.DGC(**RAMP)}, two),
    "two optimizers, local": ({"localsgd": tw.LocalSGD(3)}, two),
    "dgc of an SGD": ({"dgc": tw.DGC(**RAMP)}, sgd),
    "dgc of AdamW": ({"dgc": tw.DGC(**RAMP, value_bits=4)}, adamw),
    "dgc, merge": ({"dgc": tw.DGC(**RAMP), "gradient_merge": tw.GradientMerge(2)}, sgd),
    "recompute": ({"recompute": tw.Recompute(("0",))}, adamw),
    "local": ({"localsgd": tw.LocalSGD(3)}, adamw),
    "adaptive": ({"adaptive_localsgd": tw.AdaptiveLocalSGD(2)}, adamw),
    "local, dgc": ({"localsgd": tw.LocalSGD(3), "dgc": tw.DGC(**RAMP)}, sgd),
    "local, amp": (
        {"localsgd": tw.LocalSGD(3), "amp": tw.AMP("float16", tw.DynamicLossScale(2.0**8))},
        adamw,
    ),
}
CONFIGS = {
    "outer": tw.LocalSGD(3, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True),
    "sparse": tw.LocalSGD(3, compression=tw.Sparse(0.8)),
    "sparse, all": tw.LocalSGD(3, compression=tw.Sparse(0.8, mean_over="all")),
    "quantized": tw.LocalSGD(3, compression=tw.Quantized(4)),
    "one bit": tw.LocalSGD(3, compression=tw.Quantized(1)),
    "low rank": tw.LocalSGD(3, compression=tw.LowRank(2, begin_step=1, min_numel=40)),
    "delay": tw.LocalSGD(4, delay=2, compression=tw.Quantized(4)),
    "longer delay": tw.LocalSGD(4, delay=3, compression=tw.Quantized(4)),
    "fragments": tw.LocalSGD(4, fragments=2),
    "state": tw.LocalSGD(3, average_state=True),
}


def setting(size: int) -> tuple[Any, nn.Module]:
    if size == 2:
        return None, Split(2)
    mesh = mesh_of(2, 2)
    return mesh, sharded_model(mesh)


def loss_of(model: nn.Module, site: int, step: int) -> Tensor:
    x, y = batch(site, step)
    return nn.functional.mse_loss(model(x), y)


def engine_run(rank: int, size: int, name: str, clip: bool) -> tuple[dict[str, Tensor], Any]:
    fields, make = ENGINES[name]
    mesh, model = setting(size)
    if size == 2:  # its names are others, and it changes no bit
        fields = {key: value for key, value in fields.items() if key != "recompute"}
    grad_clip = tw.optim.ClipByValue(0.05) if clip else None
    told = {"grad_clip": grad_clip, "mesh": mesh}
    engine = engine_of(model, optimizer=make(model), options=told, **fields)
    for step in range(STEPS):
        engine.train_step(*batch(site_of(mesh), step))
        if step == 5:  # leaves whole parameters behind in the outermost module
            engine.evaluate(*batch(9, step))
    engine.flush()
    return whole_values(model), engine.stats()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine(ranks: Pool, name: str) -> None:
    clip = name == "no field"
    sharded = ranks.run(engine_run, name, clip, size=4)
    whole = ranks.run(engine_run, name, clip, size=2)
    for values, _ in sharded:
        same(values, whole[0][0])
    assert not torch.equal(whole[0][0]["0.weight"], Split(2).whole()["0.weight"])


def local_run(rank: int, size: int, name: str) -> tuple[dict[str, Tensor], Any]:
    mesh, model = setting(size)
    optimizer = adamw(model)
    # in host memory on shards, which changes no bit
    config = replace(CONFIGS[name], state_device=None if mesh is None else "cpu")
    with tw.local_sgd(model, optimizer, config, mesh=mesh) as sync:
        for step in range(STEPS):
            descend(optimizer, loss_of(model, site_of(mesh), step))
            with torch.no_grad():
                model(batch(9, step)[0])
    return whole_values(model), sync.stats()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_local_updates(ranks: Pool, name: str) -> None:
    sharded, whole = ranks.run(local_run, name, size=4), ranks.run(local_run, name, size=2)
    for values, _ in sharded:
        # products of matrices round by their layout
        (torch.testing.assert_close if name == "low rank" else same)(values, whole[0][0])


def optimizer_run(rank: int, size: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    mesh, model = setting(size)
    optimizer = tw.optim.DGCMomentum(
        model.named_parameters(), **MOMENTUM, **RAMP, **settings, mesh=mesh
    )
    for step in range(STEPS):
        descend(optimizer, loss_of(model, site_of(mesh), step))
    return whole_values(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"value_bits": 8, "nesterov": True}, {"weight_decay": 0.1}, {"maximize": True}],
    ids=str,
)
def test_dgc_momentum_by_itself(ranks: Pool, settings: dict[str, Any]) -> None:
    whole = ranks.run(optimizer_run, settings, size=2)
    for values in ranks.run(optimizer_run, settings, size=4):
        same(values, whole[0])
