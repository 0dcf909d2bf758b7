"""What several processes print, passed on as whole lines that say whose they are."""

import os
import re
import selectors
import time
from typing import IO, final

__all__ = ["Prefixed"]

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
