"""Averagings that are made without members that are late: `grace_seconds`."""

import time
from collections import Counter
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import thinwire as tw
from tests.api import AuthenticatedStore, HostStore, KeyValueView, Membership, Outcome, Terms
from tests.members.places import LOOPBACK, met
from tests.members.relays import relay_place
from tests.members.test_rejoining import CONFIGS as REJOINING
from tests.members.test_restarts import restarted
from tests.members.training import MOST_STEPS, PHASES, digest, faulty, model, wait_for
from tests.ranks import Lost, Pool
from tests.toys import engine_of
from tests.waiting import time_out

TIMEOUT_S, GRACE_S = time_out(10.0), time_out(0.5)
CONFIGS = {name: one for name, one in REJOINING.items() if name != "three steps late"}


def trained(
    rank: int,
    size: int,
    address: str,
    config: tw.LocalSGD,
    folder: str,
    late: dict[tuple[int, int], int],
    *,
    muon: bool = False,
    steps: int = 40,
    founders: int = 0,
    enters_at: int = 4,
    leaves: int = -1,
    fault: dict[str, Any] | None = None,
    grows: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train up to `steps`, and return what was seen after each averaging.

    Args:
        late: By rank and number of its own step, the averaging that others make before this step.
        founders: Ranks that begin; the others join once averaging `enters_at` has been made.
        leaves: Rank that leaves at step 24.
        fault: See `training.faulty`.
        grows: Train until there are so many members, and 12 steps more, instead.
    """
    founders = founders or size
    wait_for("" if rank < founders else f"{folder}/{enters_at}")
    net = model(rank)
    groups = tw.optim.muon_groups(net) if muon else None
    optimizer = tw.optim.Muon(groups, lr=0.01) if groups else torch.optim.AdamW(net.parameters())
    batches = torch.Generator().manual_seed(rank)
    rounds: dict[int, str] = {}
    made, end = 0, MOST_STEPS if grows else steps
    options = {"timeout": TIMEOUT_S, "start_members": founders, "grace_seconds": GRACE_S, **options}
    with faulty(rank, fault), tw.join(address, run="test", **options) as members:
        own_id = members.id
        with tw.local_sgd(net, optimizer, config, members=members) as sync:
            averagings = sync.stats()["averagings"]
            while sync.step < end and not members.left:
                x = torch.randn(8, 24, generator=batches)
                optimizer.zero_grad()
                (net(x) - x.roll(1, 1)).square().mean().backward()
                if (awaited := late.get((rank, made))) is not None:
                    wait_for(f"{folder}/{awaited}")
                if rank == leaves and sync.step == 24:
                    members.leave()
                optimizer.step()
                made += 1
                applied, averagings = averagings, sync.stats()["averagings"]
                if averagings > applied and not members.left:
                    rounds[int(averagings)] = digest(sync)
                    for number in range(int(applied) + 1, int(averagings) + 1):
                        Path(folder, str(number)).touch()
                    if members.size == grows:
                        end = min(end, sync.step + 12)
                time.sleep(0.01)
            seen = members.generation, members.size
            kept_id = members.id == own_id
        state = (
            None if members.left else (digest(sync), float(next(net.parameters()).detach().sum()))
        )
    return {"rounds": rounds, "made": made, "state": state, "seen": seen, "kept id": kept_id}


def run(rank: int, size: int, address: str, config: Any, *args: Any) -> dict[str, Any]:
    *args, options = args
    return trained(rank, size, address, config, *args, **options)


def _equal(found: list[dict[str, Any]]) -> None:
    """That members hold the same after each averaging that two of them saw, and in the end."""
    assert len({one["state"] for one in found if one["state"]}) == 1
    for averaging in {number for one in found for number in one["rounds"]}:
        seen = {one["rounds"][averaging] for one in found if averaging in one["rounds"]}
        assert len(seen) == 1, averaging


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("dense", "one bit") else pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_late_member_takes_over_averagings_made_without_it(
    ranks: Pool, tmp_path: Path, name: str
) -> None:
    config = CONFIGS[name]
    late = {(1, 10): 4, (1, 20): 7} if config.fragments == 1 else {(1, 10): 7, (1, 20): 13}
    if config.delay:  # between the end of one and the next proposal
        late = {(1, 12): 5}
    options = {"muon": name == "Muon"}
    if config.round_seconds:
        late, options = {(1, 5): 2}, {"steps": 120}
    found = met(ranks, run, config, str(tmp_path), late, options, size=3)
    _equal(found)
    assert all(one["seen"] == (0, 3) and one["kept id"] for one in found)
    assert found[0]["rounds"].keys() == found[2]["rounds"].keys() > found[1]["rounds"].keys()
    assert found[1]["made"] < min(found[0]["made"], found[2]["made"])


def counted(
    rank: int, size: int, address: str, folder: str, config: Any, late: dict[tuple[int, int], int]
) -> Any:
    """Each step lowers the only parameter by 1, 2 or 3: moves of the anchor, own rounds, steps."""
    net = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 1.0 + rank)
    moves, own, made = dict[int, float](), list[int](), 0
    options = {"timeout": TIMEOUT_S, "start_members": size, "grace_seconds": GRACE_S}
    with (
        tw.join(address, run="test", **options) as members,
        tw.local_sgd(net, optimizer, config, members=members) as sync,
    ):
        [anchor] = sync.state_dict()["anchors"].values()
        while sync.step < 40:
            optimizer.zero_grad()
            net.weight.sum().backward()
            if (awaited := late.get((rank, made))) is not None:
                wait_for(f"{folder}/{awaited}")
            before = sync.stats()["averagings"]
            optimizer.step()
            made += 1
            after = int(sync.stats()["averagings"])
            [now] = sync.state_dict()["anchors"].values()
            if after > before:
                moves[after] = float((anchor - now).detach())
                own += [after] if sync.synced else []
                for number in range(int(before) + 1, after + 1):
                    Path(folder, str(number)).touch()
            anchor = now
            time.sleep(0.01)
    return moves, own, made * (1 + rank), float((anchor - net.weight).detach())


@pytest.mark.parametrize("late", [{(1, 10): 3}, {(1, 10): 4, (1, 20): 7}, {(0, 13): 6}])
def test_no_step_of_a_late_member_is_lost_or_counts_twice(
    ranks: Pool, tmp_path: Path, late: dict[tuple[int, int], int]
) -> None:
    config = tw.LocalSGD(4, begin_step=0)
    found = met(ranks, counted, str(tmp_path), config, late, size=3)
    present = Counter(number for _, own, *_ in found for number in own)
    [moves] = [one for one, *_ in found if len(one) == len(present)][:1]
    moved = sum(present[number] * move for number, move in moves.items())
    moved += 3 * found[0][3]  # the last averaging, of all
    assert moved == pytest.approx(sum(made for *_, made, _ in found), abs=1e-3)
    assert min(present.values()) == 2


def test_two_members_wait_for_one_another(ranks: Pool, tmp_path: Path) -> None:
    found = met(ranks, _slow, str(tmp_path), size=2)
    assert found[0] == found[1]
    assert len(found[0]) == 10


def _slow(rank: int, size: int, address: str, folder: str, **options: Any) -> Any:
    """The averagings of a run in which rank 1 sleeps before its step 10."""
    made = count(1)

    def sleep(*_: object) -> None:
        if next(made) == 10 and rank == 1:
            time.sleep(3 * GRACE_S)

    hook = register_optimizer_step_pre_hook(sleep)
    try:
        return trained(rank, size, address, CONFIGS["dense"], folder, {}, **options)["rounds"]
    finally:
        hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "dies"), [("one bit", 0), ("one bit", 2), ("parts", 2)])
def test_one_dies_while_another_is_late(
    ranks: Pool, tmp_path: Path, name: str, dies: int, phase: str
) -> None:
    """In an averaging that is made without the late one, which may lose what sends it to it."""
    config = next(config for key, config in CONFIGS.items() if name in key)
    fault = {"rank": dies, "phase": phase, "at": 4 * config.fragments}
    late = {(1, 10): 8 * config.fragments}
    args = config, str(tmp_path), late, {"fault": fault}
    found = met(ranks, run, *args, size=4, errors=True)
    assert isinstance(found.pop(dies), Lost)
    _equal(found)
    assert {one["seen"][1] for one in found} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1, 2])
def test_one_joins_while_another_is_late(ranks: Pool, tmp_path: Path, late: int) -> None:
    """Whichever sends it the state."""
    options = {"founders": 3, "steps": 160, "enters_at": 2}
    args = CONFIGS["one bit"], str(tmp_path), {(late, 12): 5, (late, 30): 12}, options
    found = met(ranks, run, *args, size=4)
    _equal(found)
    assert {one["seen"][1] for one in found} == {4}


@pytest.mark.slow
def test_one_leaves_while_another_is_late(ranks: Pool, tmp_path: Path) -> None:
    options = {"leaves": 2}
    args = CONFIGS["sparse"], str(tmp_path), {(0, 21): 8}, options
    found = met(ranks, run, *args, size=4)
    assert found[2]["state"] is None
    _equal(found)
    assert {one["seen"] for one in found if one["state"]} == {(1, 3)}


@pytest.mark.slow
def test_a_late_member_that_has_died_is_left_out_in_the_end(ranks: Pool, tmp_path: Path) -> None:
    args = CONFIGS["one bit"], str(tmp_path), 1
    found = met(ranks, _dying, *args, size=3, errors=True)
    assert isinstance(found.pop(1), Lost)
    _equal(found)
    assert {one["seen"] for one in found} == {(1, 2)}


def _dying(rank: int, size: int, address: str, config: Any, folder: str, dies: int) -> Any:
    fault = {"rank": dies, "phase": "before the first agreement", "at": 4}
    options = {"timeout": time_out(3.0), "grows": 2}
    return trained(rank, size, address, config, folder, {}, fault=fault, **options)


@pytest.mark.slow
def test_through_the_relay(ranks: Pool, token_file: str, tmp_path: Path) -> None:
    options = {"token_file": token_file, "relay": True}
    with relay_place() as address:
        args = address, CONFIGS["one bit"], str(tmp_path), {(1, 10): 4, (2, 25): 9}, options
        found = ranks.run(run, *args, size=3, group=False)
    _equal(found)
    assert {one["seen"] for one in found} == {(0, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_all_are_waited_for_while_the_host_is_away(
    ranks: Pool, token_file: str, tmp_path: Path, kept: bool
) -> None:
    flag, back = tmp_path / "5", tmp_path / "back"
    options = {"token_file": token_file, "steps": 400}
    with restarted(token_file, flag, back, kept=kept, times=1) as address:
        args = address, CONFIGS["one bit"], str(tmp_path), {(1, 10): 4, (1, 80): 25}, options
        found = ranks.run(run, *args, size=3, group=False)
    _equal(found)
    assert back.exists()
    assert {one["seen"][1] for one in found} == {3}
    assert len(found[1]["rounds"]) < len(found[0]["rounds"])


def engine(rank: int, size: int, address: str, folder: str) -> Any:
    """An engine that merges, with one member late for averaging 3: samples and steps."""
    config = tw.LocalSGD(2, begin_step=0, compression=tw.Quantized(1))
    fields = {"localsgd": config, "gradient_merge": tw.GradientMerge(2)}
    net, data, made = model(rank), torch.randn(96, 24), 0
    options = {"timeout": TIMEOUT_S, "start_members": size, "grace_seconds": GRACE_S}
    seen = []
    with tw.join(address, run="test", keep_batch=True, **options) as members:
        sampler = tw.ShardedSampler(data, members=members, shuffle=False)
        ours = engine_of(net, options={"members": members}, **fields)
        assert ours.sync is not None
        for index in chain.from_iterable(repeat(sampler)):
            if rank == 1 and made == 10:
                wait_for(f"{folder}/4")
            ours.train_step(data[[index, index]], data[[index, index]])
            seen.append(index)
            made += 1
            for number in range(1, int(ours.stats()["averagings"]) + 1):
                Path(folder, str(number)).touch()
            if members.step >= 16:
                break
        ours.flush()
        state = digest(ours.sync), sampler.state_dict()
        ours.close()
    return state, made, seen


def test_an_engine_of_a_late_member_and_its_sampler_go_on(ranks: Pool, tmp_path: Path) -> None:
    found = met(ranks, engine, str(tmp_path), size=3)
    (state, made, _), *others = found
    assert all(one[0][0] == state[0] for one in others)
    assert others[0][1] < made
    whole = [index for *_, indices in found for index in indices]
    assert len(whole) == len(set(whole))


def test_an_agreement_of_others_is_not_taken_for_that_of_a_late_member(server: HostStore) -> None:
    """Where it is known from the next generation alone, by a member that is one agreement behind"""
    kv = KeyValueView(AuthenticatedStore(server, None))
    late = Membership(kv, "ann", Terms(LOOPBACK, 1, 1, TIMEOUT_S))
    late.recorded = Outcome(1, (b"answer",), ("bob", "cid"))
    assert late.accept_recorded(1) is None
    assert late.agreed.vote == 0
    late.recorded = Outcome(1, (b"answer", b"answer"), ("ann", "bob"))
    assert late.accept_recorded(1) == [b"answer", b"answer"]


def test_fewer_than_min_members_wait(ranks: Pool, tmp_path: Path) -> None:
    found = met(ranks, _few, str(tmp_path), size=3)
    assert found[0] == found[1] == found[2]


def _few(rank: int, size: int, address: str, folder: str) -> Any:
    return _slow(rank, size, address, folder, min_members=size)
