"""Open files: the soft limit is raised before a run connects; else an error says what is needed."""

import re
import resource
import sys
from pathlib import Path

import pytest

from tests.members.places import host_command, meeting_place, stranger
from tests.processes import ran

JOIN = """
import resource, sys
import thinwire as tw
from thinwire.errors import ThinwireError
soft, hard, start, address = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    tw.join(address, run="test", start_members=start, timeout=3.0)
except ThinwireError as error:
    print(type(error).__name__, resource.getrlimit(resource.RLIMIT_NOFILE)[0], error)
"""


def joined(soft: int, hard: int, start: int) -> tuple[str, int, str]:
    """Type of the error, soft limit afterwards, and text, of a member that waits for others."""
    with meeting_place(None) as address:
        words = [sys.executable, "-c", JOIN, *map(str, (soft, hard, start)), address]
        name, limit, text = ran(words, cwd=Path.cwd()).stdout.split(" ", 2)
    return name, int(limit), text


def test_a_soft_limit_is_raised_as_far_as_needed() -> None:
    name, limit, _ = joined(128, 4096, 200)
    assert name == "QuorumLost"
    assert 4 * 200 < limit < 4 * 200 + 200


def test_a_hard_limit_that_is_too_low_is_reported_before_the_run() -> None:
    name, limit, text = joined(128, 256, 200)
    assert (name, limit) == ("ThinwireError", 128)
    needed, present = map(int, re.findall(r"(\d+) open files.* (\d+) at most", text)[0])
    assert needed > 4 * 200
    assert present == 256
    assert f"ulimit -n {needed}" in text


@pytest.mark.parametrize("hard", [64, 1024])
def test_a_host_serves_as_many_clients_as_it_may_and_says_where_that_ends(hard: int) -> None:
    with host_command("--bind", "127.0.0.1:0") as (process, address):
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (32, hard))
        clients = [stranger(address) for _ in range(100)]
        if hard == 64:
            assert process.stdout is not None
            assert any(" 64 at most" in line and "ulimit -n" in line for line in process.stdout)
        else:
            assert [client.check(["key"]) for client in clients] == [False] * 100
