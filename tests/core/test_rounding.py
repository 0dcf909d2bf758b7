import math

import pytest
import torch

from tests.api import FoldRule, commit_, mixed, narrowed, propose, rounding_seed, store_
from tests.precision import same_bits
from tests.reference import rounding as oracle

RULES = [FoldRule(0.9), FoldRule(0.9, nesterov=True), None]
"""None: without momentum buffer."""
NOTHING = torch.empty(0, dtype=torch.int64), torch.empty(0)


@pytest.fixture(params=["auto", "reference"], autouse=True)
def body(request, monkeypatch):
    monkeypatch.setenv("THINWIRE_KERNELS", request.param)


def normal(numel, seed=0, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def stored(values, seed):
    target = torch.full_like(values, 7, dtype=torch.bfloat16)
    store_(target, values, seed)
    return target


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-38, 1e-40, 3e37])
def test_every_entry_becomes_the_neighbour_that_its_random_bits_say(scale):
    values, seed = normal(700) * scale, 0xC0FFEE
    words = [oracle.random_word(i, seed) for i in range(700)]
    assert mixed(torch.arange(700) ^ seed).tolist() == words
    assert stored(values, seed).tolist() == [
        oracle.rounded(x, word >> 16) for x, word in zip(values.tolist(), words, strict=True)
    ]


def test_bfloat16_stays_bfloat16():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()]
    for seed in (0, 1, 2**32 - 1):
        assert same_bits(stored(every.float(), seed), every)


def test_no_finite_number_becomes_infinite_and_nothing_else_becomes_finite():
    top = torch.tensor([torch.finfo(torch.float32).max, oracle.LARGEST, 3.3961e38, 3.3e38]).repeat(
        2000
    )
    top[::2] *= -1
    result = stored(top, 5)
    assert result.isfinite().all()
    assert same_bits(result[0::4], torch.full((2000,), -oracle.LARGEST, dtype=torch.bfloat16))
    poison = torch.tensor([math.inf, -math.inf, math.nan]).repeat(500)
    assert not stored(poison, 5).isfinite().any()


def test_mean_of_stored_values_is_unbiased():
    values = torch.cat([normal(300), normal(300) * 1e-39, normal(300) * 1e30])
    rounds, total = 3000, torch.zeros(900, dtype=torch.float64)
    for step in range(rounds):
        total += stored(values, rounding_seed(step, 3)).double()
    errors = total / rounds - values.double()
    deviations = torch.tensor(
        [math.sqrt(oracle.variance(x) / rounds) for x in values.tolist()], dtype=torch.float64
    )
    z = errors[deviations > 0] / deviations[deviations > 0]
    assert z.abs().max() < 5  # 900 normal variables pass it once in 2,000 times
    assert abs(z.sum()) < 5 * math.sqrt(len(z))
    # neither more random than said, nor less: 1 within three deviations
    assert 0.9 < z.square().mean() < 1.15


def test_steps_tensors_and_both_states_are_rounded_independently():
    half = torch.full((100_000,), 1 + 2**-8)  # in the middle between two bfloat16
    zero = torch.zeros_like(half)
    columns = [
        stored(half, rounding_seed(step, key)) for step, key in [(0, 0), (1, 0), (0, 1), (9, 9)]
    ]
    v, u = torch.zeros(2, half.numel(), dtype=torch.bfloat16)
    commit_(half, v, u, *NOTHING, FoldRule(0.9), seed=rounding_seed(5, 5))
    columns += [v, u]
    ups = torch.stack([(c > 1).double() - 0.5 for c in columns])
    correlation = ups @ ups.T / (0.25 * len(zero))
    assert (correlation - torch.eye(6, dtype=torch.float64)).abs().max() < 5 / math.sqrt(len(zero))
    neighbours = (ups[:, 1:] * ups[:, :-1]).sum(dim=1) / (0.25 * len(zero))
    assert neighbours.abs().max() < 5 / math.sqrt(len(zero))


@pytest.mark.parametrize("numel", [1, 700])
@pytest.mark.parametrize("rule", RULES)
def test_fold_equals_float32_and_only_the_rest_is_rounded(rule, numel):
    grad, v, u = (
        normal(numel),
        normal(numel, 1).bfloat16(),
        normal(numel, 2).bfloat16() if rule else None,
    )
    rule = rule or FoldRule(0.0)
    wide_v, wide_u = v.float(), None if u is None else u.float()
    k, seed = max(1, numel // 20), 77
    proposal = propose(grad, v, u, k, rule)
    exact = propose(grad, wide_v, wide_u, k, rule)
    assert torch.equal(proposal.indices, exact.indices)
    assert torch.equal(proposal.values, exact.values)
    sent = proposal.values * 0.75
    commit_(grad, v, u, proposal.indices, sent, rule, seed=seed)
    commit_(grad, wide_v, wide_u, exact.indices, sent, rule)
    words = [oracle.random_word(i, seed) for i in range(numel)]
    assert v.tolist() == [
        oracle.rounded(x, w & 0xFFFF) for x, w in zip(wide_v.tolist(), words, strict=True)
    ]
    if u is not None:
        assert u.tolist() == [
            oracle.rounded(x, w >> 16) for x, w in zip(wide_u.tolist(), words, strict=True)
        ]
        assert u[proposal.indices].count_nonzero() == 0


def test_a_gradient_too_small_to_move_the_nearest_bfloat16_accumulates_at_its_rate():
    steps, numel, tiny = 2000, 4096, 1e-3
    v, grad = torch.ones(numel, dtype=torch.bfloat16), torch.full((numel,), tiny)
    naive = v.clone()
    for step in range(steps):
        commit_(grad, v, None, *NOTHING, FoldRule(0.0), seed=rounding_seed(step, 0))
        naive = (naive.float() + grad).to(torch.bfloat16)
    assert torch.equal(naive, torch.ones(numel, dtype=torch.bfloat16))
    # Below 4 two neighbours are 2^-6 apart, so a step adds at most a variance of 2^-14.
    deviation = math.sqrt(steps * 2**-14 / numel)
    assert abs(v.double().mean() - (1 + steps * tiny)) < 4 * deviation
    assert 0 < (v.double() - 3).std() < math.sqrt(steps * 2**-14)


def test_wider_state_is_stored_as_it_is():
    for dtype in (torch.float32, torch.float64):
        target = torch.zeros(100, dtype=dtype)
        store_(target, normal(100, dtype=dtype), 3)
        assert torch.equal(target, normal(100, dtype=dtype))


def test_one_conversion_is_to_the_nearest_and_finite():
    values = torch.tensor([1.0, 1 + 2**-9, 3.4e38, -3.4e38, math.inf, math.nan])
    result = narrowed(values, torch.bfloat16)
    assert result[:5].tolist() == [1.0, 1.0, oracle.LARGEST, -oracle.LARGEST, math.inf]
    assert result[5].isnan()
    assert narrowed(values[:2], torch.float64).tolist() == [1.0, 1 + 2**-9]
    assert narrowed(values, torch.float32) is values
