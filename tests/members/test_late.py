"""Rounds that close without members that are late: `grace_seconds`."""

import time
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.members.places import met
from tests.members.training import digest, in_run, model
from tests.ranks import Pool
from tests.waiting import time_out

TIMEOUT_S = time_out(20.0)
GRACE_S = 0.3
LATE_S = 2.0
CONFIGS = {
    "dense": tw.LocalSGD(4, begin_step=0),
    "one bit": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1)),
    "sparse": tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9)),
    "Muon": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1)),
    "low rank, with state": tw.LocalSGD(
        4, begin_step=1, average_state=True, compression=tw.LowRank(2, begin_step=0, min_numel=16)
    ),
    "delayed": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=2),
    "outer momentum, parts": tw.LocalSGD(
        4, begin_step=1, fragments=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    ),
    "by time": tw.LocalSGD(50, begin_step=0, round_seconds=0.3),
}


def trained(
    rank: int,
    size: int,
    address: str,
    config: tw.LocalSGD,
    late: dict[int, list[int]],
    *,
    muon: bool = False,
    steps: int = 40,
    **options: Any,
) -> dict[str, Any]:
    """Train; a rank sleeps before those of its own steps that `late` lists for it."""
    net = model(rank)
    groups = tw.optim.muon_groups(net) if muon else None
    optimizer = tw.optim.Muon(groups, lr=0.01) if groups else torch.optim.AdamW(net.parameters())
    batches = torch.Generator().manual_seed(rank)
    rounds: dict[int, str] = {}
    longest_s, made = 0.0, 0
    options = {"timeout": TIMEOUT_S, "start_members": size, "grace_seconds": GRACE_S, **options}
    with in_run(address, net, config, optimizer, **options) as (members, sync, _):
        own_id, averagings = members.id, sync.stats()["averagings"]
        while sync.step < steps:
            x = torch.randn(8, 24, generator=batches)
            optimizer.zero_grad()
            (net(x) - x.roll(1, 1)).square().mean().backward()
            time.sleep(LATE_S if made in late.get(rank, []) else 0.02)
            begun = time.monotonic()
            optimizer.step()
            longest_s = max(longest_s, time.monotonic() - begun)
            made += 1
            applied, averagings = averagings, sync.stats()["averagings"]
            if averagings > applied:
                rounds[int(averagings)] = digest(sync)
        assert members.id == own_id
        seen = members.generation, members.size
    return {"rounds": rounds, "made": made, "state": digest(sync), "longest_s": longest_s, "seen": seen}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_late_member_takes_the_rounds_over_that_were_made_without_it(
    ranks: Pool, name: str
) -> None:
    found = met(ranks, trained, CONFIGS[name], {1: [10, 20]}, size=3)
    assert len({one["state"] for one in found}) == 1
    assert {one["seen"] for one in found} == {(0, 3)}
    late = found.pop(1)
    print(found, late)
    assert found[0]["rounds"] == found[1]["rounds"]
    assert late["rounds"].items() <= found[0]["rounds"].items()
    assert len(late["rounds"]) < len(found[0]["rounds"])
    assert max(one["longest_s"] for one in found) < LATE_S
