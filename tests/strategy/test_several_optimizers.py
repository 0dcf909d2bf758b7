"""Several optimizers of one model: what one optimizer of all parameters gives."""

import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import batch, digest, make_model, prepared, settings, train

FIELD_SETS = [
    (),
    ("amp",),
    ("gradient_merge",),
    ("low_rank",),
    ("lamb",),
    ("lars",),
    ("localsgd",),
    ("localsgd", "amp", "gradient_merge"),
    ("pipeline",),
]


def optimizers_of(model: nn.Module, fields: tuple[str, ...], several: bool) -> Any:
    """One optimizer of everything, or three: of weights of even and of odd places, and the rest."""
    named = list(model.named_parameters())
    matrices = [pair for pair in named if pair[1].dim() > 1]
    rest = [pair for pair in named if pair[1].dim() <= 1]
    parts = [matrices[::2], matrices[1::2], rest]

    def make(pairs: Any) -> torch.optim.Optimizer:
        if "lamb" in fields:
            return torch.optim.Adam(pairs, lr=0.02)
        return tw.optim.SGD(pairs, tw.schedules.CosineDecay(0.0, 0.05, 20), momentum=0.9)

    return [make(part) for part in parts] if several else make(named)


def engine_of(fields: tuple[str, ...], several: bool, **given: Any) -> Any:
    make = partial(optimizers_of, fields=fields, several=several)
    return prepared(optimizer=make, options=given, **settings(fields))


def trained(rank: int, size: int, fields: tuple[str, ...], several: bool) -> str:
    clip = None if "lars" in fields else tw.optim.ClipByGlobalNorm(0.5)
    engine = engine_of(fields, several, grad_clip=clip)
    train(engine, fields, 0, 8)
    engine.flush()
    return digest(engine)


@pytest.mark.parametrize("fields", FIELD_SETS, ids=lambda fields: " ".join(fields) or "dense")
def test_three_give_the_bits_of_one(fields: tuple[str, ...], ranks: Pool) -> None:
    assert ranks.run(trained, fields, True) == ranks.run(trained, fields, False)


def resumed(rank: int, size: int, folder: str, fields: tuple[str, ...]) -> list[str]:
    whole, first, second = (engine_of(fields, True) for _ in range(3))
    train(whole, fields, 0, 8)
    train(first, fields, 0, 5)
    first.optimizers[1].state["steps of mine"] = 3
    first.save(folder)
    second.load(folder)
    found = [(each.position, each.state.get("steps of mine")) for each in second.optimizers]
    assert found == [(5, None), (5, 3), (5, None)]
    train(second, fields, 5, 8)
    return [digest(whole), digest(second)]


@pytest.mark.parametrize("fields", [(), ("low_rank",), ("localsgd",)], ids=str)
def test_a_checkpoint_goes_on(fields: tuple[str, ...], ranks: Pool, tmp_path: Path) -> None:
    for whole, second in ranks.run(resumed, str(tmp_path / "checkpoint"), fields):
        assert whole == second


def schedulers_saved(rank: int, size: int, folder: str) -> list[list[int]]:
    def made() -> tuple[Any, list[Any]]:
        model = make_model(plain=True)
        named = list(model.named_parameters())
        several = [torch.optim.SGD(named[:3], 0.1), torch.optim.AdamW(named[3:], 0.1)]
        engine = tw.DistributedStrategy().prepare(model, several, cross_entropy)
        return engine, [torch.optim.lr_scheduler.StepLR(each, 2) for each in several]

    engine, schedulers = made()
    train(engine, (), 0, 3)
    schedulers[0].step()
    for _ in range(4):
        schedulers[1].step()
    engine.save(folder)
    again, others = made()
    again.load(folder)
    return [[each.last_epoch for each in those] for those in (schedulers, others)]


def test_every_scheduler_goes_on_with_its_own_optimizer(ranks: Pool, tmp_path: Path) -> None:
    for before, after in ranks.run(schedulers_saved, str(tmp_path / "checkpoint")):
        assert before == after == [1, 4]


def followed(
    rank: int, size: int, fields: tuple[str, ...], order: tuple[int, ...], between: bool
) -> list[str]:
    found = []
    for by_hand in (False, True):
        engine = engine_of(fields, True)
        assert engine.optimizer is engine.optimizers[0] and len(engine.optimizers) == 3
        if by_hand:
            engine.follow_steps()
        for step in range(6):
            x, y = batch(step, rank)
            if not by_hand:
                engine.train_step(x, y)
                continue
            if not between:
                engine.model.zero_grad()
            cross_entropy(engine.model(x), y).backward()
            for place in order:
                torch.nn.utils.clip_grad_norm_(
                    engine.optimizers[place].param_groups[0]["params"], 9
                )
                engine.optimizers[place].step()
                if between:
                    engine.optimizers[place].zero_grad()
        engine.flush()
        found.append(digest(engine))
        engine.close()
    return found


@pytest.mark.parametrize("fields", [(), ("localsgd",)], ids=str)
@pytest.mark.parametrize("between", [False, True])
def test_steps_by_hand_in_any_order(fields: tuple[str, ...], between: bool, ranks: Pool) -> None:
    """Gradients are clipped and cleared before or between the steps."""
    for first, second in ranks.run(followed, fields, (2, 0, 1), between):
        assert first == second


def gan() -> tuple[nn.Module, Any, Any]:
    """A model with a generator and a critic, and an optimizer of each."""
    torch.manual_seed(7)
    model = nn.ModuleDict({"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)})
    generator, critic = (torch.optim.Adam(part.parameters(), 0.01) for part in model.values())
    return model, generator, critic


def gan_loop(model: Any, generator: Any, critic: Any, kind: str, rank: int, steps: int) -> None:
    """Train in turn, each from a loss of its own."""
    for step in range(steps):
        z, real = batch(step, rank)[0], batch(step + 100, rank)[0] * 3
        for _ in range(2 if kind == "two steps of the critic" else 1):
            critic.zero_grad(set_to_none=kind != "cleared in place")
            fake = model["generator"](z)
            scores = model["critic"](real), model["critic"](fake.detach())
            (softplus(-scores[0]) + softplus(scores[1])).mean().backward()
            if kind != "a critic that begins later":
                critic.step()
        generator.zero_grad(set_to_none=kind != "cleared in place")
        model["critic"].requires_grad_(kind != "a frozen critic")
        softplus(-model["critic"](model["generator"](z))).mean().backward()
        model["critic"].requires_grad_(True)
        generator.step()


GANS = ["one step of each", "two steps of the critic", "a critic that begins later"]
GANS += ["a frozen critic", "cleared in place"]


def followed_gan(rank: int, size: int, kind: str, config: Any, odd: tuple[int, ...]) -> list[Any]:
    model, generator, critic = gan()
    engine = tw.DistributedStrategy(localsgd=config).prepare(model, [generator, critic])
    before = digest(engine)
    engine.follow_steps()
    try:
        if rank in odd:
            gan_loop(model, generator, critic, kind, rank, 4)
        for step in range(4):
            model.zero_grad()
            model["critic"](model["generator"](batch(step, rank)[0])).mean().backward()
            generator.step()
            critic.step()
    except RuntimeError as error:
        return [str(error), digest(engine) == before or len(odd) == 1]
    return ["", False]


def flushed_between(rank: int, size: int, config: Any) -> list[Any]:
    model, generator, critic = gan()
    engine = tw.DistributedStrategy(localsgd=config).prepare(model, [generator, critic])
    before = digest(engine)
    engine.follow_steps()
    model["critic"](model["generator"](batch(0, rank)[0])).mean().backward()
    generator.step()
    try:
        engine.flush()
    except RuntimeError as error:
        return [str(error), digest(engine) == before]
    return ["", False]


@pytest.mark.parametrize("config", [None, tw.LocalSGD(2)], ids=["dense", "local"])
def test_a_flush_between_the_steps_of_two_optimizers_is_an_error(config: Any, ranks: Pool) -> None:
    for text, unmoved in ranks.run(flushed_between, config):
        assert "flush" in text and "[0]" in text and unmoved


@pytest.mark.parametrize("config", [None, tw.LocalSGD(2)], ids=["dense", "local"])
@pytest.mark.parametrize("kind", GANS)
def test_optimizers_out_of_step_are_an_error_on_all(kind: str, config: Any, ranks: Pool) -> None:
    for odd in ((0, 1), (1,)) if kind in GANS[:3] else ((0, 1),):
        for text, unmoved in ranks.run(followed_gan, kind, config, odd):
            assert "optimizer 1 (Adam)" in text or "optimizer 0 (Adam)" in text
            assert "one engine a part" in text
            assert unmoved


@pytest.mark.parametrize("kind", GANS[:4])
def test_engine_for_every_part_trains_as_the_plain_loop_does(kind: str) -> None:
    found = []
    for followed in (False, True):
        model, generator, critic = gan()
        if followed:
            for part, optimizer in zip(model.values(), (generator, critic), strict=True):
                tw.DistributedStrategy().prepare(part, optimizer).follow_steps()
        gan_loop(model, generator, critic, kind, 0, 5)
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))


def local_gan(rank: int, size: int, kind: str) -> tuple[list[int], list[Any]]:
    model, generator, critic = gan()
    averaged = []
    with tw.local_sgd(model, [generator, critic], tw.LocalSGD(4)) as sync:
        for step in range(12):
            gan_loop(model, generator, critic, kind, rank + 2 * step, 1)
            averaged.append(int(sync.stats()["averagings"]))
    return averaged, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", GANS[:3])
def test_local_steps_go_on_where_an_optimizer_steps_less_often(kind: str, ranks: Pool) -> None:
    (averaged, first), (same, second) = ranks.run(local_gan, kind)
    assert averaged == same
    assert averaged[-1] >= 2
    assert all(map(torch.equal, first, second))


def local_steps(rank: int, size: int, order: tuple[int, ...] | None) -> list[Any]:
    model = make_model(plain=True)
    made = optimizers_of(model, (), order is not None)
    with tw.local_sgd(model, made, tw.LocalSGD(3, 0)) as sync:
        synced = []
        for step in range(7):
            x, y = batch(step, rank)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            for each in [made] if order is None else [made[place] for place in order]:
                each.step()
            synced.append(sync.synced)
        assert sync.step == 7
    return [synced, [p.detach().clone() for p in model.parameters()]]


def test_local_step_is_over_when_every_has_stepped(ranks: Pool) -> None:
    (synced, expected), _ = ranks.run(local_steps, None)
    for order in itertools.permutations(range(3)):
        for found, params in ranks.run(local_steps, order):
            assert found == synced == [False, False, True, False, False, True, False]
            assert all(map(torch.equal, params, expected))


def left_in_the_middle(rank: int, size: int, last: int) -> list[torch.Tensor]:
    model = make_model(plain=True)
    made = optimizers_of(model, (), True)
    with tw.local_sgd(model, made, tw.LocalSGD(2, 0)):
        for step in range(3):
            x, y = batch(step, rank)
            cross_entropy(model(x), y).backward()
            for each in made:
                each.step()
        made[last].step()  # and no other
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("last", range(3))
def test_ranks_are_equal_whatever_was_stepped_last(last: int, ranks: Pool) -> None:
    first, second = ranks.run(left_in_the_middle, last)
    assert all(map(torch.equal, first, second))


def by_local_sgd(model: nn.Module, optimizers: Any) -> Any:
    return tw.local_sgd(model, optimizers, tw.LocalSGD(2))


def by_prepare(model: nn.Module, optimizers: Any) -> Any:
    return tw.DistributedStrategy().prepare(model, optimizers)


@pytest.mark.parametrize("start", [by_local_sgd, by_prepare])
def test_unusual_setup_is_refused_or_reported(start: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first, second = model[0].parameters, model[1].parameters
    twice = [torch.optim.SGD(first(), 0.1), torch.optim.AdamW(model.parameters())]
    with pytest.raises(ValueError, match=r"parameter 0\.weight is in optimizer 0 \(SGD\) and in"):
        start(model, twice)
    with pytest.raises(ValueError, match="empty sequence"):
        start(model, [])
    with pytest.raises(TypeError, match=r"optimizer\[1\] must be a torch.optim.Optimizer, got str"):
        start(model, [twice[0], "adam"])
    exchanging = [twice[0], tw.optim.DGCMomentum(second(), 0.1)]
    with pytest.raises((TypeError, tw.errors.StrategyError), match=r"DGCMomentum.*exchanges"):
        start(model, exchanging)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        started = start(model, [twice[0], torch.optim.SGD([model[1].weight], 0.1)])
    assert [str(each.message).count("1.bias") for each in said] == [1]
    assert started.__class__.__name__ in ("LocalUpdates", "Engine")
