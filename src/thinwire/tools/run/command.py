"""`thinwire run`: run a user's script over an emulated link; torch is not imported."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self, final

from thinwire._launched import launched_rank
from thinwire.tools.app import Count
from thinwire.tools.network.netns import Link, Network, network, why_unavailable
from thinwire.tools.run.config import MOST_WORKERS, require_within
from thinwire.tools.run.launch import end, environments, signal_group, start

_POLL_S = 0.02
_OF_LINK = ("--link", "--latency", "--up", "--down", "--loss", "--congestion")


def _ran(
    command: Sequence[str], environments: Sequence[tuple[int, dict[str, str]]]
) -> tuple[int, int] | None:
    """Run a command on ranks until all have ended or one failed; return that one and its status."""
    running: dict[int, subprocess.Popen[bytes]] = {}
    with Prefixed() as output:
        try:
            for rank, (fd, environment) in enumerate(environments):
                process = start(command, environment, fd, subprocess.PIPE, subprocess.PIPE)
                running[rank] = process
                for pipe, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    assert pipe is not None, "asked for just now"
                    output.add(rank, pipe, to.buffer)
            while running:
                output.pass_on(_POLL_S)
                for rank, process in list(running.items()):
                    if (status := process.poll()) is not None:
                        del running[rank]
                        signal_group(process.pid, signal.SIGKILL)  # what it has left behind
                        if status:
                            return rank, status
        finally:
            end(running.values(), output.pass_on)
    return None


_CHUNK_BYTES = 65_536
_LAST_S = 1.0
_LAST_LINES, _SHOWN, _LONGEST_BYTES = 20, 300, 1 << 20
_TELLS = re.compile(r"^(?!\s).*(error|because|cannot|unable|not found|no such|denied)", re.I)


@final
class Prefixed:
    """Reader of pipes that writes `[number] line` for every line."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, number: int, pipe: IO[bytes], to: IO[bytes]) -> None:
        """Add a pipe; its lines go to `to` with this number in front."""
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, Speaker(str(number), to))

    def pass_on(self, patience_s: float) -> bool:
        """Forward output that arrives within this time; return True if there was any."""
        ready = self._selector.select(patience_s)
        for key, _ in ready:
            self._hear(key, os.read(key.fd, _CHUNK_BYTES))
        return bool(ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Forward the remaining output, with any unfinished line, and stop reading."""
        end_s = time.monotonic() + _LAST_S  # for a process that is not ours, and never stops
        while self.pass_on(0.0) and time.monotonic() < end_s:
            pass
        for key in [*self._selector.get_map().values()]:
            self._hear(key, b"")
        self._selector.close()

    def _hear(self, key: selectors.SelectorKey, chunk: bytes) -> None:
        key.data.hear(chunk)
        if not chunk:
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]  # a pipe


@final
class Speaker:
    """Writer of the lines of one process, with its name in front."""

    def __init__(self, name: str, to: IO[bytes]) -> None:
        self._last = deque[str](maxlen=_LAST_LINES)
        self._prefix = f"[{name}] ".encode()
        self._to = to
        self._held = b""
        self._line = bytearray()

    def hear(self, chunk: bytes) -> None:
        """Write the lines that end in this chunk; an empty one ends the last line.

        A line also ends after a carriage return, as of a progress bar, and at its first megabyte.
        """
        text = self._held + (chunk or b"\n" * bool(self._held or self._line))
        self._held = b"\r" if text.endswith(b"\r") else b""  # the newline may be in the next chunk
        for piece in text.removesuffix(self._held).splitlines(keepends=True):
            words = piece.rstrip(b"\r\n")
            self._line += words
            if words != piece or len(self._line) >= _LONGEST_BYTES:
                self._write(empty=piece != b"\r")
        self._to.flush()

    def _write(self, *, empty: bool) -> None:
        if self._line or empty:
            self._to.write(self._prefix + self._line + b"\n")
            self._last.append(self._line[:_SHOWN].decode(errors="replace"))
            self._line.clear()

    @property
    def reason(self) -> str:
        """The first of the last lines that tells of an error, else the last three."""
        last = [*self._last]
        return next(filter(_TELLS.search, last), " / ".join(last[-3:]))


EXAMPLES = """Examples:

thinwire run --link 20mbit --workers 2 -- train.py --epochs 3

thinwire run --link 100mbit --latency 20ms --workers 4 -- train.py

thinwire run --up 10mbit --down 100mbit --workers 4 -- train.py

thinwire run --link loopback -- train.py
"""


def run(
    *script: str,
    workers: Count = 2,
    link: str | None = None,
    latency: str = "0ms",
    up: str | None = None,
    down: str | None = None,
    loss: str = "0%",
    congestion: str | None = None,
    quiet: bool = False,
) -> None:
    """Run your own Python script on several ranks over an emulated link.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the other variables of torchrun,
    and GLOO_SOCKET_IFNAME. Each line that a rank prints begins with its number. At the end it
    prints the seconds and the bytes that each rank sent over its link. If a rank fails, the others
    are ended and its exit status is returned: 128 plus the signal number if a signal killed it.

    Args:
        script: The Python file and its arguments. Options of run come first; "--" may stand
            between.
        workers: Number of ranks, each in a network of its own, like a machine.
        link: Rate of each rank's link in both directions, such as 20mbit or 1gbit; 100mbit by
            default. "none" is unshaped, "loopback" uses no network namespaces and needs no root.
        latency: One-way delay of every packet, such as 10ms.
        up: Rate at which each rank sends, such as 10mbit, if the directions differ; with --down.
        down: Rate at which each rank receives, such as 100mbit.
        loss: Share of the packets that is lost, each way, such as 0.2%.
        congestion: Congestion control of TCP, cubic or bbr; the machine's own by default.
        quiet: Print only the output of the ranks.
    """
    if launched_rank(os.environ) is not None:
        raise ValueError(
            "thinwire run starts the ranks itself; run it without torchrun, with RANK and "
            "WORLD_SIZE unset"
        )
    require_within("workers", workers, 1, MOST_WORKERS)
    shape = Link.parse(link, latency, up=up, down=down, loss=loss, congestion=congestion)
    _require_script(script)
    misplaced = [word for word in script[1:] if word.partition("=")[0] in _OF_LINK]
    if misplaced and link is None and up is None:
        sys.stderr.write(
            f"thinwire: {', '.join(misplaced)} after the script are the script's, and the link is "
            "100mbit: options of thinwire run come before --\n"
        )
    reason = why_unavailable() if shape.emulated else None
    if reason is not None:
        raise ValueError(
            f"link={str(shape)!r} cannot be emulated here: it {reason}; run as root on Linux with "
            "'thinwire[cli]' installed, or use --link loopback, the real loopback of this "
            "machine"
        )
    with ExitStack() as stack:
        emulated = stack.enter_context(network(workers, shape)) if shape.emulated else None
        begin_s = time.monotonic()
        try:
            failed = _ran([sys.executable, *script], environments(workers, emulated))
        finally:
            if not quiet:
                print(_summary(shape, emulated, time.monotonic() - begin_s), flush=True)
    if failed is not None:
        rank, status = failed
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        others = "; the others were ended" if workers > 1 else ""
        sys.stderr.write(f"thinwire: rank {rank} {ended}{others}\n")
        sys.exit(128 - status if status < 0 else status)


def _require_script(script: tuple[str, ...]) -> None:
    if not script:
        raise ValueError(
            "no script is given; write it after --, as in thinwire run --workers 2 -- train.py"
        )
    if not Path(script[0]).is_file():
        problem = "is a folder" if Path(script[0]).is_dir() else "does not exist"
        raise ValueError(f"{script[0]} {problem}; give a Python script after --")


def _summary(link: Link, emulated: Network | None, seconds: float) -> str:
    if emulated is None:
        return f"{seconds:.1f} s over loopback, where bytes are not counted"
    sent = [f"rank {rank} sent {count:,} bytes" for rank, count in enumerate(emulated.bytes_sent())]
    return f"{seconds:.1f} s over the link {link}; with headers {', '.join(sent)}"
