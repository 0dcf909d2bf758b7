"""Settings that a plan compares: valid ones, quick to predict."""

import cProfile
import pstats
from typing import Any

import pytest

import thinwire as tw
from tests.api import LEFT_OUT, STRATEGIES
from tests.processes import ran_thinwire

NUMBERS: dict[str, Any] = {"params": "124M", "step_seconds": 0.35, "link": "100mbit"}


def in_file(document: Any) -> bool:
    return tw.DistributedStrategy.from_dict(document).to_dict() is not None


@pytest.mark.parametrize("workers", [2, 8])
def test_every_setting_is_a_strategy_that_can_be_prepared(workers: int) -> None:
    plan = tw.plan(**NUMBERS, workers=workers)
    names = [row.name for row in plan.strategies]
    assert len(set(names)) == len(names) > 300
    documents = [row.document for row in plan.strategies if row.document is not None]
    assert all(map(in_file, documents))
    assert not any("split" in name or "gather" in name for name in names) or workers > 2


def test_strategies_are_found_by_their_name_and_the_best_setting_of_every_is_shown() -> None:
    plan = tw.plan(**NUMBERS, workers=8)
    for name in set(STRATEGIES) - set(LEFT_OUT):
        assert plan[name].strategy == name
    best = plan.best()
    assert [row.strategy for row in best].count("dense") == 1
    assert len({row.strategy for row in best}) == len(best)
    for row in plan.strategies:
        shown = next(other for other in best if other.strategy == row.strategy)
        assert shown.time_at_worst <= row.time_at_worst or not row.reaches_dense_loss
    with pytest.raises(KeyError, match=r"'nothing' is not a row of this plan.*dense"):
        _ = plan["nothing"]


def test_planned_setting_sends_no_fewer_entries_than_a_measured_one() -> None:
    for row in tw.plan(**NUMBERS, workers=8).strategies:
        for own in ((row.document or {}).get("localsgd", {}).get("compression") or {}).values():
            over_all = own.get("mean_over") == "all"
            assert own.get("sparsity", 0.0) <= (0.97 if over_all else 0.9)


def test_a_plan_is_no_more_work_for_more_ranks() -> None:
    tw.plan(**NUMBERS, workers=3)  # what is done once
    calls = []
    for workers in (64, 100_000):
        with cProfile.Profile() as profile:
            tw.plan(**NUMBERS, workers=workers)
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    few, many = calls
    assert many < 2 * few


def test_table_shows_the_best_of_every_and_all_of_them_when_asked() -> None:
    words = ["--params", "124M", "--step-seconds", "0.35", "--workers", "8"]
    said = [ran_thinwire("plan", *words, *more).stdout for more in ([], ["--all"])]
    few, many = ([line for line in text.splitlines() if "GB" in line] for text in said)
    assert len(few) == len(tw.plan(**NUMBERS, workers=8).best())
    assert len(many) == len(tw.plan(**NUMBERS, workers=8).strategies)
    assert max(map(len, said[0].splitlines())) <= 80
    assert "--all" in said[0]
    assert "thinwire compare measures it" in " ".join(said[0].split())
