import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api import checked_mean_, reference, sum_sparse
from tests.reference import dgc_fold

VALUE = st.floats(-(2.0**100), 2.0**100, width=32)
PART = st.dictionaries(st.integers(0, 30), VALUE, max_size=20)


@given(st.lists(PART, min_size=1, max_size=5), st.sampled_from([torch.float32, torch.float64]))
def test_the_sum_is_taken_in_the_order_of_the_parts(parts, dtype):
    parts = [(sorted(part), [part[i] for i in sorted(part)]) for part in parts]
    expected = dgc_fold.sparse_sum(parts, np.float32 if dtype == torch.float32 else np.float64)
    tensors = [
        (torch.tensor(i, dtype=torch.int64), torch.tensor(v, dtype=torch.float32)) for i, v in parts
    ]
    split = [list(each) for each in zip(*tensors, strict=True)]
    for indices, sums in (sum_sparse(tensors, dtype), reference.sum_sparse(*split, dtype)):
        assert indices.tolist() == list(expected)
        assert sums.dtype == dtype
        assert sums.tolist() == [float(x) for x in expected.values()]
        assert not sums[sums == 0].signbit().any()


def test_the_parts_are_left_alone():
    part = (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]))
    _, sums = sum_sparse([part], torch.float32)
    sums += 1
    assert part[1].tolist() == [1.0, 2.0]


PIECE = 1 << 17
"""float32 entries of a piece that is read while it is in the cache."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("numel", [0, 1, 777, 2 * PIECE + 3])
def test_a_checked_mean_is_the_mean_and_finite(numel: int, dtype: torch.dtype) -> None:
    total = torch.randn(numel, dtype=dtype)
    expected = total / 3
    finite, _ = checked_mean_(total, 3, bits=True).tolist()
    assert torch.equal(total, expected)
    assert finite == 1


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE + 2])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_entry_that_is_not_finite_shows_in_a_checked_mean(place: int, value: float) -> None:
    total = torch.ones(2 * PIECE + 3)
    total[place] = value
    assert checked_mean_(total, 2, bits=False).tolist() == [0, 0]


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE + 2])
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_bit_shows_in_a_checked_mean(place: int, bit: int) -> None:
    total = torch.ones(2 * PIECE + 3)
    _, sound = checked_mean_(total.clone(), 1, bits=True).tolist()
    total.view(torch.int32).numpy()[place] ^= np.uint32(1 << bit).astype(np.int32)
    _, damaged = checked_mean_(total, 1, bits=True).tolist()
    assert sound != damaged


def test_swapped_pieces_show_in_a_checked_mean() -> None:
    total = torch.randn(2 * PIECE)
    moved = torch.cat([total[PIECE:], total[:PIECE]])
    assert not torch.equal(checked_mean_(total, 1, bits=True), checked_mean_(moved, 1, bits=True))
