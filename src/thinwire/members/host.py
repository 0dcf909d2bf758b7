"""The meeting place: a store behind a listening socket of our own, and what runs meet in it."""

import json
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from thinwire.errors import PayloadCorrupt
from thinwire.members.meeting import greet, require_run, run_store

__all__ = ["serve"]

_TIMEOUT: Final = timedelta(seconds=5)
_LOOK_S: Final = 1.0
_MOST_RUNS: Final = 64
_LOOPBACKS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve(
    listener: socket.socket,
    token: bytes | None,
    *,
    say: Callable[[str], None],
    ready: Callable[[], None],
    stop: threading.Event,
) -> None:
    """Hold the store until `stop` is set, and say when the generation of a run changes.

    Args:
        listener: Listens already; it is the only socket that does, and is closed in the end.
        token: For the greeting, and to read what runs tell; None without.
        say: Takes one line.
        ready: Called once newcomers are admitted.
        stop: Ends it within a second.
    """
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        _LOOPBACKS.get(host, host),  # for its own client
        port,
        None,
        True,
        _TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    session = greet(store, token)
    ready()
    told: dict[str, str] = {}
    while not stop.wait(_LOOK_S):
        for run in _runs(store):
            line = _state(store, run, token, session)
            if line != told.get(run) and (run in told or len(told) < _MOST_RUNS):
                told[run] = line
                say(f"run {run}: {line}")


def _runs(store: TCPStore) -> list[str]:
    """Names of runs that have a generation; a stranger may have put anything in there."""
    found = []
    try:
        keys = store.list_keys()
    except UnicodeDecodeError:  # whoever put it there must not end the host
        return []
    for key in keys:
        parts = key.split("/")
        if len(parts) == 3 and parts[0] == "run" and parts[2] == "gen":
            try:
                require_run(parts[1])
            except ValueError:
                continue
            found.append(parts[1])
    return sorted(found)


def _state(store: TCPStore, run: str, token: bytes | None, session: str) -> str:
    """The generation of a run and its members, or why they cannot be told."""
    of_run = run_store(store, run, token, session)
    try:
        generation = json.loads(of_run.get("gen"))
        if type(generation) is not int:
            raise ValueError(f"it is {_shown(generation)}, no number")
        key = f"members/{generation}"
        members = json.loads(of_run.get(key)) if of_run.check([key]) else None
    except PayloadCorrupt as error:
        return str(error)
    except (ValueError, RecursionError, DistError) as error:
        return f"its generation cannot be read: {error}"
    ids = members.get("ids") if isinstance(members, dict) else None
    names = ", ".join(map(_shown, ids)) if isinstance(ids, list) else ""
    return f"generation {_shown(generation)}, members: {names or 'not told'}"


def _shown(value: Any) -> str:
    """A value as a terminal may be given it, whoever wrote it."""
    return ascii(value)[:100].strip("'")
