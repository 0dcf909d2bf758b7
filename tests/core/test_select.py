import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api import count_sent, top_k
from tests.reference import dgc_fold


@pytest.mark.parametrize(
    ("numel", "sparsity", "sent"),
    [
        (1, 0.999, 1),
        (1000, 0.999, 1),
        (25_600_000, 0.999, 25_600),
        (10, 0.0, 10),
        (10, 0.75, 2),
        (6, 0.75, 2),
        (3, 0.9, 1),
    ],
)
def test_the_number_sent_is_rounded_and_at_least_one(numel, sparsity, sent):
    assert count_sent(numel, sparsity) == sent


@pytest.mark.fault("ties at the threshold of a selection")
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=200), st.data())
def test_selection_is_exact_and_takes_the_lowest_of_equal_ones(values, data):
    k = data.draw(st.integers(1, len(values)))
    assert top_k(torch.tensor(values, dtype=torch.float32), k).tolist() == dgc_fold.largest(
        values, k
    )


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=100),
    st.data(),
)
def test_selection_of_any_floats(values, data):
    k = data.draw(st.integers(1, len(values)))
    for dtype in (torch.float32, torch.float64):
        assert top_k(torch.tensor(values, dtype=dtype), k).tolist() == dgc_fold.largest(values, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_selected_exactly(dtype):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert top_k(values, 50).tolist() == dgc_fold.largest(values.tolist(), 50)
