"""Orthonormal columns of many matrices: the span, the bits, and columns that depend on others."""

import pytest
import torch
from torch import Tensor

from tests.api import orthonormal


def columns_of(rows: int, seed: int) -> Tensor:
    """Two nearly dependent columns, shape (2, rows)."""
    columns = torch.randn(2, rows, generator=torch.Generator().manual_seed(seed))
    columns[1] += 100 * columns[0]
    return columns


@pytest.mark.parametrize("rows", [[3], [1000, 3], [128, 70_001, 129, 4]])
def test_columns_are_orthonormal_and_same_bits_on_any_number_of_threads(rows: list[int]) -> None:
    given = [columns_of(n, seed) for seed, n in enumerate(rows)]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            basis, lost = orthonormal(torch.cat(given, 1), rows)
            assert lost.shape == (2, len(rows)) and not lost.any()
            found.append(basis)
    finally:
        torch.set_num_threads(before)
    assert found[0].numpy().tobytes() == found[1].numpy().tobytes()
    for matrix, basis in zip(given, found[0].split(rows, 1), strict=True):
        torch.testing.assert_close(basis @ basis.T, torch.eye(2), rtol=0, atol=1e-5)
        # the span is that of the columns
        residue = matrix - (matrix @ basis.T) @ basis
        assert float(residue.norm()) < 1e-5 * float(matrix.norm())


@pytest.mark.parametrize("width", [1, 2, 5])
def test_gram_schmidt_from_left_to_right_gives_the_same(width: int) -> None:
    """1e-12 in float64, times what nearly dependent columns make of it."""
    rows = [width + 1, 300]
    columns = torch.randn(width, sum(rows), generator=torch.Generator().manual_seed(2)).double()
    found, _ = orthonormal(columns, rows)
    pairs = zip(columns.split(rows, 1), found.split(rows, 1), strict=True)
    for matrix, basis in pairs:
        expected: list[Tensor] = []
        for column in matrix:
            rest = column.clone()
            for other in expected:
                rest -= (rest @ other) * other
            expected.append(rest / rest.norm())
        torch.testing.assert_close(basis, torch.stack(expected), rtol=0, atol=1e-11)


def test_dependent_and_empty_columns_are_zero() -> None:
    column = torch.arange(1.0, 6.0)
    given = torch.cat([torch.stack([column, 3 * column, column**2]), torch.zeros(3, 4)], 1)
    found, lost = orthonormal(given, [5, 4])
    assert lost.tolist() == [[False, True], [True, True], [False, True]]
    basis, nothing = found.split([5, 4], 1)
    assert not nothing.any() and not basis[1].any()
    torch.testing.assert_close(basis[0], column / column.norm())
    torch.testing.assert_close(basis[2] @ basis[0], torch.tensor(0.0), rtol=0, atol=1e-6)


def test_nan_stays_in_its_matrix() -> None:
    given = columns_of(9, 1)
    spoiled = given.clone()
    spoiled[0, 5] = float("nan")
    found, lost = orthonormal(torch.cat([spoiled, given], 1), [9, 9])
    alone, _ = orthonormal(given, [9])
    assert torch.equal(found[:, 9:], alone) and lost[0].tolist() == [True, False]
    assert found[0, :9].isnan().any()
