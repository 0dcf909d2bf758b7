"""Whatever `fully_shard` can be told: sites train as whole replicas do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import thinwire as tw
from tests.ranks import Pool
from tests.sharded.models import IN, batch, mesh_of, plain_model, site_of
from tests.sharded.models import whole_values as values_of
from tests.toys import engine_of


class Tied(nn.Module):
    """A matrix that is used twice, and a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(IN, IN, bias=False)
        self.norm = nn.BatchNorm1d(IN)
        self.second = nn.Linear(IN, IN, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(self.norm(self.first(x)).tanh()))
        return result


def model_of(way: str) -> nn.Module:
    if way == "tied":
        return Tied()
    if way == "meta":
        with torch.device("meta"):
            return plain_model()
    return plain_model()


def sharded(way: str, mesh: Any) -> nn.Module:
    model = model_of(way)
    options: dict[str, Any] = {
        "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "kept": {"reshard_after_forward": False},
    }.get(way, {})
    if way not in ("tied", "one group"):
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["shard"], **options)
    fully_shard(model, mesh=mesh["shard"], **options)
    if way == "compiled":
        model[0].compile(backend="eager")
    if way == "meta":
        model.to_empty(device="cpu")
        values = plain_model().state_dict()
        with torch.no_grad():
            for name, param in model.named_parameters():
                shards = values[name].chunk(2)
                at = mesh.get_local_rank("shard")
                if at < len(shards):
                    param.to_local().copy_(shards[at])
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


FIELDS: dict[str, dict[str, Any]] = {
    "every step": {"gradient_merge": tw.GradientMerge(2)},
    "local": {"localsgd": tw.LocalSGD(2, compression=tw.Quantized(8))},
}


def trained(rank: int, size: int, way: str, field: str) -> dict[str, Tensor]:
    mesh = None if size == 2 else mesh_of(2, 2)
    model = model_of("plain" if way == "meta" else way) if mesh is None else sharded(way, mesh)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    told = {"grad_clip": tw.ClipByGlobalNorm(1.0), "mesh": mesh}
    engine = engine_of(model, optimizer=optimizer, options=told, **FIELDS[field])
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 4, 0.5)
    for step in range(10):
        engine.train_step(*batch(site_of(mesh), step))
        schedule.step()
    engine.flush()
    if mesh is None:
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    else:
        values = values_of(model)
    return values | {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "way", ["one group", "mixed", "offload", "kept", "tied", "compiled", "meta"]
)
def test_sites_train_as_whole_replicas(ranks: Pool, way: str, field: str) -> None:
    if field == "local" and way not in ("tied", "offload"):
        pytest.skip("two ways are enough for local updates")
    whole = ranks.run(trained, way, field, size=2)[0]
    loose = {"rtol": 0.05, "atol": 0.02} if way == "mixed" else {"rtol": 1e-4, "atol": 2e-5}
    # of eight bits, one may fall to the other side
    loose = {"rtol": 1e-2, "atol": 2e-3} if field == "local" else loose
    for values in ranks.run(trained, way, field, size=4):
        torch.testing.assert_close(values, whole, **loose)
