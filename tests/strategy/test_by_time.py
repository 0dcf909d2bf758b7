"""Engines whose rounds end by time: ranks make unequal numbers of updates, and count by them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.local.rounds import rounds_of
from tests.ranks import Pool, Raised
from tests.strategy.training import (
    batch,
    digest,
    flat,
    make_engine,
    make_model,
    make_optimizer,
    train,
)

UPDATES = (3, 1)
"""That each rank makes in a round, whatever its time."""
TOKENS = (16, 48)
ROUNDS = 4
CONFIG = tw.LocalSGD(50, begin_step=0, round_seconds=1e9)
LOSS = nn.functional.cross_entropy


def by_engine(rank: int, size: int, merged: int, tokens: bool) -> tuple[list[str], int, int]:
    """What is held after each averaging, and the counts."""
    merge = {"gradient_merge": tw.GradientMerge(merged)} if merged > 1 else {}
    strategy = tw.DistributedStrategy(localsgd=CONFIG, **merge)
    model = make_model()
    optimizer = make_optimizer(model, ())
    engine = strategy.prepare(model, optimizer, LOSS)
    torch.manual_seed(rank)  # of dropout
    found = []
    with rounds_of(UPDATES[rank]):
        for step in range(ROUNDS * UPDATES[rank] * merged):
            engine.train_step(*batch(step, rank), tokens=TOKENS[rank] if tokens else None)
            assert engine.sync is not None
            if engine.sync.synced and not engine.stats()["microsteps"]:
                found.append(digest(engine))
                assert not engine.pending
    assert engine.stats()["averagings"] == ROUNDS
    return found, engine.step, engine.sync.step


def by_hand(rank: int, size: int, merged: int, tokens: bool) -> tuple[list[str], int, int]:
    """The same with `local_sgd` and a loop."""
    model = make_model()
    optimizer = make_optimizer(model, ())
    found, updates = [], ROUNDS * UPDATES[rank]
    with rounds_of(UPDATES[rank]), tw.local_sgd(model, optimizer, CONFIG) as sync:
        torch.manual_seed(rank)
        for update in range(updates):
            optimizer.zero_grad()
            for part in range(merged):
                x, y = batch(update * merged + part, rank)
                (LOSS(model(x), y) / merged).backward()
                sync.observe(0.0, tokens=TOKENS[rank] if tokens else None)
            optimizer.step()
            if sync.synced:
                found.append(digest(SimpleNamespace(model=model)))
        return found, updates, sync.step


@pytest.mark.parametrize(("merged", "tokens"), [(1, False), (1, True), (2, True)])
def test_the_bits_of_local_sgd(ranks: Pool, merged: int, tokens: bool) -> None:
    found = ranks.run(by_engine, merged, tokens)
    assert found == ranks.run(by_hand, merged, tokens)
    assert len(found[0][0]) == ROUNDS
    assert found[0][0] == found[1][0]
    assert [step for _, step, _ in found] == [ROUNDS * each for each in UPDATES]
    assert {common for _, _, common in found} == {ROUNDS * max(UPDATES)}


def composed(rank: int, size: int, fields: tuple[str, ...]) -> list[str]:
    engine = make_engine([*fields, "localsgd"], replace={"localsgd": CONFIG})
    found: list[str] = []
    with rounds_of(UPDATES[rank]):
        microstep = 0
        while len(found) < ROUNDS:
            loss = engine.train_step(*batch(microstep, rank))
            assert bool(loss.isfinite())
            microstep += 1
            if engine.sync.synced and engine.stats()["averagings"] > len(found):
                found.append(digest(engine))
    engine.flush()
    assert digest(engine) == found[-1]
    return found


@pytest.mark.parametrize(
    "fields",
    [("amp",), ("recompute", "lars"), ("dgc",), ("lamb", "gradient_merge"), ("amp", "dgc")],
    ids="-".join,
)
def test_other_fields_beside_it(ranks: Pool, fields: tuple[str, ...]) -> None:
    first, other = ranks.run(composed, fields)
    assert first == other
    assert len(set(first)) == ROUNDS


def leftover(rank: int, size: int, steps: int) -> tuple[str, str, int]:
    """Ranks stop after one and after two of three microsteps, beside two whole updates; rounds of
    so many updates end meanwhile on rank 0.
    """
    engine = make_engine(
        ("gradient_merge", "localsgd"),
        replace={"gradient_merge": tw.GradientMerge(3), "localsgd": CONFIG},
        plain=True,
    )
    with rounds_of(steps):
        for microstep in range((7, 2)[rank]):
            engine.train_step(*batch(microstep, rank))
    pending = engine.pending
    engine.flush()
    assert not engine.pending
    return digest(engine), pending, engine.step


@pytest.mark.parametrize("each", [99, 2])
def test_merged_gradients_are_flushed_whatever_their_number(ranks: Pool, each: int) -> None:
    (one, first, steps), (other, second, fewer) = ranks.run(leftover, each)
    assert one == other
    averaging = " and an averaging" if each > 2 else ""
    assert (first, second) == (f"1 merged microsteps{averaging}", "2 merged microsteps")
    assert (steps, fewer) == (3, 1)


def without_batches(
    rank: int, size: int, batches: tuple[int, ...]
) -> tuple[list[float], int, float]:
    engine = make_engine(("localsgd",), replace={"localsgd": CONFIG}, plain=True)
    with rounds_of(3), engine.join():
        for step in range(batches[rank]):
            engine.train_step(*batch(step, rank))
    engine.flush()
    return flat(engine.model), engine.step, engine.stats()["averagings"]


def test_a_rank_without_batches_counts_nothing(ranks: Pool) -> None:
    found, alone = ranks.run(without_batches, (9, 0)), make_engine((), plain=True)
    train(alone, (), 0, 9)
    assert found[0][0] == found[1][0]
    # 1e-5: an averaging takes the change off and puts it on again, in float32
    assert found[0][0] == pytest.approx(flat(alone.model), rel=1e-5, abs=1e-5)
    assert [steps for _, steps, _ in found] == [9, 0]
    assert [averagings for *_, averagings in found] == [3, 3]


def saved(rank: int, size: int, folder: str, part: str) -> list[str]:
    """Train whole, or in two parts."""
    engine = make_engine(("localsgd", "dgc"), replace={"localsgd": CONFIG})
    found: list[str] = []
    with rounds_of(UPDATES[rank]):
        if part == "second":
            engine.load(folder)
        first = 0 if part != "second" else 2 * UPDATES[rank]
        last = (2 if part == "first" else ROUNDS) * UPDATES[rank]
        for step in range(first, last):
            engine.train_step(*batch(step, rank))
            if engine.sync.synced:
                found.append(digest(engine))
    if part == "first":
        path = engine.save(folder)
        assert path.name.endswith(str(2 * max(UPDATES)))
    return found


@pytest.mark.slow
def test_resume_bit_for_bit(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks.run(saved, str(tmp_path), "whole")
    first = ranks.run(saved, str(tmp_path), "first")
    second = ranks.run(saved, str(tmp_path), "second")
    assert whole == [a + b for a, b in zip(first, second, strict=True)]


def resumed_alone(rank: int, size: int, folder: str) -> int:
    engine = make_engine(("localsgd", "dgc"), replace={"localsgd": CONFIG})
    engine.load(folder)
    return int(engine.sync.step)


def test_another_number_of_ranks_goes_on(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(saved, str(tmp_path), "first")
    assert ranks.run(resumed_alone, str(tmp_path), size=3) == [2 * max(UPDATES)] * 3


def saved_too_early(rank: int, size: int, folder: str) -> None:
    engine = make_engine(("localsgd",), replace={"localsgd": CONFIG})
    engine.train_step(*batch(0, rank))
    engine.save(folder)


def test_saving_between_averagings_is_refused_on_all(ranks: Pool, tmp_path: Path) -> None:
    for answer in ranks.run(saved_too_early, str(tmp_path), expect_errors=True):
        assert isinstance(answer, Raised)
        assert "save right after an averaging" in answer.text
    assert not any(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("fields", [(), ("localsgd",), ("adaptive_localsgd",)], ids="-".join)
@pytest.mark.parametrize("call", ["train_step", "minimize", "apply_gradients"])
def test_tokens_are_refused_where_nothing_is_weighed(fields: tuple[str, ...], call: str) -> None:
    engine = make_engine(fields)
    x, y = batch(0, 0)
    calls: dict[str, Callable[[], Any]] = {
        "train_step": lambda: engine.train_step(x, y, tokens=16),
        "minimize": lambda: engine.minimize(LOSS(engine.model(x), y), tokens=16),
        "apply_gradients": lambda: engine.apply_gradients(tokens=16),
    }
    with pytest.raises(ValueError, match=r"tokens=16 .*round_seconds"):
        calls[call]()
    engine.train_step(x, y)  # nothing is left behind
    assert engine.step == 1


def test_a_pipeline_does_not_take_it() -> None:
    with pytest.raises(tw.StrategyError, match=r"pipeline and localsgd\.round_seconds"):
        tw.DistributedStrategy(
            localsgd=tw.LocalSGD(8, round_seconds=1.0), pipeline=tw.Pipeline(2, 2)
        )


def test_local_updates_of_an_engine_are_at_hand() -> None:
    assert make_engine(()).sync is None
    sync = make_engine(("localsgd",)).sync
    assert isinstance(sync, tw.LocalUpdates)
    assert (sync.step, sync.k_steps, sync.synced) == (0, 2, False)
    with pytest.raises(ValueError, match="skip_step"):
        sync.end_round()
