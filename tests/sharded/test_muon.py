"""Muon on matrices in shards: the bits of whole matrices in one process."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import thinwire as tw
from tests.ranks import Pool
from tests.sharded.models import mesh_of, same, site_of

STEPS = 20
SHAPES = [(5, 7), (64, 64), (130, 17), (3, 256), (16, 16)]
"""Rows that do not divide, and fewer rows than ranks."""


class Net(nn.Module):
    """Matrices of many shapes, a kernel, one that is used twice, and one that is frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in SHAPES)
        self.convolution = nn.Conv2d(3, 6, 3)
        self.once, self.again = nn.Linear(9, 9), nn.Linear(9, 9)
        self.again.weight = self.once.weight
        self.frozen = nn.Linear(9, 33)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        found = [layer(x[:, : layer.in_features]).tanh().mean(1) for layer in self.layers]
        found.append(self.convolution(x[:, :75].view(-1, 3, 5, 5)).tanh().flatten(1).mean(1))
        found.append(self.frozen(self.again(self.once(x[:, :9]).tanh())).mean(1))
        return torch.stack(found, 1)


def sharded(mesh: Any, dtype: torch.dtype) -> Net:
    model = Net(dtype)
    for layer in (*model.layers, model.convolution):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch(site: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All ranks of a site see the same, so that its mean has the bits of one process."""
    generator = torch.Generator().manual_seed(100 * step + site)
    x = torch.randn(8, 256, generator=generator).to(dtype)
    return x, x[:, : len(SHAPES) + 2].sin()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def muon_of(model: nn.Module, **settings: Any) -> tw.optim.Muon:
    groups = [{"params": list(model.named_parameters()), "conv": True}]
    return tw.optim.Muon(groups, lr=0.02, **settings)


def trained(
    rank: int, size: int, way: str, place: tuple[int, int] | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """By FSDP alone, by an engine, or by local updates; whole models where there is no `place`."""
    mesh = None if place is None else mesh_of(*place)
    if mesh is None:
        model = Net(dtype)
    else:
        model = sharded(mesh if way == "hybrid" else mesh["shard"], dtype)
    optimizer = muon_of(model, nesterov=dtype == torch.float32)
    given = {} if mesh is None else {"mesh": mesh}
    site = 0 if way in ("bare", "hybrid") else site_of(mesh)
    if way == "prepare":
        engine = tw.DistributedStrategy().prepare(model, optimizer, mse_loss, **given)
        for step in range(STEPS):
            engine.train_step(*batch(site, step, dtype))
        return values_of(model)
    local = tw.local_sgd(model, optimizer, tw.LocalSGD(4), **given) if way == "local" else None
    with local or nullcontext():
        for step in range(STEPS):
            x, y = batch(site, step, dtype)
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("way", ["bare", "hybrid", "prepare", "local"])
def test_the_bits_are_those_of_whole_matrices(
    ranks: Pool, way: str, place: tuple[int, int], dtype: torch.dtype
) -> None:
    alone = way in ("bare", "hybrid")
    whole = ranks.run(trained, way, None, dtype, size=1 if alone else place[0])[0]
    begun = values_of(Net(dtype))
    for values in ranks.run(trained, way, place, dtype, size=4):
        same(values, whole)
    assert all(torch.equal(whole[n], begun[n]) == n.startswith("frozen") for n in begun)
