"""The steps of LAMB and LARS against the formulas, one operation of torch at a time."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch

from tests import api
from tests.precision import assert_same_bits
from thinwire import optim

SIZES = [1, 2, 3, 127, 128, 129, 1023, 1024, 1025, 2049, 32_767, 32_768, 32_769, 70_001, 300_007]
"""Around the lanes (128), the block (1024) and the chunk (32768) of the sums."""
KINDS = ["random", "tied", "denormal", "huge", "zero"]
DTYPES = [torch.float32, torch.float64]
WAYS = [1, 2, 3]
"""Threads."""


@functools.cache
def tensor(kind, numel, dtype, seed):
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    normal = torch.randn(numel, generator=generator, dtype=torch.float64)
    small = 1e-42 if dtype == torch.float32 else 1e-310
    values = {
        "random": normal,
        "tied": (3 * normal).round(),
        "denormal": normal * small,
        "huge": normal * 2e37,
        "zero": normal * 0,
    }
    return values[kind].to(dtype)


def tensors(kind, dtype, seed, sizes=SIZES):
    return [tensor(kind, numel, dtype, seed) for numel in sizes]


def squares(kind, dtype, seed):
    return [t.square() for t in tensors(kind, dtype, seed)]


def clones(lists):
    return [[t.clone() for t in each] for each in lists]


def norm(x):
    """Of squares in float64, summed in the widest float, where the order does not show."""
    return math.sqrt(x.double().square().numpy().sum(dtype=np.longdouble))


def exact_root(x):
    """Rounded as IEEE 754 has it, which torch's own root is not always."""
    return torch.from_numpy(np.sqrt(x.numpy()))


def ratio_by_hand(p, update, decay=0.0, eps=0.0, coefficient=1.0, low=0.0, high=math.inf):
    param_norm, update_norm = norm(p), norm(update)
    if param_norm == 0 or update_norm == 0:
        return 1.0
    return min(max(coefficient * param_norm / (update_norm + decay * param_norm + eps), low), high)


def assert_one_rounding_apart(ratio, expected):
    """float32: the rounding of the quotient is left. float64: a few hundred additions."""
    allowed = 2.0**-23 if ratio.dtype == torch.float32 else 1e-13
    assert abs(float(ratio) - expected) <= max(allowed * expected, 2.0**-149)


def assert_lamb(lists, moved, ratios, decay, trust):
    """The third step at rate 0.1, with betas 0.9 and 0.99 and eps 1e-6."""
    for i, (p, g, m, v) in enumerate(zip(*lists, strict=True)):
        mean, square = m * 0.9 + g * (1 - 0.9), v * 0.99 + g * g * (1 - 0.99)
        r = (mean * (1 / (1 - 0.9**3))) / (
            exact_root(square * (1 / (1 - 0.99**3))) + 1e-6
        ) + decay * p
        assert_same_bits(moved[1][i], g)
        assert_same_bits(moved[2][i], mean)
        assert_same_bits(moved[3][i], square)
        assert_one_rounding_apart(ratios[i], ratio_by_hand(p, r, low=trust.low, high=trust.high))
        assert_same_bits(moved[0][i], p - (0.1 * ratios[i]) * r)


def assert_lars(lists, moved, ratios, momentum, decay, eps):
    """A step at rate 0.1, with momentum 0.9 and trust coefficient 0.02."""
    for i, (p, g, b) in enumerate(zip(*lists, strict=True)):
        expected = ratio_by_hand(p, g, decay, eps, 0.02) if decay else 1.0
        assert_one_rounding_apart(ratios[i], expected)
        step = (0.1 * ratios[i]) * (g + decay * p)
        velocity = b if momentum == "none" else b * 0.9 + step
        change = {"none": step, "plain": velocity, "nesterov": step + 0.9 * velocity}[momentum]
        assert_same_bits(moved[0][i], p - change)
        assert_same_bits(moved[1][i], g)
        assert_same_bits(moved[2][i], velocity)


@pytest.fixture
def on_threads(monkeypatch):
    def set_way(count):
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)

    return set_way


def assert_the_way_changes_nothing(on_threads, work, lists):
    """The results of `work`, which every number of threads and every cut has to repeat."""
    results = []
    for way in WAYS:
        on_threads(way)
        copies = clones(lists)
        results.append([work(*copies), *itertools.chain(*copies)])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            assert_same_bits(a, b)
    on_threads(WAYS[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("decay", "trust"), [(0.01, api.TrustRule()), (0.0, api.TrustRule(low=0.9, high=1.1))]
)
def test_lamb(kind, dtype, decay, trust, on_threads):
    rule = api.LambRule(0.1, 0.9, 0.99, 1e-6, decay, 3, trust)
    lists = [
        tensors(kind, dtype, 0),
        tensors(kind, dtype, 1),
        tensors(kind, dtype, 2),
        squares(kind, dtype, 3),
    ]
    assert_the_way_changes_nothing(
        on_threads, lambda *each: api.numba_body.lamb_(*each, rule), lists
    )
    moved = clones(lists)
    ratios = api.numba_body.lamb_(*moved, rule)
    assert_lamb(lists, moved, ratios, decay, trust)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("momentum", "decay", "eps"),
    [("none", 0.01, 0.0), ("plain", 0.01, 0.5), ("nesterov", 0.01, 0.0), ("plain", 0.0, 0.0)],
)
def test_lars(kind, dtype, momentum, decay, eps, on_threads):
    rule = api.LarsRule(0.1, 0.9, momentum == "nesterov", api.TrustRule(0.02, decay, eps))
    lists = [tensors(kind, dtype, seed) for seed in range(3)]

    def work(p, g, b):
        return api.numba_body.lars_(p, g, None if momentum == "none" else b, rule)

    assert_the_way_changes_nothing(on_threads, work, lists)
    moved = clones(lists)
    ratios = work(*moved)
    assert_lars(lists, moved, ratios, momentum, decay, eps)


def test_a_plain_outer_step_is_the_change_itself():
    change = torch.ones(2)
    assert api.outer_step_(change, None, api.OuterRule()) is change


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_readable_twins_agree(dtype):
    """Norms are summed in another order, in float32: n times its rounding unit at most."""
    sizes = [3, 1025, 33_000]
    p, g, m, b = (tensors("random", dtype, seed, sizes) for seed in range(4))
    v = [t.square() for t in b]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    lamb, lars = (
        api.LambRule(0.1, 0.9, 0.99, 1e-6, 0.01, 3, api.TrustRule()),
        api.LarsRule(0.1, 0.9, True, api.TrustRule(0.02, 0.01)),
    )
    for fast_, slow_, lists, rule in (
        (api.numba_body.lamb_, api.lamb_, (p, g, m, v), lamb),
        (api.numba_body.lars_, api.lars_, (p, g, b), lars),
    ):
        fast, slow = clones(lists), clones(lists)
        ratios = fast_(*fast, rule)
        twins = [slow_(*each, rule) for each in zip(*slow, strict=True)]
        torch.testing.assert_close(ratios, torch.stack(twins), rtol=tolerance, atol=0)
        for a, c in zip(itertools.chain(*fast), itertools.chain(*slow), strict=True):
            torch.testing.assert_close(a, c, rtol=tolerance, atol=tolerance)


def test_norms_that_float32_cannot_have_give_the_right_ratio():
    for size in (1e25, 1e-30):
        p, g, m, v = (
            [torch.full((2000,), size)],
            [torch.ones(2000)],
            [torch.zeros(2000)],
            [torch.zeros(2000)],
        )
        ratio = api.numba_body.lamb_(
            p, g, m, v, api.LambRule(0.0, 0.9, 0.99, 1e-6, 0.0, 1, api.TrustRule())
        )
        assert float(ratio) == pytest.approx(size, rel=1e-5)


def test_a_nan_stays_in_its_tensor_and_its_ratio_is_one():
    lists = [tensors("random", torch.float32, seed, [40, 40]) for seed in range(3)]
    lists[1][0][7] = math.nan
    twins = clones(lists)
    rule = api.LarsRule(0.1, 0.9, False, api.TrustRule(0.02, 0.01))
    ratios = api.numba_body.lars_(*lists, rule)
    slow = [api.lars_(*each, rule) for each in zip(*twins, strict=True)]
    assert float(ratios[0]) == float(slow[0]) == 1.0
    for a, b in zip(itertools.chain(*lists), itertools.chain(*twins), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, device="meta"),
        torch.zeros(8)[::2],
        torch.zeros(4).as_subclass(Strange),
        torch.zeros(4, dtype=torch.complex64).conj().imag,
        torch.zeros(4).to_sparse(),
    ],
)
def test_tensors_without_plain_addresses_are_left_to_torch(other, monkeypatch):
    plain = torch.zeros(4)
    assert api.compiled_steps([plain], [torch.nn.Parameter(plain)]) is api.numba_body
    assert api.compiled_steps([other], [plain]) is None
    assert api.compiled_steps([plain, plain], [plain, other]) is None
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    assert api.compiled_steps([plain]) is None


@pytest.mark.parametrize("make", [optim.Lamb, lambda params: optim.Lars(params, lr=0.1)])
def test_autograd_sees_that_parameters_have_changed(make):
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    optimizer = make([p])
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("make", [optim.Lamb, lambda params: optim.Lars(params, lr=0.1)])
def test_gradients_and_parameters_in_bfloat16_take_the_same_way(make, monkeypatch):
    results = []
    for choice in ("auto", "reference"):
        monkeypatch.setenv("THINWIRE_KERNELS", choice)
        p = torch.nn.Parameter(tensor("random", 1500, torch.float32, 0).bfloat16())
        p.grad = tensor("random", 1500, torch.float32, 1).bfloat16()
        optimizer = make([p])
        for _ in range(3):
            optimizer.step()
        results.append(p.detach())
    # the same float32 numbers but for the last bits, which may fall on either side of a rounding to
    # bfloat16
    torch.testing.assert_close(*results, rtol=2.0**-8, atol=0)
    assert (results[0] == results[1]).float().mean() > 0.99


def test_works_one_after_another_all_run_and_errors_come_last(monkeypatch):
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        done = []

        def work(i, done=done):
            done.append(i)
            if i == 4:
                raise ValueError("number four")

        api.threads.run_all([lambda i=i: work(i) for i in range(4)])
        assert sorted(done) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="number four"):
            api.threads.run_all([lambda i=i: work(i) for i in range(9)])
        seen = len(done)
        api.threads.run_all([])
        assert len(done) == seen


@pytest.mark.parametrize("make", [optim.Lamb, lambda params: optim.Lars(params, lr=0.1)])
def test_state_of_another_size_is_refused_before_anything_is_written(make):
    small, large = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(64))
    small.grad, large.grad = torch.ones(8), torch.ones(64)
    one, other = make([small]), make([large])
    one.step()
    with pytest.raises(ValueError, match=r"has shape \(8,\), the parameter has \(64,\)"):
        other.load_state_dict(one.state_dict())
    assert not other.state
    large.data = torch.ones(100)
    fresh = make([large])
    with pytest.raises(
        RuntimeError, match=r"gradient of parameter 0 has shape \(64,\) and the parameter \(100,\)"
    ):
        fresh.step()


def test_parameters_in_one_memory_are_left_to_torch():
    whole = torch.zeros(100)
    apart = [torch.zeros(50), torch.zeros(50)]
    assert api.compiled_steps(apart, apart) is not None
    assert api.compiled_steps([whole[:60], whole[40:]], apart) is None
