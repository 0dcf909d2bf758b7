"""The meeting place: a store behind a socket of our own; how a newcomer reaches it, and is told at
once when it does not belong there.
"""

import json
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError, DistStoreError

from thinwire._aside import Late, addresses_of, within
from thinwire._version import __version__
from thinwire.errors import Mismatch, PayloadCorrupt, PeerLost, PeerStalled
from thinwire.members.credentials import Address, derived_key, parse_address
from thinwire.members.kv import AuthenticatedStore

__all__ = [
    "MEETING_VERSION",
    "connect",
    "greet",
    "reached_from",
    "require_run",
    "require_same",
    "run_store",
    "serve",
]

MEETING_VERSION: Final = 1
"""Of what members say to each other through the store; others are refused."""

_PLACE: Final = "thinwire/"
_GREETING: Final = "host"
_RUNS: Final = "thinwire/runs"
"""Names of runs, each with a space behind it. torch lists no keys before 2.13."""
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_GREETING_S: Final = 5.0
_SLACK_S: Final = 1.0
_SHORTEST_S: Final = 0.1
_THREAD: Final = "thinwire-meeting"
_SESSION_BYTES: Final = 16


def connect(
    address: str, run: str, token: bytes | None, timeout: timedelta, *, at_most_s: float = math.inf
) -> AuthenticatedStore:
    """The store of a run at a meeting place, once that has shown that it knows the token.

    Args:
        address: Such as "tcp://10.0.0.1:29400".
        run: Name of the run: letters, digits, ".", "_" and "-", at most 64.
        token: As the host has it; None where the host has none.
        timeout: For this call, and of the store's calls afterwards.
        at_most_s: For this call, where that is less.

    Returns:
        With the keys of this run alone, which stand under run/{run}/ in the host's store. Sealed,
        where there is a token, for this run and this life of the host: nothing of another run, or
        of before the host was restarted, verifies.

    Raises:
        ValueError: The address or the run is no such text.
        PeerLost: Nobody listens there, or whoever does went away.
        PeerStalled: No answer within the time-out.
        Mismatch: It is no meeting place, has another token or none, or another version.
    """
    require_run(run)
    place = parse_address("address", address, scheme=True)
    limit_s, begun = min(timeout.total_seconds(), at_most_s), time.monotonic()
    reached_from(place, limit_s)
    patience_s = min(limit_s, _GREETING_S)
    try:
        left_s = max(limit_s - (time.monotonic() - begun), 0.0)
        store = within(left_s, lambda: _client(place, timeout), name=_THREAD)
        session = within(
            patience_s + _SLACK_S,
            lambda: _greeted(store, token, place, timedelta(seconds=patience_s), run),
            name=_THREAD,
        )
    except Late:
        raise PeerStalled(
            f"tcp://{place} took the connection and did not answer within {limit_s:g} s: it is "
            "stopped, cut off, or no meeting place of thinwire"
        ) from None
    except (DistStoreError, MemoryError):  # the length that it announces is allocated
        raise Mismatch(
            f"tcp://{place} is a store and no meeting place of thinwire: `thinwire host --bind "
            f"{place}` makes one"
        ) from None
    except DistError as error:
        raise PeerLost(
            f"tcp://{place} closed the connection: {_first_line(error)}. Has `thinwire host` ended?"
        ) from error
    return run_store(store, run, token, session)


def greet(store: Store, token: bytes | None) -> str:
    """Leave the greeting, in the host's new store, by which newcomers know this host, and know that
    it has their token; return the session, random: keys of runs are made from it too.
    """
    session = secrets.token_hex(_SESSION_BYTES)
    told = {"meeting": MEETING_VERSION, "thinwire": __version__, "session": session}
    _place_store(store, token).set(_GREETING, json.dumps(told))
    return session


def run_store(store: Store, run: str, token: bytes | None, session: str) -> AuthenticatedStore:
    """The part of a host's store that belongs to a run, for one life of the host."""
    secret = None if token is None else derived_key(token, "run", run, session)
    return AuthenticatedStore(store, secret, f"run/{run}/", session)


def require_run(run: str) -> None:
    """Check the name of a run.

    Raises:
        ValueError: It has another form.
    """
    if not _RUN.fullmatch(run):
        raise ValueError(
            f'run={run!r} is no name of a run: 1 to 64 letters, digits, ".", "_" and "-", the '
            "first one a letter or digit"
        )


def require_same(
    store: AuthenticatedStore, facts: Mapping[str, Any], *, cures: Mapping[str, str] | None = None
) -> None:
    """Agree with the run on facts, as JSON holds them: the first member that comes sets them, every
    other one compares, in their order. `cures` says what to do where an entry differs, by its name.

    Raises:
        Mismatch: On this member alone: the first entry that differs, and both values.
        PayloadCorrupt: A stranger has written them.
    """
    mine: dict[str, Any] = json.loads(json.dumps(facts))
    theirs = json.loads(store.compare_set("facts", "", json.dumps(mine)))
    for name in [*mine, *theirs]:
        ours, run_has = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if ours != run_has:
            cure = (cures or {}).get(name, "Start it as the others were started, or as another run")
            raise Mismatch(
                f"this member does not fit the run: {name} is {ours} here and {run_has} there. "
                f"{cure}"
            )


def reached_from(place: Address, limit_s: float) -> str:
    """The address of this machine from which it reaches another one that listens.

    Raises:
        PeerLost, PeerStalled: Nobody listens there, or nothing answers within the limit.
    """
    # torch tries again and again where nobody listens, until the time-out
    try:
        return _own_end(place, time.monotonic() + limit_s)
    except socket.gaierror as error:
        raise PeerLost(
            f"{place.host} does not resolve to an address: {error.strerror or error}"
        ) from None
    except ConnectionRefusedError as error:
        raise PeerLost(
            f"nobody listens at tcp://{place} ({error.strerror}): start `thinwire host --bind "
            f"{place}` there first"
        ) from None
    except OSError as error:  # no answer in time, or no way there
        why = f" ({error.strerror})" if error.strerror else ""
        raise PeerStalled(
            f"nothing answers at tcp://{place} within {limit_s:g} s{why}: is the machine up, and "
            "does a firewall let the port through?"
        ) from None


def _own_end(place: Address, until: float) -> str:
    addresses = addresses_of(place.host, until - time.monotonic())
    # one after the other: the first may be of a kind that has no route from here
    for tried, address in enumerate(addresses, 1):
        rest = len(addresses) - tried
        part_s = max(until - time.monotonic(), _SHORTEST_S) / (1 + rest)
        try:
            with socket.create_connection((address, place.port), timeout=part_s) as connection:
                return str(connection.getsockname()[0])
        except OSError:
            if rest == 0:
                raise
    raise AssertionError(f"{place.host} has been found without an address")


def _client(place: Address, timeout: timedelta) -> TCPStore:
    return TCPStore(place.host, place.port, None, False, timeout, wait_for_workers=False)


def _greeted(
    store: TCPStore, token: bytes | None, place: Address, patience: timedelta, run: str
) -> str:
    """Return the session of a host with the same token and version, and name the run to it."""
    store.wait([_PLACE + _GREETING], patience)
    plain = store.get(_PLACE + _GREETING)
    try:
        told = json.loads(_place_store(store, token).get(_GREETING))
        version, release, session = told["meeting"], told["thinwire"], told["session"]
    except PayloadCorrupt:
        other = "no token" if plain.startswith(b"{") else "another token"
        raise Mismatch(
            f"the host at tcp://{place} has {other}: the same token file belongs on all machines "
            "and to `thinwire host --token-file`"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise Mismatch(
            f"the host at tcp://{place} has a token, and this member has none: token_file= names "
            "a copy of the host's token file"
        ) from None
    if version != MEETING_VERSION or not isinstance(session, str):
        raise Mismatch(
            f"the host at tcp://{place} has thinwire {release}, which meets in version {version}; "
            f"this is thinwire {__version__} with version {MEETING_VERSION}: install the same "
            "release on all machines"
        )
    if run not in _names(store):
        store.append(_RUNS, f"{run} ")  # type: ignore[attr-defined]  # torch's stubs lack it
    return session


def _place_store(store: Store, token: bytes | None) -> AuthenticatedStore:
    return AuthenticatedStore(store, None if token is None else derived_key(token, "place"), _PLACE)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


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


def _names(store: TCPStore) -> set[str]:
    """Return the names of runs that members connected for; a stranger may write any."""
    return set(store.compare_set(_RUNS, "", "").decode(errors="replace").split())


def _runs(store: TCPStore) -> list[str]:
    """Return the names of runs that have a generation."""
    return sorted(
        run for run in _names(store) if _RUN.fullmatch(run) and store.check([f"run/{run}/gen"])
    )


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
