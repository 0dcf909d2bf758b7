"""A script of the user's on several ranks: their environment, what they print, and their end."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from thinwire.lab.network import enter
from thinwire.lab.network.netns import Network
from thinwire.lab.run.launch import cores, loopback_name
from thinwire.lab.run.prefixed import Prefixed

__all__ = ["Ranks", "environments"]

_PORT = 29500
_POLL_S, _GRACE_S = 0.02, 3.0


def environments(workers: int, network: Network | None) -> list[dict[str, str]]:
    """The environment of each rank: that of this process, and what torchrun would set.

    In a network of its own every rank is a machine: its LOCAL_RANK is 0 and its LOCAL_WORLD_SIZE 1.

    Args:
        workers: Number of ranks.
        network: Where they run; None is the loopback of this machine.
    """
    default = {"OMP_NUM_THREADS": max(1, cores() // workers), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    common = {
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers if network is None else 1,
        "GROUP_WORLD_SIZE": 1 if network is None else workers,
        "MASTER_ADDR": "127.0.0.1" if network is None else network.addresses[0],
        "MASTER_PORT": _free_port() if network is None else _PORT,
        "GLOO_SOCKET_IFNAME": loopback_name() if network is None else network.interface,
        "TORCHELASTIC_RUN_ID": "thinwire run",  # for torch.distributed.is_torchelastic_launched()
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@final
class Ranks:
    """The processes of one run, as a context that none of them outlives, nor what they start.

    The kernel ends them where this process is killed.
    """

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._started = 0
        self._output = Prefixed()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for process in self._running.values():
                _signal_group(process.pid, signal.SIGTERM)
            end_s = time.monotonic() + _GRACE_S
            while self._running and time.monotonic() < end_s:
                self._output.pass_on(_POLL_S)
                self._ended()
        finally:
            for process in self._running.values():
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
            self._output.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str], fd: int) -> None:
        """Start the next rank.

        Args:
            command: The program and its arguments.
            environment: All of its variables.
            fd: Descriptor of its network namespace; -1 for that of this process.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(enter.__file__)), str(fd), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[fd] if fd >= 0 else [],
            env=dict(environment),
            # Ctrl-C is for the command, which then ends the ranks in order
            start_new_session=True,
        )
        rank, self._started = self._started, self._started + 1
        self._running[rank] = process
        for pipe, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None, "asked for just now"
            self._output.add(rank, pipe, to.buffer)

    def wait(self) -> tuple[int, int] | None:
        """Pass on what they print until all have ended, or one has failed.

        Returns:
            The rank that failed first and its exit status, minus the signal's number where one has
            killed it; None where none failed.
        """
        while self._running:
            self._output.pass_on(_POLL_S)
            for rank, status in self._ended():
                if status:
                    return rank, status
        return None

    def _ended(self) -> list[tuple[int, int]]:
        """Ranks that have ended since the last call, with what they ended with."""
        statuses = [(rank, process.poll()) for rank, process in self._running.items()]
        ended = [(rank, status) for rank, status in statuses if status is not None]
        for rank, _ in ended:
            _signal_group(self._running.pop(rank).pid, signal.SIGKILL)  # what it has left behind
        return ended


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # all of them have ended
        return
