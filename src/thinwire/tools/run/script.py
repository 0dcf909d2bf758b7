"""A script of the user's on several ranks: what they print, and their end."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, final

from thinwire.tools.run.ranks import signal_group, start

__all__ = ["Prefixed", "Ranks"]

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


_CHUNK_BYTES = 65_536
_LAST_S = 1.0
# a progress bar ends what it shows with a carriage return; whether one at the end of a chunk is
# followed by a newline is not known yet
_LINE = re.compile(rb"([^\r\n]*)(?:\r?\n|\r(?=[^\n]))")


@final
class Prefixed:
    """Reads from pipes, and writes `[number] line` for every line."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, number: int, pipe: IO[bytes], to: IO[bytes]) -> None:
        """Read from `pipe` too, whose lines get this number and go to `to`, until it ends or
        `close`.
        """
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, _Speaker(number, pipe, to))

    def pass_on(self, patience_s: float) -> bool:
        """Pass on what there is, waiting so long for the first of it.

        Returns:
            Whether there was something.

        Raises:
            OSError: What is written here can go nowhere.
        """
        ready = self._selector.select(patience_s)
        for key, _ in ready:
            chunk = os.read(key.fd, _CHUNK_BYTES)
            key.data.hear(chunk)
            if not chunk:
                self._forget(key)
        return bool(ready)

    def close(self) -> None:
        """Pass on what is left, a line without an end too, and read no more."""
        end_s = time.monotonic() + _LAST_S  # for a process that is not ours, and never stops
        try:
            while self.pass_on(0.0) and time.monotonic() < end_s:
                pass
            for key in self._selector.get_map().values():
                key.data.hear(b"")
        finally:
            for key in list(self._selector.get_map().values()):
                self._forget(key)
            self._selector.close()

    def _forget(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        key.data.pipe.close()


@final
class _Speaker:
    def __init__(self, number: int, pipe: IO[bytes], to: IO[bytes]) -> None:
        self.pipe = pipe
        self._prefix, self._to, self._unfinished = b"[%d] " % number, to, b""

    def hear(self, chunk: bytes) -> None:
        """Write the lines that end in this chunk; an empty one ends the last line."""
        text = self._unfinished + (chunk or b"\n" * bool(self._unfinished))
        lines, end = [], 0
        for match in _LINE.finditer(text):
            if match[1] or match[0] != b"\r":
                lines.append(self._prefix + match[1] + b"\n")
            end = match.end()
        self._unfinished = text[end:]
        if lines:
            self._to.write(b"".join(lines))
            self._to.flush()
