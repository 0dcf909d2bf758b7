"""What an engine with a pipeline leaves behind, and errors of one stage, which all are told."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import thinwire as tw
from tests.ranks import Pool


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))


def data(replica: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + replica)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def stages(**fields: Any) -> tw.DistributedStrategy:
    return tw.DistributedStrategy(pipeline=tw.Pipeline(2, 2, split_points=("2",)), **fields)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def prepared_again(rank: int, size: int, second: str) -> tuple[float, float, list[str]]:
    model, (x, y) = net(), data()
    engine = stages().prepare(model, sgd(model), mse_loss)
    for _ in range(20):
        engine.train_step(x, y)
    engine.model.eval()
    before, mine = engine.evaluate(x, y), dict(engine.model.state_dict())
    kept = {name: value.clone() for name, value in mine.items()}
    engine.close()
    if second == "the same":
        engine = stages().prepare(model, sgd(model), mse_loss)
    elif second == "other stages":
        pipeline = tw.Pipeline(2, 2, split_points=("3",))
        engine = tw.DistributedStrategy(pipeline=pipeline).prepare(model, sgd(model), mse_loss)
    else:
        engine = tw.DistributedStrategy().prepare(model, sgd(model), mse_loss)
    engine.model.eval()
    after = engine.evaluate(x, y)
    now = model.state_dict()
    return before.item(), after.item(), [k for k, v in kept.items() if not torch.equal(v, now[k])]


@pytest.mark.parametrize("second", ["the same", "other stages", "whole"])
def test_new_engine_continues_from_the_state_of_every_stage(ranks: Pool, second: str) -> None:
    for before, after, lost in ranks.run(prepared_again, second, size=2):
        assert after == pytest.approx(before, rel=1e-6)
        assert lost == []


def optimizer_again(rank: int, size: int, fields: Any, same: bool) -> tuple[float, float]:
    """The loss after four steps, with a new engine for the same optimizer between, and without."""
    x, y = data(rank // 2)
    losses = []
    for again in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        engine = stages(**fields).prepare(model, optimizer, mse_loss)
        for step in range(4):
            if again and step == 2:
                engine.close()
                strategy = stages(**fields) if same else tw.DistributedStrategy(**fields)
                engine = strategy.prepare(model, optimizer, mse_loss)
            loss = engine.train_step(x, y)
        losses.append(loss.item())
        engine.close()
    return losses[0], losses[1]


def test_the_optimizer_of_a_stage_may_be_prepared_again(ranks: Pool) -> None:
    for size in (2, 4):
        for one, other in ranks.run(optimizer_again, {}, True, size=size):
            assert one == other


def test_the_optimizer_of_a_stage_is_none_of_a_whole_model(ranks: Pool) -> None:
    ranks.raise_alike(
        "StrategyError",
        "left the optimizer with the parameters of one stage",
        optimizer_again,
        {},
        False,
        size=2,
    )


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(1.0).mul_(2.0)


def in_place(rank: int, size: int) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(InPlace(), nn.Linear(4, 8), nn.Linear(8, 2))
    (x, y), lr = data(), 0.0
    pipeline = tw.Pipeline(2, 2, split_points=("2",))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    engine = tw.DistributedStrategy(pipeline=pipeline).prepare(model, optimizer, mse_loss)
    kept = x.clone()
    losses = [engine.evaluate(x, y).item() for _ in range(2)]
    losses += [engine.train_step(x, y).item() for _ in range(2)]
    return [*losses, mse_loss(model(kept.clone()), y).item()], torch.equal(x, kept)


def test_model_may_begin_inplace(ranks: Pool) -> None:
    for losses, untouched in ranks.run(in_place, size=2):
        assert losses == pytest.approx([losses[-1]] * 5)
        assert untouched


def one_stage_fails(rank: int, size: int, what: str) -> str:
    model, (x, y) = net(), data()
    if what == "loss":
        loss_fn = mse_loss if rank else None
        engine = stages().prepare(model, sgd(model), loss_fn)
    else:
        model[3].bias.requires_grad_(False)
        engine = stages().prepare(model, sgd(model), mse_loss)
        model[3].bias.requires_grad_(True)
    with pytest.raises((RuntimeError, tw.errors.Mismatch)) as told:
        engine.train_step(x, y)
    return str(told.value)


@pytest.mark.parametrize(
    ("what", "wanted"), [("loss", "loss function"), ("unfrozen", "became trainable")]
)
def test_error_of_one_stage_before_step_lets_none_wait(ranks: Pool, what: str, wanted: str) -> None:
    """Who waits hears of a time-out, and not of this."""
    for text in ranks.run(one_stage_fails, what, size=2):
        assert wanted in text


def frozen_stage(rank: int, size: int) -> None:
    model = net()
    model[:2].requires_grad_(False)
    stages(localsgd=tw.LocalSGD(2)).prepare(model, sgd(model), mse_loss)


def test_a_frozen_stage_of_local_updates_is_refused_on_all_ranks(ranks: Pool) -> None:
    ranks.raise_alike(
        "StrategyError",
        "stage 1 of 2 has no non-empty parameter with requires_grad=True",
        frozen_stage,
        size=2,
    )


def traffic(rank: int, size: int) -> tuple[float, float]:
    model, (x, y) = net(), data()
    engine = stages().prepare(model, sgd(model), mse_loss)
    before = engine.stats()["bytes_between_stages"]
    engine.train_step(x, y)
    engine.train_step(x, y)
    return before, engine.stats()["bytes_between_stages"]


def test_bytes_between_stages_are_counted(ranks: Pool) -> None:
    for before, after in ranks.run(traffic, size=2):
        assert after - before >= 2 * 8 * 8 * 4  # two mini-batches of 8 times 8 floats


class Drawing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() if self.kind == "random" else float(np.random.rand())
        return self.layer(x) * drawn


@pytest.mark.parametrize("kind", ["random", "numpy"])
def test_recompute_draws_the_numbers_of_python_and_numpy_again(kind: str) -> None:
    grads = []
    for fields in ({}, {"recompute": tw.Recompute(("0",))}):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(Drawing(kind), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = tw.DistributedStrategy(**fields).prepare(model, optimizer, mse_loss)
        engine.train_step(*data())
        grads.append(model[0].layer.weight.grad)
        drawn = random.random() if kind == "random" else np.random.rand()
        grads.append(torch.tensor(drawn))
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])


@pytest.mark.parametrize("got", ["one element", "several", "a pair"])
def test_evaluate_wants_a_mean(got: str) -> None:
    model, (x, y) = net(), data()

    def loss_fn(outputs: Tensor, targets: Tensor) -> Any:
        each = (outputs - targets).square().mean(1)
        return {"one element": each.mean()[None], "several": each, "a pair": (each.mean(), {})}[got]

    engine = tw.DistributedStrategy().prepare(model, sgd(model), loss_fn)
    if got == "one element":
        assert engine.evaluate(x, y).shape == ()
        return
    with pytest.raises((TypeError, ValueError), match="loss"):
        engine.evaluate(x, y)


def test_parameters_of_a_checkpoint_get_no_gradient_of_the_old_ones(tmp_path: Any) -> None:
    x, y = data()
    model = net()
    tw.DistributedStrategy().prepare(model, sgd(model), mse_loss).save(tmp_path)
    weights = []
    for spoilt in (False, True):
        model = net()
        strategy = tw.DistributedStrategy(gradient_merge=tw.GradientMerge(2))
        engine = strategy.prepare(model, sgd(model), mse_loss)
        if spoilt:
            engine.train_step(100 * x, y)
        engine.load_parameters(tmp_path)
        assert engine.pending == ""
        engine.train_step(x, y)
        engine.train_step(x, y)
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(*weights)
