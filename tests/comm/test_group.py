"""The seam to the ranks: gathers, sums, agreement, and how failures are named."""

import gc
import os
import re
import signal
import time
import warnings
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.api import Group, left_s, one_deadline, require_agreement, sources_of
from tests.api import private as private_module
from tests.ranks import BACKENDS, Lost, Pool, Raised, say, wait_for_word
from tests.waiting import time_out
from thinwire.errors import PeerStalled, ThinwireError

LIMIT_S = time_out(4.0)


def gather_bytes(rank: int, size: int, payloads: list[bytes]) -> tuple[list[bytes], int]:
    group = Group()
    return group.gather_bytes(payloads[rank], action="test"), group.bytes_sent


@pytest.mark.parametrize("payloads", [[b"same", b"same", b"same"], [b"a", b"bbb", b""]])
def test_gather_bytes_brings_all_payloads_to_all_ranks(ranks: Pool, payloads: list[bytes]) -> None:
    assert [got for got, _ in ranks.run(gather_bytes, payloads, size=3)] == [payloads] * 3


def test_equal_payloads_cost_one_small_round(ranks: Pool) -> None:
    assert [sent for _, sent in ranks.run(gather_bytes, [b"x" * 10_000] * 2)] == [24, 24]


def gather_and_sum(rank: int, size: int) -> tuple[list[list[int]], list[float]]:
    group = Group()
    rows = group.all_gather(torch.full((3,), rank, dtype=torch.uint8), action="test")
    total = group.all_reduce_(torch.tensor([float(rank), 1.0]), action="test")
    return rows.wait().tolist(), total.wait().tolist()


@pytest.mark.parametrize("size", [0, 1, 2, 4])
def test_gather_and_sum(ranks: Pool, size: int) -> None:
    n = max(size, 1)
    expected = ([[r] * 3 for r in range(n)], [float(sum(range(n))), float(n)])
    assert ranks.run(gather_and_sum, size=size) == [expected] * n


def swapped(rank: int, size: int, unit: int) -> bool:
    """In one piece or in several; a rank gives nothing to those before it."""
    group = Group(timeout=2)
    lengths = [[unit * max(to - of + 1, 0) for to in range(size)] for of in range(size)]
    parts = [torch.full((n,), 10 * rank + to) for to, n in enumerate(lengths[rank])]
    given = torch.cat(parts).to(torch.uint8)
    came = group.swap(given, lengths, action="test").wait()
    rows = [torch.full((lengths[of][rank],), 10 * of + rank) for of in range(size)]
    assert group.bytes_sent == sum(lengths[rank]) - lengths[rank][rank]
    return torch.equal(came, torch.cat(rows).to(torch.uint8))


@pytest.mark.parametrize("unit", [0, 3, 50_001])
def test_strings_may_be_long_by_sender_too(ranks: Pool, unit: int) -> None:
    assert ranks.run(swapped, unit, size=3) == [True] * 3


def over_nodes(rank: int, size: int, width: int) -> tuple[Any, ...]:
    nodes = sources_of(Group(), width)
    me = nodes.rank
    rows = nodes.all_gather(torch.full((3,), me, dtype=torch.uint8), action="test")
    total = nodes.all_reduce_(torch.tensor([float(me), 1.0]), action="test")
    exchanged = nodes.all_to_all(
        torch.arange(2 * nodes.size, dtype=torch.uint8) + 50 * me, [2] * nodes.size, action="test"
    )
    again = sources_of(Group(), width)
    same = nodes.node._shared is again.node._shared
    return (
        me,
        nodes.size,
        rows.wait().tolist(),
        total.wait().tolist(),
        exchanged.wait().tolist(),
        same,
    )


@pytest.mark.parametrize("width", [1, 2, 4])
def test_nodes_give_once_and_get_everything_everywhere(ranks: Pool, width: int) -> None:
    count = 4 // width
    for rank, (me, size, rows, total, exchanged, same) in enumerate(
        ranks.run(over_nodes, width, size=4)
    ):
        assert (me, size, same) == (rank // width, count, True)
        assert rows == [[node] * 3 for node in range(count)]
        assert total == [float(sum(range(count))), float(count)]
        assert exchanged == [[50 * node + 2 * me, 50 * node + 2 * me + 1] for node in range(count)]


def subgroup(rank: int, size: int) -> tuple[int, int] | None:
    members = [1, 2]
    process_group = dist.new_group(members)
    if rank not in members:
        return None
    group = Group(process_group)
    assert group.gather_bytes(bytes([rank]), action="test") == [b"\x01", b"\x02"]
    return group.rank, group.size


def test_a_group_of_some_ranks(ranks: Pool) -> None:
    assert ranks.run(subgroup, size=3) == [None, (0, 2), (1, 2)]


def user_collectives_interleave(rank: int, size: int) -> list[bytes]:
    group = Group()
    if rank == 0:
        # nobody answers; it must not meet our traffic
        dist.all_reduce(torch.zeros(7), async_op=True)
    return group.gather_bytes(bytes([rank]), action="test")


@pytest.mark.parametrize(
    "set_up",
    [
        lambda model, sgd: tw.DistributedStrategy().prepare(model, sgd),
        lambda model, sgd: tw.local_sgd(model, sgd, tw.LocalSGD(2)).__enter__(),
        lambda model, sgd: tw.optim.DGCMomentum(model.parameters(), 0.1, min_numel=1).step(),
    ],
)
def test_ranks_that_train_alone_are_warned(set_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that forgot init_process_group."""
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"rank 1 of 2 .*init_process_group\("):
        set_up(model, sgd)


OF_SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
OF_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
ONE_OF_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (OF_SRUN, "rank 0 of 4 "),
        (OF_SRUN | {"WORLD_SIZE": "1"}, None),
        (OF_SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (OF_BATCH, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "rank 1 of 2 "),
        (OF_SRUN | ONE_OF_MPI, None),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "rank 1 of 2 "),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "rank 1 of 2 "),
        ({"PMIX_RANK": "1"}, "rank 1 of several "),
        ({"PMIX_RANK": "0"}, None),
        ({"RANK": "1", "WORLD_SIZE": "many"}, None),
        ({"WORLD_SIZE": "2"}, None),
    ],
)
def test_a_process_of_a_launcher_is_warned_unless_it_is_alone(
    environment: dict[str, str], told: str | None
) -> None:
    with patch.dict(os.environ, environment), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert Group().size == 1
    assert len(found) == (told is not None)
    assert told is None or told in str(found[0].message)


@pytest.mark.fault("collectives of the user in between")
def test_user_collectives_do_not_meet_ours(ranks: Pool) -> None:
    assert ranks.run(user_collectives_interleave) == [[b"\x00", b"\x01"]] * 2


def disagree(rank: int, size: int, facts: list[object]) -> None:
    require_agreement(Group(), {"first": 1, "settings": facts[rank]}, action="starting")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            [{"lr": 1, "m": 2}, {"lr": 1, "m": 2}, {"lr": 1, "m": 3}],
            "settings.m differs: rank 0 has 2, rank 2 has 3",
        ),
        ([[1, 2], [1, 2, 5], [1, 2]], "settings.2 differs: rank 0 has nothing, rank 1 has 5"),
        ([[], [], ["x"]], "settings.0 differs: rank 0 has nothing, rank 2 has 'x'"),
        ([{}, {"a": {"b": 1}}, {}], "settings.a.b differs: rank 0 has nothing, rank 1 has 1"),
        ([[], {}, []], "settings differs: rank 0 has [], rank 1 has {}"),
        ([None, {"a": 1}, None], "settings"),
        ([1, True, 1], "settings differs: rank 0 has 1, rank 1 has True"),
    ],
)
def test_first_difference_is_named_everywhere(ranks: Pool, facts: list[object], text: str) -> None:
    answers = ranks.run(disagree, facts, size=3, expect_errors=True)
    assert {(a.type_name, a.text) for a in answers} == {("Mismatch", answers[0].text)}
    assert text in answers[0].text


def die_or_gather(rank: int, size: int, how: int) -> None:
    group = Group(timeout=LIMIT_S)
    group.gather_bytes(b"", action="warming up")
    if rank == 1:
        os.kill(os.getpid(), how)
    group.gather_bytes(b"after", action="gathering messages")


@pytest.mark.fault("SIGKILL in the middle of an exchange")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_is_lost_on_the_others(ranks: Pool, backend: str | None) -> None:
    answers = ranks.run(die_or_gather, signal.SIGKILL, size=3, expect_errors=True, backend=backend)
    assert isinstance(answers[1], Lost)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised)
        assert answer.type_name == "PeerLost"
        assert "gathering messages: rank 1 closed its connection" in answer.text


def die_or_join(rank: int, size: int, how: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), how)
    Group(timeout=LIMIT_S)


@pytest.mark.fault("a rank comes too late")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_that_does_not_come_to_the_group_is_distinguished(ranks: Pool, how: int) -> None:
    answers = ranks.run(die_or_join, how, size=3, group_timeout_s=60, expect_errors=True)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised)
        assert answer.type_name in {"PeerLost", "PeerStalled"}
        assert "making a process group" in answer.text


def refused_group(rank: int, size: int) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "Gloo connectFullMesh failed with pair.cc:553 Connection closed by peer [127.0.0.1]:707"
        )

    # the moment in which a peer dies while gloo connects cannot be hit from outside
    with patch.object(dist.distributed_c10d, "_new_process_group_helper", broken):
        Group()


@pytest.mark.fault
def test_a_rank_that_dies_while_the_group_connects_is_lost(ranks: Pool) -> None:
    answers = ranks.run(refused_group, expect_errors=True)
    assert [answer.type_name for answer in answers] == ["PeerLost"] * 2


@pytest.mark.fault("SIGSTOP for longer than the time-out")
@pytest.mark.parametrize(
    "backend", ["gloo", *(pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS[1:])]
)
def test_a_stopped_rank_is_named_by_all_others(ranks: Pool, backend: str | None) -> None:
    how = {"group_timeout_s": 60, "expect_errors": True, "backend": backend}
    answers = ranks.run(die_or_gather, signal.SIGSTOP, size=3, **how)
    assert answers[1] is None  # it is stopped still; the pool is rebuilt without it
    for answer in (answers[0], answers[2]):
        assert answer.type_name == "PeerStalled"
        # never, where it was stopped before it gave its first sign
        silent = "rank 1 has (sent no|never sent a) heartbeat"
        told = rf"rank 1 did not take part within {LIMIT_S:g} s: {silent}"
        assert re.search(told, answer.text)


def shared_then_released(rank: int, size: int) -> tuple[bool, bool]:
    first, second = Group(), Group()
    first.gather_bytes(b"", action="test")
    del first
    gc.collect()
    second.gather_bytes(b"", action="test")
    third = Group()
    third.gather_bytes(b"", action="test")
    same = second._shared is third._shared
    private_module._release_all()
    return same, third._shared is not None and third._shared.group is None


def test_groups_over_the_same_ranks_share_one_that_is_released_at_exit(ranks: Pool) -> None:
    """Else its threads outlive the interpreter, and abort the process at exit."""
    assert ranks.run(shared_then_released) == [(True, True)] * 2


def timeouts_of(rank: int, size: int) -> tuple[float, float]:
    own, longer = Group(), Group(timeout=timedelta(minutes=10))
    assert own._shared is longer._shared
    limit_s = 2 * LIMIT_S  # the last heartbeat of a rank may be five seconds old
    shorter = Group(timeout=limit_s)
    own.gather_bytes(b"", action="warming up")
    if rank == 1:
        wait_for_word("over")
    else:
        told = rf"rank 1 did not take part within {limit_s:g} s: rank 1 was alive .* s ago, busy"
        with pytest.raises(PeerStalled, match=f"{told} with other work .* after 'warming up'"):
            shorter.gather_bytes(b"", action="test")
        with pytest.raises(ThinwireError, match="was aborted"):
            longer.gather_bytes(b"", action="test")
        say("over")
    return own.timeout_s, longer.timeout_s


@pytest.mark.fault("a rank comes too late")
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_group_keeps_the_time_out_that_it_was_given(ranks: Pool, backend: str | None) -> None:
    """That of the process group is not cut down, and groups over the same ranks may have others."""
    assert ranks.run(timeouts_of, group_timeout_s=300, backend=backend) == [(300.0, 600.0)] * 2


def left_after_making(rank: int, size: int) -> tuple[float, float]:
    """Seconds that are left of 60, and those that the making took here."""
    if rank == 1:
        wait_for_word("making")
        time.sleep(0.5)
    else:
        say("making")
    with one_deadline(60):
        begun = time.monotonic()
        Group(timeout=60)
        return left_s(60), time.monotonic() - begun


def test_making_the_first_group_counts_against_the_call_that_it_is_made_in(ranks: Pool) -> None:
    (left, taken_s), _ = ranks.run(left_after_making)
    assert 0 < 60 - left <= taken_s


def late_in_the_second(rank: int, size: int) -> None:
    group = Group(timeout=10 * LIMIT_S)
    group.gather_bytes(b"", action="warming up")
    if rank == 1:
        time.sleep(LIMIT_S / 3)
        group.gather_bytes(b"", action="test")
        wait_for_word("over")
        return
    told = rf"within the \d[\d.]* s that were left of {LIMIT_S:g} s for the whole call"
    with pytest.raises(PeerStalled, match=told), one_deadline(LIMIT_S):
        group.gather_bytes(b"", action="test")
        group.gather_bytes(b"", action="test")
    say("over")


@pytest.mark.fault
def test_a_call_of_several_exchanges_has_one_deadline(ranks: Pool) -> None:
    ranks.run(late_in_the_second)


def in_pieces(rank: int, size: int) -> tuple[bool, bool, bool]:
    generator = torch.Generator().manual_seed(rank)
    small, large = Group(timeout=2), Group()  # pieces of 64 KiB, and none
    values = torch.randn(100_003, generator=generator)
    whole = large.all_reduce_(values.clone(), action="test").wait()
    cut = small.all_reduce_(values.clone(), action="test").wait()
    everywhere = small.all_gather(cut.view(torch.uint8), action="test").wait()
    equal = all(torch.equal(row, everywhere[0]) for row in everywhere)
    message = values.view(torch.uint8)
    gathered = torch.equal(
        large.all_gather(message, action="test").wait(),
        small.all_gather(message, action="test").wait(),
    )
    lengths = [100_000 + 70_000 * receiver for receiver in range(size)]
    parts = (
        message[: sum(lengths)]
        if sum(lengths) <= message.numel()
        else message.repeat(3)[: sum(lengths)]
    )
    exchanged = torch.equal(
        large.all_to_all(parts, lengths, action="test").wait(),
        small.all_to_all(parts, lengths, action="test").wait(),
    )
    return equal and torch.equal(whole, cut), gathered, exchanged


@pytest.mark.parametrize("size", [2, 3])
def test_pieces_make_the_same_whole(ranks: Pool, size: int) -> None:
    assert ranks.run(in_pieces, size=size) == [(True, True, True)] * size


def on_the_wire(rank: int, size: int) -> list[float]:
    group, seen = Group(), []
    for exchange in (
        lambda: group.all_gather(torch.zeros(100, dtype=torch.uint8), action="test"),
        lambda: group.all_reduce_(torch.zeros(30), action="test"),
        lambda: group.all_to_all(
            torch.zeros(30, dtype=torch.uint8), [10] * max(size, 1), action="test"
        ),
        lambda: group.broadcast_(torch.zeros(30), action="test"),
    ):
        before = group.bytes_sent
        exchange().wait()
        seen.append(group.bytes_sent - before)
    return seen


def test_on_the_wire_a_message_counts_for_every_rank_that_it_goes_to(ranks: Pool) -> None:
    """The root of a broadcast sends it to both others."""
    assert ranks.run(on_the_wire, size=3) == [[200, 160, 20, sent] for sent in (240, 0, 0)]
    assert ranks.run(on_the_wire, size=0) == [[0, 0, 0, 0]]
