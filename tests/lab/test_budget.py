from itertools import pairwise

import pytest

from tests.api import ByClock, BySteps, rate_factor
from tests.ranks import Pool


def test_steps_end_where_they_should_and_evaluate_evenly() -> None:
    budget = BySteps(10, 3)
    answers = [budget.advance(step, 0.0, 0.0) for step in range(1, 11)]
    assert [step for step, (due, _) in enumerate(answers, 1) if due] == [3, 7, 10]
    assert [step for step, (_, stop) in enumerate(answers, 1) if stop] == [10]
    assert budget.progress(5) == 0.5


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    assert rate_factor(0.05) == pytest.approx(0.5)
    assert rate_factor(0.1) == pytest.approx(1.0)
    assert rate_factor(0.55) == pytest.approx(0.55)
    assert rate_factor(1.0) == pytest.approx(0.1)
    assert 0 < rate_factor(0.0) <= 0.1


def run_by_clock(rank: int, size: int) -> list[tuple[int, bool, bool, float]]:
    budget = ByClock(seconds=4.0, evaluations=4)
    answers = []
    step, stop = 0, False
    while not stop:
        step += 1
        # the clock of rank 1 runs away; it must not matter
        due, stop = budget.advance(step, 0.1 * step * (1 + rank), 0.0)
        answers.append((step, due, stop, budget.progress(step)))
    return answers


def test_ranks_agree_on_a_budget_of_seconds(ranks: Pool) -> None:
    first, second = ranks.run(run_by_clock, size=2)
    assert first == second
    assert 40 <= first[-1][0] <= 45
    assert sum(due for _, due, _, _ in first) == 4
    assert all(a[3] <= b[3] for a, b in pairwise(first))


def run_with_rare_long_steps(rank: int, size: int) -> tuple[int, list[int], float]:
    budget = ByClock(seconds=300.0, evaluations=16)
    elapsed_s, controls = 0.0, 0
    evaluations = []
    step, stop = 0, False
    while not stop:
        step += 1
        elapsed_s += 5.5 if step % 32 == 0 else 0.5
        controls += step >= budget.next_control_step
        due, stop = budget.advance(step, elapsed_s, reserve_s=5.0)
        evaluations += [step] if due else []
    return controls, evaluations, elapsed_s


def test_ranks_on_their_own_agree_rarely_and_keep_time_for_the_last_averaging(ranks: Pool) -> None:
    (controls, evaluations, elapsed_s), second = ranks.run(run_with_rare_long_steps, size=2)
    assert second == (controls, evaluations, elapsed_s)
    assert len(evaluations) == 16
    assert controls <= 16 * 4 + 8
    assert 294.5 <= elapsed_s <= 296.0
