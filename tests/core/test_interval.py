"""The interval rule, the cut into fragments and the outer step, on their own."""

from fractions import Fraction

import pytest

import thinwire as tw
from tests.api import adapted_interval
from tests.api import fragments_partition as partition


@pytest.mark.parametrize(
    ("first", "now", "expected"),
    [
        ((1.0, 0.1), (1.0, 0.1), 4),
        ((1.0, 0.1), (0.25, 0.1), 2),
        ((1.0, 0.1), (0.26, 0.1), 3),
        ((1.0, 0.4), (1.0, 0.1), 8),
        ((1.0, 0.1), (0.0, 0.1), 1),
        ((0.0, 0.1), (5.0, 0.1), 4),
        ((0.0, 0.1), (0.0, 0.1), 4),
        ((1e-300, 1e10), (1e300, 1e-10), 16),
        ((1e-300, 1e-300), (1e-300, 1e-300), 4),
        ((1e300, 1e10), (1e300, 1e10), 4),
    ],
)
def test_interval(first: tuple[float, float], now: tuple[float, float], expected: int) -> None:
    """Loss and rate, at first and now."""
    config = tw.AdaptiveLocalSGD(init_k_steps=4, max_k_steps=16)
    assert adapted_interval(config, first, now) == expected


def test_cut_covers_in_order_and_is_nearly_equal() -> None:
    for sizes in (
        [1],
        [5, 5, 5, 5],
        [1, 1, 100, 1],
        [100, 1, 1, 1],
        [1, 1, 1, 100],
        [3, 1, 4, 1, 5, 9, 2, 6],
    ):
        for parts in range(1, len(sizes) + 1):
            ranges = partition(sizes, parts)
            assert [i for r in ranges for i in r] == list(range(len(sizes)))
            assert all(len(r) for r in ranges) and len(ranges) == parts
            heaviest = max(sum(sizes[i] for i in r) for r in ranges)
            assert heaviest <= Fraction(sum(sizes), parts) + max(sizes)
    for parts in (0, 3):
        with pytest.raises(ValueError, match="fragments is"):
            partition([4, 4], parts)
