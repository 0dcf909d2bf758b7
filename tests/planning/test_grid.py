"""Settings that a plan compares: valid ones, a progress with a true source, quick to predict."""

import cProfile
import json
import pstats
from importlib.resources import files
from typing import Any

import pytest

import thinwire as tw
from tests.api import (
    LEFT_OUT,
    STRATEGIES,
)
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
        assert shown.time_to_dense_loss <= row.time_to_dense_loss
    with pytest.raises(KeyError, match=r"'nothing' is not a row of this plan.*dense"):
        _ = plan["nothing"]


def test_a_progress_that_belongs_to_other_settings_says_to_which() -> None:
    plan = tw.plan(**NUMBERS, workers=8)
    assert "known for" not in plan["localsgd"].progress_source
    for name, says in {
        "dgc 1% b4 split": "known for value_bits=1, exchange=auto",
        "low-rank r8": "known for rank=2",
        "sparse-local k32 d8 25% b2": "; known for density=0.1",
        "localsgd k32 f4": "known for fragments=1",
        "quantized-local k64 b2": "known for value_bits=4",
    }.items():
        assert plan[name].progress_source.endswith(says)
    late = plan["sparse-local k32 d8 25% b2"].progress_source
    assert "for the delay, from quantized-local k16 d4; times " in late
    assert "for the ranks, from sparse-local k16 with 4; " in late
    origins = ("by definition", "a prior", "that of", "benchmarks/results/evidence.jsonl: ")
    for row in plan.strategies:
        assert row.progress_source.startswith(origins)


def test_planned_setting_sends_no_fewer_entries_than_a_measured_one() -> None:
    for row in tw.plan(**NUMBERS, workers=8).strategies:
        if "known for density" in row.progress_source:
            local = (row.document or {})["localsgd"]
            assert local["compression"]["sparse"]["sparsity"] < 0.9


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


def measured(method: str, k_steps: int, value_bits: int | None) -> list[dict[str, Any]]:
    """What the planner knows of these settings."""
    text = files("thinwire.tools.planning").joinpath("progress.json").read_text()
    asked = method, k_steps, value_bits
    return [
        run
        for run in json.loads(text)
        if (run["method"], run["k_steps"], run.get("value_bits")) == asked
    ]


def test_ranks_cost_as_measured_at_two_and_four() -> None:
    of_two, of_many = (tw.plan(**NUMBERS, workers=workers) for workers in (2, 64))
    kept = {}
    for method, k_steps, bits in (
        ("muon-local", 16, 1),
        ("sparse-local", 16, 2),
        ("quantized-local", 16, 4),
        ("localsgd", 32, None),
        ("powersgd", 1, None),  # an average in every step, measured with both
        ("low-rank", 1, None),
        ("dgc", 1, None),
    ):
        runs = measured(method, k_steps, bits)
        known = {run["workers"]: run["progress"] for run in runs if "delay" not in run}
        assert known[4] < known[2]
        assert of_two[method].progress == known[2]
        assert of_many[method].progress == known[4]
        kept[method] = known[4] / known[2]
    for name, source in (
        ("muon-local k32", "muon-local"),
        ("sparse-local k32", "sparse-local"),
        ("quantized-local k32", "quantized-local"),
        ("localsgd k64", "localsgd"),
    ):
        share = of_many[name].progress / of_two[name].progress
        assert share == pytest.approx(kept[source]), name


def test_delay_costs_the_measured_share_and_a_shorter_one_less() -> None:
    plan = tw.plan(**NUMBERS, workers=2)
    runs = measured("quantized-local", 16, 4)
    known = {run.get("delay", 0): run["progress"] for run in runs if run["workers"] == 2}
    assert known[4] < known[0]
    share = {name: plan[name].progress for name in ("localsgd", "localsgd k32 d8")}
    assert share["localsgd k32 d8"] / share["localsgd"] == pytest.approx(known[4] / known[0])
    assert plan["quantized-local k16 d4"].progress == known[4]
    shorter = plan["quantized-local k16 d1 f4"].progress
    assert known[4] < shorter < known[0]
