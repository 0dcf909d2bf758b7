"""Pairs of fields, and triples and more at random: trained on real ranks, or refused in words."""

import math
import random
from collections.abc import Sequence

import pytest

from tests.api import RULES
from tests.ranks import Pool
from tests.strategy.test_rules import CONFLICTS, PAIRS
from tests.strategy.training import FIELDS, digest, make_engine, train, world_rank


def conflicting(fields: Sequence[str]) -> bool:
    return any(conflict <= set(fields) for conflict in CONFLICTS)


def some_combinations(count: int) -> list[tuple[str, ...]]:
    """Of three fields and more, drawn once and for all, none of them with a conflict."""
    draw = random.Random(20261120)
    found: set[tuple[str, ...]] = set()
    while len(found) < count:
        size = draw.randint(3, 7)
        fields = tuple(name for name in FIELDS if name in draw.sample(list(FIELDS), size))
        if not conflicting(fields):
            found.add(fields)
    return sorted(found)


def five_updates(
    rank: int, size: int, fields: Sequence[str]
) -> tuple[list[float], str, dict[str, object]]:
    engine = make_engine(fields)
    microsteps = 10 if "gradient_merge" in fields else 5
    losses = train(engine, fields, 0, microsteps)
    # five steps are few and every one sees another batch: falling is judged on the first batch
    # again
    again = train(engine, fields, 0, 2)
    engine.flush()
    stats = {**engine.stats(), "pending": engine.pending}
    engine.close()
    assert world_rank() == rank
    return [losses[0], sum(again) / 2], digest(engine), stats


def check_training(fields: Sequence[str], pool: Pool) -> None:
    size = 4 if "pipeline" in fields else 2
    answers = pool.run(five_updates, tuple(fields), size=size)
    for (first, last), _, stats in answers:
        assert math.isfinite(first)
        assert last < first, (fields, first, last)
        assert stats["step"] >= 5
        assert stats["bytes_sent"] > 0
        assert stats["dropped_steps"] == 0
        assert stats["pending"] == ""
    # ranks 0, 2 hold one stage of a pipeline, 1, 3 the other
    stages = 2 if "pipeline" in fields else 1
    for stage in range(stages):
        assert len({answer[1] for answer in answers[stage::stages]}) == 1, (
            f"replicas of stage {stage} differ"
        )


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not conflicting(pair)], ids="-".join)
def test_every_pair_that_works_trains(pair: tuple[str, str], ranks: Pool) -> None:
    """What the others say is in `test_rules.py`."""
    assert next(rule for rule in RULES if set(rule.pair) == set(pair)).works
    check_training(pair, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("fields", some_combinations(40), ids="-".join)
def test_more_than_two_fields_work(fields: tuple[str, ...], ranks: Pool) -> None:
    check_training(fields, ranks)
