"""`benchmarks.law`: a law that is found again, and lines that are not made again."""

import math
from dataclasses import replace
from random import Random

import pytest

from benchmarks.gaps import Cell, Gap, Law

CELL = Cell(
    part="held_out",
    size="0.14M",
    workers=2,
    interval=4,
    bits=1,
    optimizer="muon",
    steps=10,
    batch=8,
    lr=0.012,
    seed=5,
    data="",
)


def made_by_a_law(workers: int, interval: int, numel: int, rounds: int, noise: float) -> Gap:
    beta = 0.02 * (numel / 1e6) ** -0.3 * (interval / 16) ** 0.5 * (rounds / 200) ** -0.7
    cell = replace(CELL, workers=workers, interval=interval)
    return Gap(cell, numel, rounds, math.expm1(beta * math.log(workers) + noise))


def grid(spread: float) -> list[Gap]:
    random = Random(1)
    return [
        made_by_a_law(k, interval, numel, rounds, random.gauss(0, spread))
        for k in (2, 4, 8)
        for interval in (4, 16)
        for numel in (10**5, 10**6)
        for rounds in (100, 400)
    ]


def test_a_law_is_found_again_and_its_intervals_cover_other_runs() -> None:
    assert Law.of(grid(0.0)).theta.tolist() == pytest.approx(
        [math.log(0.02), -0.3, 0.0, 0.5, -0.7], abs=1e-6
    )
    law = Law.of(grid(0.001))
    assert law.identified
    assert law.free == 24 - 5
    assert law.theta[1] == pytest.approx(-0.3, abs=0.1)
    random, inside = Random(2), 0
    for _ in range(200):
        point = made_by_a_law(16, 8, 300_000, 200, random.gauss(0, 0.001))
        low, mid, high = law.interval(point)
        assert low < mid < high
        inside += low <= point.gap <= high
    assert inside > 180
