"""A member that slept longer than the time-out enters the run again in the same process."""

import contextlib
import hashlib
import io
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.members.places import met
from tests.members.training import digest, model, stop_for
from tests.ranks import Pool, Raised
from tests.waiting import time_out

TIMEOUT_S = time_out(2.0)
CONFIGS = {
    "dense": tw.LocalSGD(4, begin_step=0),
    "one bit": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1)),
    "sparse": tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9)),
    "low rank, with state": tw.LocalSGD(
        4, begin_step=1, average_state=True, compression=tw.LowRank(2, begin_step=0, min_numel=16)
    ),
    "late": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=2),
    "three steps late": tw.LocalSGD(4, begin_step=1, delay=3),
    "outer momentum, parts": tw.LocalSGD(
        4, begin_step=1, fragments=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    ),
    "by time": tw.LocalSGD(round_seconds=0.2, begin_step=0, k_steps=50),
}


def sleeper(
    rank: int,
    size: int,
    address: str,
    config: tw.LocalSGD,
    folder: str,
    *,
    muon: bool = False,
    asleep: int = 1,
    at: int = 6,
    more: int = 16,
    rejoin: bool = True,
) -> dict[str, Any]:
    """Train until one that was asleep has been back for some steps; what was seen after rounds."""
    net = model(rank)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    if muon:
        optimizer = tw.optim.Muon(tw.optim.muon_groups(net), lr=0.01)
    batches = torch.Generator().manual_seed(rank)
    rounds: dict[int, tuple[str, int, int]] = {}
    changes: list[tuple[int, int, int, int]] = []
    ids = []
    end = 4000
    options = {"run": "test", "timeout": TIMEOUT_S, "start_members": size, "rejoin": rejoin}
    with tw.join(address, **options) as members:
        members.on_change(
            lambda now: changes.append((now.generation, now.size, now.rank, now.step))
        )
        with tw.local_sgd(net, optimizer, config, members=members) as sync:
            averagings = sync.stats()["averagings"]
            ids.append(members.id)
            made = 0
            while sync.step < end:
                x = torch.randn(8, 24, generator=batches)
                optimizer.zero_grad()
                (net(x) - x.roll(1, 1)).square().mean().backward()
                if rank == asleep and made == at:
                    stop_for(TIMEOUT_S + 4)
                before = sync.step
                optimizer.step()
                made += 1
                applied, averagings = averagings, sync.stats()["averagings"]
                if members.id != ids[-1]:
                    ids.append(members.id)
                    assert sync.step > before
                elif averagings > applied:
                    rounds[sync.step] = digest(sync), members.size, members.generation
                if sync.step in rounds and members.size == size and members.generation > 0:
                    end = min(end, sync.step + more)  # on all of them after the same averaging
                time.sleep(0.05)
        return {
            "step": sync.step,
            "rounds": rounds,
            "changes": changes,
            "ids": ids,
            "state": digest(sync),
            "made": made,
            "params": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest(),
        }


def back_again(found: list[dict[str, Any]], asleep: int = 1) -> None:
    size = len(found)
    late = found[asleep]
    first = found[1 - bool(asleep)] if False else found[(asleep + 1) % size]
    assert len(late["ids"]) == 2
    assert late["made"] < first["made"]
    assert {one["step"] for one in found} == {first["step"]}
    assert {one["params"] for one in found} == {first["params"]}
    for one in found:
        shared = one["rounds"].keys() & first["rounds"].keys()
        assert len(shared) >= 3
        assert {step: first["rounds"][step] for step in shared} == {step: one["rounds"][step] for step in shared}
    assert len({one["state"] for one in found}) == 1


def slept(rank, size, address, config, folder, options):
    logging.basicConfig(level=logging.INFO)
    return sleeper(rank, size, address, config, folder, **options)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_x(ranks: Pool, tmp_path: Path, name: str, size: int) -> None:
    found = met(ranks, slept, CONFIGS[name], str(tmp_path), {}, size=size)
    print([(one["changes"], one["rounds"], one["made"], one["ids"]) for one in found])
    back_again(found)
