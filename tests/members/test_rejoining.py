"""A member that was away longer than the time-out enters the run again in the same process."""

import contextlib
import io
import threading
import time
from collections.abc import Callable
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.api import Link, network, parse_address
from tests.faults.lines import blackhole
from tests.faults.proxy import proxy
from tests.lab.namespaces import needs_netns
from tests.members.homes import at_home
from tests.members.places import host_command, meeting_place, met
from tests.members.training import MOST_STEPS, digest, in_run, model, stop_for, wait_for
from tests.ranks import Pool, Raised
from tests.waiting import time_out, until

TIMEOUT_S = time_out(2.0)
CONFIGS = {
    "dense": tw.LocalSGD(4, begin_step=0),
    "one bit": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1)),
    "sparse": tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9)),
    "Muon": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1)),
    "low rank, with state": tw.LocalSGD(
        4, begin_step=1, average_state=True, compression=tw.LowRank(2, begin_step=0, min_numel=16)
    ),
    "late": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=2),
    "three steps late": tw.LocalSGD(4, begin_step=1, delay=3),
    "outer momentum, parts": tw.LocalSGD(
        4, begin_step=1, fragments=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    ),
    "by time": tw.LocalSGD(50, begin_step=0, round_seconds=0.3),
}
pytestmark = pytest.mark.slow


def away(
    rank: int,
    size: int,
    address: str,
    config: tw.LocalSGD,
    *,
    muon: bool = False,
    asleep: int = 1,
    at: int = 6,
    flag: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Train until one is back, 16 steps more, and tell what was seen.

    Rank `asleep` is stopped after its step `at`; with a `flag`, which it touches then, it goes on.
    """
    net = model(rank)
    groups = tw.optim.muon_groups(net) if muon else None
    optimizer = tw.optim.Muon(groups, lr=0.01) if groups else torch.optim.AdamW(net.parameters())
    batches = torch.Generator().manual_seed(rank)
    rounds: dict[int, tuple[str, int, int]] = {}
    changes, jumps = list[Any](), list[tuple[int, int]]()
    options = {"timeout": TIMEOUT_S, "start_members": size, **options}
    with in_run(address, net, config, optimizer, **options) as (members, sync, _):
        members.on_change(lambda now: changes.append((now.generation, now.size, now.step)))
        own_id, made, end, averagings = members.id, 0, MOST_STEPS, sync.stats()["averagings"]
        while sync.step < end:
            x = torch.randn(8, 24, generator=batches)
            optimizer.zero_grad()
            (net(x) - x.roll(1, 1)).square().mean().backward()
            if rank == asleep and made == at:
                Path(flag).touch() if flag else stop_for(TIMEOUT_S + 3)
            before = sync.step
            optimizer.step()
            made += 1
            applied, averagings = averagings, sync.stats()["averagings"]
            if members.id != own_id:
                jumps.append((before, sync.step))
                own_id = members.id
                assert members.ids[members.rank] == own_id
                assert changes[-1] == (members.generation, members.size, sync.step)
            elif averagings > applied:
                rounds[sync.step] = digest(sync), members.size, members.generation
                if members.size == size and members.generation:  # on all in the same round
                    end = min(end, sync.step + 16)
            time.sleep(0.03)
        moments = optimizer.state_dict()["state"]
    parameters = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    state = digest(sync), float(parameters.double().sum()), sync.step
    return {"rounds": rounds, "jumps": jumps, "made": made, "state": state, "moments": moments}


def _alike(found: list[dict[str, Any]], asleep: int = 1) -> None:
    """That all hold the same after each averaging that they share, and in the end."""
    assert [len(one["jumps"]) for one in found] == [rank == asleep for rank in range(len(found))]
    others = found[:asleep] + found[asleep + 1 :]
    late = found[asleep]
    assert len({one["state"] for one in found}) == 1
    assert late["made"] < min(one["made"] for one in others)
    again = [step for step in late["rounds"] if step > late["jumps"][0][1]]
    assert len(again) >= 2
    assert {late["rounds"][step][1] for step in again} == {len(found)}
    for other in others:
        assert other["rounds"] == others[0]["rounds"]
        assert late["rounds"].items() <= other["rounds"].items()


def _away(rank: int, size: int, address: str, config: Any, options: Any) -> Any:
    return away(rank, size, address, config, **options)


@pytest.mark.fault("a member sleeps longer than the time-out")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_that_slept_trains_on_with_the_others(ranks: Pool, name: str, size: int) -> None:
    found = met(ranks, _away, CONFIGS[name], {"muon": name == "Muon"}, size=size)
    _alike(found)
    if name != "Muon":  # the state of its optimizer is that of its own steps
        assert {float(one["step"]) for one in found[1]["moments"].values()} == {found[1]["made"]}


def counted(rank: int, size: int, address: str, delay: int, at: int, when: int) -> Any:
    """Each step lowers the only parameter by 1: what averagings moved in all, and steps made."""
    net = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    moved, made, end = 0.0, 0, MOST_STEPS
    config = tw.LocalSGD(4, begin_step=0, delay=delay)
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with tw.join(address, run="test", **options) as members:
        with tw.local_sgd(net, optimizer, config, members=members) as sync:
            [anchor] = sync.state_dict()["anchors"].values()
            while sync.step < end:
                optimizer.zero_grad()
                net.weight.sum().backward()
                if rank == at and made == when:
                    stop_for(TIMEOUT_S + 3)
                applied, own_id = sync.stats()["averagings"], members.id
                optimizer.step()
                made += 1
                [now] = sync.state_dict()["anchors"].values()
                if sync.stats()["averagings"] > applied and members.id == own_id:
                    moved += members.size * float(anchor - now)
                    if members.size == size and members.generation:
                        end = min(end, sync.step + 8)
                anchor = now
                time.sleep(0.03)
            size_at_end = members.size
        moved += size_at_end * float(anchor - net.weight.detach())
    return moved, made, float(net.weight.detach())


@pytest.mark.parametrize(("delay", "when"), [(0, 6), (3, 4), (3, 5), (3, 6), (3, 7), (2, 5)])
def test_no_step_is_lost_or_counts_twice(ranks: Pool, delay: int, when: int) -> None:
    """Wherever it is stopped: between averagings, with data on the way, after its last vote."""
    found = met(ranks, counted, delay, 1, when, size=2)
    moved, steps = found[0][0], sum(made for _, made, _ in found)
    assert moved == pytest.approx(steps, abs=1e-3)
    assert found[0][2] == found[1][2]


def test_without_rejoining_it_is_evicted(ranks: Pool) -> None:
    found = met(ranks, _alone, size=2, errors=True)
    assert isinstance(found[1], Raised)
    assert found[1].type_name == "Evicted"
    assert found[0] > 6


def _alone(rank: int, size: int, address: str) -> int:
    """The first one goes on to step 40; the other is stopped, and does not enter again."""
    net = model(rank)
    options = {"timeout": TIMEOUT_S, "start_members": size, "rejoin": False}
    with in_run(address, net, CONFIGS["dense"], **options) as (_, sync, optimizer):
        while sync.step < 40:
            net(torch.randn(8, 24)).square().mean().backward()
            if rank == 1 and sync.step == 6:
                stop_for(TIMEOUT_S + 3)
            optimizer.step()
        return sync.step


def _deserted(rank: int, size: int, address: str, folder: str, anew: bool) -> int:
    """Rank 1 sleeps; rank 0 ends; rank 2 begins the run anew, if at all."""
    gone, done = Path(folder, "gone"), Path(folder, "done")
    if rank == 2:
        wait_for(str(gone))
    net = model(rank)
    options = {"timeout": TIMEOUT_S, "start_members": 1 if rank == 2 else 2}
    if rank == 2 and not anew:
        return 0
    try:
        with in_run(address, net, CONFIGS["dense"], **options) as (members, sync, optimizer):
            while not done.exists() and (rank or members.size == 2 or sync.step < 20):
                net(torch.randn(8, 24)).square().mean().backward()
                if rank == 1 and sync.step == 6:
                    stop_for(6 * TIMEOUT_S + 6)
                optimizer.step()
                time.sleep(0.03)
    finally:
        (gone if rank == 0 else done).touch()
    wait_for(str(done))  # the pool gives up who is stopped once it asks for its answer
    return sync.step


@pytest.mark.parametrize(("anew", "says"), [(True, "begun anew"), (False, "no member of the run")])
def test_a_run_that_has_ended_is_not_entered_again(
    ranks: Pool, tmp_path: Path, anew: bool, says: str
) -> None:
    found = met(ranks, _deserted, str(tmp_path), anew, size=3, errors=True)
    assert isinstance(found[1], Raised), found
    assert found[1].type_name == "Evicted"
    assert says in found[1].text
    assert not isinstance(found[2], Raised)


def test_three_failures_to_connect_end_it(ranks: Pool, tmp_path: Path) -> None:
    flag = tmp_path / "cut"
    with meeting_place(None) as address:
        place = parse_address("address", address, scheme=True)
        with proxy(place.host, place.port) as line:
            cutting = threading.Thread(target=lambda: (until(flag.exists), line.cut()))
            cutting.start()
            addresses = [address, line.address]
            found = ranks.run(_cut, addresses, str(flag), size=2, group=False, expect_errors=True)
            cutting.join()
    assert found[0] == 40
    assert isinstance(found[1], Raised)
    assert found[1].type_name == "Evicted", found[1].traceback
    assert "cannot enter the run again" in found[1].text


def _cut(rank: int, size: int, addresses: list[str], flag: str) -> int:
    net = model(rank)
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with in_run(addresses[rank], net, CONFIGS["dense"], **options) as (_, sync, optimizer):
        while sync.step < 40:
            net(torch.randn(8, 24)).square().mean().backward()
            if rank == 1 and sync.step == 6:
                Path(flag).touch()
                stop_for(TIMEOUT_S + 3)
            optimizer.step()
        return sync.step


@needs_netns
def test_one_that_was_cut_off_comes_back(ranks: Pool, token_file: str, tmp_path: Path) -> None:
    """From the host and from its peers, for three time-outs."""
    flag = tmp_path / "cut"
    options = {"flag": str(flag), "token_file": token_file}
    with network(4, Link.parse("1gbit")) as net:

        def cut() -> None:
            until(flag.exists)
            for ends in (False, True):
                for one, others in ((2, (0, 1, 3)), (0, (2,)), (1, (2,)), (3, (2,))):
                    there = [net.addresses[other] for other in others]
                    blackhole(net.namespace_fds[one], there, ends=ends)
                time.sleep(0 if ends else 3 * TIMEOUT_S)

        bind = ["--bind", f"{net.addresses[0]}:29400", "--token-file", token_file]
        with host_command(*bind, namespace=net.namespace_fds[0]) as (_, address):
            cutting = threading.Thread(target=cut)
            cutting.start()
            homes = [*net.namespace_fds[1:]]
            found = at_home(ranks, homes, _away, address, CONFIGS["one bit"], options)
            cutting.join()
    _alike(found)


def _over_a_cut(rank: int, size: int, address: str, flag: str, token_file: str) -> float:
    net = model(rank)
    options = {"timeout": 60.0, "start_members": size, "token_file": token_file}
    with in_run(address, net, CONFIGS["dense"], **options) as (_, sync, optimizer):
        while sync.step < 8:
            net(torch.randn(8, 24)).square().mean().backward()
            if rank == 1 and sync.step == 7:
                Path(flag).touch()
                until(Path(f"{flag} it").exists)
            began_s = time.monotonic()
            optimizer.step()
        return time.monotonic() - began_s


@needs_netns
def test_a_round_ends_soon_after_a_cut_line_is_back(
    ranks: Pool, token_file: str, tmp_path: Path
) -> None:
    """TCP alone would be silent for as long again: 12.6 s after the first message it resends."""
    flag, cut_s = tmp_path / "cut", 8.0
    with network(3, Link.parse("1gbit")) as net:

        def cut() -> None:
            until(flag.exists)
            for ends in (False, True):
                blackhole(net.namespace_fds[1], [net.addresses[2]], ends=ends)
                blackhole(net.namespace_fds[2], [net.addresses[1]], ends=ends)
                Path(f"{flag} it").touch()
                time.sleep(0 if ends else cut_s)

        bind = ["--bind", f"{net.addresses[0]}:29400", "--token-file", token_file]
        with host_command(*bind, namespace=net.namespace_fds[0]) as (_, address):
            cutting = threading.Thread(target=cut)
            cutting.start()
            homes = [*net.namespace_fds[1:]]
            found = at_home(ranks, homes, _over_a_cut, address, str(flag), token_file)
            cutting.join()
    assert cut_s - 1 < found[1] < cut_s + 2.5


def _not_finite(rank: int, size: int, address: str) -> tuple[str, list[str]]:
    net, told = model(rank), io.StringIO()
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with (
        contextlib.redirect_stderr(told),
        in_run(address, net, CONFIGS["sparse"], **options) as (members, sync, optimizer),
    ):
        end = MOST_STEPS
        while sync.step < end:
            optimizer.zero_grad()
            net(torch.randn(8, 24)).square().mean().backward()
            if rank == 1 and sync.step == 6:
                next(net.parameters()).data[0] = torch.nan
                stop_for(TIMEOUT_S + 3)
            optimizer.step()
            if sync.synced and members.size == size and members.generation:
                end = min(end, sync.step + 8)
            time.sleep(0.03)
    return digest(sync), [line for line in told.getvalue().splitlines() if "dropped" in line]


def test_a_change_that_is_not_finite_is_dropped_with_a_warning(ranks: Pool) -> None:
    (first, none), (second, [line]) = met(ranks, _not_finite, size=2)
    assert first == second
    assert none == []
    assert line.startswith("0.weight is not finite")


def _with_an_engine(rank: int, size: int, address: str) -> tuple[int, int, Any, list[int]]:
    """A merge, a sampler, and a flush in which one is away."""
    net, data = model(rank), torch.randn(64, 24)
    strategy = tw.DistributedStrategy(
        localsgd=CONFIGS["one bit"], gradient_merge=tw.GradientMerge(2)
    )
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with tw.join(address, run="test", **options) as members:
        sampler = tw.ShardedSampler(data, members=members)
        optimizer = torch.optim.AdamW(net.parameters())
        engine = strategy.prepare(net, optimizer, torch.nn.MSELoss(), members=members)
        assert engine.sync is not None
        samples = chain.from_iterable(repeat(sampler))
        end = MOST_STEPS
        made = 0
        while members.step < end:
            x = data[[*islice(samples, 4)]]
            if rank == 1 and made == 13:
                stop_for(TIMEOUT_S + 3)
            engine.train_step(x, x.roll(1, 1))
            made += 1
            if engine.sync.synced and members.size == size and members.generation:
                end = min(end, members.step + 8)
            time.sleep(0.02)
        engine.flush()
        state = digest(engine.sync), sampler.state_dict()
        engine.close()
        return made, members.step, state, list(sampler)


def test_an_engine_and_its_sampler_go_on(ranks: Pool) -> None:
    found = met(ranks, _with_an_engine, size=2)
    assert found[1][0] < found[0][0]
    assert found[0][1:3] == found[1][1:3]
    assert not set(found[0][3]) & set(found[1][3])


def _saved(engine: tw.Engine, to: str) -> None:
    assert engine.save(to, wait=False) == engine.wait_for_save()


STEPS = tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(1))
LATE = tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(1), delay=3)
TIMED = tw.LocalSGD(50, begin_step=0, round_seconds=0.3)
CALLS: dict[str, tuple[tw.LocalSGD, int, Callable[[Any, str], object]]] = {
    "train_step": (STEPS, 7, lambda engine, _: None),
    "a vote of join": (STEPS, 8, lambda engine, _: None),
    "leaving join": (STEPS, 8, lambda engine, _: None),
    "leaving join, timed": (TIMED, 8, lambda engine, _: None),
    "flush of a merge": (STEPS, 13, lambda engine, _: engine.flush()),
    "flush whose merge averages": (STEPS, 7, lambda engine, _: engine.flush()),
    "flush of timed rounds": (TIMED, 13, lambda engine, _: engine.flush()),
    "flush, late": (LATE, 13, lambda engine, _: engine.sync.flush()),
    "save with an agreement on the way": (LATE, 8, lambda engine, to: engine.save(to)),
    "save with a vote on the way": (LATE, 12, _saved),
    "state_dict": (LATE, 12, lambda engine, _: engine.sync.state_dict()),
    "require_equal": (STEPS, 12, lambda engine, _: engine.sync.require_equal()),
    "end_round": (TIMED, 12, lambda engine, _: engine.sync.end_round()),
}
"""By name the config, and what is called after so many microsteps, two of which are a step."""


def _in_a_call(rank: int, size: int, address: str, name: str, folder: str) -> Any:
    """Call it, on rank 1 after a sleep; then train until both are there, and 8 steps more."""
    config, at, call = CALLS[name]
    net = model(rank)
    strategy = tw.DistributedStrategy(localsgd=config, gradient_merge=tw.GradientMerge(2))
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with tw.join(address, run="test", **options) as members:
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        engine = strategy.prepare(net, optimizer, torch.nn.MSELoss(), members=members)
        assert engine.sync is not None
        made, end, own_id, jumped = 0, MOST_STEPS, members.id, 0
        with engine.join() if "join" in name else contextlib.nullcontext():
            while members.step < end:
                before = members.step
                if made == at:
                    if rank == 1:
                        stop_for(TIMEOUT_S + 3)
                    if rank == 1 and name.startswith("leaving join"):
                        break
                    call(engine, f"{folder}/{rank}")
                x = torch.randn(4, 24)
                engine.train_step(x, x.roll(1, 1))
                made += 1
                jumped = jumped or (members.id != own_id and members.step - before)
                if engine.sync.synced and members.size == size and members.generation:
                    end = min(end, members.step + 8)
                time.sleep(0.02)
        engine.flush()
        parameters = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        state = digest(engine.sync), float(parameters.double().sum()), members.step
        engine.close()
        return state, members.id != own_id, jumped


@pytest.mark.parametrize("name", CALLS)
def test_a_member_that_slept_comes_back_whatever_it_calls(
    ranks: Pool, tmp_path: Path, name: str
) -> None:
    (first, *stayed), (second, came_back, _) = met(ranks, _in_a_call, name, str(tmp_path), size=2)
    assert first == second
    assert came_back
    assert stayed == [False, 0]
    for folder in tmp_path.glob("1/*"):  # of the state that it has, not that it had
        assert int(folder.name.rsplit("_", 1)[-1]) > 6


def _at_the_end(rank: int, size: int, address: str, config: tw.LocalSGD) -> tuple[str, list[float]]:
    """The loop of both ends with the averaging after which the one that slept is back."""
    net = model(rank)
    options = {"timeout": TIMEOUT_S, "start_members": size}
    with in_run(address, net, config, **options) as (members, sync, optimizer):
        own_id, last = members.id, False
        while not last and members.id == own_id:
            net(torch.randn(8, 24)).square().mean().backward()
            if rank == 1 and sync.step == 6:
                stop_for(TIMEOUT_S + 3)
            ready = members._member._membership.ready_joiners()
            averagings = sync.stats()["averagings"]
            optimizer.step()
            last = bool(ready) and sync.stats()["averagings"] > averagings
            time.sleep(0.03)
    return digest(sync), [float(p.detach().double().sum()) for p in net.parameters()]


@pytest.mark.parametrize("name", ["dense", "one bit", "late", "outer momentum, parts"])
def test_one_that_is_back_when_its_loop_ends_leaves_with_the_model_of_the_run(
    ranks: Pool, name: str
) -> None:
    first, second = met(ranks, _at_the_end, CONFIGS[name], size=2)
    assert first == second
