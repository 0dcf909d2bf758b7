"""Sockets between ranks: who answers, who does not, and why."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from tests.api import TOKEN_BYTES, Answering, Peer, reach, reach_all
from tests.waiting import PATIENCE_S

TOKEN = b"t" * TOKEN_BYTES
HERE = "127.0.0.1"
SHORT_S = 0.5


def test_ranks_that_answer_are_reached() -> None:
    with (
        Answering(HERE, 1, TOKEN, PATIENCE_S) as one,
        Answering("::1", 2, TOKEN, PATIENCE_S) as two,
    ):
        ports = (1, HERE, one.port), (2, "::1", two.port)
        found = reach_all([Peer(*where, TOKEN, PATIENCE_S) for where in ports], {2})
    assert [(row.to, row.error, row.large) for row in found] == [(1, "", None), (2, "", True)]
    assert all(row.latency_s is not None and row.latency_s > 0 for row in found)


@pytest.mark.parametrize("ahead_s", [7.5e6, -3e6])
def test_the_skew_of_a_clock_is_measured(ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, read = threading.current_thread(), time.time
    monkeypatch.setattr(
        time, "time", lambda: read() + ahead_s * (threading.current_thread() is fast)
    )
    with Answering(HERE, 0, TOKEN, PATIENCE_S) as answering:
        found = reach(Peer(0, HERE, answering.port, TOKEN, PATIENCE_S), large=False)
    assert found.latency_s is not None
    assert abs(found.ahead_s - ahead_s) <= found.latency_s / 2 < PATIENCE_S


def test_it_listens_on_the_one_address_and_ends_with_the_block() -> None:
    with Answering(HERE, 1, TOKEN, PATIENCE_S) as answering:
        away = Peer(1, "127.0.0.2", answering.port, TOKEN, SHORT_S)
        assert reach(away, large=True).error == "refused"
    assert reach(replace(away, address=HERE), large=True).error == "refused"


def test_another_rank_and_another_run_are_reported() -> None:
    with Answering(HERE, 1, TOKEN, PATIENCE_S) as answering:
        two = Peer(2, HERE, answering.port, TOKEN, PATIENCE_S)
        assert reach(two, large=True).error == "rank 1 answers"
        other = reach(replace(two, rank=1, token=b"x" * TOKEN_BYTES), large=True)
        assert other.error == "closed by the listener"


def test_another_program_is_reported() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        assert reach(Peer(1, HERE, port, TOKEN, SHORT_S), large=True).error == "time-out"


def test_no_ranks_are_no_findings() -> None:
    assert reach_all([], set()) == []
