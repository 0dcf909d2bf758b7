"""The host of runs: its store, what it says of them, and their page; without torch."""

import json
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from thinwire._version import __version__
from thinwire.errors import PayloadCorrupt
from thinwire.members.credentials import Address, Signer, derived_key, host_secret, run_secret
from thinwire.members.server import HostedStore, Journal, Relaying, serving
from thinwire.page import RunView

MEETING_VERSION = 2
"""Version of the protocol between members and the store; other versions are refused."""
GREETING_KEY = "thinwire/host"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOOK_S = 1.0
_MOST_RUNS = 64


def require_run_name(run: str) -> None:
    """Raise `ValueError` for what is no name of a run."""
    if not RUN_NAME.fullmatch(run):
        raise ValueError(
            f'run={run!r} is no name of a run: 1 to 64 letters, digits, ".", "_" and "-", the '
            "first one a letter or digit"
        )


def run_host(
    listener: socket.socket,
    token: bytes | None,
    *,
    say: Callable[[str], None],
    ready: Callable[[str], object],
    stop: threading.Event,
    page: Address | None = None,
    relay: Relaying | None = None,
    tls: ssl.SSLContext | None = None,
    journal: Journal | None = None,
    recover: bool = False,
) -> None:
    """Run the store, and a page at this address, until `stop` is set; report generations."""
    signer = Signer(host_secret(token))
    session = _kept_session(journal, signer) or secrets.token_hex(16)
    store = HostedStore(journal, say)
    for run, _, of_run in _runs(store, token, session):
        if of_run.is_over():
            store.forget(f"run/{run}/")
    greeting = {"meeting": MEETING_VERSION, "thinwire": __version__, "session": session}
    content = json.dumps(greeting).encode()
    store.write(GREETING_KEY.encode(), signer.sign(GREETING_KEY, content))  # it has the token
    with serving(listener, store, relay, tls):
        shown = None
        if page is not None:
            from thinwire.page.server import Page  # loads torch

            shown = Page(*page, derived_key(token or secrets.token_bytes(), "page").hex()[:32])
        ready("" if shown is None else shown.url)
        reported: dict[str, str] = {}
        while not stop.wait(_LOOK_S):
            for run, prefix, of_run in _runs(store, token, session):
                generation, ids, line = _state(of_run)
                if line is None:
                    line = of_run.recovered(by_hand=recover)
                known = prefix in reported or len(reported) < _MOST_RUNS
                if line and known and line != reported.get(prefix):
                    reported[prefix] = line
                    say(f"run {run}: {line}")
                if known and shown is not None and ids:
                    _show(shown.runs.setdefault(run, RunView()), of_run, generation, ids)


def _kept_session(journal: Journal | None, signer: Signer) -> str | None:
    """Return the session with which a file was written, if it is of this token and protocol."""
    if journal is None or not journal.values:
        return None
    try:
        kept = journal.values.get(GREETING_KEY.encode(), b"")
        greeting = json.loads(signer.verify(GREETING_KEY, kept))
        if greeting["meeting"] == MEETING_VERSION:
            return str(greeting["session"])
        why = "another release of thinwire"
    except (PayloadCorrupt, ValueError, KeyError, TypeError):
        why = "another token"
    journal.close()
    raise ValueError(
        f"{journal.path} was written with {why}: give the same token file to go on with its runs, "
        "or remove the file to begin new ones"
    )


_PREFIX = re.compile(rf"(run/{RUN_NAME.pattern}/(shard/[0-9]+/)?)(gen|recover/.+)".encode())


def _runs(
    store: HostedStore, token: bytes | None, session: str
) -> Iterator[tuple[str, str, "_RunView"]]:
    """Yield name, prefix and values of the runs that have members; a stranger may write any."""
    found = filter(None, map(_PREFIX.fullmatch, list(store.values)))
    for prefix in sorted({match[1].decode() for match in found}):
        run = prefix.split("/")[1]
        yield run, prefix, _RunView(store, Signer(run_secret(token, run, session)), prefix)


class _RunView:
    """Values of one run, as its members wrote them."""

    def __init__(self, store: HostedStore, signer: Signer, prefix: str) -> None:
        self._store = store
        self._signer = signer
        self._prefix = prefix

    def value(self, key: str) -> Any:
        """Return a value; raise `PayloadCorrupt` or `ValueError` if no member wrote it."""
        where = self._prefix + key
        found = self._store.values.get(where.encode())
        return None if found is None else json.loads(self._signer.verify(where, found))

    def known(self, key: str) -> Any:
        """Return a value; None if no member wrote it."""
        with suppress(PayloadCorrupt, ValueError, RecursionError):
            return self.value(key)
        return None

    def is_over(self) -> bool:
        """Return True if all members have left: its name may begin another run."""
        members = self.known(f"members/{self.known('gen')}")
        left = [self.known(f"left/{one}") is not None for one in _ids(members)]
        return isinstance(members, dict) and all(left)

    def recovered(self, *, by_hand: bool) -> str:
        """Go on with a run whose file is lost, from what its members present; say how far it is."""
        # more than half of the members of the latest generation that anybody presents: its members
        # that are not back may have formed a later one
        start = f"{self._prefix}recover/".encode()
        keys = [key for key in list(self._store.values) if key.startswith(start)]
        names = [key[len(start) :].decode() for key in keys]
        found = {one: self.known(f"recover/{one}") for one in names}
        shown = {one: value for one, value in found.items() if _is_presented(value)}
        # one that was away holds a state that is older; it joins those that trained on
        trained = [value for value in shown.values() if not value.get("away")]
        if not trained:
            return ""
        latest = max(trained, key=lambda value: (value["number"], len(value["ids"])))
        number, ids, limit_s = latest["number"], latest["ids"], latest["timeout_s"]
        missing = [one for one in ids if shown.get(one, {}).get("ids") != ids]
        line = f"generation {number} is known from its members {', '.join(map(_printable, ids))}"
        if missing:
            line = f"{line}; {', '.join(map(_printable, missing))} are not back"
        if self._store.age_s < limit_s:
            return f"{line}; waiting for {limit_s:g} s"
        if not by_hand and 2 * len(missing) >= len(ids):
            return f"{line}: more than half are needed. `--recover` goes on without them"
        decision = {"ids": ids, "continuing": ids, "vote": latest["vote"]}
        decision |= {"answers": [], "voters": []}
        for key, value in ((f"members/{number}", decision), ("gen", number)):
            where = self._prefix + key
            self._store.write_soon(where, self._signer.sign(where, json.dumps(value).encode()))
        return f"{line}: the run goes on"


def _is_presented(value: Any) -> bool:
    """Return True for what a member presents; without a token a stranger may write anything."""
    if not _ids(value):
        return False
    whole = all(type(value.get(name)) is int for name in ("number", "vote"))
    return whole and isinstance(value.get("timeout_s"), int | float)


def _ids(value: Any) -> list[str]:
    found = value.get("ids") if isinstance(value, dict) else None
    if isinstance(found, list) and all(isinstance(one, str) for one in found):
        return found
    return []


def _state(of_run: _RunView) -> tuple[Any, list[str], str | None]:
    """Return generation and members of a run, and the line of text that says so, or why not."""
    try:
        generation = of_run.value("gen")
        if generation is None:
            return None, [], None
        if type(generation) is not int:
            raise ValueError(f"{_printable(generation)} is not a number")
        members = of_run.value(f"members/{generation}")
    except PayloadCorrupt as error:
        return None, [], str(error)
    except (ValueError, RecursionError) as error:
        return None, [], f"its generation cannot be read: {error}"
    ids = [*map(_printable, _ids(members))]
    return generation, ids, f"generation {generation}, members: {', '.join(ids) or 'unknown'}"


def _show(view: RunView, of_run: _RunView, generation: int, ids: list[str]) -> None:

    def fate(member: str) -> str:
        if of_run.known(f"left/{member}") is not None:
            return "left"
        broken = of_run.known(f"break/{view.generation}")
        why = broken.get("why") if isinstance(broken, dict) else None
        return "lost" if why is None else f"lost: {str(why).partition('. ')[0][:200]}"

    present = [one for one in ids if of_run.known(f"left/{one}") is None]
    found = {one: (of_run.known(f"hb/{one}"), of_run.known(f"shown/{one}")) for one in present}
    view.update(generation, found, fate)


def _printable(value: Any) -> str:
    """Return a value as plain ASCII, safe to print whoever wrote it."""
    return ascii(value)[:100].strip("'")
