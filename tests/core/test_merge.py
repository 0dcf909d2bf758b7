import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import dgc_fold
from thinwire.core.merge import sum_sparse

VALUE = st.floats(-(2.0**100), 2.0**100, width=32)
PART = st.dictionaries(st.integers(0, 30), VALUE, max_size=20)


@given(st.lists(PART, min_size=1, max_size=5), st.sampled_from([torch.float32, torch.float64]))
def test_the_sum_is_taken_in_the_order_of_the_parts(parts, dtype):
    parts = [(sorted(part), [part[i] for i in sorted(part)]) for part in parts]
    expected = dgc_fold.sparse_sum(parts, np.float32 if dtype == torch.float32 else np.float64)
    tensors = [(torch.tensor(i, dtype=torch.int64), torch.tensor(v, dtype=torch.float32)) for i, v in parts]
    indices, sums = sum_sparse(tensors, dtype)
    assert indices.tolist() == list(expected)
    assert sums.dtype == dtype
    assert sums.tolist() == [float(x) for x in expected.values()]
    assert not sums[sums == 0].signbit().any()


def test_the_order_matters_and_is_kept():
    big, small = (torch.tensor([4]), torch.tensor([1e8])), (torch.tensor([4]), torch.tensor([1.0]))
    minus = (torch.tensor([4]), torch.tensor([-1e8]))
    assert sum_sparse([big, minus, small], torch.float32)[1].tolist() == [1.0]
    assert sum_sparse([big, small, minus], torch.float32)[1].tolist() == [0.0]


def test_the_parts_are_left_alone():
    part = (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]))
    _, sums = sum_sparse([part], torch.float32)
    sums += 1
    assert part[1].tolist() == [1.0, 2.0]


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="parts is empty"):
        sum_sparse([], torch.float32)
