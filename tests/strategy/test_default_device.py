"""What torch's default device is changes nothing: every tensor that the library makes has its
device named. "meta" stands for "cuda", which this machine has not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.laws.test_frontends import METHODS
from tests.ranks import Pool
from tests.strategy.training import digest

FIELDS: dict[str, dict[str, Any]] = {
    **METHODS,
    "merge": {"gradient_merge": tw.GradientMerge(2)},
    "local, outer": {"localsgd": tw.LocalSGD(2, outer_momentum=0.5)},
    "lars": {"lars": tw.LARS()},
    "scaled": {"amp": tw.AMP("bfloat16", tw.DynamicLossScale(init_loss_scale=8.0))},
}


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def trained(rank: int, size: int, case: str, device: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [
        torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        for step in range(6)
    ]
    with default_device(device):
        strategy = tw.DistributedStrategy(**FIELDS[case])
        engine = strategy.prepare(
            model,
            optimizer,
            lambda out, x: (out.float() - x[:, :4]).square().mean(),
            grad_clip=None if "dgc" in case else tw.ClipByGlobalNorm(1.0),
        )
        for x in batches:
            loss = engine.train_step(x, x)
        assert float(engine.mean_loss(loss)) > 0
        state = engine.state_dict()
        engine.flush()
        engine.load_state_dict(state)
        engine.flush()
        engine.close()
    return digest(engine)


@pytest.mark.parametrize("case", FIELDS)
def test_bits_equal_without_a_scheduler(case: str, ranks: Pool) -> None:
    expected = ranks.run(trained, case, "cpu", size=2)
    assert ranks.run(trained, case, "meta", size=2) == expected


def trained_by_torch(rank: int, size: int, case: str) -> str:
    with patch.dict(os.environ, {"THINWIRE_KERNELS": "reference"}):
        return trained(rank, size, case, "cpu")


@pytest.mark.parametrize("case", [case for case in FIELDS if case != "lars"])
def test_torch_operations_train_with_the_bits_of_the_kernels(case: str, ranks: Pool) -> None:
    """They are what runs on a GPU. Those of LARS round differently."""
    assert ranks.run(trained_by_torch, case, size=2) == ranks.run(trained, case, "cpu", size=2)
