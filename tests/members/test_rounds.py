"""A member that goes, in whatever moment, costs the others a part of one averaging."""

import contextlib
import io
import os
import signal
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire as tw
from tests import api
from tests.members.places import meeting_place, met
from tests.members.training import (
    MOST_STEPS,
    PHASES,
    TIMEOUT_S,
    deaf,
    digest,
    member,
    model,
    wait_for,
)
from tests.ranks import Lost, Pool, Raised
from tests.waiting import PATIENCE_S
from thinwire.errors import PeerStalled

NEVER_S = 4 * PATIENCE_S
"""A time-out for which nobody can have waited, since the test would have failed."""
SPARSE = tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9))
CONFIGS = {
    "sparse": SPARSE,
    "whole": tw.LocalSGD(4, begin_step=0),
    "one bit, late": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=2),
    "one bit, three steps late": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=3),
    "outer momentum, parts": tw.LocalSGD(
        4, begin_step=1, fragments=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    ),
    "low rank, with state": tw.LocalSGD(
        4, begin_step=1, average_state=True, compression=tw.LowRank(2, begin_step=0, min_numel=16)
    ),
    "split": tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9, exchange="split")),
}


def _alike(found: list[dict[str, Any]], steps: int | None = 24) -> dict[int, tuple[str, int, int]]:
    """That all who went on to the end hold the same after every averaging."""
    assert {one["step"] for one in found} == {steps or found[0]["step"]}
    first, *others = (one["rounds"] for one in found)
    assert first
    for other in others:
        assert {step: first[step] for step in other} == other
    return first


@pytest.mark.fault("survivors go on without a restart")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 2])
def test_whoever_is_killed_others_make_the_round_again(ranks: Pool, phase: str, rank: int) -> None:
    fault = {"rank": rank, "phase": phase, "at": 3, "how": "kill"}
    found = met(ranks, _member_with, SPARSE, {"fault": fault}, size=3, errors=True)
    assert isinstance(found[rank], Lost)
    survivors = [one for n, one in enumerate(found) if n != rank]
    rounds = _alike(survivors)
    assert set(rounds) == {1, 5, 9, 13, 17, 21}
    assert [size for _, size, _ in rounds.values()][-1] == 2
    for one in survivors:
        assert one["changes"] == [(1, 2)]
        assert 0 < one["stats"]["lost_regrouping"] < 1 - one["stats"]["goodput"]


def test_a_lost_member_is_reported_in_one_line_without_a_set_up_of_logging(ranks: Pool) -> None:
    fault = {"rank": 1, "phase": "once sent", "at": 3, "how": "kill"}
    found = met(ranks, _reported, {"fault": fault}, size=3, errors=True)
    for told in (found[0], found[2]):
        [line] = [line for line in told.splitlines() if "lost" in line]
        assert line.startswith("lost ")
        assert line.endswith(" go on")
        assert "checkpoint" not in told
        assert "frame #" not in told


def _reported(rank: int, size: int, address: str, options: Any) -> str:
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        member(rank, size, address, SPARSE, **options)
    return told.getvalue()


@pytest.mark.parametrize("phase", PHASES)
def test_local_steps_go_on_while_members_agree_and_one_is_killed(ranks: Pool, phase: str) -> None:
    fault = {"rank": 1, "phase": phase, "at": 3, "how": "kill"}
    config = CONFIGS["one bit, three steps late"]
    found = met(ranks, _member_with, config, {"fault": fault}, size=3, errors=True)
    assert isinstance(found[1], Lost)
    assert _alike([found[0], found[2]])[24][1] == 2


@pytest.mark.fault("a rank dies between two averagings; a joiner; a stage of a pipeline dies")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_method_goes_on_without_a_member_that_was_killed(ranks: Pool, name: str) -> None:
    fault = {"rank": 1, "phase": "before the last agreement", "at": 3, "how": "kill"}
    found = met(ranks, _member_with, CONFIGS[name], {"fault": fault}, size=3, errors=True)
    assert isinstance(found[1], Lost)
    _alike([found[0], found[2]])


@pytest.mark.fault("a rank dies between two averagings; a joiner; a stage of a pipeline dies")
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_joiner_has_the_bits_of_the_others(ranks: Pool, tmp_path: Path, name: str) -> None:
    options = {"founders": 2, "flag": str(tmp_path / "go"), "step_s": 0.05, "steps": 80}
    found = met(ranks, _member_with, CONFIGS[name], options, size=3)
    first, joiner = found[0], found[2]
    assert joiner["entered"] > 1
    assert len(joiner["rounds"]) > 3
    rounds = _alike(found, 80)
    assert [size for _, size, _ in rounds.values()][-1] == 3
    assert all(step > joiner["entered"] for step in joiner["rounds"])
    assert first["changes"] == [(1, 3)]
    assert max(one["longest_s"] for one in found[:2]) < 1 + TIMEOUT_S / 3
    assert joiner["stats"]["lost_joining"] > 0 == first["stats"]["lost_joining"]


def test_one_that_leaves_is_no_error_for_the_others(ranks: Pool) -> None:
    options = {"leave_at": {1: 10}, "timeout_s": NEVER_S}
    found = met(ranks, _member_with, SPARSE, options, size=3)
    assert found[1]["left"]
    assert found[1]["step"] == 13
    rounds = _alike([found[0], found[2]])
    assert [size for _, size, _ in rounds.values()] == [3, 3, 3, 3, 2, 2]


def test_residual_of_a_leaving_member_goes_to_a_remaining_one(ranks: Pool) -> None:
    found = met(ranks, _leaving, size=3)
    kept, _ = found[2]
    ((came, factor),) = [received for _, received in found if received is not None]
    assert factor == 2 / 3
    assert kept > 0
    assert came == kept


def _leaving(rank: int, size: int, address: str) -> Any:
    """What is kept on leaving, and what is inherited with which factor, as sums of squares."""
    seen: dict[str, Any] = {"kept": None, "came": None}
    own_state, inherit = api.JoinerState.own_state, api.JoinerState.add_handoff

    def square(given: api.StateMessage) -> float:
        return sum(float(t.double().square().sum()) for _, t in sorted(given.tensors.items()))

    def kept(work: api.JoinerState) -> api.StateMessage | None:
        given = own_state(work)
        assert given is not None
        seen["kept"] = square(given)
        return given

    def came(work: api.JoinerState, given: api.StateMessage, factor: float) -> None:
        before = square(own_state(work))  # type: ignore[arg-type]
        inherit(work, given, factor)
        assert square(own_state(work)) != before  # type: ignore[arg-type]
        seen["came"] = square(given), factor

    with patch.multiple(api.JoinerState, own_state=kept, add_handoff=came):
        member(rank, size, address, SPARSE, leave_at={2: 6}, steps=60, step_s=0.02)
    return seen["kept"], seen["came"]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("call", [8, 9])
def test_member_that_missed_an_agreement_takes_it_from_another(
    ranks: Pool, call: int, leaves: bool
) -> None:
    """Nobody is lost: one member gives the generation up just before it goes along."""
    found = met(ranks, _deaf, call, leaves, size=3)
    stay = [one for one in found if not one["left"]]
    rounds = _alike(stay)
    assert set(rounds) == {1, 5, 9, 13, 17, 21}
    assert len(stay) == 2 if leaves else 3
    assert [size for _, size, _ in rounds.values()][-1] == len(stay)
    assert found[1]["deaf"] == 1


def _deaf(rank: int, size: int, address: str, call: int, leaves: bool) -> Any:
    options: dict[str, Any] = {"leave_at": {2: 6}} if leaves else {}
    with deaf(at=call if rank == 1 else 0) as times:
        found = member(rank, size, address, SPARSE, timeout_s=NEVER_S, **options)
        return {**found, "deaf": len(times)}


def test_the_last_but_one_may_leave(ranks: Pool) -> None:
    found = met(ranks, _member_with, SPARSE, {"leave_at": {0: 10}}, size=2)
    assert found[0]["left"]
    assert found[1]["step"] == 24
    assert [size for _, size, _ in found[1]["rounds"].values()] == [2, 2, 2, 2, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["taking", "giving"])
def test_joiner_that_dies_in_the_copy_delays_nobody(ranks: Pool, tmp_path: Path, what: str) -> None:
    """A joiner that loses its giver asks another member; one that dies is not let in."""
    fault = {"rank": 3 if what == "taking" else 2, "phase": what, "at": 2, "how": "kill"}
    options = {"founders": 3, "flag": str(tmp_path / "go"), "step_s": 0.05, "steps": 160}
    found = met(
        ranks,
        _member_with,
        SPARSE,
        {**options, "fault": fault},
        size=5 if what == "taking" else 4,
        errors=True,
    )
    if what == "taking":  # rank 4 comes at the same time and stays
        assert isinstance(found[3], Lost)
        rounds = _alike([found[0], found[1], found[2], found[4]], 160)
        assert [size for _, size, _ in rounds.values()][-1] == 4
    else:
        alive = [one for one in found if not isinstance(one, Lost)]
        rounds = _alike(alive, 160)
        assert len(alive) >= 3
        assert [size for _, size, _ in rounds.values()][-1] == len(alive)


@pytest.mark.slow
def test_one_that_was_stopped_finds_itself_evicted(ranks: Pool, tmp_path: Path) -> None:
    options = {"stop_at": {1: 10}, "steps": 120, "step_s": 0.15}
    found = met(ranks, _member_with, SPARSE, options, size=3, errors=True)
    rounds = _alike([found[0], found[2]], 120)
    assert [size for _, size, _ in rounds.values()][-1] == 2
    assert isinstance(found[1], Raised)
    assert found[1].type_name == "Evicted"
    assert max(found[n]["longest_s"] for n in (0, 2)) < TIMEOUT_S + 3


@pytest.mark.parametrize(
    ("how", "name"),
    [
        pytest.param("killed", "killed", marks=pytest.mark.slow),
        pytest.param("left", "left", marks=pytest.mark.slow),
        ("left", "another"),
    ],
)
def test_a_run_of_which_nobody_is_left_begins_anew_from_the_last_copy(
    ranks: Pool, tmp_path: Path, how: str, name: str
) -> None:
    """By the same command, also under its own name, with a joiner that comes later."""
    folder = str(tmp_path / "copies")
    with meeting_place(None) as address:
        flag = str(tmp_path / "one")
        ended = ranks.run(
            _saving, address, folder, how, flag, size=2, group=False, expect_errors=True
        )
        assert all(isinstance(one, Lost) == (how == "killed") for one in ended)
        flag = str(tmp_path / "two")
        again = ranks.run(_saving, address, folder, name, flag, size=3, group=False)
    assert [each[0] for each in again] == [True, True, False]
    assert [each[1] for each in again[:2]] == [10, 10]
    assert again[2][1] > 10, "it took over what the others held"
    assert len({each[2] for each in again}) == 1
    assert again[0][3] != again[1][3]


def test_member_cut_off_from_a_restarted_run_is_evicted() -> None:
    """The run is written to have begun anew, while the only member of it was not heard of."""
    net = model(0)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with meeting_place(None) as address:
        kv = api.KeyValueView(api.connect(address, "test", None, timedelta(seconds=TIMEOUT_S)))
        with (
            pytest.raises(tw.errors.Evicted, match="generation 1 was formed without this member"),
            tw.join(address, run="test", timeout=2.0, rejoin=False) as members,
            tw.local_sgd(net, optimizer, tw.LocalSGD(1), members=members) as sync,
        ):
            kv.put_if_absent("members/1", api.Decision(("ann",), ("ann",)).to_dict())
            while sync.step < 1000:
                net(torch.randn(8, 24)).square().mean().backward()
                optimizer.step()
                time.sleep(0.02)


def test_a_member_that_has_left_flushes_nothing(ranks: Pool) -> None:
    left = met(ranks, _leaving_an_engine, size=3)
    assert left == [False, True, False]


def _leaving_an_engine(rank: int, size: int, address: str) -> bool:
    strategy = tw.DistributedStrategy(localsgd=SPARSE, gradient_merge=tw.GradientMerge(2))
    net = model(rank)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with tw.join(address, run="test", start_members=3, timeout=TIMEOUT_S) as members:
        engine = strategy.prepare(net, optimizer, torch.nn.MSELoss(), members=members)
        while members.step < 24 and not members.left:
            x = torch.randn(8, 24)
            engine.train_step(x, x.roll(1, 1))
            if rank == 1 and members.step == 8:
                members.leave()
        engine.flush()
        engine.close()
        return members.left


def _saving(rank: int, size: int, address: str, folder: str, run: str, flag: str) -> Any:
    """A run to step 20 that saves at step 10; or one from there, until a joiner is in it."""
    wait_for(flag if rank == 2 else "")
    begins = not Path(folder).exists()
    net = model(rank)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    strategy = tw.DistributedStrategy(localsgd=tw.LocalSGD(4, compression=tw.Quantized(4)))
    with tw.join(address, run=run, start_members=2, timeout=TIMEOUT_S) as members:
        engine = strategy.prepare(net, optimizer, torch.nn.MSELoss(), members=members)
        loaded = engine.load(folder, if_any=True)
        first = members.step
        end = 20 if begins else MOST_STEPS
        while members.step < end:
            x = torch.randn(8, 24)
            engine.train_step(x, x.roll(1, 1))
            if members.step == 10 and members.rank == 1:
                engine.save(folder)
            if members.step == 14:
                Path(flag).touch()
            if begins and run == "killed" and members.step == 18:
                os._exit(1)
            if engine.sync.synced and members.size == 3:  # type: ignore[union-attr]
                end = min(end, members.step + 8)
            time.sleep(0.02)
        engine.flush()
        digests = digest(engine.sync)
        random = torch.rand(2).tolist()
        engine.close()
    return loaded is not None, first, digests, random


@pytest.mark.parametrize("ends", ["done", "failed"])
def test_one_may_hear_the_last_agreement_late(ranks: Pool, tmp_path: Path, ends: str) -> None:
    """Those who end by themselves are not lost, however many they are; those who fail are."""
    found = met(ranks, _last_to_hear, str(tmp_path), ends, size=3, errors=True)
    if ends == "done":
        assert len(set(found)) == 1
        assert found[2][0] == 8
    else:
        assert isinstance(found[2], Raised)
        assert found[2].type_name == "QuorumLost"


def _last_to_hear(rank: int, size: int, address: str, folder: str, ends: str) -> Any:
    net = model(rank)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    config = tw.LocalSGD(4, begin_step=0)
    passed = api.Membership.accept_agreement

    def late(self: api.Membership, number: int, vote: int, answers: Any) -> bool:
        for other in range(2):
            wait_for(f"{folder}/{other}")
        self.report_broken(number, "told so by the test")
        self.wait_for_next(number)
        return passed(self, number, vote, answers)

    with ExitStack() as stack:
        stack.callback(Path(folder, str(rank)).touch)
        members = stack.enter_context(
            tw.join(address, run="test", min_members=3, timeout=TIMEOUT_S)
        )
        with tw.local_sgd(net, optimizer, config, members=members) as sync:
            while sync.step < 8:
                optimizer.zero_grad()
                net(torch.randn(8, 24)).square().mean().backward()
                optimizer.step()
            if rank == 2:
                stack.enter_context(patch.object(api.Membership, "accept_agreement", late))
        if ends == "failed" and rank < 2:
            raise RuntimeError("of the test")
        return members.step, digest(sync)


@pytest.mark.parametrize("case", ["one after another", "closed inside", "forgotten"])
def test_some_end_by_themselves(ranks: Pool, tmp_path: Path, case: str) -> None:
    """None is lost by that, nor what was heard from who has gone."""
    found = met(ranks, _ending, str(tmp_path), case, size=3, errors=True)
    if case == "one after another":
        assert [step for step, _ in found] == [6, 14, 22]
    elif case == "closed inside":
        assert isinstance(found[2], Raised)
        assert "has been closed" in found[2].text
        assert [step for step, _ in found[:2]] == [14, 14]
    else:
        assert len(set(found)) == 1


def _ending(rank: int, size: int, address: str, folder: str, case: str) -> tuple[int, list[float]]:
    net = model(rank)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    strategy = tw.DistributedStrategy(localsgd=tw.LocalSGD(4, begin_step=0))
    passed, connect_all = api.Membership.accept_agreement, api.watcher.MemberGroups
    heard = failures = 0
    last = {"one after another": (6, 14, 22), "closed inside": (14, 14, 6), "forgotten": (8, 8, 8)}

    def late(self: api.Membership, number: int, vote: int, answers: Any) -> bool:
        nonlocal heard
        heard += 1
        if heard == 2:  # of step 8: what all have got
            wait_for(f"{folder}/gone")
            self.report_broken(number, "told so by the test")
            self.wait_for_next(number)
        return passed(self, number, vote, answers)

    def cut(*given: Any) -> Any:
        nonlocal failures
        failures += 1
        if failures == 1:
            time.sleep(0.5)
            raise PeerStalled("told so by the test")
        return connect_all(*given)

    with ExitStack() as stack:
        if rank == 0:
            stack.callback(Path(folder, "gone").touch)
        members = stack.enter_context(
            tw.join(address, run="test", min_members=3, timeout=TIMEOUT_S)
        )
        engine = strategy.prepare(net, optimizer, torch.nn.MSELoss(), members=members)
        for step in range(1, last[case][rank] + 1):
            if case == "forgotten" and rank and step == 8:
                stack.enter_context(patch.object(api.Membership, "accept_agreement", late))
                stack.enter_context(patch.object(api.watcher, "MemberGroups", cut))
            x = torch.randn(8, 24)
            engine.train_step(x, x)
        if case == "closed inside" and rank == 2:
            members.close()
            engine.flush()
        values = [p.sum().item() for p in net.parameters()] if case == "forgotten" else []
        return members.step, tuple(values)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["admits", "lets go"])
def test_break_at_an_agreement_that_changes_members(ranks: Pool, tmp_path: Path, what: str) -> None:
    """Nobody dies: one gives the generation up while the others still apply what was averaged."""
    found = met(ranks, _breaking, str(tmp_path / "go"), what, size=3)
    assert sum(broke for broke, *_ in found) == 1
    if what == "admits":
        assert {step for _, step, *_ in found} == {200}
        assert len({state for *_, state in found}) == 1
    else:
        assert [step for _, step, *_ in found] == [24, 24, 8]
        assert max(longest_s for _, _, longest_s, _ in found) < TIMEOUT_S / 2


def _breaking(
    rank: int, size: int, address: str, flag: str, what: str
) -> tuple[bool, int, float, str]:
    admits = what == "admits"
    net = model(rank)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    wait_for(flag if admits and rank == 2 else "")
    passed, commit, broke, longest_s = (
        api.Membership.accept_agreement,
        api.Averaging.commit_,
        False,
        0.0,
    )

    def late(self: api.Membership, number: int, vote: int, answers: Any) -> bool:
        nonlocal broke
        word = b'"admit":["' if admits else b'"leaving"'
        if not broke and any(word in each for each in answers):
            broke = True
            self.report_broken(number, "told so by the test")
            self.wait_for_next(number)
        return passed(self, number, vote, answers)

    def slow(self: api.Averaging, *given: Any) -> None:
        time.sleep(1.0 if broke or not admits else 0.0)
        commit(self, *given)

    late_one = patch.object(api.Membership, "accept_agreement", late)
    slow_one = patch.object(api.Averaging, "commit_", slow)
    with late_one if rank == 1 else slow_one:
        founders = 2 if admits else 3
        with (
            tw.join(address, run="test", start_members=founders, timeout=TIMEOUT_S) as members,
            tw.local_sgd(net, optimizer, CONFIGS["whole"], members=members) as sync,
        ):
            while sync.step < (200 if admits else 24) and not members.left:
                if rank == 2 and not admits and sync.step == 6:
                    members.leave()
                begun = time.monotonic()
                optimizer.zero_grad()
                net(torch.randn(8, 24)).square().mean().backward()
                optimizer.step()
                longest_s = max(longest_s, time.monotonic() - begun)
                if admits:
                    time.sleep(0.1)
                if rank == 0 and sync.step == 4:
                    Path(flag).touch()
            return broke, sync.step, longest_s, digest(sync)


def _member_with(rank: int, size: int, address: str, config: Any, options: Any) -> Any:
    return member(rank, size, address, config, **options)


def test_one_may_leave_while_a_result_is_on_its_way(ranks: Pool) -> None:
    found = met(ranks, _leaving_at_the_end, size=2)
    assert found[0] == (True, 8)
    assert found[1] == (False, 8)


def _leaving_at_the_end(rank: int, size: int, address: str) -> tuple[bool, int]:
    net = model(rank)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    config = tw.LocalSGD(6, begin_step=0, delay=3)
    with (
        tw.join(address, run="test", start_members=2, timeout=TIMEOUT_S) as members,
        tw.local_sgd(net, optimizer, config, members=members) as sync,
    ):
        for step in range(1, 9):
            optimizer.zero_grad()
            net(torch.randn(3, 24)).square().mean().backward()
            if step == 8 and rank == 0:
                members.leave()
            optimizer.step()
        assert sync.pending is not None
        sync.flush()
        return members.left, sync.step


def _interrupted(rank: int, size: int, address: str) -> list[str]:
    """Threads that are left of a `join` that Ctrl-C ends."""
    meet, before = api.Membership.meet, set(threading.enumerate())

    def interrupts(self: api.Membership, *given: Any) -> None:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        meet(self, *given)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with patch.object(api.Membership, "meet", interrupts), pytest.raises(KeyboardInterrupt):
        tw.join(address, run="test", start_members=2, timeout=30)
    left = set(threading.enumerate()) - before
    return [thread.name for thread in left if "thinwire" in thread.name]


def test_an_interrupted_join_leaves_no_member_behind(ranks: Pool) -> None:
    assert met(ranks, _interrupted, size=1) == [[]]
