"""A joiner is let in whatever the others do meanwhile, and its trouble is its own."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire as tw
from tests.api import Channel, Donor, Download, JoinerState, StateMessage, next_identity
from tests.members.places import TOKEN, meeting_place, met, stranger
from tests.members.test_transfer import both_ends
from tests.members.training import MOST_STEPS, TIMEOUT_S, digest, faulty, in_run, member, wait_for
from tests.ranks import Pool
from tests.toys import descend
from tests.waiting import PATIENCE_S, time_out, until
from thinwire.errors import QuorumLost

EVERY_4 = tw.LocalSGD(4, begin_step=0)


def change(value: float) -> StateMessage:
    return StateMessage("round", {}, {"w": torch.full((9,), value)})


def test_a_round_may_take_longer_than_the_time_out() -> None:
    limit_s = time_out(2.0)
    donor, recipient = both_ends(limit_s)
    donor.enqueue(change(0))
    assert recipient.receive(1 << 20).kind == "round"
    later = threading.Timer(1.5 * limit_s, lambda: donor.enqueue(change(1)))
    later.start()
    assert recipient.receive(1 << 20).kind == "round"
    later.join()
    recipient.line.close()
    donor.close(PATIENCE_S)


def test_a_frozen_part_is_in_the_bound_of_a_state() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(3000, 6000, bias=False))
    net[1].requires_grad_(False)
    optimizer = torch.optim.SGD(net[0].parameters(), 0.1)
    with tw.local_sgd(net, optimizer, EVERY_4) as sync:
        work = JoinerState(sync._averager, None)  # type: ignore[arg-type]
        nbytes = sum(tensor.nbytes for tensor in work.tensors().values())
        assert 64 << 20 < nbytes <= work.max_bytes


def after_other_things(rank: int, size: int, address: str) -> int:
    for _ in range(rank):
        next_identity()
    return member(rank, size, address, EVERY_4, steps=12)["step"]


def test_state_of_a_process_before_does_not_matter(ranks: Pool) -> None:
    with meeting_place(None) as address:
        assert ranks.run(after_other_things, address, size=2) == [12, 12]


def layer_of(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Linear(8, 8)


def paced_step(net: torch.nn.Module, optimizer: Any) -> None:
    descend(optimizer, net(torch.randn(4, 8)).square().mean())
    time.sleep(0.05)


def beside_a_stranger(rank: int, size: int, address: str, token_file: str, flag: str) -> Any:
    wait_for(flag if rank == 2 else "")
    net, options = layer_of(rank), {"token_file": token_file, "start_members": 2}
    with in_run(address, net, EVERY_4, **options) as (members, sync, optimizer):
        entered, end = sync.step, MOST_STEPS
        while sync.step < end:
            paced_step(net, optimizer)
            if sync.synced and members.size == 3:  # on all of them after the same averaging
                end = min(end, sync.step + 8)
            if rank == 0 and sync.step == 8:
                other = stranger(address)
                for number in range(9):
                    key = f"run/test/hello/{number}"
                    if not other.check([key]):
                        other.set(key, json.dumps({"id": "x", "n": number}))
                other.set("run/test/hellos", "0")
                Path(flag).touch()
        return entered, members.size


def test_requests_of_a_stranger_end_nothing(ranks: Pool, tmp_path: Path, token_file: str) -> None:
    found = met(ranks, beside_a_stranger, token_file, str(tmp_path / "go"), size=3, token=TOKEN)
    assert [size for _, size in found] == [3, 3, 3]
    assert found[2][0] >= 8


def one_after_the_other(rank: int, size: int, address: str, config: Any, flag: str) -> Any:
    wait_for(flag if rank == 1 else "")
    rounds: dict[int, str] = {}
    with tw.join(address, run="test", timeout=TIMEOUT_S) as members:
        before = members.rank, members.size, members.step, 7 % members.size
        net = layer_of(rank)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        with tw.local_sgd(net, optimizer, config, members=members) as sync:
            end = MOST_STEPS
            while sync.step < end:
                paced_step(net, optimizer)
                if sync.synced:
                    rounds[sync.step] = digest(sync)
                    if members.size == 2:
                        end = min(end, sync.step + 8)
                if rank == 0 and sync.step == 4:
                    Path(flag).touch()
            return before, rounds, sync.stats()


@pytest.mark.parametrize(
    "config",
    [EVERY_4, tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(1), outer_momentum=0.9)],
)
def test_one_member_alone_takes_another_in(ranks: Pool, tmp_path: Path, config: Any) -> None:
    (first, rounds, _), (joiner, later, stats) = met(
        ranks, one_after_the_other, config, str(tmp_path / "go"), size=2
    )
    assert (first, joiner) == ((0, 1, 0, 0), (-1, 1, 0, 0))
    assert later
    assert later.items() <= rounds.items()
    assert 0 < stats["joining_total_bytes"] <= stats["joining_bytes"]


MOVING = tw.LocalSGD(4, begin_step=0, outer_momentum=0.9, compression=tw.Sparse(0.999))
"""Every number of the state changes at each averaging, and little is sent."""


def large(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Linear(1024, 1024, bias=False)


def moved(
    net: Any,
    optimizer: Any,
    sync: Any,
    *,
    start: Callable[[], None] | None,
    last: Callable[[], bool],
) -> dict[int, str]:
    """The digests after averagings, until two after `last`; `start` is called at step 8."""
    rounds, end = dict[int, str](), MOST_STEPS
    while sync.step < end:
        net.weight.grad = torch.randn_like(net.weight)
        optimizer.step()
        time.sleep(0.05)
        if sync.synced:
            rounds[sync.step] = digest(sync)
            if last():
                end = min(end, sync.step + 8)
        if start is not None and sync.step == 8:
            start()
    return rounds


def state_bytes(sync: Any) -> int:
    return sum(t.nbytes for t in JoinerState(sync._averager, None).tensors().values())


def losing_a_donor(rank: int, size: int, address: str, flag: str, victim: int) -> Any:
    """The state in bytes, what a joiner received, and the digests after averagings."""
    wait_for(flag if rank == 3 else "")
    net, fault = large(rank), {"rank": victim, "phase": "giving", "at": 30}
    options = {"start_members": 3}
    received, close, send = 0, Download.close, Channel.send

    def slow(channel: Channel, content: Any, then_bytes: int = 0) -> None:
        time.sleep(len(content) / 5e5)
        send(channel, content, then_bytes)

    def counted(download: Download) -> None:
        nonlocal received
        close(download)
        received += sum(one.line.nbytes for one in download._recipients if one)

    with (
        patch.multiple(Channel, send=slow),
        patch.multiple(Download, close=counted),
        faulty(rank, fault),
        in_run(address, net, MOVING, **options) as (members, sync, optimizer),
    ):
        rounds = moved(
            net,
            optimizer,
            sync,
            start=Path(flag).touch if rank == 0 else None,
            last=lambda: rank == 3 or (members.size == 3 and members.generation > 1),
        )
        return state_bytes(sync), received, rounds


@pytest.mark.slow
@pytest.mark.fault("a donor dies while it sends")
@pytest.mark.parametrize("part", [0, 1])
def test_the_others_send_the_rest_of_a_lost_donor(ranks: Pool, tmp_path: Path, part: int) -> None:
    found = met(ranks, losing_a_donor, str(tmp_path / "go"), part, size=4, errors=True)
    state, received, rounds = found[3]
    assert received < 1.1 * state
    assert rounds
    survivor = found[1 - part]
    assert rounds.items() <= survivor[2].items()


def coming_back(rank: int, size: int, address: str, flag: str, path: str) -> Any:
    """Bytes that a joiner received, of how many, and the digests after averagings."""
    wait_for(flag if rank == 2 else "")
    net, options = large(rank), {"start_members": 2, "timeout": TIMEOUT_S}
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def keep() -> None:
        torch.save(sync.state_dict(), path)
        Path(flag).touch()

    with tw.join(address, run="test", **options) as members:
        sync = tw.local_sgd(net, optimizer, MOVING, members=members)
        if rank == 2:
            sync.load_state_dict(torch.load(path))
        with sync:
            start, last = (keep if rank == 0 else None), lambda: members.size == 3
            rounds = moved(net, optimizer, sync, start=start, last=last)
            return state_bytes(sync), sync.stats()["joining_bytes"], rounds


def test_joiner_with_an_earlier_state_receives_difference(ranks: Pool, tmp_path: Path) -> None:
    found = met(ranks, coming_back, str(tmp_path / "go"), str(tmp_path / "state"), size=3)
    state, received, rounds = found[2]
    assert 0 < received < 0.2 * state
    assert rounds
    assert rounds.items() <= found[0][2].items()


def beside_a_bad_donor(rank: int, size: int, address: str, flag: str, how: str, bad: Any) -> Any:
    """How often this member gave, what a joiner entered with, and the digests or the error."""
    wait_for(flag if rank == size - 1 else "")
    given, make = 0, Donor.__init__

    def made(donor: Donor, *words: Any) -> None:
        nonlocal given
        given += 1
        if how == "a wrong bit":
            words = (*words[:5], {n: t.clone() for n, t in words[5].items()}, *words[6:])
            first = next(t for t in words[5].values() if t.numel())
            first.view(-1).view(torch.uint8)[0] ^= 1
        make(donor, *words)

    send = {"no JSON": lambda _, line: line.send(b"no JSON")}.get(how, Donor._send_state)
    spoiled = patch.multiple(Donor, __init__=made, _send_state=send)
    net, rounds = layer_of(rank), dict[int, str]()
    with contextlib.ExitStack() as ends:
        if rank in bad:
            ends.enter_context(spoiled)
        options = {"start_members": size - 1}
        members, sync, optimizer = ends.enter_context(in_run(address, net, EVERY_4, **options))
        end = MOST_STEPS
        while sync.step < end:
            paced_step(net, optimizer)
            if sync.synced:
                rounds[sync.step] = digest(sync)
                if members.size == size:
                    end = min(end, sync.step + 8)
            if rank == 0 and sync.step == 4:
                Path(flag).touch()
    return given, rounds


@pytest.mark.parametrize("how", ["a wrong bit", "no JSON"])
def test_a_donor_that_failed_is_asked_once(ranks: Pool, tmp_path: Path, how: str) -> None:
    found = met(ranks, beside_a_bad_donor, str(tmp_path / "go"), how, [1], size=4)
    assert found[1][0] == 1
    assert found[3][1]
    assert found[3][1].items() <= found[0][1].items()


def flushing(rank: int, size: int, address: str, flag: str) -> Any:
    wait_for(flag if rank == 1 else "")
    net, config = layer_of(rank), tw.LocalSGD(6, begin_step=0, delay=3)
    with in_run(address, net, config) as (members, sync, optimizer):
        entered = sync.step
        while sync.step < 40:
            paced_step(net, optimizer)
            if rank == 0 and sync.step == 4:
                Path(flag).touch()
                until(members._member._membership.waiting_joiners, "the joiner")
            if sync.step == 14:
                if rank == 0:
                    until(members._member._membership.ready_joiners, "the joiner")
                sync.flush()
        return entered, members.size


def test_nobody_is_let_in_between_two_averagings_of_one_call(ranks: Pool, tmp_path: Path) -> None:
    found = met(ranks, flushing, str(tmp_path / "go"), size=2)
    assert found == [(0, 2), (14, 2)]


def left_alone(rank: int, size: int, address: str, flag: str) -> float:
    """How long the joiner still waits once the only member has left."""
    wait_for(flag if rank == 1 else "")
    net, config = layer_of(rank), tw.LocalSGD(100, begin_step=0)
    if rank == 0:
        with in_run(address, net, config) as (members, _, optimizer):
            paced_step(net, optimizer)
            Path(flag).touch()
            until(members._member._membership.waiting_joiners, "the joiner")
        Path(f"{flag}.left").touch()
        return 0.0
    with pytest.raises(QuorumLost, match="the run has ended"), in_run(address, net, config):
        raise AssertionError("nobody lets it in")
    return time.time() - Path(f"{flag}.left").stat().st_mtime


def test_a_joiner_hears_that_all_have_left(ranks: Pool, tmp_path: Path) -> None:
    _, waited_s = met(ranks, left_alone, str(tmp_path / "go"), size=2)
    assert waited_s < TIMEOUT_S


def with_a_schedule(rank: int, size: int, address: str, flag: str) -> list[tuple[int, float]]:
    wait_for(flag if rank == 1 else "")
    net, rate = layer_of(rank), tw.schedules.CosineDecay(0.0, 1e-3, MOST_STEPS)
    optimizer = tw.optim.AdamW(net.named_parameters(), lr=rate)
    seen = []
    with in_run(address, net, EVERY_4, optimizer) as (members, sync, _):
        end = MOST_STEPS
        while sync.step < end:
            paced_step(net, optimizer)
            if sync.synced and members.size == 2:
                end = min(end, sync.step + 8)
            seen.append((sync.step, optimizer.get_lr()))
            if rank == 0 and sync.step == 4:
                Path(flag).touch()
    return seen


def test_a_schedule_goes_on_where_the_others_are(ranks: Pool, tmp_path: Path) -> None:
    first, joiner = met(ranks, with_a_schedule, str(tmp_path / "go"), size=2)
    assert len(joiner) < len(first)
    assert joiner == first[-len(joiner) :]
