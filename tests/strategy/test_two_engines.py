"""Engines that train side by side, as of a generator and its critic; an optimizer beside one."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.ranks import Pool


def second_optimizer(rank: int, size: int, fields: dict[str, Any]) -> tuple[list[str], list[float]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first, second = (
        torch.optim.SGD(model[0].parameters(), 0.1),
        torch.optim.SGD(model[1].parameters(), 0.1),
    )
    torch.manual_seed(rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = tw.DistributedStrategy(**fields).prepare(model, first)
        for _ in range(2):
            second.zero_grad()
            engine.minimize(model(torch.randn(8, 4)).square().mean())
            second.step()
        engine.flush()
    return [str(each.message) for each in said], [
        float(v) for p in model.parameters() for v in p.detach().reshape(-1)
    ]


@pytest.mark.parametrize("fields", [{}, {"localsgd": tw.LocalSGD(1)}])
def test_parameters_of_a_second_optimizer_are_named(fields: dict[str, Any], ranks: Pool) -> None:
    (said, first), (_, second) = ranks.run(second_optimizer, fields)
    assert len(said) == 1
    assert ": 1.weight, 1.bias." in said[0]
    assert not fields or first == second
