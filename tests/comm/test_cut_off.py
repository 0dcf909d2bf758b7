"""Whatever is stopped or cut, every rank hears of it, truly, 2 s after its time-out at most."""

import random
import time
from collections.abc import Callable, Sequence

import pytest

from tests.api import Link, network
from tests.comm.cutting import Ended, trainees
from tests.faults.lines import blackhole, state
from tests.lab.namespaces import needs_netns

TIMEOUT_S = 5.0
LIMIT_S = TIMEOUT_S + 2


def check(ends: Sequence[Ended | None]) -> list[str]:
    """The texts of the errors, which came in time, from processes that ended by themselves."""
    for end in ends:
        assert end is not None, "a rank is still blocked"
        assert (end.type_name, end.exit_code) == ("PeerStalled", 1)
        assert end.error_s < LIMIT_S
    return [end.text for end in ends if end is not None]


@pytest.mark.fault
@pytest.mark.slow  # a time-out that a loaded machine keeps
@pytest.mark.parametrize("kind", ["votes", "engine", "streams"])
def test_the_host_of_the_store_is_stopped(kind: str) -> None:
    with trainees(kind, 3, TIMEOUT_S) as job:
        time.sleep(random.random())
        texts = check(job.ended([1, 2], lambda: job.stop(0), 40))
    assert all("The store of the process group does not answer either" in text for text in texts)


@pytest.mark.fault
@pytest.mark.slow  # a time-out that a loaded machine keeps
@pytest.mark.parametrize(("victim", "moment_s"), [(0, 0.5), (0, 7.0), (1, 7.0)])
def test_a_busy_rank_is_stopped(
    victim: int, moment_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the time-out of those who wait for it; the host of the store or not."""
    monkeypatch.setenv("BUSY_RANK", str(victim))
    with trainees("busy", 3, TIMEOUT_S) as job:
        time.sleep(moment_s)
        assert [process.poll() for process in job.processes] == [None] * 3
        texts = check(job.ended([1 - victim, 2], lambda: job.stop(victim), 40))
    assert victim == 0 or all("rank 1 has sent no heartbeat for" in text for text in texts)


@pytest.mark.fault("a line is cut for good")
@pytest.mark.slow  # a time-out that a loaded machine keeps
@needs_netns
@pytest.mark.parametrize(
    ("cut", "victim"), [(lambda there, _: state(there, "down"), 0), (blackhole, 1)]
)
@pytest.mark.parametrize("kind", ["engine", "streams"])
def test_the_network_of_a_rank_is_cut(
    kind: str, cut: Callable[[int, Sequence[str]], None], victim: int
) -> None:
    with network(3, Link.parse("100mbit")) as net:
        others = [address for rank, address in enumerate(net.addresses) if rank != victim]
        namespaces = net.namespace_fds
        with trainees(kind, 3, TIMEOUT_S, address=net.addresses[0], namespaces=namespaces) as job:
            time.sleep(random.random())
            texts = check(job.ended([0, 1, 2], lambda: cut(namespaces[victim], others), 40))
    if victim == 1:  # the others reach the store
        assert all("rank 1 has sent no heartbeat for" in texts[rank] for rank in (0, 2))
        assert "does not answer either" in texts[1]


@pytest.mark.fault("survivors go on without a restart")
@pytest.mark.slow  # a time-out that a loaded machine keeps
@needs_netns
@pytest.mark.parametrize("victim", [0, 1])
def test_new_process_group_trains_on_in_the_same_processes_after_the_network(victim: int) -> None:
    with network(3, Link.parse("100mbit")) as net:
        there = net.namespace_fds
        with trainees("again", 3, TIMEOUT_S, address=net.addresses[0], namespaces=there) as job:
            state(there[victim], "down")
            assert [job.hear(rank) for rank in range(3)] == [{"type": "PeerStalled"}] * 3
            state(there[victim], "up")
            for rank in range(3):
                job.tell(rank)
            told = [job.hear(rank) for rank in range(3)]
            assert [process.wait(20) for process in job.processes] == [0] * 3
    assert told[0] == told[1] == told[2]
    assert told[0]["step"] == 6
