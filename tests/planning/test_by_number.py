"""What a plan promises where it knows no shapes: fewer parameters never take longer."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests import api
from tests.api import network_Network as Network
from tests.api import work_Work as Work

RATES = (1e4, 1e6, 2e7, 1e8, 3e8, 1e9, 1e10, 4e11)
LATENCIES_S = (0.0, 1e-6, 5e-4, 0.02, 0.1, 1.0)
EDGES = (1, 2, 16_383, 16_384, 2**18 - 1, 2**18, 2**19 - 1, 2**19, 2**20, api.MOST_PARAMS)
SIZES = st.sampled_from(EDGES) | st.floats(0, 13).map(lambda digits: int(10**digits))
OTHERS, LOCAL = 6, 3
"""How many settings are drawn: of methods that exchange gradients, and of local updates."""


def of_number(params: int, step_s: float = 0.35) -> Work:
    return Work(params, api.matrices(params), step_s, assumed=True)


def seconds(chosen: Sequence[api.Candidate], work: Work, network: Network) -> list[float]:
    return [
        api.cost_by_number(document or {}, recipe.name, work, network).step_s
        for _, recipe, document in chosen
    ]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_fewer_parameters_and_a_better_line_never_take_longer(data: st.DataObject) -> None:
    workers = data.draw(st.sampled_from((2, 3, 4, 8, 17, 64, 1000)), "workers")
    step_s = data.draw(st.sampled_from((1e-4, 0.01, 0.35, 5.0)), "step_s")
    offered = list(api.candidates(workers))
    local = [one for one in offered if "localsgd" in (one[2] or {})]
    others = [one for one in offered if "localsgd" not in (one[2] or {})]
    chosen = [
        *data.draw(st.lists(st.sampled_from(others), min_size=OTHERS, max_size=OTHERS), "others"),
        *data.draw(st.lists(st.sampled_from(local), min_size=LOCAL, max_size=LOCAL), "local"),
    ]
    few, many = sorted((data.draw(SIZES, "params"), data.draw(SIZES, "params")))
    near = max(1, few - data.draw(st.integers(1, 1 + few // 50), "fewer by"))
    slow, fast = sorted(data.draw(st.sampled_from(RATES), "rate") for _ in range(2))
    short, far = sorted(data.draw(st.sampled_from(LATENCIES_S), "latency") for _ in range(2))
    growing = [
        seconds(chosen, of_number(near, step_s), Network(fast, short, workers)),
        seconds(chosen, of_number(few, step_s), Network(fast, short, workers)),
        seconds(chosen, of_number(many, step_s), Network(fast, short, workers)),
        seconds(chosen, of_number(many, step_s), Network(slow, short, workers)),
        seconds(chosen, of_number(many, step_s), Network(slow, far, workers)),
    ]
    for less, more in itertools.pairwise(growing):
        for (name, _, _), less_s, more_s in zip(chosen, less, more, strict=True):
            assert less_s <= more_s * (1 + 1e-12), name


@pytest.mark.parametrize(
    ("fewer", "more", "line"),
    [
        (16_383, 16_384, {"workers": 3, "link": "1gbit", "latency": "1s"}),
        (396_026, 747_908, {"workers": 8, "link": "300mbit", "latency": "100ms"}),
        (524_287, 524_288, {"workers": 3, "link": "100mbit"}),
        (1_611, 2_100, {"workers": 8, "link": "100kbit", "latency": "1ms"}),
    ],
)
def test_all_rows_of_a_plan_grow_with_number(fewer: int, more: int, line: dict[str, Any]) -> None:
    small, large = (tw.plan(params=params, step_seconds=0.05, **line) for params in (fewer, more))
    for row in small.strategies:
        beside = large[row.name]
        for less, greater in zip(row.step_seconds, beside.step_seconds, strict=True):
            assert less <= greater * (1 + 1e-12), row.name
    for params, plan in ((fewer, small), (more, large)):
        dense_s = plan["dense"].step_seconds[1]
        for row in plan.strategies:
            if row.optimizer is None:
                steps = api.steps_to_dense_loss(row.loss_gap[1], params)
                expected = steps * (row.step_seconds[1] / dense_s if steps <= 4 else 1)
                assert row.time_to_dense_loss == pytest.approx(expected, rel=1e-12), row.name


@pytest.mark.parametrize("params", [868_000, 3_300_000, 124_000_000, 3_000_000_000])
@pytest.mark.parametrize("line", [Network(2e7, 0.01, 4), Network(1e9, 0.001, 8)])
def test_usual_sizes_cost_as_their_shapes(params: int, line: Network) -> None:
    """Where buckets change, a bucket's latencies are between two sizes 3 % apart."""
    work = of_number(params)
    for name, recipe, document in itertools.islice(api.candidates(line.ranks), 0, None, 7):
        own = api.cost_of(document or {}, recipe.name, work, line)
        cost = api.cost_by_number(document or {}, recipe.name, work, line)
        assert cost.step_s == pytest.approx(own.step_s, rel=0.02), name
        assert (cost.bytes, cost.state_bytes) == (own.bytes, own.state_bytes)


def test_a_size_costs_no_more_than_the_next_larger_one_that_was_looked_at() -> None:
    assert api.grown([(100, 5.0), (10, 7.0), (32, 1.0)], 32) == 5.0
    assert api.grown([(100, 5.0), (10, 2.0), (32, 1.0)], 32) == 2.0
    assert api.grown([(100, 5.0), (10, 2.0)], 55) == pytest.approx(3.5)


def test_known_shapes_have_their_cost() -> None:
    """A tensor too small to be compressed may well take longer than a larger one."""
    line = Network(1e9, 1.0, 3)
    small, large = (
        api.cost_of({"dgc": {}}, "", Work(params, api.matrices(params), 0.35), line).step_s
        for params in (16_383, 16_384)
    )
    assert small > large
