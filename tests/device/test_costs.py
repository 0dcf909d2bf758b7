"""What one exchange costs on a device that is not the CPU: waits, launches, bytes over the bus."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import ByteTransformer, ModelSize
from tests.device import stand_in
from tests.ranks import Pool


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return tw.optim.Muon(tw.optim.muon_groups(model), lr=0.01, ns_dtype=torch.float32)


@dataclass(frozen=True)
class Cost:
    """Of one exchange and the steps up to it, beyond those of the optimizer alone."""

    waits: int
    launches: int
    down: float
    """Bytes a parameter to the host."""
    up: float


def local(*cost: Any, by: Any = adamw, **config: Any) -> Any:
    return {"localsgd": tw.LocalSGD(2, begin_step=0, **config)}, by, Cost(*cost)


LOW_RANK = tw.LowRank(2, begin_step=1, min_numel=256)
DGC = tw.DGC(sparsity=(0.99,), min_numel=256)
AMP = tw.AMP("float16")
ONE, FOUR, EIGHT = tw.Quantized(1), tw.Quantized(4), tw.Quantized(8)
SPLIT = tw.Quantized(1, exchange="split")
COSTS: dict[str, tuple[dict[str, Any] | None, Callable[[nn.Module], Any], Cost]] = {
    # with the launches of Muon itself
    "dense, Muon": (None, muon, Cost(3, 184, 4.0, 4.0)),
    "dense": ({}, adamw, Cost(3, 51, 4.0, 4.0)),
    "clip": ({}, adamw, Cost(3, 901, 4.0, 4.0)),
    "dgc": ({"dgc": DGC}, sgd, Cost(5, 2003, 0.1, 0.4)),
    "low rank": ({"low_rank": LOW_RANK}, adamw, Cost(5, 646, 0.2, 0.2)),
    "4 bits": ({"compression": FOUR}, adamw, Cost(5, 1904, 0.5, 1.0)),
    "lamb": ({"lamb": tw.LAMB()}, adamw, Cost(3, 3083, 4.0, 4.0)),
    "lars": ({"lars": tw.LARS()}, sgd, Cost(3, 2551, 4.0, 4.0)),
    "amp": ({"amp": AMP}, adamw, Cost(3, 333, 4.0, 4.0)),
    "local": local(6, 437, 4.0, 4.0),
    "local, momentum": local(7, 460, 4.0, 4.0, outer_momentum=0.9),
    "local, 1 bit": local(6, 111, 0.1, 0.3, by=muon, compression=ONE),
    "local, 4 bits": local(6, 409, 0.5, 1.0, by=muon, compression=FOUR),
    "local, 8 bits": local(6, 4704, 1.0, 2.0, compression=EIGHT),
    "local, 1 bit, split": local(8, 4761, 0.2, 0.3, compression=SPLIT),
    "local, 1 bit, host": local(7, 108, 8.1, 20.3, compression=ONE, state_device="cpu"),
    "local, 1 bit, delay": local(5, 183, 0.1, 0.3, compression=ONE, delay=1),
    "local, sparse": local(9, 3584, 5.2, 3.6, compression=tw.Sparse(0.9)),
    "local, low rank": local(9, 1368, 0.2, 0.2, compression=LOW_RANK),
}
"""At most; a count that falls makes its ceiling fall."""


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def batches(rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(rank)
    for _ in range(count):
        text = torch.randint(256, (4, 17), generator=source).to(stand_in.FIRST)
        yield text[:, :-1], text[:, 1:]


def counted(rank: int, steps: int, train: Callable[[Tensor, Tensor], Any]) -> stand_in.Counting:
    """Of so many steps, once the exchange is steady."""
    for batch in batches(rank, 4):
        train(*batch)
    given = list(batches(rank + 2, steps))
    with stand_in.Counting() as seen:
        for batch in given:
            train(*batch)
    return seen


def cost(rank: int, size: int, name: str) -> tuple[Cost, list[str]]:
    """Also the lines that wait, and those that launch most."""
    stand_in.library()
    fields, make, _ = COSTS[name]
    steps = 2 if fields and "localsgd" in fields else 1
    models = []
    for _ in range(2):  # 76 tensors
        torch.manual_seed(0)
        models.append(ByteTransformer(ModelSize(64, 12, context=16)).to(stand_in.FIRST))
    alone, model = models
    optimizer = make(alone)

    def step(x: Tensor, y: Tensor) -> None:
        loss_of(alone(x), y).backward()  # type: ignore[no-untyped-call]
        if fields is not None:
            optimizer.step()
        optimizer.zero_grad()

    plain = counted(rank, steps, step)
    clip = tw.ClipByGlobalNorm(1.0) if name == "clip" else None
    engine = tw.DistributedStrategy(**fields or {}).prepare(
        model, make(model), loss_of, grad_clip=clip
    )
    seen = counted(rank, steps, engine.train_step)
    engine.flush()
    engine.close()
    waits = [f"{n} waits: {line}" for line, n in seen.waits.most_common()]
    launches = [f"{n} launches: {line}" for line, n in seen.launches.most_common(9)]
    numel = sum(p.numel() for p in model.parameters())
    moved = (round(seen.bytes[way] / numel, 1) for way in ("down", "up"))
    beyond = seen.launches.total() - plain.launches.total()
    return Cost(seen.waits.total(), beyond, *moved), waits + launches


@pytest.mark.parametrize("name", COSTS)
def test_exchange_on_a_device_stays_within_its_row(ranks: Pool, name: str) -> None:
    found, lines = max(ranks.run(cost, name), key=lambda pair: astuple(pair[0]))
    most = COSTS[name][2]
    # what torch itself launches differs from version to version
    least = Cost(most.waits, round(most.launches * 0.9) - 9, most.down - 0.1, most.up - 0.1)
    bounds = zip(astuple(least), astuple(found), astuple(most), strict=True)
    kept = all(low <= value <= high for low, value, high in bounds)
    assert kept, "\n".join([f"{name}: {found}, where the row has {most}", *lines])
