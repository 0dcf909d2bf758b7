"""The mean gradient for optimizers that do not exchange, against an oracle in float64."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.api import DGC, Group
from tests.ranks import Pool
from tests.sync.means import GradientMean

SHAPES = {"big": (20, 15), "small": (6,), "middle": (7, 3, 4), "scalar": ()}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    return {name: Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def gradient(step: int, rank: int, name: str) -> Tensor:
    seed = 1000 * step + 10 * rank + list(SHAPES).index(name)
    return torch.randn(
        SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def gradients(step: int, rank: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: gradient(step, rank, name).to(dtype) for name in SHAPES}


def half_precision(rank: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    params = parameters(dtype)
    dense = GradientMean(Group(), params)
    sparse = GradientMean(Group(), params, DGC(sparsity=(0.9,), min_numel=1, value_bits=32))
    huge = {name: torch.full(shape, 60000.0).to(dtype) for name, shape in SHAPES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all ranks bring the same
        means = [
            dense.reduce(0, huge),
            sparse.reduce(0, gradients(0, rank, dtype)),
            dense.reduce(1, huge),
        ]
    assert all(
        m is not None and t.dtype == torch.float32 for m in means for t in (m or {}).values()
    )
    assert all(v.dtype == torch.float32 for v in sparse.residuals.values())
    return {"huge": means[0], "big": means[1]["big"] if means[1] else None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_and_kept_in_float32(ranks: Pool, dtype: torch.dtype) -> None:
    """The sum of two gradients of 60000 passes what float16 holds, their mean does not."""
    a, b = ranks.run(half_precision, dtype)
    expected = torch.tensor(60000.0).to(dtype).float()
    assert all(bool((mean == expected).all()) for mean in a["huge"].values())
    assert torch.equal(a["big"], b["big"]) and int(a["big"].count_nonzero()) > 0


def unchecked(rank: int, size: int) -> list[Tensor]:
    own = gradients(0, rank)
    if rank == 1:
        own["small"][2] = float("inf")
    means = GradientMean(Group(), parameters(), check_finite=False).reduce(0, own)
    assert means is not None
    with pytest.warns(UserWarning, match="small"):  # a residual would be spoiled for ever
        assert (
            GradientMean(Group(), parameters(), DGC(min_numel=84), check_finite=False).reduce(
                0, own
            )
            is None
        )
    return [means["small"], means["big"]]


def test_unchecked_dense_mean_is_not_changed(ranks: Pool) -> None:
    for small, big in ranks.run(unchecked):
        assert small.isinf().tolist() == [False, False, True, False, False, False]
        assert big.isfinite().all()


def row_sparse(rank: int, size: int, everywhere: bool) -> list[Tensor]:
    params = {"table": Parameter(torch.zeros(30, 4)), "weight": Parameter(torch.zeros(40))}
    mean = GradientMean(
        Group(), params, DGC(sparsity=(0.9,), min_numel=1, local_grad_clip_norm=0.1)
    )
    rows = torch.sparse_coo_tensor(
        torch.tensor([[3, 3, 7 + rank]]), torch.ones(3, 4), (30, 4), check_invariants=True
    )
    weight = torch.linspace(-1, 1, 40)
    means = mean.reduce(
        0, {"table": rows if everywhere or rank == 0 else rows.to_dense(), "weight": weight}
    )
    assert means is not None and means["table"].is_sparse == everywhere
    assert not mean.residuals["table"].any() and mean.residuals["weight"].any()
    return [means["table"].to_dense(), means["weight"]]


@pytest.mark.parametrize("everywhere", [True, False])
def test_row_sparse_gradients_travel_densely_on_all_ranks(ranks: Pool, everywhere: bool) -> None:
    expected = torch.zeros(30, 4)
    expected[3], expected[7], expected[8] = 2.0, 0.5, 0.5
    for table, weight in ranks.run(row_sparse, everywhere):
        assert torch.equal(table, expected)
        assert int(weight.count_nonzero()) == 4


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    dgc = DGC(sparsity=(0.9,), min_numel=84)
    mean = GradientMean(Group(), parameters(), dgc)
    mean.reduce(0, gradients(0, 0))
    residuals = {name: value.clone() for name, value in mean.residuals.items()}
    good = {**mean.state_dict(), "residuals": residuals}
    for bad, text in [
        ({}, "keys"),
        ({**good, "more": 1}, "more"),
        ({**good, "dropped_steps": -1}, "dropped_steps"),
        ({**good, "residuals": {"big": residuals["big"]}}, "residual, middle has shape nothing"),
        ({**good, "residuals": {**residuals, "big": torch.zeros(3)}}, r"big has shape \(3,\)"),
        ({**good, "residuals": {**residuals, "other": torch.zeros(3)}}, "residual, other"),
    ]:
        with pytest.raises(ValueError, match=text):
            mean.load_state_dict(bad)
    assert all(torch.equal(v, residuals[n]) for n, v in mean.residuals.items())


def reused(rank: int, size: int) -> list[bool]:
    """The mean of what is compressed may lie in the gradient's memory, with the same bits."""
    dgc = DGC(sparsity=(0.9,), min_numel=84, rampup_begin_step=1)
    plain, saving = (GradientMean(Group(), parameters(torch.float32), dgc) for _ in range(2))
    same = []
    for step in range(4):
        given, lent = gradients(step, rank, torch.float32), gradients(step, rank, torch.float32)
        expected, got = plain.reduce(step, given), saving.reduce(step, lent, reuse=True)
        assert expected is not None and got is not None
        same += [torch.equal(got[n], expected[n]) for n in SHAPES]
        same += [(got[n].data_ptr() == lent[n].data_ptr()) == (step > 0) for n in ("big", "middle")]
        same += [torch.equal(lent[n], given[n]) for n in ("small", "scalar")]
    narrow = parameters(torch.bfloat16)
    got = GradientMean(Group(), narrow, dgc).reduce(
        1, gradients(1, rank, torch.bfloat16), reuse=True
    )
    assert got is not None
    return [*same, got["big"].dtype == torch.float32]


def test_means_may_replaces_gradients(ranks: Pool) -> None:
    assert all(all(answer) for answer in ranks.run(reused))


def one_memory(rank: int, size: int, reuse: bool) -> list[Tensor]:
    """Two gradients that are views of one tensor, as autograd makes them of a sum of views."""
    names = ("a", "b")
    params = {name: Parameter(torch.zeros(40)) for name in names}
    mean = GradientMean(Group(), params, DGC(sparsity=(0.9,), min_numel=1, value_bits=32))
    for name in names:  # they differ, so that different entries are sent
        mean.residuals[name].copy_(
            torch.randn(40, generator=torch.Generator().manual_seed(ord(name)))
        )
    whole = torch.randn(40, generator=torch.Generator().manual_seed(rank))
    found = mean.reduce(0, {"a": whole.view(40), "b": whole.view(40)}, reuse=reuse)
    assert found is not None
    return [found[name].clone() for name in names]


def test_gradients_in_one_memory_are_not_written_over_one_another(ranks: Pool) -> None:
    kept, reused = ranks.run(one_memory, False), ranks.run(one_memory, True)
    for one, other in zip(kept[0], reused[0], strict=True):
        assert torch.equal(one, other)
