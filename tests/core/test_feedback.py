import numpy as np
import pytest
import torch

from tests.api import FoldRule, commit_, propose
from tests.reference import dgc_fold

RULES = [FoldRule(0.9), FoldRule(0.9, nesterov=True), FoldRule(0.0), None]
"""None: without momentum buffer."""


def state(numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(3)]


def split(rule, buffer):
    return (rule, buffer) if rule else (FoldRule(0.0), None)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_proposal_and_commit_follow_the_formula_bit_for_bit(rule, dtype):
    grad, residual, buffer = state(700, dtype)
    rule, buffer = split(rule, buffer)
    new_buffer, new_residual = dgc_fold.folded(
        grad.numpy(),
        residual.numpy(),
        None if buffer is None else buffer.numpy(),
        rule.momentum,
        rule.nesterov,
    )
    chosen = dgc_fold.largest(new_residual, 30)
    proposal = propose(grad, residual, buffer, 30, rule)
    assert proposal.finite
    assert proposal.indices.tolist() == chosen
    assert proposal.values.tolist() == [float(new_residual[i]) for i in chosen]
    assert proposal.values.dtype == dtype

    sent = (proposal.values * 0.75).float()
    commit_(grad, residual, buffer, proposal.indices, sent, rule)
    kind = np.dtype(str(dtype).removeprefix("torch.")).type
    for i, value in zip(chosen, sent.tolist(), strict=True):
        new_residual[i] = kind(new_residual[i] - kind(value))
        if new_buffer is not None:
            new_buffer[i] = kind(0)
    assert residual.tolist() == [float(x) for x in new_residual]
    if buffer is not None:
        assert buffer.tolist() == [float(x) for x in new_buffer]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_gradient_of_another_type_is_converted_to_the_residuals(dtype):
    grad, residual, buffer = state(900)
    grad = grad.to(dtype)
    for a, b in zip(
        propose(grad, residual, buffer, 9, FoldRule(0.9))[:2],
        propose(grad.float(), residual, buffer, 9, FoldRule(0.9))[:2],
        strict=True,
    ):
        assert torch.equal(a, b)
    twin, twin_buffer = residual.clone(), buffer.clone()
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    commit_(grad, residual, buffer, *nothing, FoldRule(0.9))
    commit_(grad.float(), twin, twin_buffer, *nothing, FoldRule(0.9))
    assert torch.equal(residual, twin)
    assert torch.equal(buffer, twin_buffer)
    assert grad.dtype == dtype


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["grad", "residual", "buffer"])
@pytest.mark.parametrize("numel", [1, 100, 200_000])
def test_a_single_value_that_is_not_finite_is_noticed_wherever_it_is(poison, place, numel):
    for position in {0, numel // 2, numel - 1}:
        tensors = dict(zip(["grad", "residual", "buffer"], state(numel), strict=True))
        tensors[place][position] = poison
        proposal = propose(
            tensors["grad"], tensors["residual"], tensors["buffer"], 1, FoldRule(0.9)
        )
        assert not proposal.finite


def test_more_non_finite_values_than_are_sent_and_an_overflowing_sum_are_noticed():
    grad, residual, _ = state(100_000)
    assert not propose(grad / 0, residual, None, 3, FoldRule(0.0)).finite
    grad[5] = residual[5] = 3e38
    assert not propose(grad, residual, None, 3, FoldRule(0.0)).finite
