"""The rule of the loss scale against a slow restatement, and the scaler on one rank."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api import any_non_finite, initial_scale, next_scale
from thinwire.amp import DynamicLossScale, FixedLossScale, LossScaler


@given(
    flags=st.lists(st.booleans(), max_size=60),
    window=st.integers(1, 5),
    factor=st.sampled_from([2.0, 1.5, 4.0]),
)
def test_the_dynamic_rule(flags: list[bool], window: int, factor: float) -> None:
    config = DynamicLossScale(64.0, factor, window)
    state = initial_scale(config)
    scale, run = 64.0, []
    for flag in flags:
        state = next_scale(config, state, overflow=flag)
        run = [] if flag else [*run, 1]
        if flag:
            scale = max(scale / factor, 1.0)
        elif len(run) == window:
            scale, run = scale * factor, []
        assert (state.scale, state.good_updates) == (scale, len(run))
    assert state.dropped_steps == sum(flags)


def test_a_fixed_scale_stays() -> None:
    config = FixedLossScale(8.0)
    state = initial_scale(config)
    for overflow in (True, True, False, True):
        state = next_scale(config, state, overflow=overflow)
    assert (state.scale, state.dropped_steps, state.overflows_in_a_row) == (8.0, 3, 1)


def test_the_scale_stays_in_float32() -> None:
    config = DynamicLossScale(2.0**127, 2.0, 1)
    state = next_scale(config, initial_scale(config), overflow=False)
    assert state.scale == 2.0**127
    assert state.good_updates == 0


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: FixedLossScale(8, 1), TypeError, "drop_overflow_update"),
        (lambda: DynamicLossScale(0), ValueError, "init_loss_scale"),
        (lambda: DynamicLossScale(1e39), ValueError, "init_loss_scale"),
        (lambda: DynamicLossScale(8, 1.0), ValueError, "scale_factor"),
        (lambda: DynamicLossScale(8, 2, 0), ValueError, "scale_window"),
        (lambda: LossScaler(128.0), TypeError, "config"),
    ],
)
def test_wrong_arguments(make: object, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        make()  # type: ignore[operator]


def test_configs_are_values() -> None:
    assert pickle.loads(pickle.dumps(DynamicLossScale())) == DynamicLossScale(16777216, 2, 2000)
    assert FixedLossScale() == FixedLossScale(128)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_entry_is_found(bad: float) -> None:
    good = [
        torch.ones(3, 4),
        torch.tensor(1.0, dtype=torch.float64),
        torch.zeros(0),
        torch.ones(2).bfloat16(),
    ]
    assert not any_non_finite(good)
    assert not any_non_finite([])
    assert any_non_finite([*good, torch.tensor([1.0, bad])])
    sparse = torch.sparse_coo_tensor([[1]], torch.tensor([bad]), (3,), check_invariants=True)
    assert any_non_finite([*good, sparse])
