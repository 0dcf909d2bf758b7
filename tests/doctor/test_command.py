"""`thinwire doctor` on one machine, and under torchrun on one."""

import json
import os
import subprocess
import time

import pytest

from tests.launched import free_port
from tests.processes import ran, ran_thinwire, torchrun

CLEARED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in CLEARED}
    return ran_thinwire("doctor", *options, env={**kept, **environment})


@pytest.mark.slow
def test_one_machine_is_looked_at() -> None:
    done = doctor("--json", GLOO_SOCKET_IFNAME="lo")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["status"] == 0
    checks = {one["check"] for one in told["findings"]}
    assert checks >= {"host", "interfaces", "gloo", "listeners", "ports", "open files", "store"}
    assert checks >= {"threads", "time-outs", "clock", "versions"}


@pytest.mark.slow
def test_wrong_setup_is_status_1_and_quiet_prints_nothing_else() -> None:
    done = doctor("--quiet", GLOO_SOCKET_IFNAME="no-such", MASTER_ADDR="127.0.0.1")
    assert (done.returncode, done.stderr) == (1, "")
    first = [line.split()[:2] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert first == [["wrong", "gloo"], ["wrong", "store"]]
    done = doctor("--quiet", GLOO_SOCKET_IFNAME="lo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_two_ranks_of_one_machine_have_nothing_wrong() -> None:
    done = ran(torchrun("-m", "thinwire", "doctor", "--json", "--timeout", "90"))
    told = json.loads(done.stdout)
    assert (told["title"], told["status"], done.returncode) == ("2 ranks on 1 machine", 0, 0)
    levels = {one["check"]: one["level"] for one in told["findings"]}
    for check in ("addresses", "connections", "clocks", "versions", "gloo group"):
        assert levels[check] == "ok"


@pytest.mark.fault("nobody at the meeting point, at the start or later")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "told"),
    [
        ("0", "rank 0 waited for all ranks without success: "),
        ("1", "rank 1 did not reach the store: "),
    ],
)
def test_a_rank_that_meets_nobody_says_so_in_time(rank: str, told: str) -> None:
    place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    begun = time.monotonic()
    done = doctor("--timeout", "15", **place, MASTER_PORT=str(free_port()))
    assert done.returncode == 1
    assert told in (done.stdout if rank == "0" else done.stderr)
    if rank == "1":
        assert "cannot be reached from this machine: refused" in " ".join(done.stderr.split())
    assert time.monotonic() - begun < 30
