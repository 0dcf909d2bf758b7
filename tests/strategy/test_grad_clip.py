"""Clipping that `prepare` is given acts on the mean gradient, with every optimizer."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import batch, flat, make_model, prepared

cross_entropy = nn.functional.cross_entropy
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [2.0, 30000.0])
def test_in_half_precision_the_factor_is_not_rounded(dtype: torch.dtype, norm: float) -> None:
    """It would be 0 in float16 for the larger norm."""
    model = nn.Linear(64, 64, bias=False, dtype=dtype)
    engine = prepared(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda out, given: (out * given).sum(),
        options={"grad_clip": tw.ClipByGlobalNorm(1e-3)},
        localsgd=tw.LocalSGD(2),  # gradients stay as they come
    )
    model.weight.data.zero_()
    given = torch.full((1, 64), norm / 64, dtype=dtype)
    engine.train_step(torch.ones(1, 64, dtype=dtype), given)
    moved = torch.linalg.vector_norm(model.weight.detach().double())
    assert float(moved) == pytest.approx(1e-3, rel=4e-3)


def stages(rank: int, size: int, count: int, own: bool) -> dict[str, Tensor]:
    model = make_model(plain=True, **DOUBLE)
    clip = tw.ClipByGlobalNorm(0.05)
    optimizer = tw.optim.SGD(model.named_parameters(), lr=0.5, grad_clip=clip if own else None)
    pipeline = tw.Pipeline(stages=count, micro_batches=2)
    engine = prepared(
        model, optimizer, options={"grad_clip": None if own else clip}, pipeline=pipeline
    )
    for step in range(3):
        engine.train_step(*batch(step, 0, **DOUBLE))
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("own", [False, True], ids=["given", "own"])
def test_the_norm_is_over_all_stages(own: bool, ranks: Pool) -> None:
    (whole,) = ranks.run(stages, 1, own, size=0)
    parts: dict[str, Tensor] = {}
    for part in ranks.run(stages, 2, own, size=2):
        parts |= part
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-12)


def of_large_gradients(rank: int, size: int) -> float:
    engine = prepared(
        optimizer=lambda net: torch.optim.SGD(net.named_parameters(), lr=0.5),
        loss=lambda out, given: cross_entropy(out, given) * 2.0**75,
        options={"grad_clip": tw.ClipByGlobalNorm(0.05)},
        pipeline=tw.Pipeline(stages=2, micro_batches=2),
    )
    before = flat(engine.model)
    engine.train_step(*batch(0, 0))
    return sum((a - b) ** 2 for a, b in zip(flat(engine.model), before, strict=True))


def test_the_norm_over_stages_has_room_for_large_gradients(ranks: Pool) -> None:
    moved = sum(ranks.run(of_large_gradients, size=2)) ** 0.5
    assert moved == pytest.approx(0.5 * 0.05, rel=1e-4)


@pytest.mark.parametrize("clip", [tw.ClipByGlobalNorm(1.0), tw.optim.ClipByValue(1.0)])
def test_clipping_that_dgc_lacks_is_reported_with_a_remedy(clip: Any) -> None:
    model = make_model(plain=True)
    strategy = tw.DistributedStrategy(dgc=tw.DGC())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(tw.StrategyError, match="local_grad_clip_norm"):
        strategy.prepare(model, optimizer, grad_clip=clip)
    with pytest.raises(tw.StrategyError, match="local_grad_clip_norm"):
        strategy.explain(model, optimizer, grad_clip=clip)


def test_two_clippings_are_one_too_many() -> None:
    clip = tw.optim.ClipByNorm(1.0)
    with pytest.raises(tw.StrategyError, match="one of them"):
        prepared(
            optimizer=lambda net: tw.optim.SGD(net.parameters(), lr=0.1, grad_clip=clip),
            options={"grad_clip": clip},
        )
    with pytest.raises(tw.StrategyError, match="local_grad_clip_norm"):
        prepared(options={"grad_clip": clip}, dgc=tw.DGC(local_grad_clip_norm=1.0))


def test_something_else_is_no_clipping() -> None:
    with pytest.raises(
        TypeError, match="grad_clip must be ClipByGlobalNorm or ClipByNorm or ClipByValue"
    ):
        prepared(options={"grad_clip": 1.0})


def test_explain_grad_clip_names_the_clipped_gradient() -> None:
    clip = tw.ClipByGlobalNorm(1.5)
    assert (
        "clipping of the mean gradient by ClipByGlobalNorm(c=1.5)"
        in tw.DistributedStrategy().explain(grad_clip=clip).replace("\n    ", "")
    )
    local_text = tw.DistributedStrategy(localsgd=tw.LocalSGD(4)).explain(grad_clip=clip)
    assert "this rank's own gradient" in " ".join(local_text.split())


def test_row_sparse_gradients_keep_their_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    before = model[0].weight.detach().clone()
    optimizer = tw.optim.LazyAdam(model.parameters(), lr=0.1)
    engine = tw.DistributedStrategy().prepare(
        model, optimizer, cross_entropy, grad_clip=tw.ClipByGlobalNorm(0.01)
    )
    engine.train_step(torch.tensor([[1, 3]]), torch.tensor([0]))
    moved = (model[0].weight != before).any(dim=1)
    assert moved.tolist() == [False, True, False, True, False, False, False, False]
    total = sum(
        float((p.grad.coalesce().values() if p.grad.is_sparse else p.grad).pow(2).sum())
        for p in model.parameters()
    )
    assert total**0.5 == pytest.approx(0.01)


# ---- clipping that comes too late


def late(engine: Any, model: nn.Module, change: Any, steps: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            x, y = batch(step, 0)
            engine.minimize(cross_entropy(model(x), y))
            change()
    return [str(each.message) for each in said]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dgc": tw.DGC(min_numel=64)},
        {"gradient_merge": tw.GradientMerge(2)},
        {"localsgd": tw.LocalSGD(4)},
    ],
    ids=["no field", "dgc", "merge", "local"],
)
def test_clipping_after_minimize_is_noticed_once_with_the_cure(fields: dict[str, Any]) -> None:
    engine = prepared(loss=None, **fields)
    model = engine.model
    (said,) = late(engine, model, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e6))
    assert "grad_clip=" in said
    assert "0.weight" in said


@pytest.mark.parametrize("how", ["zero_grad", "to zero", "to None", "nothing", "read"])
def test_harmless_edit_is_not_noticed(how: str) -> None:
    model = make_model(plain=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = tw.DistributedStrategy().prepare(model, optimizer)
    changes: dict[str, Any] = {
        "zero_grad": optimizer.zero_grad,
        "to zero": lambda: optimizer.zero_grad(set_to_none=False),
        "to None": model.zero_grad,
        "nothing": lambda: None,
        "read": lambda: [float(p.grad.norm()) for p in model.parameters()],
    }
    assert late(engine, model, changes[how]) == []


def test_editing_one_gradient_is_noticed_within_eight_steps() -> None:
    """In steady training an update looks at an eighth of the gradients."""
    engine = prepared(loss=None)
    *_, (name, last) = engine.model.named_parameters()
    assert late(engine, engine.model, lambda: None, steps=5) == []

    def edit() -> None:
        last.grad = last.grad * 0.5

    (said,) = late(engine, engine.model, edit, steps=9)
    assert name in said


def test_a_gradient_put_there_by_hand_is_noticed() -> None:
    model = make_model(plain=True)
    engine = tw.DistributedStrategy().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def put() -> None:
        model[0].weight.grad = torch.ones_like(model[0].weight)

    (said,) = late(engine, model, put)
    assert "no effect" in said
