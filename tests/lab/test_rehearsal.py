"""What is done before the clock starts uses every part of a strategy, and changes nothing."""

from pathlib import Path

import pytest
import torch

from tests import api
from tests.lab.configs import config
from tests.ranks import Pool

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "strategies").glob("*.yaml"))
STEPS = 4


def test_intervals_become_short_and_nothing_else_changes() -> None:
    local = {"k_steps": 64, "begin_step": 200, "fragments": 8, "delay": 5}
    local |= {"outer_lr": 0.7, "average_state": True}
    short = {**local, "k_steps": 4, "begin_step": 1, "fragments": 2, "delay": 1}
    assert api.shortened({"document": {"localsgd": local}}) == {"document": {"localsgd": short}}
    dgc = {"rampup_begin_step": 0, "rampup_step": 800, "sparsity": [0.75, 0.999]}
    assert api.shortened(dgc) == {**dgc, "rampup_step": 5}
    assert api.shortened({"k_steps": 2, "begin_step": 0}) == {"k_steps": 2, "begin_step": 0}
    assert api.shortened({"loss_scale": {"dynamic": {"init_loss_scale": 65536.0}}})["loss_scale"][
        "dynamic"
    ] == {"init_loss_scale": 1024.0}


def config_of(word: str) -> api.RunConfig:
    (recipe,) = api.choose([word])
    return config(recipe=recipe, model=api.ModelSize(64, 2, context=16), batch=1)


def losses(
    rank: int, size: int, word: str, rehearsed: bool
) -> tuple[list[float], list[float], float]:
    """Of a few steps on each rank, the parameters after them, and the bytes counted."""
    run = config_of(word)
    work = api.work_of(run)
    random = torch.get_rng_state()
    if rehearsed:
        api.rehearse(run, work)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is None for p in work.model.parameters())
    setup = api.Setup(run.optimizer)
    trainer = api.build_trainer(run.recipe.trainer, run.recipe.arguments(10), work.model, setup)
    text = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(STEPS):
        for group in trainer.optimizer.param_groups:
            group["lr"] = run.recipe.rates[run.optimizer]
        batch = torch.randint(256, (2, 17), generator=text)
        found.append(float(trainer.train_step(batch[:, :-1], batch[:, 1:])))
    trainer.finish()
    trainer.close()
    return (
        found,
        [float(p.detach().sum()) for p in trainer.module.parameters()],
        round(trainer.sent_bytes(), 6),  # a difference of large counters
    )


@pytest.mark.parametrize(
    "word", [*api.STRATEGIES, *map(str, EXAMPLES)], ids=lambda word: Path(word).stem
)
def test_a_rehearsal_changes_no_bit_of_the_training(word: str, ranks: Pool) -> None:
    assert ranks.run(losses, word, True, size=2) == ranks.run(losses, word, False, size=2)
