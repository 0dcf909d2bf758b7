"""Ranks as processes of this machine: their environment, start and end."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from thinwire.tools.network import enter
from thinwire.tools.network.netns import Network

__all__ = ["cores", "environments", "free_port", "signal_group", "start"]

_PORT, _PORTS_TRIED = 29500, 1000


def environments(workers: int, network: Network | None) -> list[dict[str, str]]:
    """The environment of each rank: that of this process, and what torchrun would set.

    In a network of its own every rank is a machine: its LOCAL_RANK is 0 and its LOCAL_WORLD_SIZE 1.
    """
    default = {"OMP_NUM_THREADS": threads_of(workers), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    common = {
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers if network is None else 1,
        "GROUP_WORLD_SIZE": 1 if network is None else workers,
        "MASTER_ADDR": "127.0.0.1" if network is None else network.addresses[0],
        "MASTER_PORT": free_port() if network is None else _PORT,
        "GLOO_SOCKET_IFNAME": _loopback_name() if network is None else network.interface,
        "TORCHELASTIC_RUN_ID": "thinwire",  # for torch.distributed.is_torchelastic_launched()
        "PYTHONUNBUFFERED": 1,
    }
    places: list[dict[str, Any]] = [
        {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        if network is None
        else {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank}
        for rank in range(workers)
    ]
    return [
        {**_texts(default), **os.environ, **_texts(common), **_texts(place)} for place in places
    ]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}


def _loopback_name() -> str:
    """The interface by which the processes of this machine reach each other."""
    return "lo" if sys.platform == "linux" else "lo0"


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def threads_of(workers: int) -> int:
    """How many threads each of as many ranks on this machine gets."""
    return max(1, cores() // workers)


def free_port() -> int:
    """A port that nobody listens on. The kernel gives none of this range to a connection, so it is
    still free when a rank takes it seconds later.

    Raises:
        OSError: A thousand of them could not be listened on.
    """
    for _ in range(_PORTS_TRIED):
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port of this machine between 15,000 and 32,000 could be listened on")


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    fd: int,
    stdout: IO[bytes] | int,
    stderr: int,
) -> "subprocess.Popen[bytes]":
    """Start a rank as the leader of a group of processes; the kernel ends it with this thread."""
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(enter.__file__)), str(fd), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[fd] if fd >= 0 else [],
        env=dict(environment),
        # Ctrl-C is for the command, which then ends the ranks in order
        start_new_session=True,
    )


def signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a rank and what it has started, where any of it still runs."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # all of them have ended
        return
