"""`engine.apply_gradients`: the update from backward passes that somebody else has made."""

import warnings
from collections.abc import Sequence

import pytest
from torch import nn

from tests.ranks import Pool
from tests.strategy.training import batch, digest, make_engine
from thinwire.errors import ThinwireError

cross_entropy = nn.functional.cross_entropy


def both_ways(rank: int, size: int, fields: Sequence[str]) -> tuple[str, str, int, int]:
    """The bits after twelve microsteps by `minimize`, and by backward passes of the loop's own."""
    digests, steps = [], []
    for given in (False, True):
        engine = make_engine(fields, plain=True)
        for step in range(12):
            x, y = batch(step, rank)
            loss = cross_entropy(engine.model(x), y)
            if given:
                loss.backward()
                engine.apply_gradients(loss)
                engine.model.zero_grad()
            else:
                engine.minimize(loss)
        engine.flush()
        digests.append(digest(engine))
        steps.append(engine.step)
        engine.close()
    return digests[0], digests[1], steps[0], steps[1]


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("dgc",),
        ("low_rank",),
        ("lamb",),
        ("localsgd",),
        ("adaptive_localsgd",),
        ("gradient_merge",),
        ("gradient_merge", "dgc"),
    ],
    ids="+".join,
)
def test_it_makes_the_update_of_minimize(ranks: Pool, fields: Sequence[str]) -> None:
    for minimized, applied, steps, same in ranks.run(both_ways, fields):
        assert minimized == applied
        assert steps == same > 0


def test_what_needs_the_loss_before_its_backward_pass_is_refused(ranks: Pool) -> None:
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
