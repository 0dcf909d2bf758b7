"""The checks of arguments, through configs: kinds, ranges and wording."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1), Fraction(1)])
def test_numbers_become_floats(value: Any) -> None:
    number = tw.FixedLossScale(value).loss_scale
    assert (number, type(number)) == (1.0, float)


@pytest.mark.parametrize("value", [3, np.int32(3), torch.tensor(3)])
def test_integers_accept_integer_like_values(value: Any) -> None:
    assert tw.GradientMerge(value) == tw.GradientMerge(3)


@pytest.mark.parametrize(
    ("make", "values", "error", "says"),
    [
        (tw.FixedLossScale, [True, np.True_, "1", None, [1], 1j], TypeError, "must be a number"),
        (tw.FixedLossScale, [math.nan, math.inf, 10**400], ValueError, "must be a finite number"),
        (tw.FixedLossScale, [0.9, -1], ValueError, r"number >= 1 and <= 3.* got (0\.9|-1)"),
        (tw.optim.ClipByNorm, [0], ValueError, "> 0, got 0"),
        (tw.Sparse, [1, 2.0], ValueError, ">= 0 and < 1, got [12]"),
        (tw.GradientMerge, [True, 3.0, "3", None, torch.tensor([3])], TypeError, "an integer"),
        (tw.GradientMerge, [torch.tensor(3.0), torch.tensor(True)], TypeError, "an integer"),
        (tw.GradientMerge, [0, -3], ValueError, "must be an integer >= 1, got"),
        (lambda v: tw.GradientMerge(2, avg=v), [1], TypeError, "avg must be True or False, got 1"),
        (tw.Quantized, [3], ValueError, "value_bits must be one of"),
        (tw.AMP, ["bfloat"], ValueError, "'float16'.*did you mean 'bfloat16'"),
        (tw.AMP, ["bf16"], ValueError, "'bf16': write 'bfloat16'"),
        (tw.AMP, ["fp16", "half", "f16"], ValueError, "write 'float16'"),
        (lambda v: tw.DGC(state_dtype=v), ["fp32", "float"], ValueError, "write 'float32'"),
        (lambda v: tw.LocalSGD(16, v), [tw.Quantized(1)], TypeError, r"compression=Quantized\("),
        (lambda v: tw.AdaptiveLocalSGD(2, v), [tw.Sparse(0.5)], TypeError, "compression=Sparse"),
    ],
)
def test_other_kinds_and_values_are_refused(
    make: Any, values: list[Any], error: type[Exception], says: str
) -> None:
    for value in values:
        with pytest.raises(error, match=says):
            make(value)


def test_numbers_of_a_group_may_be_tensors_of_one_element() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    assert tw.optim.SGD(params, 0.1, weight_decay=torch.tensor([[0.5]])).defaults
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        tw.optim.SGD(params, 0.1, weight_decay=torch.ones(2))
    with pytest.raises(TypeError, match="must be a number"):
        tw.optim.SGD(params, 0.1, weight_decay=torch.tensor(True))


WRONG_WORDS = {
    tw.DistributedStrategy: "local_sgd localsgd",
    tw.DistributedStrategy.prepare: "grad_clips grad_clip",
    tw.LocalSGD: "k k_steps",
    tw.AdaptiveLocalSGD: "outer_rate max_k_steps",
    tw.Quantized: "bits value_bits",
    tw.Sparse: "decays decay",
    tw.LowRank: "ranks rank",
    tw.DGC: "sparse sparsity",
    tw.AMP: "scale loss_scale",
    tw.GradientMerge: "steps k_steps",
    tw.Recompute: "checkpoint checkpoints",
    tw.Pipeline: "stage stages",
    tw.LARS: "coef lars_coeff",
    tw.LAMB: "decay lamb_weight_decay",
    tw.FixedLossScale: "scale loss_scale",
    tw.DynamicLossScale: "scale init_loss_scale",
    tw.ClipByNorm: "clip_norm c",
    tw.local_sgd: "group process_group",
    tw.join: "token token_file",
}


@pytest.mark.parametrize("call", WRONG_WORDS)
def test_an_unknown_argument_is_answered_with_the_known_ones(call: Any) -> None:
    word, right = WRONG_WORDS[call].split()
    with pytest.raises(TypeError, match=rf"{word!r}; (did you mean|known are) .*\b{right}\b"):
        call(**{word: 1})


@pytest.mark.parametrize(
    ("call", "extra", "name"),
    [
        (tw.DistributedStrategy, 1, "dgc"),
        (tw.LocalSGD, 3, "compression"),
        (tw.Quantized, 3, "exchange"),
        (tw.join, 2, "run"),
    ],
)
def test_a_value_without_its_name_is_answered_with_the_names(
    call: Any, extra: int, name: str
) -> None:
    with pytest.raises(TypeError, match=rf"got 1 without a name.* {name}"):
        call(*[1] * extra)


@pytest.mark.parametrize(
    ("name", "near"), [("Muon", "optim.Muon"), ("LocalSgd", "LocalSGD"), ("joins", "join")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name!r}; did you mean {near}"):
        getattr(tw, name)
