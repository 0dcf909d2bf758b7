"""A member that says that it is busy is waited for, and no other one is."""

import os
import signal
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.members.places import met
from tests.members.training import digest, in_run, model
from tests.ranks import Pool

TIMEOUT_S = 5.0
BUSY_S = 12.0
CONFIG = tw.LocalSGD(2, begin_step=0)


def member(rank: int, size: int, address: str, says: bool, stops: bool) -> dict[str, Any]:
    """Member 1 works alone for longer than the time-out after step 5."""
    net, data = model(rank), torch.Generator().manual_seed(rank)
    sizes: list[int] = []
    generations: list[int] = []
    longest_s = 0.0
    run = in_run(address, net, CONFIG, start_members=3, timeout=TIMEOUT_S)
    with run as (members, sync, optimizer):
        while sync.step < 12:
            net(torch.randn(8, 24, generator=data)).square().mean().backward()
            if rank == 1 and sync.step == 5:
                if stops:
                    with tw.busy(60):
                        time.sleep(1)
                        os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    with tw.busy(60) if says else nullcontext():
                        time.sleep(BUSY_S)
            begun = time.monotonic()
            optimizer.step()
            longest_s = max(longest_s, time.monotonic() - begun)
            sizes.append(members.size)
            generations.append(members.generation)
        seen = {"sizes": sizes, "longest_s": longest_s, "generations": generations}
        return {**seen, "digest": digest(sync)}


@pytest.mark.fault
@pytest.mark.slow  # time-outs that a loaded machine keeps
def test_a_member_that_says_that_it_is_busy_stays_one(ranks: Pool) -> None:
    found = met(ranks, member, True, False, size=3)
    assert [one["sizes"] for one in found] == [[3] * 12] * 3
    assert len({one["digest"] for one in found}) == 1
    assert found[0]["longest_s"] > 2 * TIMEOUT_S
    for one in found:
        assert one["generations"][4:] == [one["generations"][4]] * 8


@pytest.mark.fault
@pytest.mark.slow  # time-outs that a loaded machine keeps
def test_one_that_does_not_say_so_stays_since_it_lives_and_others_meet_anew(ranks: Pool) -> None:
    found = met(ranks, member, False, False, size=3)
    assert [one["sizes"][-1] for one in found] == [3] * 3
    assert len({one["digest"] for one in found}) == 1
    assert found[0]["generations"][-1] > found[0]["generations"][4]


@pytest.mark.fault
@pytest.mark.slow  # time-outs that a loaded machine keeps
def test_a_member_that_stops_while_it_is_busy_is_missed(ranks: Pool) -> None:
    found = met(ranks, member, True, True, size=3, errors=True)
    for rank in (0, 2):
        assert found[rank]["sizes"][-1] == 2
        assert found[rank]["longest_s"] < 2 * TIMEOUT_S + 4
