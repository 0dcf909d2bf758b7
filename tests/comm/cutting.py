"""Starts trainees, stops or cuts one, and tells when the others heard of it and when they ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launched import free_port
from tests.processes import running

__all__ = ["Ended", "Trainees", "trainees"]

_ROOT = Path(__file__).parents[2]
_ENTER = _ROOT / "src/thinwire/tools/network/enter.py"


@dataclass(frozen=True)
class Ended:
    """How a rank ended; seconds are from the attack on."""

    type_name: str
    text: str
    error_s: float
    exit_s: float
    exit_code: int


class Trainees:
    """Processes of one job."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes

    def ended(
        self, who: list[int], attack: Callable[[], None], limit_s: float
    ) -> list[Ended | None]:
        """Attack, and wait for the ranks `who`; None for one that has not ended in time."""
        begun, wall = time.monotonic(), time.time()
        attack()
        ends: dict[int, float] = {}
        while len(ends) < len(who) and time.monotonic() - begun < limit_s:
            for rank in who:
                if rank not in ends and self.processes[rank].poll() is not None:
                    ends[rank] = time.monotonic() - begun
            time.sleep(0.02)
        return [self._ended(rank, ends[rank], wall) if rank in ends else None for rank in who]

    def _ended(self, rank: int, exit_s: float, wall: float) -> Ended:
        process = self.processes[rank]
        assert process.stdout is not None
        line = process.stdout.read().strip().splitlines()
        told = json.loads(line[-1]) if line else {"type": "none", "text": "", "at": wall}
        return Ended(told["type"], told["text"], told["at"] - wall, exit_s, process.returncode)

    def hear(self, rank: int) -> dict[str, Any]:
        """The next line of a rank."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return dict(json.loads(stdout.readline()))

    def tell(self, rank: int) -> None:
        """Let a rank go on that waits for a line."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(b"\n")
        stdin.flush()

    def stop(self, rank: int) -> None:
        """SIGSTOP."""
        os.kill(self.processes[rank].pid, signal.SIGSTOP)


@contextmanager
def trainees(
    kind: str,
    size: int,
    timeout_s: float,
    *,
    address: str = "127.0.0.1",
    namespaces: tuple[int, ...] = (),
) -> Iterator[Trainees]:
    """Ranks that train, rank 0 with the store; all are killed in the end."""
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0"} if namespaces else {}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as ends:
        processes = []
        for rank in range(size):
            there = [_ENTER, namespaces[rank] if namespaces else -1, os.getpid(), sys.executable]
            script = ["-m", "tests.comm.trainee"]
            words = [*there, *script, kind, rank, size, address, port, timeout_s]
            command = [sys.executable, *map(str, words)]
            started = running(command, pass_fds=namespaces, env=environment, cwd=_ROOT, **pipes)
            processes.append(ends.enter_context(started))
        for process in processes:
            assert process.stdout is not None
            # before it, gloo of torch 2.10 says there who is connected
            line = process.stdout.readline()
            while line.startswith(b"[Gloo]"):
                line = process.stdout.readline()
            assert b"trains" in line, (line, process.poll())
        yield Trainees(processes)
