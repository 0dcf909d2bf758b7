"""How many agreements over the ranks one update makes: each is a round trip of a slow line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.ranks import Pool

CEILINGS = json.loads((Path(__file__).parents[2] / "benchmarks" / "structure.json").read_text())
STEPS = 6
AGREEMENT_BYTES = (24, 40)
"""Of an agreement a rank sends so many bytes first, the latter with a proof."""


@contextmanager
def counted(counts: list[int]) -> Iterator[None]:
    """Add the agreements that are launched inside to `counts[0]`."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, swap = getattr(dist, name), dist.all_to_all_single

    def noted(out: Any, message: Any, *args: Any, **options: Any) -> Any:
        counts[0] += message.dtype == torch.uint8 and message.numel() in AGREEMENT_BYTES
        return gather(out, message, *args, **options)

    def noted_at_once(out: Any, copies: Any, *args: Any, **options: Any) -> Any:
        length = copies.numel() // dist.get_world_size(options["group"])
        counts[0] += not args and copies.dtype == torch.uint8 and length in AGREEMENT_BYTES
        return swap(out, copies, *args, **options)

    setattr(dist, name, noted)
    dist.all_to_all_single = noted_at_once
    try:
        yield
    finally:
        setattr(dist, name, gather)
        dist.all_to_all_single = swap


class Net(nn.Module):
    """With batch norm, and a branch that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.seldom, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.seldom(x) if x.sum() > 0 else x)


# its messages are longer than an agreement
DGC = tw.DGC(min_numel=64, sparsity=(0.5,), value_bits=32)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dgc": {"fields": {"dgc": DGC}},
    "dgc, from gradients": {"fields": {"dgc": DGC}, "own_backward": True},
    "low rank": {"fields": {"low_rank": tw.LowRank(2, begin_step=1, min_numel=64)}},
    "everything": {
        "model": Net,
        "fields": {
            "amp": tw.AMP("float16", tw.DynamicLossScale(init_loss_scale=2.0**8)),
            "dgc": DGC,
        },
        "options": {"find_unused_parameters": True, "grad_clip": tw.optim.ClipByNorm(1.0)},
        "joins": True,
    },
    "everything, pipeline": {
        "fields": {
            "amp": tw.AMP("float16", tw.DynamicLossScale(init_loss_scale=2.0**8)),
            "pipeline": tw.Pipeline(stages=2, micro_batches=2),
        },
        "options": {"grad_clip": tw.ClipByGlobalNorm(1.0)},
        "size": 4,
        "stages": 2,
    },
}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def agreements(rank: int, size: int, kind: str) -> float:
    """Of each update, once all is set up."""
    torch.manual_seed(5)
    made = KINDS[kind]
    model = made["model"]() if "model" in made else (plain() if "fields" in made else plain()[::2])
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.01, momentum=0.9)
    strategy = tw.DistributedStrategy(**made.get("fields", {}))
    engine = strategy.prepare(
        model, optimizer, nn.functional.cross_entropy, **made.get("options", {})
    )
    counts = [0]
    with engine.join() if made.get("joins") else nullcontext():
        for step in range(2 * STEPS):
            generator = torch.Generator().manual_seed(100 * step + rank // made.get("stages", 1))
            x = torch.randn(16, 8, generator=generator)
            y = x[:, :4].argmax(1)
            with counted(counts) if step >= STEPS else nullcontext():
                if made.get("own_backward"):
                    model.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    engine.apply_gradients()
                else:
                    engine.train_step(x, y)
    assert engine.step + engine.stats()["dropped_steps"] == 2 * STEPS
    return counts[0] / STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_makes_few_agreements(ranks: Pool, kind: str) -> None:
    found = max(ranks.run(agreements, kind, size=KINDS[kind].get("size", 2)))
    assert found <= CEILINGS[f"agreements an update: {kind}"], found
