"""The meeting place: a store behind a socket of our own."""

import json
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError, DistStoreError

from thinwire._version import __version__
from thinwire._watchdog import Late, addresses_of, within
from thinwire.errors import Mismatch, PayloadCorrupt, PeerLost, PeerStalled
from thinwire.members.credentials import Address, derived_key, parse_address
from thinwire.members.kv import AuthenticatedStore
from thinwire.page import RunView

MEETING_VERSION = 1
"""Version of the protocol between members and the store; other versions are refused."""

_PREFIX = "thinwire/"
_GREETING = "host"
_THREAD = "thinwire-meeting"
_RUNS = "thinwire/runs"
"""Names of runs, each with a space behind it. torch lists no keys before 2.13."""
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_GREETING_S = 5.0
_SLACK_S = 1.0
_SHORTEST_S = 0.1


def connect(
    address: str, run: str, token: bytes | None, timeout: timedelta, *, at_most_s: float = math.inf
) -> AuthenticatedStore:
    """Return the store of a run, after the host has shown that it knows the token."""
    if not _RUN.fullmatch(run):
        raise ValueError(
            f'run={run!r} is no name of a run: 1 to 64 letters, digits, ".", "_" and "-", the '
            "first one a letter or digit"
        )
    host = parse_address("address", address, scheme=True)
    limit_s = min(timeout.total_seconds(), at_most_s)
    begun = time.monotonic()
    reached_from(host, limit_s)
    patience_s = min(limit_s, _GREETING_S)
    try:
        left_s = max(limit_s - (time.monotonic() - begun), 0.0)
        where = host.host, host.port, None, False, timeout
        store = within(left_s, lambda: TCPStore(*where, wait_for_workers=False), name=_THREAD)
        session = within(
            patience_s + _SLACK_S,
            lambda: _checked_session(store, token, host, timedelta(seconds=patience_s), run),
            name=_THREAD,
        )
    except Late:
        raise PeerStalled(
            f"tcp://{host} accepted the connection but did not answer within {limit_s:g} s: "
            "it is stopped, cut off, or no meeting place of thinwire"
        ) from None
    except (DistStoreError, MemoryError):  # the length that it announces is allocated
        raise Mismatch(
            f"tcp://{host} is a store, but no meeting place of thinwire: start one with "
            f"`thinwire host --bind {host}`"
        ) from None
    except DistError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise PeerLost(
            f"tcp://{host} closed the connection: {first_line}. Has `thinwire host` ended?"
        ) from None
    return run_store(store, run, token, session)


def run_store(store: Store, run: str, token: bytes | None, session: str) -> AuthenticatedStore:
    """Return the part of a host's store that belongs to a run, for one session of the host."""
    secret = None if token is None else derived_key(token, "run", run, session)
    return AuthenticatedStore(store, secret, f"run/{run}/", session)


def require_same(store: AuthenticatedStore, facts: Mapping[str, Any]) -> None:
    """Compare facts (JSON values) with those of the run; the first member sets them."""
    own: dict[str, Any] = json.loads(json.dumps(facts))
    theirs = json.loads(store.compare_set("facts", "", json.dumps(own)))
    for name in [*own, *theirs]:
        own_value = own.get(name, "nothing")
        run_value = theirs.get(name, "nothing")
        if own_value != run_value:
            raise Mismatch(
                f"this member does not fit the run: {name} is {own_value} here and {run_value} "
                "there. Start it as the others were started, or as another run"
            )


def reached_from(host: Address, limit_s: float) -> str:
    """Return the address of this machine from which it reaches a listening host."""
    # torch would retry until the time-out where no process listens
    try:
        return _local_address(host, time.monotonic() + limit_s)
    except socket.gaierror as error:
        raise PeerLost(
            f"{host.host} does not resolve to an address: {error.strerror or error}"
        ) from None
    except ConnectionRefusedError as error:
        raise PeerLost(
            f"nothing listens at tcp://{host} ({error.strerror}): start `thinwire host "
            f"--bind {host}` there first"
        ) from None
    except OSError as error:  # no answer in time, or no route
        why = f" ({error.strerror})" if error.strerror else ""
        raise PeerStalled(
            f"nothing answers at tcp://{host} within {limit_s:g} s{why}: is the machine up, and "
            "does a firewall let the port through?"
        ) from None


def _local_address(host: Address, until: float) -> str:
    addresses = addresses_of(host.host, until - time.monotonic())
    # one after the other: there may be no route to the first, such as over IPv6
    for tried, address in enumerate(addresses, 1):
        rest = len(addresses) - tried
        part_s = max(until - time.monotonic(), _SHORTEST_S) / (1 + rest)
        try:
            with socket.create_connection((address, host.port), timeout=part_s) as connection:
                return str(connection.getsockname()[0])
        except OSError:
            if rest == 0:
                raise
    raise AssertionError(f"{host.host} has been found without an address")


def _checked_session(
    store: TCPStore, token: bytes | None, host: Address, patience: timedelta, run: str
) -> str:
    """Return the session of a host with the same token and version, and name the run to it."""
    store.wait([_PREFIX + _GREETING], patience)
    plain = store.get(_PREFIX + _GREETING)
    try:
        reported = json.loads(_host_store(store, token).get(_GREETING))
        version = reported["meeting"]
        release = reported["thinwire"]
        session = reported["session"]
    except PayloadCorrupt:
        other = "no token" if plain.startswith(b"{") else "another token"
        raise Mismatch(
            f"the host at tcp://{host} has {other}: use the same token file on all machines "
            "and for `thinwire host --token-file`"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise Mismatch(
            f"the host at tcp://{host} has a token, and this member has none: pass a copy of "
            "the host's token file as token_file="
        ) from None
    if version != MEETING_VERSION or not isinstance(session, str):
        raise Mismatch(
            f"the host at tcp://{host} has thinwire {release} (protocol {version}), and this "
            f"member {__version__} (protocol {MEETING_VERSION}): install the same release on all "
            "machines"
        )
    if run not in _names(store):
        store.append(_RUNS, f"{run} ")  # type: ignore[attr-defined]  # torch's stubs lack it
    return session


def _host_store(store: Store, token: bytes | None) -> AuthenticatedStore:
    secret = None if token is None else derived_key(token, "place")
    return AuthenticatedStore(store, secret, _PREFIX)


_TIMEOUT = timedelta(seconds=5)
_LOOK_S = 1.0
_MOST_RUNS = 64
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run_host(
    listener: socket.socket,
    token: bytes | None,
    *,
    say: Callable[[str], None],
    ready: Callable[[str], object],
    stop: threading.Event,
    page: Address | None = None,
) -> None:
    """Run the store, and a page at this address, until `stop` is set; report generations."""
    host, port = listener.getsockname()[:2]
    where = _LOOPBACKS.get(host, host), port, None, True, _TIMEOUT  # for its own client
    store = TCPStore(*where, wait_for_workers=False, master_listen_fd=listener.detach())
    session = secrets.token_hex(16)
    greeting = {"meeting": MEETING_VERSION, "thinwire": __version__, "session": session}
    _host_store(store, token).set(_GREETING, json.dumps(greeting))  # shows that it has the token
    shown = None
    if page is not None:
        from thinwire.page.server import Page  # members import this module too

        shown = Page(*page, derived_key(token or secrets.token_bytes(), "page").hex()[:32])
    ready("" if shown is None else shown.url)
    reported: dict[str, str] = {}
    while not stop.wait(_LOOK_S):
        for run in filter(_RUN.fullmatch, sorted(_names(store))):
            if not store.check([f"run/{run}/gen"]):
                continue
            of_run = run_store(store, run, token, session)
            generation, ids, line = _state(of_run)
            known = run in reported or len(reported) < _MOST_RUNS
            if known and line != reported.get(run):
                reported[run] = line
                say(f"run {run}: {line}")
            if known and shown is not None and ids:
                _show(shown.runs.setdefault(run, RunView()), of_run, generation, ids)


def _names(store: TCPStore) -> set[str]:
    """Return the names of runs that members connected for; a stranger may write any."""
    return set(store.compare_set(_RUNS, "", "").decode(errors="replace").split())


def _state(of_run: AuthenticatedStore) -> tuple[Any, list[str], str]:
    """Return generation and members of a run, and the line of text that says so, or why not."""
    try:
        generation = json.loads(of_run.get("gen"))
        if type(generation) is not int:
            raise ValueError(f"{_printable(generation)} is not a number")
        members = json.loads(of_run.try_get(f"members/{generation}") or b"null")
    except PayloadCorrupt as error:
        return None, [], str(error)
    except (ValueError, RecursionError, DistError) as error:
        return None, [], f"its generation cannot be read: {error}"
    found = members.get("ids") if isinstance(members, dict) else None
    ids = [*map(_printable, found)] if isinstance(found, list) else []
    return generation, ids, f"generation {generation}, members: {', '.join(ids) or 'unknown'}"


def _show(view: RunView, of_run: AuthenticatedStore, generation: int, ids: list[str]) -> None:

    def value(key: str) -> Any:
        with suppress(PayloadCorrupt, ValueError, RecursionError):
            return json.loads(of_run.try_get(key) or b"null")
        return None

    def fate(member: str) -> str:
        if value(f"left/{member}") is not None:
            return "left"
        broken = value(f"break/{view.generation}")
        why = broken.get("why") if isinstance(broken, dict) else None
        return "lost" if why is None else f"lost: {str(why).partition('. ')[0][:200]}"

    present = [one for one in ids if value(f"left/{one}") is None]
    found = {one: (value(f"hb/{one}"), value(f"shown/{one}")) for one in present}
    view.update(generation, found, fate)


def _printable(value: Any) -> str:
    """Return a value as plain ASCII, safe to print whoever wrote it."""
    return ascii(value)[:100].strip("'")
