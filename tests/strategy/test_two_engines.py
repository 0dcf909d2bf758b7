"""Engines that train side by side, as of a generator and its critic."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import thinwire as tw


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


def test_a_gradient_that_the_user_changes_is_still_told() -> None:
    model = nn.Linear(4, 1)
    engine = tw.DistributedStrategy().prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    engine.minimize(model(torch.ones(2, 4)).mean())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.warns(UserWarning, match=r"the gradient of .* was changed.*no effect"):
        engine.minimize(model(torch.ones(2, 4)).mean())
    engine.close()
