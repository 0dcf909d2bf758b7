"""The interval rule, the cut into fragments and the outer step, on their own."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from tests.api import OuterRule, adapted_interval, outer_step_
from tests.api import fragments_partition as partition


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss": 1.0, "first_loss": 1.0, "rate": 0.1, "first_rate": 0.1}, 4),
        ({"loss": 0.25, "first_loss": 1.0, "rate": 0.1, "first_rate": 0.1}, 2),
        ({"loss": 0.26, "first_loss": 1.0, "rate": 0.1, "first_rate": 0.1}, 3),
        ({"loss": 1.0, "first_loss": 1.0, "rate": 0.1, "first_rate": 0.4}, 8),
        ({"loss": 0.0, "first_loss": 1.0, "rate": 0.1, "first_rate": 0.1}, 1),
        ({"loss": 5.0, "first_loss": 0.0, "rate": 0.1, "first_rate": 0.1}, 4),
        ({"loss": 0.0, "first_loss": 0.0, "rate": 0.1, "first_rate": 0.1}, 4),
        ({"loss": 1e300, "first_loss": 1e-300, "rate": 1e-10, "first_rate": 1e10}, 16),
        ({"loss": 1e-300, "first_loss": 1e-300, "rate": 1e-300, "first_rate": 1e-300}, 4),
        ({"loss": 1e300, "first_loss": 1e300, "rate": 1e10, "first_rate": 1e10}, 4),
    ],
)
def test_interval(values: dict[str, float], expected: int) -> None:
    assert adapted_interval(4, 16, **values) == expected


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


@pytest.mark.parametrize(("momentum", "nesterov"), itertools.product([0.0, 0.9], [False, True]))
@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_the_outer_step_is_torchs_sgd(momentum: float, nesterov: bool, lr: float) -> None:
    if nesterov and momentum == 0:
        return
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    sgd = torch.optim.SGD([p], lr=lr, momentum=momentum, nesterov=nesterov)
    place, buffer = (
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(5, dtype=torch.float64) if momentum else None,
    )
    for i in range(6):
        change = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        before = change.clone()
        place -= outer_step_(change, buffer, OuterRule(lr, momentum, nesterov))
        p.grad = change
        sgd.step()
        assert torch.equal(change, before)
        assert math.isclose(float((place - p.detach()).abs().max()), 0.0, abs_tol=1e-14)
