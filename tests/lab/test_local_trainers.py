"""Local updates in the comparison, step by step on two ranks."""

import pytest
import torch
from torch import nn

from tests.api import STRATEGIES, Prepared, Setup, build_trainer
from tests.ranks import Pool

LOCAL = ["localsgd", "adaptive-localsgd", "diloco", "sparse-local"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))


def parameters(module: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def run(rank: int, size: int, name: str, steps: int) -> list[tuple[bool, list[float], float]]:
    recipe = STRATEGIES[name]
    trainer = build_trainer(recipe.trainer, recipe.arguments(10), model(), Setup("sgd"))
    assert isinstance(trainer, Prepared)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1
    random = torch.Generator().manual_seed(rank)
    seen = [(True, parameters(trainer.module), trainer.sent_bytes())]
    for _ in range(steps):
        text = torch.randint(256, (2, 9), generator=random)
        trainer.train_step(text[:, :-1], text[:, 1:])
        seen.append((trainer.agreed, parameters(trainer.module), trainer.sent_bytes()))
    averaging_s, pending_s = trainer.step_s[False], trainer.step_s[True]
    assert trainer.finish_s == max(0.0, averaging_s - pending_s)
    trainer.finish()
    seen.append((True, parameters(trainer.module), trainer.sent_bytes()))
    trainer.close()
    return seen


@pytest.mark.parametrize("name", LOCAL)
def test_agreed_is_where_ranks_are_equal_and_bytes_grow_there_alone(name: str, ranks: Pool) -> None:
    first, second = ranks.run(run, name, 40, size=2)
    assert sum(agreed for agreed, _, _ in first) >= 3
    for step, ((agreed, mine, sent), (_, other, _)) in enumerate(zip(first, second, strict=True)):
        assert agreed == (mine == other), step
        if 1 < step <= 40:
            assert agreed == (sent > first[step - 1][2]), step
    assert first[-1][2] > first[-2][2]  # 40 steps do not end with an averaging


def agreed_with_delay(rank: int, size: int) -> list[tuple[bool, bool]]:
    local = {"k_steps": 8, "delay": 3, "compression": {"quantized": {"value_bits": 4}}}
    setup = Setup("sgd")
    trainer = Prepared(model(), setup, document={"localsgd": local})
    seen = []
    for step in range(40):
        text = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(2 * step + rank))
        trainer.train_step(text[:, :-1], text[:, 1:])
        assert trainer.engine.sync is not None
        seen.append((trainer.agreed, trainer.engine.sync.pending is None))
    trainer.finish()
    trainer.close()
    return seen


def test_with_a_delay_agreed_is_where_nothing_is_on_its_way(ranks: Pool) -> None:
    # an averaging that goes on while the clock stands still would cost nothing
    first, second = ranks.run(agreed_with_delay, size=2)
    assert first == second
    assert all(agreed == nothing for agreed, nothing in first)
    assert 10 < sum(agreed for agreed, _ in first) < 30
