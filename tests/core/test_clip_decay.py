"""Clipping, norms and the trust ratio, as pure functions."""

import math

import pytest
import torch

from tests.api import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    L1Decay,
    L2Decay,
    TrustRule,
    clipped,
    global_norm,
    norm,
    trust_ratio,
)

THREE_FOUR = torch.tensor([3.0, 4.0])


def rows(*entries: tuple[int, list[float]]) -> torch.Tensor:
    indices = torch.tensor([[i for i, _ in entries]])
    values = torch.tensor([v for _, v in entries])
    return torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=True).coalesce()


def test_every_clip_by_hand() -> None:
    grads = [THREE_FOUR, torch.tensor([[0.0, 12.0]])]
    assert [g.tolist() for g in clipped(ClipByGlobalNorm(6.5), grads)] == [[1.5, 2.0], [[0.0, 6.0]]]
    assert [g.tolist() for g in clipped(ClipByNorm(6.0), grads)] == [[3.0, 4.0], [[0.0, 6.0]]]
    assert [g.tolist() for g in clipped(ClipByValue(3.5), grads)] == [[3.0, 3.5], [[0.0, 3.5]]]
    assert [g.tolist() for g in clipped(ClipByValue(3.5, 1.0), grads)] == [[3.0, 3.5], [[1.0, 3.5]]]
    assert grads[0].tolist() == [3.0, 4.0]
    assert clipped(ClipByNorm(1.0), []) == []
    assert ClipByValue(2.0).min == -2.0


def test_below_the_limit_no_bit_changes() -> None:
    grad = torch.randn(1000)
    for clip in (ClipByGlobalNorm(1e6), ClipByNorm(1e6), ClipByValue(1e6)):
        assert torch.equal(clipped(clip, [grad])[0], grad)


@pytest.mark.parametrize("clip", [ClipByGlobalNorm(1.0), ClipByNorm(1.0), ClipByValue(1.0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_not_repaired(clip: object, bad: float) -> None:
    (out,) = clipped(clip, [torch.tensor([1.0, bad])])
    assert not torch.isfinite(out).all()


@pytest.mark.parametrize("size", [1e18, 1e19, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("count", [1, 100, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_large_finite_gradient_is_clipped(dtype: torch.dtype, count: int, size: float) -> None:
    grads = [torch.full((count,), size, dtype=dtype), torch.full((2, 3), -size, dtype=dtype)]
    limit = size / 4
    (norm_of_both,) = [torch.cat([g.flatten() for g in grads]).to(torch.complex128).norm()]
    together = clipped(ClipByGlobalNorm(limit), grads)
    for out, grad in zip(together, grads, strict=True):
        expected = (grad.to(torch.complex128) * (limit / norm_of_both)).to(torch.complex64)
        torch.testing.assert_close(out.to(torch.complex64), expected, rtol=1e-2, atol=0)
    for out in clipped(ClipByNorm(limit), grads):
        assert out.to(torch.complex128).norm().item() == pytest.approx(limit, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_narrow_types_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    big = torch.full((1000,), 300.0, dtype=dtype)
    assert norm(big).dtype == torch.float32
    assert norm(big).item() == pytest.approx(300 * math.sqrt(1000), rel=1e-5)
    (out,) = clipped(ClipByNorm(1.0), [big])
    assert out.dtype == dtype
    assert norm(out).item() == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("limit", [0.01, 1.0])
def test_half_precision_is_rounded_once(limit: float) -> None:
    big = torch.full((4096,), 1000.0, dtype=torch.float16)
    for clip in (ClipByGlobalNorm(limit), ClipByNorm(limit)):
        (out,) = clipped(clip, [big])
        (right,) = clipped(clip, [big.float()])
        assert torch.equal(out, right.half())


def test_the_global_norm_mixes_types_shapes_and_layouts() -> None:
    tensors = [
        THREE_FOUR,
        torch.tensor(12.0, dtype=torch.float64),
        torch.zeros(0, 3),
        rows((1, [0.0, 84.0])),
    ]
    assert global_norm(tensors).item() == 85.0
    assert global_norm(tensors).dtype == torch.float64
    out = clipped(ClipByGlobalNorm(42.5), tensors)
    assert [t.dtype for t in out] == [t.dtype for t in tensors]
    assert out[3].is_sparse
    assert out[3].to_dense()[1].tolist() == [0.0, 42.0]


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: ClipByGlobalNorm(0), ValueError, "c"),
        (lambda: ClipByNorm(-1.0), ValueError, "c"),
        (lambda: ClipByNorm(math.inf), ValueError, "c"),
        (lambda: ClipByNorm("1"), TypeError, "c"),
        (lambda: ClipByGlobalNorm(True), TypeError, "c"),
        (lambda: ClipByValue(1.0, 2.0), ValueError, "min"),
        (lambda: ClipByValue(-1.0), ValueError, "min"),
        (lambda: ClipByValue(math.nan), ValueError, "max"),
        (lambda: L1Decay(-0.1), ValueError, "c"),
        (lambda: L2Decay(None), TypeError, "c"),
    ],
)
def test_wrong_arguments(make: object, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        make()  # type: ignore[operator]


def test_the_trust_ratio_and_its_fallback() -> None:
    p, u = torch.tensor([6.0, 0.0, 6.0, 0.0]), torch.tensor([2.0, 2.0, 0.0, 0.0])
    assert trust_ratio(p, u, TrustRule()).tolist() == [3.0, 1.0, 1.0, 1.0]
    assert trust_ratio(p, u, TrustRule(low=0.0, high=0.5)).tolist() == [0.5, 1.0, 1.0, 1.0]
    assert trust_ratio(p, u, TrustRule(low=4.0)).tolist() == [4.0, 1.0, 1.0, 1.0]
    lars = TrustRule(coefficient=0.5, weight_decay=0.5, eps=1.0)
    assert trust_ratio(p, u, lars).tolist() == [0.5, 1.0, 1.0, 1.0]
