"""Engines that train side by side, as of a generator and its critic; an optimizer beside one."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import thinwire as tw
from tests.ranks import Pool


def test_a_generator_and_its_critic_train_without_a_warning() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    engines = [
        tw.DistributedStrategy().prepare(m, torch.optim.Adam(m.parameters()))
        for m in (generator, critic)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            z = torch.randn(8, 4)
            fake = critic(generator(z).detach())
            engines[1].minimize(softplus(-critic(z)).mean() + softplus(fake).mean())
            engines[0].minimize(softplus(-critic(generator(z))).mean())
    for engine in engines:
        engine.close()


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
