"""Large messages over several connections: the same bits, and the same errors."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.api import Group, Link, connections, enter
from tests.faults import disorder
from tests.faults.lines import over_lines
from tests.lab.namespaces import needs_netns
from tests.ranks import Lost, Pool, Raised
from tests.toys import bits
from tests.waiting import time_out
from thinwire.errors import Mismatch

NUMEL = 700_000
LIMIT_S = time_out(4.0)


def exchanged(rank: int, size: int, streams: int | None) -> tuple[str, int]:
    """Digest of what every collective brings, and the connections that large messages made."""
    group = Group(None, 60.0, streams)
    before = len(connections())
    torch.manual_seed(rank)
    values = torch.randn(NUMEL)
    rows = group.all_gather(values.view(torch.uint8), action="rows")
    total = group.all_reduce_(values.clone(), action="sum")
    lengths = [[NUMEL // size + of + to for to in range(size)] for of in range(size)]
    parts = torch.arange(sum(lengths[rank])).to(torch.uint8)
    swapped = group.swap(parts, lengths, action="parts")
    copy = group.broadcast_(values.clone(), action="copy")
    found = [pending.wait() for pending in (rows, total, swapped, copy)]
    return bits(found[:2] + found[3:]) + bits([found[2].sum()]), len(connections()) - before


def test_any_number_of_streams_gives_the_same_bits(ranks: Pool) -> None:
    by_streams = {n: ranks.run(exchanged, n, size=3) for n in (1, 2, 4, 8, None)}
    digests = {n: [digest for digest, _ in found] for n, found in by_streams.items()}
    assert all(found == digests[1] for found in digests.values())
    made = [by_streams[n][0][1] for n in (1, 2, 4, 8)]
    assert made[1] > 0  # those of one stream were there before
    assert made == sorted(made)


def trained(rank: int, size: int, streams: int | None, victim: int | None, how: int) -> str:
    """Average twice; the victim dies or stops with the second averaging on its way."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = tw.LocalSGD(1, begin_step=0)
    with tw.local_sgd(model, optimizer, config, timeout=LIMIT_S, streams=streams):
        for number in range(2):
            torch.manual_seed(1 + rank)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            if number and rank == victim:
                os.kill(os.getpid(), how)
            optimizer.step()
    return bits(model.parameters())


def test_training_is_the_same_with_any_number_of_streams(ranks: Pool) -> None:
    found = [ranks.run(trained, n, None, 0, size=2) for n in (1, 3, None)]
    assert found[0] == found[1] == found[2]


@pytest.mark.fault("SIGKILL or SIGSTOP with a message on several connections")
@pytest.mark.parametrize(("how", "error"), [("SIGKILL", "PeerLost"), ("SIGSTOP", "PeerStalled")])
def test_a_rank_that_fails_is_named(ranks: Pool, how: str, error: str) -> None:
    number = getattr(signal, how)
    answers: list[Any] = ranks.run(trained, 4, 1, number, size=3, expect_errors=True)
    assert answers[1] is None or isinstance(answers[1], Lost)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised)
        assert answer.type_name == error
        assert "rank 1" in answer.text


def over_line(rank: int, size: int, folder: str, streams: int | None) -> str:
    return trained(rank, size, streams, None, 0)


@pytest.mark.fault("5 % and 30 % of the packets lost, with several connections")
@needs_netns
@pytest.mark.parametrize("loss", ["5%", "30%"])
def test_lost_packets_change_no_bit(ranks: Pool, tmp_path: Path, loss: str) -> None:
    whole = ranks.run(trained, 4, None, 0, size=2)
    link = Link.parse("200mbit", "1ms", loss=loss)
    found = over_lines(ranks, over_line, 4, folder=tmp_path, size=2, link=link)
    failed = [one.type_name for one in found if isinstance(one, Raised)]
    assert set(failed) <= {"PeerLost", "PeerStalled"}
    assert found == whole or len(failed) == 2


@pytest.mark.fault("packets that come twice, and in another order")
@needs_netns
def test_doubled_and_late_packets_change_no_bit(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ranks.run(trained, 4, None, 0, size=2)
    monkeypatch.setattr(enter, "__file__", disorder.__file__)
    link = Link.parse("200mbit", "1ms")
    assert over_lines(ranks, over_line, 4, folder=tmp_path, size=2, link=link) == whole


def differing(rank: int, size: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(2), streams=1 + rank):
        pass


def test_ranks_with_other_numbers_of_streams_are_refused(ranks: Pool) -> None:
    ranks.raise_alike(Mismatch.__name__, "streams", differing)


@contextmanager
def files_left(count: int | None) -> Iterator[None]:
    """Let this process open so many further files, or as many as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    free = (number for number in range(soft) if number not in used)
    limit = soft if count is None else next(islice(free, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def with_few_files(rank: int, size: int, streams: int | None, left: list[int | None]) -> str:
    with files_left(left[rank]):
        return trained(rank, size, streams, None, 0)


@pytest.mark.parametrize("streams", [None, 30])
@pytest.mark.parametrize("left", [[60, 60], [None, 40], [34, None], [60, None, 50]], ids=str)
def test_few_open_files_leave_fewer_connections(
    ranks: Pool, left: list[int | None], streams: int | None
) -> None:
    size = len(left)
    whole = ranks.run(trained, 1, None, 0, size=size)
    assert ranks.run(with_few_files, streams, left, size=size) == whole


def without_files(rank: int, size: int) -> None:
    with files_left(2):
        Group(timeout=LIMIT_S)


@pytest.mark.fault("a rank may open no file")
def test_a_limit_of_open_files_is_named(ranks: Pool) -> None:
    ranks.raise_alike("ThinwireError", ["may open", "files", "ulimit -n"], without_files)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_wrong_number_is_refused(wrong: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError), match="streams"):
        tw.local_sgd(model, optimizer, tw.LocalSGD(2), streams=wrong)
