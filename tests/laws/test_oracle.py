"""The oracle is one more frontend: after each update it has the parameters and residuals of all."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.laws.frontends import (
    Case,
    Frontend,
    LocalBlock,
    LocalEngine,
    OwnStep,
    WithEngine,
    batches,
    cross_entropy,
)
from tests.ranks import Pool
from tests.reference.training import (
    Arrays,
    Codes,
    Compression,
    Factors,
    Largest,
    Local,
    Training,
    by_global_norm,
    by_norm,
    by_value,
)

LEAST = 60


class Mixed(nn.Module):
    """Orders of channels and columns, parts of a tensor, no dimension, complex, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        wide: dict[str, Any] = {"dtype": torch.float64}
        self.conv = nn.Conv2d(2, 16, 2, **wide).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(16, 16, **wide)
        self.inner.weight = nn.Parameter(torch.randn(16, 16, **wide).t() / 4)
        self.frozen = nn.Linear(16, 16, **wide).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5, **wide))
        self.last = nn.Linear(16, 4, **wide)
        self.last.bias = nn.Parameter(torch.randn(4, 2, **wide)[:, 0])
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        for param in (self.conv.weight, self.inner.weight, self.last.bias):
            assert not param.is_contiguous()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.double().view(-1, 2, 2, 2)).flatten(1).tanh()
        y = self.frozen(self.inner(y)).tanh() * self.scale
        return self.last(y) + (self.phase * self.phase).imag


NAMES = [name for name, p in Mixed().named_parameters() if p.requires_grad]
LARGE = [name for name, p in Mixed().named_parameters() if p.numel() >= LEAST and name in NAMES]
REAL = [name for name in NAMES if name != "phase"]
PAIRS = (4, 2)
"""Shape of the complex parameter."""
PARTS = [
    ["scale", "phase", "conv.weight", "conv.bias"],
    ["inner.weight"],
    ["inner.bias", "last.weight", "last.bias"],
]


def arrays(tensors: dict[str, Any]) -> Arrays:
    """Complex numbers as pairs."""
    real = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}
    return {n: t.detach().numpy().astype(np.float64) for n, t in real.items()}


@dataclass(frozen=True)
class Row:
    """A training, and the oracle's settings."""

    case: Case = field(default_factory=Case)
    oracle: dict[str, Any] = field(default_factory=dict)
    compression: Compression | None = None
    ways: tuple[type[Frontend], ...] = (WithEngine,)
    size: int = 3


def of_local(
    config: Any, local: Local, compression: Any = None, oracle: Any = None, **settings: Any
) -> Row:
    case = Case(local=config, **settings)
    return Row(case, {"local": local, **(oracle or {})}, compression, (LocalBlock, LocalEngine))


def of_ramp(config: Any, local: Local, levels: Any, rampup: int, begin: int) -> Row:
    """DGC beside local updates."""
    dgc = tw.DGC(begin, rampup, levels, min_numel=LEAST, value_bits=32)
    compression = Largest(LARGE, begin, levels=levels, rampup=rampup)
    return of_engine({"localsgd": config, "dgc": dgc}, compression, {"local": local})


def of_dgc(dgc: dict[str, Any], ways: Any = (OwnStep, WithEngine), /, **settings: Any) -> Row:
    """`largest`: what the oracle selects; `case`: settings of `Case`; all else is the oracle's."""
    largest = {"levels": (0.75,), "begin": 2, **settings.pop("largest", {})}
    case = Case(dgc={"min_numel": LEAST, "value_bits": 32, **dgc}, **settings.pop("case", {}))
    return Row(case, {"masked": True, **settings}, Largest(LARGE, **largest), ways)


def of_engine(
    fields: dict[str, Any], compression: Any = None, oracle: Any = None, **settings: Any
) -> Row:
    return Row(Case(fields=fields, **settings), oracle or {}, compression)


def in_nodes(row: Row, size: int, node: int) -> Row:
    return replace(row, oracle={**row.oracle, "node": node}, size=size)


def sign(p: Any) -> Any:
    return p / np.hypot(*p.T)[:, None] if p.shape == PAIRS else np.sign(p)


def centralized(p: Any, g: Any) -> Any:
    rows = g.ndim > 1 and g.shape != PAIRS
    return g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True) if rows else g


BY_NORM = tw.optim.ClipByNorm
ALONE: tuple[Any, ...] = ((OwnStep,),)
"""An engine's DGC has no such setting."""
ROWS: dict[str, Row] = {
    "dense": of_engine({}),
    "dense, merged": of_engine({}, None, {"merge": 3}, merge=3),
    "dense, sums": of_engine(
        {"gradient_merge": tw.GradientMerge(3, avg=False)}, None, {"merge": 3, "average": False}
    ),
    "dense, clip": of_engine({}, None, {"clip": by_norm(0.2)}, clip=BY_NORM(0.2)),
    "dense, clip of prepare": of_engine(
        {}, None, {"clip": by_norm(0.2)}, options={"grad_clip": BY_NORM(0.2)}
    ),
    "dense, global clip, merged": of_engine(
        {},
        None,
        {"merge": 2, "clip": by_global_norm(0.3)},
        merge=2,
        options={"grad_clip": tw.ClipByGlobalNorm(0.3)},
    ),
    "dense, values": of_engine(
        {},
        None,
        {"clip": by_value(0.02, -0.01)},
        frozen="phase",  # numbers that have no order
        options={"grad_clip": tw.optim.ClipByValue(0.02, -0.01)},
    ),
    "local, global clip": of_engine(
        {"localsgd": tw.LocalSGD(3)},
        None,
        {"local": Local(3), "clip": by_global_norm(0.3)},
        options={"grad_clip": tw.ClipByGlobalNorm(0.3)},
    ),
    "dense, dropped": of_engine({}, None, {"merge": 2}, merge=2, nan_at=5),
    "low rank": of_engine(
        {"low_rank": tw.LowRank(2, begin_step=2, min_numel=LEAST)}, Factors(LARGE, 2)
    ),
    "low rank, merged, clip, dropped": of_engine(
        {"low_rank": tw.LowRank(1, begin_step=3, min_numel=LEAST)},
        Factors(LARGE, 3),
        {"merge": 2, "clip": by_norm(0.2)},
        merge=2,
        clip=BY_NORM(0.2),
        nan_at=5,
    ),
    "sparse": of_engine(
        {"compression": tw.Sparse(0.9, 32)}, Largest(REAL, 0, 0.95, (0.9,), over_senders=True)
    ),
    "sparse, all, dropped": of_engine(
        {"compression": tw.Sparse(0.5, 4, 1.0, "all", exchange="gather")},
        Largest(REAL, 0, 1.0, (0.5,), bits=4),
        nan_at=1,
    ),
    "quantized": of_engine({"compression": tw.Quantized(4)}, Codes(REAL)),
    "quantized, forgetting, merged": of_engine(
        {"compression": tw.Quantized(1, 0.5)}, Codes(REAL, 0, 0.5, 1), {"merge": 2}, merge=2
    ),
    "dgc": of_dgc({}),
    "dgc, one bit": of_dgc({"value_bits": 1}, largest={"bits": 1}),
    "dgc, no momentum": of_dgc({"momentum": 0.0}, *ALONE, momentum=0.0),
    "dgc, nesterov": of_dgc({"nesterov": True}, *ALONE, nesterov=True),
    "dgc, all is sent": of_dgc({"sparsity": (0.0,)}, largest={"levels": (0.0,)}),
    "dgc, merged, dropped": of_dgc({}, merge=2, case={"merge": 2, "nan_at": 1}),
    "dgc, clip": of_dgc({}, clip=by_norm(0.2), local_clip=0.2, case={"clip": BY_NORM(0.2)}),
    "dgc, clip of prepare": of_dgc(
        {},
        (WithEngine,),
        clip=by_norm(0.2),
        local_clip=0.2,
        case={"options": {"grad_clip": BY_NORM(0.2)}},
    ),
    "dgc, local clip": of_dgc({"local_grad_clip_norm": 0.2}, local_clip=0.2),
    "dgc, ramp, dropped": of_dgc(
        {"sparsity": (0.5, 0.75, 0.9), "rampup_step": 5},
        largest={"levels": (0.5, 0.75, 0.9), "rampup": 5},
        case={"nan_at": 4},
    ),
    "dgc, rates": of_dgc(
        {},
        rate=lambda step: 0.1 * 0.5 ** (step / 4),
        case={"lr": tw.schedules.ExponentialDecay(0.1, 0.5, 4)},
    ),
    "dgc, decay": of_dgc({"weight_decay": 0.02}, *ALONE, shaped=lambda p, g: g + 0.02 * p),
    "dgc, maximize": of_dgc(
        {"maximize": True, "weight_decay": 0.02}, *ALONE, shaped=lambda p, g: 0.02 * p - g
    ),
    "dgc, l1": of_dgc(
        {"regularizer": tw.optim.L1Decay(0.03)}, *ALONE, shaped=lambda p, g: g + 0.03 * sign(p)
    ),
    "dgc, l2": of_dgc(
        {"regularizer": tw.optim.L2Decay(0.03)}, *ALONE, shaped=lambda p, g: g + 0.03 * p
    ),
    "dgc, centralized": of_dgc(
        {}, *ALONE, shaped=centralized, case={"group": {"grad_centralization": True}}
    ),
    "dgc, local clip for 9": of_dgc(
        {"local_grad_clip_norm": 0.2, "num_trainers": 9}, *ALONE, local_clip=0.2 * 3**0.5
    ),
    "dgc, nodes": in_nodes(of_dgc({"node_size": 2, "exchange": "gather"}), 4, 2),
    "dgc, one node": in_nodes(of_dgc({"node_size": 4, "exchange": "gather"}, *ALONE), 4, 4),
    "dgc, one rank": in_nodes(of_dgc({}), 0, 1),
    "local": of_local(tw.LocalSGD(4), Local(4)),
    "local, merged, clip": of_local(
        tw.LocalSGD(2),
        Local(2),
        None,
        {"merge": 2, "clip": by_norm(0.2)},
        merge=2,
        clip=BY_NORM(0.2),
    ),
    "local, dropped": replace(of_local(tw.LocalSGD(4), Local(4), nan_at=5), ways=(LocalEngine,)),
    "local, begin 0": of_local(tw.LocalSGD(3, begin_step=0), Local(3, 0)),
    "local, begin 6": of_local(tw.LocalSGD(4, begin_step=6), Local(4, 6)),
    "local, every step": of_local(tw.LocalSGD(1), Local(1)),
    "local, outer rate": of_local(tw.LocalSGD(4, outer_lr=0.7), Local(4, outer=(0.7, 0.0, False))),
    "local, outer momentum": of_local(
        tw.LocalSGD(3, outer_lr=0.6, outer_momentum=0.5), Local(3, outer=(0.6, 0.5, False))
    ),
    "local, nesterov": of_local(
        tw.LocalSGD(3, 0, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True),
        Local(3, 0, (0.7, 0.9, True)),
    ),
    "local, fragments": of_local(tw.LocalSGD(6, fragments=3), Local(6, parts=PARTS)),
    "local, delay": of_local(tw.LocalSGD(5, delay=3), Local(5, delay=3)),
    "local, delay and momentum": of_local(
        tw.LocalSGD(4, delay=3, outer_momentum=0.5), Local(4, 1, (1.0, 0.5, False), delay=3)
    ),
    "local, nodes": in_nodes(of_local(tw.LocalSGD(4, node_size=2), Local(4)), 4, 2),
    "dgc, nodes, local clip": in_nodes(
        of_dgc({"node_size": 2, "exchange": "gather", "local_grad_clip_norm": 0.2}, local_clip=0.2),
        4,
        2,
    ),
    "local, adaptive, shorter than the delay": of_local(
        tw.AdaptiveLocalSGD(5, max_k_steps=12, delay=4),
        Local(5, delay=4, most=12),
        None,
        {"rate": lambda step: 0.01 if step < 4 else 0.3},
        lr=tw.schedules.PiecewiseConstant([4], [0.01, 0.3]),
    ),
    "local, adaptive": of_local(tw.AdaptiveLocalSGD(3, max_k_steps=6), Local(3, most=6)),
    "local, sparse": of_local(
        tw.LocalSGD(4, compression=tw.Sparse(0.75, 32, 0.9, "all")),
        Local(4),
        Largest(NAMES, 0, 0.9, (0.75,)),
    ),
    "local, sparse, forgetting": of_local(
        tw.LocalSGD(3, 2, compression=tw.Sparse(0.9, 32, 0.0, "all")),
        Local(3, 2),
        Largest(NAMES, 0, 0.0, (0.9,)),
    ),
    "local, over senders, outer, fragments and delay": of_local(
        tw.LocalSGD(6, fragments=3, delay=1, outer_momentum=0.5, compression=tw.Sparse(0.8, 32)),
        Local(6, 1, (1.0, 0.5, False), PARTS, 1),
        Largest(NAMES, 0, 0.95, (0.8,), over_senders=True),
    ),
    **{
        f"local, {bits} bits": of_local(
            tw.LocalSGD(3, compression=tw.Quantized(bits)), Local(3), Codes(NAMES, bits=bits)
        )
        for bits in (1, 2, 4, 8, 16)
    },
    "local, quantized, outer, fragments and delay": of_local(
        tw.LocalSGD(
            6,
            fragments=3,
            delay=1,
            outer_lr=0.8,
            outer_momentum=0.5,
            outer_nesterov=True,
            compression=tw.Quantized(decay=0.5),
        ),
        Local(6, 1, (0.8, 0.5, True), PARTS, 1),
        Codes(NAMES, 0, 0.5, 4),
    ),
    "local, low rank": of_local(
        tw.LocalSGD(3, compression=tw.LowRank(2, begin_step=4, min_numel=LEAST)),
        Local(3),
        Factors(LARGE, 4),
    ),
    "local, quantized, nodes": in_nodes(
        of_local(tw.LocalSGD(3, node_size=2, compression=tw.Quantized(4)), Local(3), Codes(NAMES)),
        4,
        2,
    ),
    "local, dgc": of_ramp(tw.LocalSGD(3), Local(3), (0.8,), 1, 0),
    "local, ramp": of_ramp(tw.LocalSGD(2, 4), Local(2, 4), (0.5, 0.8, 0.9), 5, 4),
    "local, ramp, fragments and delay": of_ramp(
        tw.LocalSGD(6, fragments=3, delay=1, outer_lr=0.8, outer_momentum=0.5),
        Local(6, 1, (0.8, 0.5, False), PARTS, 1),
        (0.5, 0.8, 0.9),
        5,
        4,
    ),
}
SLOW = {"dgc, one node", "local, begin 6", "local, outer rate", "local, 2 bits", "local, 16 bits"}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def driven(rank: int, size: int, way: type[Frontend], case: Case) -> tuple[Any, Any, int]:
    """Parameters and residuals after each microstep; factors before all; dropped steps."""
    frontend, found = way(case), []
    for step in range(case.steps):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was dropped")
            frontend.train(rank, step, step + 1)
        params = trained(frontend.model)
        kept = frontend.kept().get("residuals", {})
        residuals = {n: t for n, t in kept.items() if t is not None}
        found.append((arrays(params), arrays(residuals)))
    dropped = frontend.stats()["dropped_steps"]
    frontend.end()
    return found, arrays(frontend.model.state_dict()), dropped


def first_factors(rank: int, size: int, way: type[Frontend], case: Case) -> Arrays:
    frontend = way(case)
    factors = arrays(frontend.kept()["factors"])
    frontend.close()
    return factors


def gradient_of(case: Case) -> Callable[[int, int, Arrays], tuple[float, Arrays]]:
    model = Frontend(case).model
    params = trained(model)

    def gradient(step: int, rank: int, values: Arrays) -> tuple[float, Arrays]:
        for name, p in params.items():
            p.grad = None
            value = torch.from_numpy(np.ascontiguousarray(values[name]))
            p.data.copy_(torch.view_as_complex(value) if p.is_complex() else value.view(p.shape))
        [(x, y)] = batches(case, rank, step, step + 1)
        loss = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), arrays({name: p.grad for name, p in params.items()})

    return gradient


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ROWS]
)
def test_frontends_train_as_the_oracle(ranks: Pool, name: str) -> None:
    """1e-12: float64 in another order. 1e-9: Gram-Schmidt in another order. 1e-6: values and scales
    travel as float32, which rounds such sums differently, and a difference stays in residuals."""
    row = ROWS[name]
    case = replace(row.case, made=Mixed, steps=24 if row.case.local else 12)
    compression = copy.deepcopy(row.compression)
    most = {type(None): 1e-12, Factors: 1e-9}.get(type(compression), 1e-6)
    if isinstance(compression, Factors):
        compression.factors = ranks.run(first_factors, row.ways[0], case, size=row.size)[0]
    runs = [ranks.run(driven, way, case, size=row.size) for way in row.ways]
    answers = [answer for run in runs for answer in run]
    start = arrays(trained(Frontend(case).model))
    oracle = Training(start, len(runs[0]), compression=compression, **row.oracle)
    gradient = gradient_of(case)
    for step in range(case.steps):
        oracle.train(gradient)
        for at, (found, _, _) in enumerate(answers):
            way, rank = row.ways[at // oracle.size].__name__, at % oracle.size
            params, residuals = found[step]
            for n, expected in oracle.ranks[rank].items():
                where = f"{n} of rank {rank} of {way} after {step}"
                np.testing.assert_allclose(params[n], expected, rtol=0, atol=most, err_msg=where)
            kept = oracle.residuals[rank // oracle.node]
            for n in oracle.compression.names:
                nothing = np.zeros_like(kept[n])
                where = f"residual of {n} of rank {rank} of {way} after {step}"
                np.testing.assert_allclose(
                    residuals.get(n, nothing), kept[n], rtol=0, atol=most, err_msg=where
                )
            assert not any(value.any() for n, value in residuals.items() if not kept[n].any())
    assert compression is None or any(kept[n].any() for n in compression.names)
    assert all([dropped for *_, dropped in run] == oracle.dropped for run in runs)
    still = {n: t for n, t in Mixed().state_dict().items() if "frozen" in n}
    assert all(np.array_equal(end[n], still[n]) for _, end, _ in answers for n in still)
