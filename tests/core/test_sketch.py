"""Sums that stand for tensors: inner products survive, whatever the tensors are."""

import pytest
import torch

from tests.api import SKETCH_NUMEL, sketch

SMALL, LARGE, KEYS = 4000, 50_000, 100


def tensors(numel):
    """Entries of one sign, of both, and of which few are large."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(numel, generator=generator)
    return {"one sign": torch.ones(numel), "normal": normal, "few large": normal.pow(5)}


@pytest.mark.parametrize("kind", ["one sign", "normal", "few large"])
@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_squares_are_right_on_average(numel, kind):
    """The standard error over 100 keys is sqrt(2 / 64 / 100), 1.8 %; more with few large ones."""
    tensor = tensors(numel)[kind]
    squares = [float(sketch(tensor, key).square().sum()) for key in range(KEYS)]
    mean = sum(squares) / len(squares) / float(tensor.double().square().sum())
    assert mean == pytest.approx(1, abs=0.3 if kind == "few large" and numel == LARGE else 0.06)
    spread = torch.tensor(squares).std() / torch.tensor(squares).mean()
    assert spread < (1.5 if kind == "few large" and numel == LARGE else 0.35)


def test_products_of_tensors_of_one_key_survive():
    """1 / sqrt(64) of the norms is the standard deviation of one."""
    a, b = torch.ones(SMALL), tensors(SMALL)["normal"]
    products = [float(sketch(a, key) @ sketch(b, key)) for key in range(KEYS)]
    assert sum(products) / KEYS == pytest.approx(
        float(a @ b), abs=0.06 * float(a.norm() * b.norm())
    )


def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches():
    a, b = torch.randn(70, 100, dtype=torch.float64), torch.randn(70, 100, dtype=torch.float64)
    torch.testing.assert_close(sketch(a + b, 3), sketch(a, 3) + sketch(b, 3), rtol=0, atol=1e-9)


def test_parts_of_a_long_vector_do_not_cancel_one_another():
    together = [sketch(torch.ones(SMALL), key) for key in range(50)]
    assert float(torch.stack(together).sum(0).square().sum()) == pytest.approx(50 * SMALL, rel=0.6)


@pytest.mark.parametrize("shape", [(), (1,), (63,), (64,), (65,), (3, 5, 7)])
def test_any_shape_has_as_many_sums(shape):
    tensor = torch.randn(shape)
    found = sketch(tensor, 0)
    assert found.shape == (SKETCH_NUMEL,)
    assert found.dtype == torch.float64
    if tensor.numel() <= SKETCH_NUMEL:
        assert float(found.square().sum()) == pytest.approx(float(tensor.double().square().sum()))
