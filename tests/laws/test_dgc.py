"""Laws of deep gradient compression over real ranks, against an oracle that shares no code."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.laws.frontends import AttachedStep, Case, OwnStep, trained
from tests.ranks import Pool
from tests.reference.dgc_training import Oracle

SHAPES = {"embed.weight": (40, 7), "layer.weight": (16, 20), "layer.bias": (16,), "scale": ()}
MIN_NUMEL = 100


def start_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def gradient(step: int, rank: int, name: str) -> Tensor:
    seed = 10_000 * step + 100 * rank + list(SHAPES).index(name)
    return torch.randn(
        SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def params_of(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.to(dtype)) for name, value in start_values().items()}


def train(
    rank: int, size: int, steps: int, options: dict[str, Any], group: dict[str, Any]
) -> dict[str, Any]:
    params = params_of()
    optimizer = tw.optim.DGCMomentum(
        [{"params": list(params.items()), **group}], lr=0.1, min_numel=MIN_NUMEL, **options
    )
    for step in range(steps):
        for name, p in params.items():
            p.grad = gradient(step, rank, name)
        optimizer.step()
        assert all(p.grad is not None for p in params.values())
        assert all(torch.equal(p.grad, gradient(step, rank, n)) for n, p in params.items())  # type: ignore[arg-type]
    return {
        "params": {name: p.detach().numpy() for name, p in params.items()},
        "u": {name: optimizer.state[p]["momentum_buffer"].numpy() for name, p in params.items()},
        "v": {
            name: optimizer.state[p]["residual"].numpy()
            for name, p in params.items()
            if p.numel() >= MIN_NUMEL
        },
        "stats": optimizer.stats(),
    }


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (constructor, group, the same for the oracle)
    "plain": ({"sparsity": (0.9,)}, {}, {"levels": (0.9,)}),
    "one bit": ({"sparsity": (0.9,), "value_bits": 1}, {}, {"levels": (0.9,), "bits": 1}),
    "nesterov": ({"sparsity": (0.9,), "nesterov": True}, {}, {"levels": (0.9,), "nesterov": True}),
    "no momentum": ({"sparsity": (0.9,), "momentum": 0.0}, {}, {"levels": (0.9,), "momentum": 0.0}),
    "all is sent": ({"sparsity": (0.0,)}, {}, {"levels": (0.0,)}),
    "ramp": (
        {"sparsity": (0.5, 0.75, 0.9), "rampup_begin_step": 4, "rampup_step": 6},
        {},
        {"levels": (0.5, 0.75, 0.9), "begin": 4, "rampup": 6},
    ),
    "decay": ({"sparsity": (0.9,), "weight_decay": 0.02}, {}, {"levels": (0.9,), "decay": 0.02}),
    "l1": (
        {"sparsity": (0.9,), "regularizer": tw.optim.L1Decay(0.03)},
        {},
        {"levels": (0.9,), "l1": 0.03},
    ),
    "l2 of the group": (
        {"sparsity": (0.9,), "regularizer": tw.optim.L1Decay(0.5), "rampup_begin_step": 3},
        {"regularizer": tw.optim.L2Decay(0.03)},
        {"levels": (0.9,), "l2": 0.03, "begin": 3},
    ),
    "clip by norm": (
        {"sparsity": (0.9,), "grad_clip": tw.optim.ClipByNorm(2.0), "rampup_begin_step": 3},
        {},
        {"levels": (0.9,), "clip": 2.0, "begin": 3},
    ),
    "local clip": (
        {"sparsity": (0.9,), "local_grad_clip_norm": 3.0},
        {},
        {"levels": (0.9,), "local_clip": 3.0},
    ),
    "num_trainers": (
        {"sparsity": (0.9,), "local_grad_clip_norm": 3.0, "num_trainers": 9},
        {},
        {"levels": (0.9,), "local_clip": 3.0, "num_trainers": 9},
    ),
    "centralized": (
        {"sparsity": (0.9,), "weight_decay": 0.1, "rampup_begin_step": 3},
        {"grad_centralization": True},
        {"levels": (0.9,), "decay": 0.1, "centralize": True, "begin": 3},
    ),
}


IN_NODES = ("plain", "one bit", "nesterov", "decay", "ramp", "local clip")


@pytest.mark.parametrize(
    ("name", "size", "width"),
    [
        *((name, size, 1) for name in OPTIONS for size in (0, 3)),
        *((name, 4, width) for name in IN_NODES for width in (2, 4)),
    ],
)
def test_the_oracle_agrees(ranks: Pool, name: str, size: int, width: int) -> None:
    """Nodes of `width` ranks are as many ranks with the means of their gradients."""
    options, group, oracle_options = OPTIONS[name]
    options = {"value_bits": 32, "node_size": width, "exchange": "gather", **options}
    steps = 14
    answers = ranks.run(train, steps, options, group, size=size)
    sources = len(answers) // width
    oracle = Oracle(
        {n: v.numpy() for n, v in start_values().items()},
        ranks=sources,
        min_numel=MIN_NUMEL,
        **oracle_options,
    )
    for step in range(steps):
        own = [{n: gradient(step, r, n).numpy() for n in SHAPES} for r in range(len(answers))]
        nodes = [own[at : at + width] for at in range(0, len(answers), width)]
        oracle.update(
            [{n: sum(each[n] for each in node) / width for n in SHAPES} for node in nodes]
        )
    for rank, answer in enumerate(answers):
        node, first = rank // width, answers[rank // width * width]
        for n in SHAPES:
            # values travel as float32, so two orders of summation may round a sent value
            # differently: 1e-7 of it
            np.testing.assert_allclose(
                answer["params"][n], oracle.params[n], rtol=1e-6, atol=1e-7, err_msg=n
            )
            most = {"rtol": 1e-6, "atol": 1e-6} if width == 1 else {"rtol": 1e-5, "atol": 1e-5}
            np.testing.assert_allclose(answer["u"][n], oracle.u[node][n], **most, err_msg=n)
            assert np.array_equal(answer["params"][n], answers[0]["params"][n])
            assert np.array_equal(answer["u"][n], first["u"][n])
        for n in answer["v"]:
            np.testing.assert_allclose(
                answer["v"][n], oracle.v[node][n], rtol=1e-5, atol=1e-5, err_msg=n
            )
            assert np.array_equal(answer["v"][n], first["v"][n])
        leads = answer is first and len(answers) > width  # of several nodes
        assert (answer["stats"]["bytes_between_nodes"] > 0) == leads


def sends_everything(rank: int, size: int) -> tuple[list[Tensor], list[Tensor]]:
    ours, plain = params_of(torch.float32), params_of(torch.float32)
    optimizer = tw.optim.DGCMomentum(
        ours.items(), lr=0.1, sparsity=(0.0,), value_bits=32, min_numel=1
    )
    sgd = torch.optim.SGD(plain.values(), lr=0.1)
    for step in range(10):
        for name in SHAPES:
            grads = [gradient(step, r, name).float() for r in range(size)]
            ours[name].grad = grads[rank]
            plain[name].grad = sum(grads[1:], start=grads[0]) / size
        optimizer.step()
        sgd.step()
    return [p.detach() for p in ours.values()], [p.detach() for p in plain.values()]


def test_sending_everything_is_plain_sgd(ranks: Pool) -> None:
    for ours, plain in ranks.run(sends_everything, size=2):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def conserve(rank: int, size: int, bits: int, exchange: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per step (accumulated before sending, residual after it, update of the parameters)."""
    p = nn.Parameter(torch.zeros(500))
    optimizer = tw.optim.DGCMomentum(
        [p], lr=1.0, momentum=0.9, sparsity=(0.98,), min_numel=1, value_bits=bits, exchange=exchange
    )
    u, v, history = torch.zeros(500), torch.zeros(500), []
    for step in range(50):
        g = torch.randn(500, generator=torch.Generator().manual_seed(1000 * step + rank))
        before = p.detach().clone()
        p.grad = g
        optimizer.step()
        u = u * 0.9 + g
        accumulated = v + u
        u, v = (optimizer.state[p][key].clone() for key in ("momentum_buffer", "residual"))
        history.append((accumulated, v, before - p.detach()))
    return history


@pytest.mark.parametrize("exchange", ["gather", "split"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_unsent_entries_stay(ranks: Pool, bits: int, exchange: str) -> None:
    """1e-4 of sums of size 40: float32 throughout, and the update is a difference of parameters."""
    histories = ranks.run(conserve, bits, exchange, size=3)
    for step in range(50):
        # with lr 1 the update is the mean of what was sent
        applied = 3 * histories[0][step][2].double()
        sent = sum((h[step][0].double() - h[step][1].double()) for h in histories)
        torch.testing.assert_close(applied, sent, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(h[step][2], histories[0][step][2]) for h in histories)
        if exchange == "split":
            assert int((applied != 0).sum()) <= 10 + 3
            continue
        for history in histories:
            accumulated, residual, _ = history[step]
            touched = accumulated != residual
            assert int(touched.sum()) <= 10
            if bits == 32:
                assert torch.equal(residual[touched], torch.zeros(int(touched.sum())))


@pytest.mark.slow
def test_replicas_stay_bit_identical_for_500_steps_on_4_ranks(ranks: Pool) -> None:
    case = Case(dgc={"value_bits": 1, "sparsity": (0.9, 0.97), "rampup_step": 6}, steps=500)
    assert len({each.bits for each in ranks.run(trained, OwnStep, case, size=4)}) == 1


@pytest.mark.fault("DDP makes other buckets after the first step")
@pytest.mark.slow
@pytest.mark.parametrize(
    "ddp",
    [
        {},
        {"bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dgc",
    [
        {"sparsity": (0.9, 0.97), "rampup_step": 6},
        {"weight_decay": 0.1, "local_grad_clip_norm": 0.01, "nesterov": True},
        {"state_dtype": "bfloat16", "rampup_begin_step": 6, "value_bits": 4},
    ],
    ids=str,
)
def test_attached_or_not_is_the_same(ranks: Pool, dgc: dict[str, Any], ddp: dict[str, Any]) -> None:
    attached = ranks.run(trained, AttachedStep, Case(dgc=dgc, ddp=ddp))
    stepped = ranks.run(trained, OwnStep, Case(dgc=dgc))
    assert [(each.bits, each.held) for each in attached] == [(e.bits, e.held) for e in stepped]
    assert len({each.bits for each in stepped}) == 1
