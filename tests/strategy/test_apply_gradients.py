"""`engine.apply_gradients` and `engine.follow_steps`: updates from others' backward passes."""

import gc
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import Pool
from tests.strategy.training import batch, digest, make_engine
from thinwire.errors import ThinwireError

cross_entropy = nn.functional.cross_entropy


def closure(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    engine.model.zero_grad()
    loss = cross_entropy(engine.model(x), y)
    loss.backward()
    return loss


def test_callback_that_needs_the_loss_before_its_backward_pass_is_refused(ranks: Pool) -> None:
    assert ranks.run(refusal, ("amp",)) == ["loss scale"] * 2
    assert ranks.run(refusal, ("pipeline",)) == ["pipeline"] * 2


def refusal(rank: int, size: int, fields: Sequence[str]) -> str:
    engine = make_engine(fields, plain=True)
    with pytest.raises(RuntimeError, match=r"apply_gradients does not work.*train_step") as error:
        engine.apply_gradients()
    return "pipeline" if "pipeline" in str(error.value) else "loss scale"


def test_an_interval_that_follows_the_loss_asks_for_it(ranks: Pool) -> None:
    for text in ranks.run(without_loss):
        assert "observe" in text


def without_loss(rank: int, size: int) -> str:
    engine = make_engine(("adaptive_localsgd",), plain=True)
    x, y = batch(0, rank)
    cross_entropy(engine.model(x), y).backward()
    with pytest.raises((ThinwireError, RuntimeError)) as error:
        engine.apply_gradients()
    return str(error.value)


def test_gradients_that_were_given_are_no_left_ones(ranks: Pool) -> None:
    ranks.run(quiet)


def quiet(rank: int, size: int) -> None:
    engine = make_engine((), plain=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            x, y = batch(step, rank)
            for part in (slice(0, 8), slice(8, 16)):
                (cross_entropy(engine.model(x[part]), y[part]) / 2).backward()
            engine.apply_gradients()
            engine.model.zero_grad(set_to_none=step == 1)


def handled(rank: int, size: int) -> tuple[int, bool]:
    engine = make_engine((), plain=True)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    noted = engine.optimizer.step
    handle = engine.follow_steps()
    with pytest.raises(RuntimeError, match="follow_steps is already active"):
        engine.follow_steps()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch would warn of a step that it was not told of
        engine.optimizer.step(partial(closure, engine, *batch(0, rank)))
        scheduler.step()
    handle.remove()
    handle.remove()
    back = engine.optimizer.step == noted
    with pytest.raises(RuntimeError, match="was called while an engine uses"):
        engine.optimizer.step()
    engine.follow_steps()
    del handle
    kept = weakref.ref(engine)
    optimizer = engine.optimizer
    del engine
    gc.collect()
    assert kept() is None  # the optimizer does not keep its engine, and is given back
    optimizer.step()
    return scheduler.last_epoch, back


def test_hooks_of_followed_steps_are_removed(ranks: Pool) -> None:
    assert ranks.run(handled) == [(1, True)] * 2


def scheduled_afterwards(rank: int, size: int) -> tuple[int, float, bool]:
    engine = make_engine((), plain=True)
    handle = engine.follow_steps()
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
    before = engine.optimizer.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.optimizer.step(partial(closure, engine, *batch(0, rank)))
        scheduler.step()
    handle.remove()
    with pytest.raises(RuntimeError, match="was called while an engine uses"):
        engine.optimizer.step()
    return engine.step, engine.optimizer.param_groups[0]["lr"] / before, handle.active


def test_a_scheduler_may_be_made_after_steps_are_followed(ranks: Pool) -> None:
    assert ranks.run(scheduled_afterwards) == [(1, 0.5, False)] * 2


def scaled(rank: int, size: int, fields: Sequence[str]) -> tuple[str, bool]:
    engine = make_engine(fields, plain=True)
    engine.follow_steps()
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(0, rank)
    before = digest(engine)
    scaler.scale(cross_entropy(engine.model(x), y)).backward()
    with pytest.raises(RuntimeError, match="a GradScaler calls step") as error:
        scaler.step(engine.optimizer)
    return str(error.value), digest(engine) == before


@pytest.mark.parametrize("fields", [(), ("dgc",), ("localsgd",), ("gradient_merge",)])
def test_scaler_that_leaves_out_steps_is_refused(ranks: Pool, fields: Sequence[str]) -> None:
    for text, unmoved in ranks.run(scaled, fields):
        assert "amp=AMP(...)" in text
        assert unmoved
