"""A script of the user's on several ranks: what they print, and their end."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import final

from thinwire.tools.run.prefixed import Prefixed
from thinwire.tools.run.ranks import signal_group, start

__all__ = ["Ranks"]

_POLL_S, _GRACE_S = 0.02, 3.0


@final
class Ranks:
    """The processes of one run, as a context that none of them outlives, nor what they start.

    They end where this process is killed, too.
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
                signal_group(process.pid, signal.SIGTERM)
            end_s = time.monotonic() + _GRACE_S
            while self._running and time.monotonic() < end_s:
                self._output.pass_on(_POLL_S)
                self._ended()
        finally:
            for process in self._running.values():
                signal_group(process.pid, signal.SIGKILL)
                process.wait()
            self._output.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str], fd: int) -> None:
        """Start the next rank.

        Args:
            command: The program and its arguments.
            environment: All of its variables.
            fd: Descriptor of its network namespace; -1 for that of this process.
        """
        process = start(command, environment, fd, subprocess.PIPE, subprocess.PIPE)
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
            signal_group(self._running.pop(rank).pid, signal.SIGKILL)  # what it has left behind
        return ended
