"""`timeout=` of the three ways to train: what it takes, that ranks agree, what it leaves."""

import math
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.laws.frontends import Case, LocalBlock, OwnStep, WithEngine, batches, bits_of
from tests.ranks import BACKENDS, Pool
from tests.toys import bits, descend

WAYS = {"engine": WithEngine, "local": LocalBlock, "dgc": OwnStep}


def one_step(way: str, timeout: Any) -> None:
    trainer = WAYS[way](Case(options={"timeout": timeout}))
    trainer.train(0, 0, 1)
    trainer.close()


@pytest.mark.parametrize("way", WAYS)
def test_malformed_time_is_refused_by_name(way: str) -> None:
    for wrong in ("5", [5], True):
        with pytest.raises(TypeError, match="timeout, in seconds or as a timedelta,"):
            one_step(way, wrong)
    for out_of_range in (0, -1, math.nan, math.inf, timedelta(0)):
        with pytest.raises(ValueError, match="timeout, in seconds or as a timedelta,"):
            one_step(way, out_of_range)
    for right in (None, 5, 0.5, timedelta(minutes=1)):
        one_step(way, right)


def unequal_speed(rank: int, size: int) -> tuple[float, str]:
    """Rank 1 falls behind by a fifth of the time-out between averagings, by more in all."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    begin_s = time.monotonic()
    with tw.local_sgd(model, sgd, tw.LocalSGD(2), timeout=6):
        for step in range(14):
            time.sleep(0.6 * rank)
            out = model(torch.full((3, 4), (step + rank) / 10))
            descend(sgd, nn.functional.mse_loss(out, torch.ones(3, 2)))
    return time.monotonic() - begin_s, bits(model.parameters())


@pytest.mark.slow
def test_slow_rank_may_fall_behind_by_the_time_out_between_averagings_only(ranks: Pool) -> None:
    (seconds, first), (_, second) = ranks.run(unequal_speed)
    assert seconds > 6
    assert first == second


def rank_0_alone(
    rank: int, size: int, way: str, seconds: float, how: str, limit_s: float
) -> tuple[float, str]:
    """Two steps over a time-out, for longer than which rank 0 works between them."""
    trainer = WAYS[way](Case(options={"timeout": limit_s}, local=tw.LocalSGD(1)))
    trainer.train(rank, 0, 1)
    begin_s = time.monotonic()
    if rank == 0 and how == "evaluate":
        nap = trainer.model.register_forward_pre_hook(lambda *_: time.sleep(1.0))
        for batch in batches(trainer.case, rank, 0, round(seconds)):
            trainer.engine.evaluate(*batch)  # type: ignore[attr-defined]
        nap.remove()
    elif rank == 0:
        with tw.busy(1 if how == "too short" else 60), tw.busy(timedelta(seconds=0.5)):
            time.sleep(seconds)
    try:
        trainer.train(rank, 1, 2)
        return time.monotonic() - begin_s, bits_of(trainer.model)
    except tw.errors.ThinwireError as error:
        return time.monotonic() - begin_s, f"{type(error).__name__}: {error}"
    finally:
        trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "how", "backend"),
    [
        *(("engine", "busy", backend) for backend in BACKENDS),
        *((way, "busy", "gloo") for way in ("local", "dgc")),
        ("engine", "evaluate", "gloo"),
    ],
)
def test_busy_rank_is_waited_for(ranks: Pool, way: str, how: str, backend: str | None) -> None:
    answers = ranks.run(rank_0_alone, way, 10.0, how, 6.0, backend=backend)
    (seconds, first), (waited, second) = answers
    assert min(seconds, waited) > 8  # longer than the time-out
    assert first == second
    assert ":" not in first


@pytest.mark.slow
@pytest.mark.fault
def test_rank_is_waited_for_as_long_as_it_reported_and_a_time_out_longer(ranks: Pool) -> None:
    _, (waited, told) = ranks.run(rank_0_alone, "engine", 12.0, "too short", 3.0)
    assert 3.5 < waited < 6
    assert told.startswith("PeerStalled")
    assert "within 3 s after a rank was last known to be busy: rank 0 was alive" in told


def test_a_time_for_busy_ranks_is_positive() -> None:
    for wrong, kind in (("5", TypeError), (None, TypeError), (0, ValueError), (-1, ValueError)):
        with pytest.raises(kind, match="at_most, in seconds or as a timedelta,"), tw.busy(wrong):
            pass
