"""A run beside its plan: what is a departure, when it is told, and what the means are of."""

from types import SimpleNamespace
from typing import Any

import pytest

import thinwire as tw
from tests.api import Pace, Rate, planned_row

ROW = SimpleNamespace(name="dgc 1%", step_seconds=(0.8, 1.0, 1.2), waiting_share=0.5)


def told(pace: Pace, seconds: list[float], steps: int = 1, **more: Any) -> list[str]:
    now_s = pace_s = 0.0
    found = [pace.round(steps, now_s, 0.0, **more)]
    for each in seconds:
        now_s += each
        pace_s += each / 4
        found.append(pace.round(steps, now_s, pace_s, **more))
    return [text for text in found if text is not None]


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_twenty_rounds_outside_are_reported_once_with_both_numbers(seconds: float) -> None:
    assert told(Pace(ROW), [seconds] * 19) == []
    assert told(Pace(ROW), [seconds] * 19 + [1.0] + [seconds] * 19) == []
    [text] = told(Pace(ROW), [seconds] * 60, bit_s=2e7)
    assert f"takes {seconds:.3g} s" in text
    assert "0.8 to 1.2 s were planned" in text
    assert "25 % of the time, where 50 % were planned" in text
    assert "20 Mbit/s" in text


def test_rounds_that_the_plan_is_not_about_do_not_count() -> None:
    assert told(Pace(ROW), [9.0] * 60, compare=False) == []
    assert told(Pace(), [9.0] * 60) == []
    assert told(Pace(ROW), [8.0] * 60, steps=8) == []
    assert len(told(Pace(ROW), [8.0] * 60, steps=4)) == 1


def test_the_share_of_waiting_is_that_of_the_last_rounds() -> None:
    pace = Pace()
    assert pace.waiting_share == 0
    now_s = waited_s = 0.0
    for round_number in range(200):
        now_s, waited_s = now_s + 1.0, waited_s + (0.9 if round_number < 100 else 0.1)
        pace.round(1, now_s, waited_s)
    assert pace.waiting_share == pytest.approx(0.1, abs=0.01)


def test_a_plan_stands_for_the_row_that_it_recommends() -> None:
    plan = tw.plan(params="1M", step_seconds=0.1, link="1mbit")
    assert planned_row(plan) is plan[plan.recommended]
    assert planned_row(plan["dgc"]) is plan["dgc"]
    assert planned_row(None) is None


def test_rate_counts_exchanges_with_a_seen_end() -> None:
    rate = Rate()
    rate.ended(1e6, 0.0, 5.0, 5.0)  # was over when it was waited for
    rate.ended(1000, 0.0, 5.0, 6.0)  # an agreement
    assert rate.bit_s == 0
    rate.ended(1e6, 10.0, 10.1, 11.0)
    assert rate.bit_s == 8e6
    rate.ended(1e6, 10.0, 11.0, 12.0)  # launched beside it, on the same line
    assert rate.bit_s == pytest.approx(8e6)


def test_goodput_counts_waiting_saving_and_dropped_steps() -> None:
    pace = Pace()

    def goodput(useful: int, dropped: int) -> float:
        return pace.goodput(useful, dropped)["goodput"]

    assert goodput(0, 0) == 1
    pace.round(1, 10.0, 3.0)
    assert goodput(1, 0) == 1, "nothing is known after one round"
    pace.round(1, 14.0, 4.0)
    assert goodput(2, 0) == pytest.approx(0.75), "one of four seconds was waiting"
    pace.exclude(1.0)
    assert goodput(2, 0) == pytest.approx(0.5)
    assert goodput(3, 1) == pytest.approx(0.375), "and one of four steps was dropped"
    pace.exclude(100.0)
    assert goodput(2, 0) == 0


def test_losses_are_named_and_missing_ones_computed() -> None:
    pace = Pace()
    pace.exclude(4.0, "joining")
    pace.round(1, 10.0, 0.0)
    pace.round(1, 16.0, 1.0)
    pace.exclude(2.0, "regrouping")
    assert pace.goodput(2, 0) == {
        "goodput": pytest.approx(0.3),
        "lost_waiting": 0.1,
        "lost_regrouping": 0.2,
        "lost_joining": 0.4,
        "lost_saving": 0.0,
    }
