"""The Triton steps of LAMB, LARS and the outer SGD against the formulas, one operation of torch at
a time."""

import math
from collections.abc import Iterator

import pytest
import torch

from tests.core.test_steps import (
    DTYPES,
    assert_lamb,
    assert_lars,
    assert_outer,
    assert_same_bits,
    clones,
    tensors,
)
from tests.triton_body import DEVICE, require_triton, triton_kernels

require_triton()

from tests.api import (  # noqa: E402
    LambRule,
    LarsRule,
    OuterRule,
    TrustRule,
    compiled_steps,
    device_steps,
    lamb_list_,
    lars_list_,
    outer_list_,
)
from thinwire import optim  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning"
    ),  # NumPy's, which the interpreter computes with
]
BLOCK = 8
SIZES = [1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK * (BLOCK + 1) + 5]
"""Around one block, and more blocks than their sums are added at a time."""
KINDS = ["random", "denormal", "huge", "zero"]


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with triton_kernels(BLOCK):
        yield


def moved_by(work, lists):
    """Ratios and lists after `work` on the device, on copies."""
    there = [[t.to(DEVICE, copy=True) for t in each] for each in lists]
    ratios = work(*there)
    return ratios and torch.stack(ratios).cpu(), [[t.cpu() for t in each] for each in there]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("decay", "trust"), [(0.01, TrustRule()), (0.0, TrustRule(low=0.9, high=1.1))]
)
def test_lamb(kind, dtype, decay, trust):
    rule = LambRule(0.1, 0.9, 0.99, 1e-6, decay, 3, trust)
    lists = [tensors(kind, dtype, seed, SIZES) for seed in range(4)]
    lists[3] = [t.square() for t in lists[3]]
    ratios, moved = moved_by(lambda *each: lamb_list_(*each, rule), lists)
    assert_lamb(lists, moved, ratios, decay, trust)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("momentum", "decay", "eps"),
    [("none", 0.01, 0.0), ("plain", 0.01, 0.5), ("nesterov", 0.01, 0.0), ("plain", 0.0, 0.0)],
)
def test_lars(kind, dtype, momentum, decay, eps):
    rule = LarsRule(0.1, 0.9, momentum == "nesterov", TrustRule(0.02, decay, eps))
    lists = [tensors(kind, dtype, seed, SIZES) for seed in range(3)]
    work = lambda p, g, b: lars_list_(p, g, None if momentum == "none" else b, rule)  # noqa: E731
    ratios, moved = moved_by(work, lists)
    assert_lars(lists, moved, ratios, momentum, decay, eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rule", [OuterRule(0.7), OuterRule(0.7, 0.9), OuterRule(0.7, 0.9, nesterov=True)]
)
def test_the_outer_step(dtype, rule):
    lists = [tensors("random", dtype, seed, SIZES) for seed in range(3)]
    _, moved = moved_by(
        lambda s, c, b: outer_list_(s, c, b if rule.momentum else None, rule), lists
    )
    assert_outer(lists, moved, rule)


def test_a_nan_or_nothing_at_all_stays_in_its_tensor_and_has_the_ratio_one():
    twins = [tensors("random", torch.float32, seed, [40, 41, 0, 33]) for seed in range(3)]
    lists = clones(twins)
    lists[1][0][37] = math.nan
    rule = LarsRule(0.1, 0.9, False, TrustRule(0.02, 0.01))
    (ratios, moved), (expected, sane) = (
        moved_by(lambda *each: lars_list_(*each, rule), x) for x in (lists, twins)
    )
    assert ratios[0] == ratios[2] == 1
    assert moved[0][0].isnan().nonzero().tolist() == [[37]]
    for i in (1, 3):
        assert ratios[i] == expected[i]
        assert_same_bits(moved[0][i], sane[0][i])


@pytest.mark.parametrize(
    "make",
    [
        lambda params: optim.Lamb(params, lr=0.01, trust_clip=(0.5, 2.0)),
        lambda params: optim.Lars(params, lr=0.1, momentum=0.9, nesterov=True),
    ],
)
def test_the_optimizers_take_the_kernels_and_agree_with_the_readable_path(make, monkeypatch):
    calls, results = [], []
    whole = device_steps.launch
    monkeypatch.setattr(
        device_steps,
        "launch",
        lambda *given, **more: (calls.append(given[1]), whole(*given, **more)),
    )
    for choice in ("triton", "reference"):
        monkeypatch.setenv("THINWIRE_KERNELS", choice)
        params = [
            torch.nn.Parameter(t.to(DEVICE)) for t in tensors("random", torch.float32, 0, SIZES)
        ]
        optimizer = make(params)
        for step in range(3):
            for p, grad in zip(
                params, tensors("random", torch.float32, 10 + step, SIZES), strict=True
            ):
                p.grad = grad.to(DEVICE)
            optimizer.step()
        results.append(params)
    blocks = sum(-(-size // BLOCK) for size in SIZES)
    assert calls == 3 * [
        (blocks,),
        (len(SIZES),),
        (blocks,),
    ]  # whole lists, and nothing in the readable path
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # its norms are summed in float32


def test_autograd_sees_that_parameters_have_changed():
    p = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    optim.Lamb([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_who_gets_the_kernels(monkeypatch):
    plain = torch.zeros(4, device=DEVICE)
    assert compiled_steps([plain], [torch.nn.Parameter(plain)]) is device_steps
    for other in (
        plain.double(),
        plain.bfloat16(),
        torch.zeros(8, device=DEVICE)[::2],
        torch.zeros(4, device="meta"),
    ):
        assert compiled_steps([plain, plain], [plain, other]) is None
    monkeypatch.setenv("THINWIRE_KERNELS", "reference")
    assert compiled_steps([plain]) is None
