"""The limit on one rank's norm, against a loop of Python floats."""

import math
import statistics

import pytest
import torch

from tests.api import source_factors, squared_norms


@pytest.mark.parametrize("k", [1, 2, 3, 7, 64, 1000])
def test_norms_are_those_of_exact_sums(k: int) -> None:
    """1e-14: float64 sums of a few hundred terms, of one sign."""
    rows = torch.randn(4, k, generator=torch.Generator().manual_seed(k)) * 1e3
    rows[2] = 0
    before = rows.clone()
    found = squared_norms(rows)
    assert found.dtype == torch.float64 and torch.equal(rows, before)
    for row, square in zip(rows.tolist(), found.tolist(), strict=True):
        assert square == pytest.approx(math.fsum(v * v for v in row), rel=1e-14)


def test_norms_do_not_depend_on_the_number_of_threads() -> None:
    rows = torch.randn(2, 200_003, generator=torch.Generator().manual_seed(0))
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(squared_norms(rows))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("times", [1.0, 1.5, 4.0])
@pytest.mark.parametrize(
    "norms",
    [
        [3.0],
        [0.0],
        [0.0, 0.0],
        [1.0, 100.0],
        [100.0, 1.0, 2.0],
        [4.0, 1.0, 2.0, 300.0],
        [0.0, 5.0, 0.0, 20.0],  # those that sent nothing do not count
        [1e-20, 1e20, 1e19],
        [1.0, 1.0, 1.0],
    ],
    ids=str,
)
def test_no_norm_is_above_so_many_times_the_lower_median(norms: list[float], times: float) -> None:
    """1e-7: factors are float32."""
    factors = source_factors(torch.tensor(norms, dtype=torch.float64).square(), times)
    assert factors.dtype == torch.float32
    some = [n for n in norms if n > 0]
    limit = times * statistics.median_low(some) if some else 0.0
    for n, factor in zip(norms, factors.tolist(), strict=True):
        assert factor == (pytest.approx(limit / n, rel=1e-7) if n > limit else 1.0)
