"""Who listens where, seen on real processes."""

import subprocess
import sys

import pytest

from tests.api import is_loopback, listening, program_of, source_towards
from tests.processes import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LISTENER = """
import socket, sys, torch
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 0), family=family) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def own_address() -> str:
    """One of this machine that is not loopback; empty where there is none."""
    address = source_towards()
    return "" if is_loopback(address) else address


@pytest.mark.slow
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "127.0.0.1", "::1", "own"])
def test_a_process_with_torch_is_found_with_its_address(address: str) -> None:
    named = own_address() if address == "own" else address
    if not named:
        pytest.skip("this machine has loopback only")
    command = [sys.executable, "-c", LISTENER, named]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        found = listening()
        assert process.stdin is not None
        process.stdin.close()
    who = f"pid {process.pid} ("
    everywhere = [told for told in found.everywhere if who in told]
    outward = [told for told in (*found.public, *found.private) if who in told]
    assert len(everywhere) == (address in {"0.0.0.0", "::"})
    assert len(outward) == (address == "own")
    for told in everywhere:
        assert told.startswith(f"port {port}: {who}")
    for told in outward:
        assert told.startswith(f"{named}:{port}: {who}")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("/usr/bin/python3 -u -X dev /home/me/train.py --token abc", "python3 train.py"),
        (
            "python -m torch.distributed.run --nproc-per-node 2 train.py",
            "python -m torch.distributed.run",
        ),
        ("python -c print(1) abc", "python -c"),
        ("/venv/bin/python /venv/bin/thinwire host --token-file t", "thinwire host"),
        ("python --token=abc", "python"),
        ("/opt/trainer --token abc", "trainer"),
    ],
)
def test_a_process_is_named_without_its_options(command: str, told: str) -> None:
    assert program_of(command.split()) == told


def test_a_process_that_names_itself_is_too() -> None:
    assert program_of(["trainer: --token abc"]) == "trainer:"
    assert program_of([]) == ""
