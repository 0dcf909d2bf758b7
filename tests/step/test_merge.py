import pytest
import torch

from tests.api import GradientSum


def random_rounds(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    grads = [
        {"a": torch.randn(3, 4, generator=generator), "b": torch.randn((), generator=generator)}
        for _ in range(5)
    ]
    rounds = [{name: g.to(dtype) for name, g in each.items()} for each in grads]
    rounds[1]["b"] = None
    del rounds[3]["b"]
    return rounds


def test_small_gradients_are_not_lost_beside_large_sums():
    """In bfloat16 256 + 1 is 256."""
    merge = GradientSum()
    for value in [256.0] + [1.0] * 8:
        merge.add({"p": torch.tensor([value], dtype=torch.bfloat16)})
    assert merge.take(avg=False)["p"].tolist() == [264.0]


@pytest.mark.parametrize("order", ["sparse first", "dense first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_sparse_gradients_become_dense(order, dtype):
    rows = torch.sparse_coo_tensor([[1, 3, 1]], torch.ones(3, 2), (4, 2), check_invariants=True).to(
        dtype
    )
    dense = torch.full((4, 2), 0.5, dtype=dtype)
    merge = GradientSum()
    for grad in (rows, dense) if order == "sparse first" else (dense, rows):
        merge.add({"table": grad}, 2.0)
    total = merge.take(avg=False)["table"]
    assert total.layout is torch.strided
    assert total.dtype == torch.float32
    assert total.tolist() == [[1.0] * 2, [5.0] * 2, [1.0] * 2, [3.0] * 2]


def test_a_parameter_without_any_gradient_is_absent():
    merge = GradientSum()
    merge.add({"a": torch.ones(2), "never": None})
    merge.add({"never": None})
    assert merge.microsteps == 2
    assert {name: g.tolist() for name, g in merge.take(avg=True).items()} == {"a": [0.5, 0.5]}


@pytest.mark.parametrize("avg", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_completing_equals_adding_and_taking_and_leaves_the_sum(dtype, factor, avg):
    rounds = random_rounds(dtype)
    for before in range(len(rounds)):
        whole, merge = GradientSum(), GradientSum()
        for grads in rounds[:before]:
            whole.add(grads, factor)
            merge.add(grads, factor)
        last = {name: grad.clone() for name, grad in rounds[before].items() if grad is not None}
        whole.add(rounds[before], factor)
        expected, sums = (
            whole.take(avg),
            {name: total.clone() for name, total in merge.take(avg=False).items()},
        )
        places = {
            name: grad.data_ptr() for name, grad in last.items() if grad.layout is torch.strided
        }
        done = merge.completed_(last, factor, avg)
        assert done.keys() == expected.keys()
        for name, value in done.items():
            assert torch.equal(value, expected[name]), name
            if name in places and value.dtype == last[name].dtype:
                assert value.data_ptr() == places[name]
        assert merge.microsteps == before
        assert all(torch.equal(total, sums[name]) for name, total in merge.take(avg=False).items())


def test_views_of_one_gradient_are_not_written_to():
    merge, grad = GradientSum(), torch.ones(4)
    merge.add({"a": torch.ones(2), "b": torch.ones(2)})
    done = merge.completed_({"a": grad[:2], "b": grad[2:]}, avg=False)
    assert [value.tolist() for value in done.values()] == [[2.0, 2.0]] * 2
    assert grad.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"microsteps": -1}, ValueError, "microsteps"),
        ({"microsteps": True}, TypeError, "microsteps"),
        ({"overflowed": 1}, TypeError, "overflowed"),
        ({"sums": {"p": [1.0]}}, TypeError, "p"),
        ({"other": 1}, ValueError, "other"),
    ],
)
def test_a_wrong_state_changes_nothing(change, error, name):
    merge = GradientSum()
    merge.add({"p": torch.ones(2)})
    with pytest.raises(error, match=name):
        merge.load_state_dict({**merge.state_dict(), **change})
    assert merge.microsteps == 1
    assert merge.take()["p"].tolist() == [1.0, 1.0]
