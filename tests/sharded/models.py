"""A small model in shards, and in one process with each shard as a parameter: the same bits."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

IN, HIDDEN, OUT = 6, 33, 3


def plain_model(seed: int = 3) -> nn.Sequential:
    """33 rows do not divide by 2; 3 outputs leave 2 and 1; the last layer leaves an empty shard."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT), nn.Tanh(), nn.Linear(OUT, 1)
    )


def mesh_of(sites: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (sites, shards), mesh_dim_names=("replicate", "shard"))


def sharded_model(mesh: DeviceMesh, seed: int = 3, **options: Any) -> nn.Sequential:
    """Several groups: two layers of their own, the rest by the outermost module."""
    model = plain_model(seed)
    fully_shard(model[0], mesh=mesh["shard"], **options)
    fully_shard(model[2], mesh=mesh["shard"], **options)
    fully_shard(model, mesh=mesh["shard"], **options)
    return model


class Split(nn.Module):
    """`plain_model` whose parameters are the shards, each a tensor of its own."""

    def __init__(self, shards: int, seed: int = 3) -> None:
        super().__init__()
        self._inner = [plain_model(seed)]  # hidden, so that its parameters are not the model's
        self._shards = shards
        self._shapes: dict[str, list[str]] = {}
        for name, param in self._inner[0].named_parameters():
            layer, kind = name.split(".")
            if not hasattr(self, layer):
                self.add_module(layer, nn.Module())
            self._shapes[name] = []
            for at, piece in enumerate(param.detach().chunk(shards)):
                own = f"{kind}_{at}"
                self.get_submodule(layer).register_parameter(own, nn.Parameter(piece.clone()))
                self._shapes[name].append(f"{layer}.{own}")

    def whole(self) -> dict[str, Tensor]:
        return {
            name: torch.cat([self.get_parameter(own) for own in owns])
            for name, owns in self._shapes.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(self._inner[0], self.whole(), (x,))
        return result


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, Split):
        return {name: value.detach().clone() for name, value in model.whole().items()}
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def batch(site: int, step: int) -> tuple[Tensor, Tensor]:
    """All shards of a site see the same, so that its mean has the bits of one process."""
    generator = torch.Generator().manual_seed(100 * step + site)
    x = torch.randn(8, IN, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def site_of(mesh: DeviceMesh | None) -> int:
    return dist.get_rank() if mesh is None else mesh.get_local_rank("replicate")


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
