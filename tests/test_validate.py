"""The checks of arguments: kinds, ranges and wording."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from thinwire import _validate as check


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1), Fraction(1)])
def test_numbers_become_floats(value: object) -> None:
    number = check.real("x", value)
    assert number == 1.0
    assert type(number) is float


@pytest.mark.parametrize("value", [True, np.bool_(True), "1", None, [1], 1j, torch.tensor(1.0)])
def test_other_kinds_are_no_numbers(value: object) -> None:
    with pytest.raises(TypeError, match="x must be a number"):
        check.real("x", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_numbers_have_to_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="x must be a finite number"):
        check.real("x", value)


def test_infinity_is_let_through_on_request_and_nan_never() -> None:
    assert check.real("x", math.inf, finite=False) == math.inf
    with pytest.raises(ValueError, match="x must be a number"):
        check.real("x", math.nan, finite=False)


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"at_least": 1}, 1, 0.9),
        ({"above": 1}, 1.1, 1),
        ({"at_most": 1}, 1, 1.1),
        ({"below": 1}, 0.9, 1),
    ],
)
def test_bounds(bounds: dict, good: float, bad: float) -> None:
    assert check.real("x", good, **bounds) == good
    sign = {"at_least": ">= 1", "above": "> 1", "at_most": "<= 1", "below": "< 1"}[
        next(iter(bounds))
    ]
    with pytest.raises(ValueError, match=f"x must be a finite number {sign}, got {bad}"):
        check.real("x", bad, **bounds)


def test_two_bounds_read_well() -> None:
    with pytest.raises(ValueError, match="x must be a finite number >= 0 and < 1, got 2"):
        check.real("x", 2, at_least=0, below=1)


@pytest.mark.parametrize("value", [3, np.int32(3), torch.tensor(3)])
def test_integers(value: object) -> None:
    assert check.integer("x", value) == 3
    with pytest.raises(ValueError, match="x must be an integer >= 4, got"):
        check.integer("x", value, at_least=4)


@pytest.mark.parametrize(
    "value", [True, 3.0, "3", None, torch.tensor([3]), torch.tensor(3.0), torch.tensor(True)]
)
def test_other_kinds_are_no_integers(value: object) -> None:
    with pytest.raises(TypeError, match="x must be an integer"):
        check.integer("x", value)


def test_scalars_may_be_tensors_of_one_element() -> None:
    assert check.scalar("x", torch.tensor([[2.5]])) == 2.5
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        check.scalar("x", torch.ones(2))
    with pytest.raises(TypeError, match="x must be a number"):
        check.scalar("x", torch.tensor(True))


def test_flags_kinds_and_choices() -> None:
    assert check.boolean("x", False) is False
    with pytest.raises(TypeError, match="x must be True or False, got 1"):
        check.boolean("x", 1)
    check.instance("x", 1, (int, str))
    with pytest.raises(
        TypeError, match=r"x must be int or str, got 1\.0 of type float; use an int"
    ):
        check.instance("x", 1.0, (int, str), advice="use an int")
    check.one_of("x", "dense", ("dense", "dgc"))
    with pytest.raises(ValueError, match=r"x must be one of .*'dgc'.*did you mean 'dense'"):
        check.one_of("x", "dens", ("dense", "dgc"))
    assert check.closest("zzz", ["dense"]) == ""
    assert check.closest(3, ["dense"]) == ""
