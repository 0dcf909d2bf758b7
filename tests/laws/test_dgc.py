"""Laws of deep gradient compression over real ranks, against an oracle that shares no code."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.laws.frontends import AttachedStep, Case, OwnStep, trained
from tests.ranks import Pool


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
