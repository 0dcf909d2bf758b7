"""Equal settings, data and ranks give the same bits through every frontend."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.laws.frontends import (
    GRADIENTS,
    PARAMETERS,
    Case,
    Followed,
    Frontend,
    LocalBlock,
    Minimize,
    WithEngine,
    batches,
    bits_of,
    cross_entropy,
    losses,
    make_model,
    trained,
)
from tests.laws.test_matrix import COMPRESSED as DGC
from tests.laws.test_matrix import ENGINES
from tests.ranks import Pool

CASES = {
    "plain": Case(),
    "merge": Case(merge=2),
    "clip": Case(clip=tw.optim.ClipByNorm(0.5)),
    "schedule": Case(lr=tw.schedules.CosineDecay(0.01, 0.2, 12)),
    "not finite": Case(nan_at=5),
    "resume": Case(resume_at=6),
    "resume within an interval, merged": Case(resume_at=8, merge=2),
}
COMPRESSED = {
    f"{name}, {how}": Case(compression=name, resume_at=at)
    for name in ("sparse", "quantized", "low rank")
    for how, at in (("plain", None), ("resume", 7))
}


def in_other_orders() -> torch.nn.Module:
    """A convolution in the order of channels, a matrix in that of columns, a part of a tensor."""
    torch.manual_seed(5)
    first = torch.nn.Conv2d(2, 16, 2).to(memory_format=torch.channels_last)
    last = torch.nn.Linear(16, 4)
    last.weight = torch.nn.Parameter(torch.randn(16, 4).t())
    last.bias = torch.nn.Parameter(torch.randn(4, 2)[:, 0])
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 2, 2)), first, torch.nn.Flatten(), torch.nn.Tanh(), last
    )


OTHER_ORDERS = Case(made=in_other_orders, options={"digest_every": 1})
OF_DGC = {
    "other orders": OTHER_ORDERS,
    "other orders, dense": replace(OTHER_ORDERS, dgc={"rampup_begin_step": 99}),
    "bfloat16": Case(dgc={"state_dtype": "bfloat16"}),
    "nodes": Case(dgc={"node_size": 2, "exchange": "gather"}),
}


def bits(
    ranks: Pool, frontends: tuple[type[Frontend], ...], case: Case, size: int = 2
) -> set[tuple[str, int]]:
    """Of all ranks and frontends."""
    answers = [ranks.run(trained, frontend, case, size=size) for frontend in frontends]
    return {(each.bits, each.dropped) for answer in answers for each in answer}


@pytest.mark.parametrize("name", [*CASES, *OF_DGC])
def test_all_frontends_of_dgc_give_the_same_bits(ranks: Pool, name: str) -> None:
    case = {**CASES, **OF_DGC}[name]
    found = bits(ranks, GRADIENTS, case, 4 if name == "nodes" else 2)
    assert len(found) == 1
    assert {dropped for _, dropped in found} == {int(case.nan_at is not None)}


@pytest.mark.parametrize("name", [*CASES, *COMPRESSED])
def test_all_frontends_of_local_updates_give_the_same_bits(ranks: Pool, name: str) -> None:
    case = {**CASES, **COMPRESSED}[name]
    ways = PARAMETERS
    if case.nan_at is not None:  # a loop of one's own makes that step: the averaging refuses it
        ways = tuple(way for way in PARAMETERS if way is not LocalBlock)
    found = bits(ranks, ways, case)
    assert len({each for each, _ in found}) == 1


class Applied(WithEngine):
    """`engine.apply_gradients`."""

    def train(self, rank: int, begin: int, end: int) -> None:
        for loss in losses(self.case, self.model, rank, begin, end):
            loss.backward()  # type: ignore[no-untyped-call]
            self.engine.apply_gradients(loss)
            self.model.zero_grad()


class WithClosure(Followed):
    """The optimizer's step with a closure."""

    def train(self, rank: int, begin: int, end: int) -> None:
        for x, y in batches(self.case, rank, begin, end):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                self.model.zero_grad()
                loss = cross_entropy(self.model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            self.engine.optimizer.step(closure)


ADAPTIVE = {"adaptive_localsgd": tw.AdaptiveLocalSGD(2, max_k_steps=4)}
OF_ENGINES = {
    **{name: case for name, case in ENGINES.items() if "amp" not in name and "nodes" not in name},
    "dgc": Case(),
    "lamb": Case(fields={"lamb": tw.LAMB()}, optimizer=torch.optim.AdamW),
    "local": Case(fields={"localsgd": tw.LocalSGD(2)}),
    "adaptive": Case(fields=ADAPTIVE),
    "other orders": OTHER_ORDERS,
    "other orders, dense": replace(OTHER_ORDERS, fields={}),
}


@pytest.mark.parametrize("name", OF_ENGINES)
def test_all_ways_of_an_engine_give_the_same_bits(ranks: Pool, name: str) -> None:
    ways = [Minimize, Applied, WithClosure]
    ways += [] if name == "adaptive" else [Followed]  # which is not told the loss
    assert len(bits(ranks, (WithEngine, *ways), OF_ENGINES[name])) == 1


@pytest.mark.parametrize("merge", [1, 3])
@pytest.mark.parametrize("field", ["none", "dgc", "localsgd"])
def test_a_loss_scale_changes_no_bit(ranks: Pool, field: str, merge: int) -> None:
    """It is a power of two, and gradients are divided by it before any other use."""
    fields = {"dgc": {"dgc": DGC}, "localsgd": {"localsgd": tw.LocalSGD(2)}}.get(field, {})
    cases = [
        Case(
            fields={"amp": tw.AMP("bfloat16", tw.FixedLossScale(scale)), **fields},
            merge=merge,
            options={} if field == "dgc" else {"grad_clip": tw.ClipByGlobalNorm(0.1)},
        )
        for scale in (1.0, 2.0**10)
    ]
    for way in (WithEngine, Minimize):
        assert len(set().union(*(bits(ranks, (way,), case) for case in cases))) == 1


EMPTY = ((0,), (3, 0), (0, 3), (2, 0, 4), (5, 1, 0))
SMALL: dict[str, Any] = {"sparsity": (0.75,), "min_numel": 1}
METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dgc, gather": {"dgc": tw.DGC(**SMALL, exchange="gather")},
    "dgc, split": {"dgc": tw.DGC(**SMALL, exchange="split", value_bits=8)},
    "dgc, clip": {"dgc": tw.DGC(**SMALL, local_grad_clip_norm=0.5)},
    "low rank": {"low_rank": tw.LowRank(1, min_numel=1)},
    "local": {"localsgd": tw.LocalSGD(2)},
    "local, adaptive": {"adaptive_localsgd": tw.AdaptiveLocalSGD(2)},
    "local, dgc": {"localsgd": tw.LocalSGD(2), "dgc": tw.DGC(**SMALL)},
    "local, fragments": {"localsgd": tw.LocalSGD(4, fragments=2)},
    **{
        f"local, {name}": {"localsgd": tw.LocalSGD(2, compression=compression)}
        for name, compression in {
            "sparse": tw.Sparse(0.75, exchange="gather"),
            "sparse, split": tw.Sparse(0.75, exchange="split"),
            "quantized, 1": tw.Quantized(1),
            "quantized, 8": tw.Quantized(8, decay=0.9),
            "low rank": tw.LowRank(1, min_numel=1),
        }.items()
    },
}


def with_empty_tensors(
    rank: int, size: int, method: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]
) -> str:
    model = make_model().to(dtype)
    for i, shape in enumerate(shapes):
        model[0].register_parameter(f"empty_{i}", torch.nn.Parameter(torch.zeros(shape).to(dtype)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = tw.DistributedStrategy(**METHODS[method]).prepare(model, optimizer)
    for x, y in batches(Case(), rank, 0, 6):
        loss = cross_entropy(model(x.to(dtype)), y)
        engine.minimize(loss + sum(p.sum() for p in model[0].parameters() if not p.numel()))
    engine.load_state_dict(engine.state_dict())
    engine.flush()
    engine.close()
    return bits_of(torch.nn.ParameterList(p.double() for p in model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_empty_tensor_changes_nothing(ranks: Pool, method: str, dtype: torch.dtype) -> None:
    some = ranks.run(with_empty_tensors, method, dtype, EMPTY)
    none = ranks.run(with_empty_tensors, method, dtype, ())
    assert len({*some, *none}) == 1
