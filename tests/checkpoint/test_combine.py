"""The rule for another number of ranks, against NumPy and plain loops."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.api import Rule, combine, random_state, set_random_state
from tests.checkpoint.states import same
from thinwire.errors import CheckpointError


def some(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_mean_is_taken_in_float64_and_rounded_once(dtype: torch.dtype, count: int) -> None:
    values = [some(seed, dtype, 50) for seed in range(count)]
    total = np.zeros(50)
    for value in values:
        total += value.to(torch.float64).numpy()
    expected = torch.from_numpy(total / count).to(dtype)
    assert same(combine([{"a": value} for value in values])["a"], expected)


def test_complex_numbers_have_a_mean_too() -> None:
    values = [
        torch.complex(some(seed, torch.float32, 9), some(seed + 9, torch.float32, 9))
        for seed in range(3)
    ]
    expected = torch.from_numpy(
        np.mean([value.numpy().astype(np.complex128) for value in values], axis=0)
    )
    torch.testing.assert_close(combine(values), expected.to(torch.complex64), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"a is torch\.complex64, which has no min"):
        combine([{"a": torch.ones(1, dtype=torch.complex64)}] * 2, {"a": "min"})


@pytest.mark.parametrize("count", range(1, 8))
def test_equal_values_on_all_ranks_stay_bit_for_bit(count: int) -> None:
    odd = torch.tensor([0x7F800001, 0x7FC12345, -0x80000000, 1], dtype=torch.int32).view(
        torch.float32
    )
    states = [
        {"a": torch.full((3,), 0.1, dtype=torch.float64), "nan": odd.clone(), "x": 0.1}
        for _ in range(count)
    ]
    assert same(combine(states), states[0])
    nothing = [{"x": math.nan, "y": -0.0, "z": math.inf, "e": torch.empty(0)} for _ in range(count)]
    assert same(combine(nothing), nothing[0])


def test_kinds_and_their_defaults() -> None:
    a = {
        "i": 1,
        "b": True,
        "s": "x",
        "y": b"1",
        "f": 1.0,
        "n": None,
        "t": torch.tensor([1, 2]),
        "m": torch.tensor(True),
    }
    b = {
        "i": 2,
        "b": False,
        "s": "z",
        "y": b"2",
        "f": 2.0,
        "n": 3,
        "t": torch.tensor([5, 6]),
        "m": torch.tensor(False),
    }
    assert same(combine([a, b]), {**a, "f": 1.5, "n": 3})


@pytest.mark.parametrize(
    ("rule", "number", "integer", "tensor"),
    [
        ("mean", 3.0, 1, [2.0, 3.0]),
        ("first", 1.0, 1, [1.0, 5.0]),
        ("min", 1.0, 1, [1.0, 1.0]),
        ("max", 5.0, 3, [3.0, 5.0]),
    ],
)
def test_rules(rule: Rule, number: float, integer: int, tensor: list[float]) -> None:
    a, b = (
        {"p": {"f": 1.0, "i": 1, "t": torch.tensor([1.0, 5.0]), "b": True}},
        {"p": {"f": 5.0, "i": 3, "t": torch.tensor([3.0, 1.0]), "b": False}},
    )
    came = combine([a, b], {"p/*": rule})["p"]
    assert (came["f"], came["i"], came["t"].tolist()) == (number, integer, tensor)
    assert came["b"] is (rule != "min")


def test_the_first_pattern_that_matches_counts() -> None:
    states = [
        {"loss_scale": {"scale": 8.0}, "x": {"scale": 8.0}},
        {"loss_scale": {"scale": 4.0}, "x": {"scale": 4.0}},
    ]
    came = combine(states, {"loss_scale/*": "min", "*/scale": "max"})
    assert came == {"loss_scale": {"scale": 4.0}, "x": {"scale": 8.0}}


def test_gradients_of_some_ranks_only_are_an_error() -> None:
    one, three = torch.tensor([1.0]), torch.tensor([3.0])
    states = [
        {"moment": {}, "pending": {}},
        {"moment": {"w": one}, "pending": {"w": one}},
        {"moment": {"w": three}},
    ]
    came = combine(states, {"pending/*": "mean_zero"})
    assert same(
        came, {"moment": {"w": torch.tensor([2.0])}, "pending": {"w": torch.tensor([1 / 3])}}
    )
    assert same(combine([{"a": None}, {"a": one}]), {"a": one})
    assert same(combine([{"a": None}, {"a": one}], {"a": "mean_zero"}), {"a": one / 2})
    assert combine([{"x": {"f": 3.0}}, {}], {"x/f": "mean_zero"}) == {"x": {"f": 1.5}}


def test_codes_come_with_their_scales_from_the_first_rank_that_has_them() -> None:
    first, second = ({"q": torch.tensor([n, 1]), "scale": torch.tensor(float(n))} for n in (2, 4))
    assert same(combine([{"a": {}}, {"a": first}, {"a": second}], {"a*": "whole"}), {"a": first})
    for other in (first["q"].reshape(1, -1), first["q"].view(torch.uint8)):  # of the same bytes
        assert same(
            combine([{"a": first}, {"a": {**second, "q": other}}], {"a*": "whole"}), {"a": first}
        )
    equal = combine([{"a": first}, {"a": {**second, "q": first["q"]}}], {"a*": "whole"})
    assert same(equal, {"a": {**first, "scale": torch.tensor(3.0)}})


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 2), (None, 1.0), ([1.0], [1.0, 2.0]), (torch.tensor(1), torch.tensor(2)), ({"a": 1}, {})],
)
def test_strict_values_without_a_mean_must_be_equal(one: Any, other: Any) -> None:
    state = {"w": torch.ones(2), "n": torch.tensor([3, 4]), "x": [one]}
    assert same(combine([state, state], {"*": "strict"}), state)
    came = combine([state, {**state, "w": torch.zeros(2)}], {"*": "strict"})
    assert same(came["w"], torch.full((2,), 0.5))
    with pytest.raises(CheckpointError, match=r"2 ranks, x.* have no mean"):
        combine([state, {**state, "x": [other]}], {"*": "strict"})


def test_sequences() -> None:
    assert combine([[1.0, (2.0, "a")], [3.0, (4.0, "b")]]) == [2.0, (3.0, "a")]
    assert combine([{"a": [1.0]}, {"a": [2.0, 3.0]}]) == {"a": [1.0]}


def test_nothing_given_is_changed() -> None:
    states = [{"a": torch.ones(2)}, {"a": torch.zeros(2)}]
    came = combine(states)
    came["a"].add_(7)
    assert states[0]["a"].tolist() == [1, 1] and states[1]["a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("one", "other", "fact"),
    [
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, r"a/w is torch.float32 of shape \(2,\) on"),
        (torch.ones(2), torch.ones(2).half(), r"a is torch.float16 .* torch.float32"),
        (torch.ones(2), 1.0, "a is Tensor on one rank and float on another"),
        ({}, [], "a is dict on one rank and list on another"),
        (1, "1", "a is int on one rank and str on another"),
    ],
)
def test_facts_that_do_not_fit_together_are_named(one: Any, other: Any, fact: str) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s){fact}.*number of ranks that saved"):
        combine([{"a": one}, {"a": other}])


def draws() -> list[float]:
    """A few numbers of every generator."""
    return [
        random.random(),
        random.gauss(),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.randn(3).tolist(),
    ]


@pytest.fixture(autouse=True)
def same_numbers_afterwards() -> Any:
    state = random_state()
    yield
    set_random_state(state)


def test_random_numbers_go_on_where_they_were() -> None:
    random.gauss(), np.random.randn()  # each keeps a second number for the next call
    state = random_state()
    expected = draws()
    draws()
    set_random_state(state)
    assert draws() == expected


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox])
def test_numpys_other_generators_are_kept_too(kind: type[np.random.BitGenerator]) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(kind(3))
        state = random_state()
        expected = draws()
        set_random_state(state)
        assert draws() == expected
    finally:
        np.random.set_bit_generator(before)


def test_old_ranks_go_on_with_their_own_numbers_and_new_ones_get_others() -> None:
    states, expected = [], []
    for seed in range(2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        states.append({"random": random_state()})
        expected.append(draws())
    came = []
    for rank in range(6):
        set_random_state(combine(states, rank=rank)["random"])
        came.append(draws())
    assert came[:2] == expected
    for numbers in zip(*came, strict=True):
        assert len(set(numbers)) == 6
    set_random_state(combine(states, rank=5)["random"])
    assert draws() == came[5]


def test_a_strange_random_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"state must come from random_state\(\), got dict"):
        set_random_state({})
