"""Meeting places for tests: in this process, or as the command in one of its own."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.api import (
    Address,
    AuthenticatedStore,
    HostedStore,
    HostStore,
    RelayEndpoint,
    enter,
    parse_address,
    run_host,
    serving,
)
from tests.processes import running
from tests.ranks import Pool
from tests.waiting import PATIENCE_S

TOKEN = b"0123456789abcdef0123456789abcdef"
TIMEOUT = timedelta(seconds=10)
LOOPBACK = RelayEndpoint("127.0.0.1", 0, b"", own_address="127.0.0.1")
"""A member that others reach; there is no relay."""


@contextlib.contextmanager
def meeting_place(token: bytes | None = TOKEN, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a meeting place in this process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    with hosted(listener, token):
        yield f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@contextlib.contextmanager
def hosted(listener: socket.socket, token: bytes | None, **more: Any) -> Iterator[None]:
    """Serve a meeting place on this socket, on a thread, while the block runs."""
    stop, ready = threading.Event(), threading.Event()
    options = {"say": lambda _: None, "ready": lambda _: ready.set(), "stop": stop, **more}
    thread = threading.Thread(target=run_host, args=(listener, token), kwargs=options)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)


class Plain(HostStore):
    """A connection of somebody without the token, who reads and writes any value."""

    def set(self, key: str, value: str | bytes) -> None:
        self.ask("set", key, value)

    def get(self, key: str) -> bytes:
        return AuthenticatedStore(self, None).get(key)

    def check(self, keys: list[str]) -> bool:
        return None not in AuthenticatedStore(self, None).look(keys)[1]


@contextlib.contextmanager
def store_alone() -> Iterator[Plain]:
    """A connection to a store in this process, without a host's greeting."""
    listener = socket.create_server(("127.0.0.1", 0))
    place = Address(*listener.getsockname())
    with serving(listener, HostedStore()):
        yield Plain(place, TIMEOUT, PATIENCE_S)


def stranger(address: str) -> Plain:
    """A connection of somebody without the token."""
    return Plain(parse_address("address", address, scheme=True), TIMEOUT, PATIENCE_S)


def met(
    ranks: Pool,
    function: Callable[..., Any],
    *args: Any,
    size: int,
    token: bytes | None = None,
    errors: bool = False,
) -> Any:
    """`function(rank, size, address, *args)` of processes that meet at a place of their own."""
    options = {"size": size, "group": False, "expect_errors": errors}
    with meeting_place(token) as address:
        return ranks.run(function, address, *args, **options)


def token_in(folder: str | Path) -> Path:
    """A file with the token, that its owner alone may read."""
    path = Path(folder, "token")
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def host_command(*options: str, namespace: int = -1) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`thinwire host` as a process, in the namespace of a descriptor, and its address."""
    there = [sys.executable, enter.__file__, str(namespace), str(os.getpid())]
    # no run of an earlier test at the same address
    has_none = {"--journal", "--store"}.isdisjoint(options)
    kept = ("--journal", f"{tempfile.mkdtemp()}/runs") if has_none else ()
    command = [*there, sys.executable, "-m", "thinwire", "host", *options, *kept]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    passed = () if namespace < 0 else (namespace,)
    with running(command, cwd=Path.cwd(), pass_fds=passed, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"listening on (tcp://\S+)\n", line)
        assert found, line
        yield process, found[1]


def lines_of_two(folder: Path, command: Sequence[str], *more: str) -> list[list[str]]:
    """The lines of two processes of a script that are members at the same time, and end well."""
    token = token_in(folder)
    with meeting_place() as address, contextlib.ExitStack() as ends:
        words = [sys.executable, *command, address, str(token), *more]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        both = [ends.enter_context(running(words, **pipes)) for _ in range(2)]
        told = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return [text.splitlines() for text in told]
