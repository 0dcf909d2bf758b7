"""`thinwire host`: addresses and the token are checked before torch is loaded."""

import contextlib
import errno
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from thinwire.members.credentials import Address, parse_address, read_token
from thinwire.members.credentials import new_token as make_token

if TYPE_CHECKING:
    from thinwire.members.server import Journal

EXAMPLES = """Examples:

thinwire host --new-token token

thinwire host --bind 10.0.0.1:29400 --token-file token --page 8080

thinwire host --bind 203.0.113.7:29400 --token-file token --relay --cert cert.pem --key key.pem

thinwire host --bind 198.51.100.9:29400 --token-file token --relay --store tcp://203.0.113.7:29400
"""
_BACKLOG = 512
_END_S = 10.0
_EVERYWHERE = {"*": "0.0.0.0"}
_REASONS: dict[int | None, str] = {
    errno.EADDRINUSE: "the port is in use: take another one, or end the process that uses it",
    errno.EADDRNOTAVAIL: "not an address of this machine: `ip address` lists its addresses",
    errno.EACCES: "not allowed: use a port from 1024 on, or run it as root",
}
_Flag = Annotated[bool, Parameter(negative="")]


def host(
    *,
    bind: str | None = None,
    token_file: Path | None = None,
    new_token: Path | None = None,
    public: _Flag = False,
    relay: _Flag = False,
    store: str | None = None,
    announce: str | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    page: int | None = None,
    journal: Path | None = None,
    recover: _Flag = False,
    end: str | None = None,
    quiet: _Flag = False,
) -> None:
    """Run the meeting place of runs whose members join and leave: tw.join names its address.

    It listens on the given address only, prints a line when the members of a run change, and ends
    on Ctrl-C; members train on meanwhile. Started again at the same address with the same token,
    it goes on with its runs. Traffic is not encrypted: docs/security.md describes the protection.

    Args:
        bind: ADDRESS:PORT of this machine; IPv6 addresses in brackets; port 0 takes a free one.
        token_file: Secret of all members. Without it, anyone who reaches the port can join.
        new_token: Make such a file, readable by its owner only, and exit.
        public: Allow listening on all addresses.
        relay: Relay the messages of members that join with relay=True, which then need no open
            port.
        store: tcp://HOST:PORT of the meeting place, on another machine: only relay for its members.
            Two members use the relay that both reach soonest.
        announce: ADDRESS:PORT at which members reach this relay, if it is not --bind.
        cert: Certificate in PEM form for the relay, so that its traffic is encrypted; members pass
            its CA as ca=.
        key: Its private key, unless it is in the same file.
        page: Port of a live page of the members, at the same address; it is read only. Beyond
            loopback its link ends in a token of its own.
        journal: File that keeps the runs for a host that is started again; by default one for each
            address in ~/.local/state/thinwire, unless the port is 0.
        recover: If that file is lost: go on with the members that are back, also with half of them
            or fewer. Only if the others have ended.
        end: Let all members of this run leave after their next averaging, and exit. The host runs
            at --bind.
        quiet: Print only the address on which it listens.
    """
    if new_token is not None:
        if bind is not None or token_file is not None or relay:
            raise ValueError("--new-token makes a file and ends: leave the other options out")
        make_token(new_token)
        print(f"{new_token}: mode 600, copy it to every machine, such as with scp -p")
        return
    if bind is None:
        raise ValueError("--bind is missing: an address of this machine, such as 10.0.0.1:29400")
    requested = parse_address("bind", bind, scheme=False)
    token = None if token_file is None else read_token(token_file)
    if (cert or key or store) and not relay:
        raise ValueError("--cert, --key and --store are for the relay: give --relay too")
    if key and not cert:
        raise ValueError("--cert is missing: the certificate that belongs to --key")
    is_host = journal or recover or end or page is not None
    if (announce and not store) or (store and (is_host or (public and not announce))):
        raise ValueError(
            "--store needs --announce with --public, and takes no --journal, --recover, --page or "
            "--end: these are for the host of the store. --announce needs --store"
        )
    if end is not None:
        print(_ended(requested, end, token))
        return
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(_listener(requested, public=public))
        where = Address(*listener.getsockname()[:2])
        relaying = None
        if relay:
            # loads torch
            from thinwire.members.relay import Relay, certificate, relay_key, run_relay

            relaying = Relay(relay_key(token), certificate(cert, key) if cert else None)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        from thinwire.members.host import run_host

        def say(line: str) -> None:
            if not quiet:
                _print(line)

        kept = None if store else _journal(journal, requested, say)

        def ready(url: str) -> None:
            _print(f"listening on tcp://{where}")
            if kept is not None and kept.values:
                say(f"going on with the runs of {kept.path}")
            if relay:
                say(f"relaying for members with relay=True{f' of {store}' if store else ''}")
            if url:
                _print(f"page of the members: {url}")
            if token is None:
                say(
                    "no --token-file: anyone who reaches this port can join and write values that "
                    "members read. Make a token with --new-token"
                )
            address = ipaddress.ip_address(where.host)
            if address.is_global or address.is_unspecified:
                say(
                    "the internet may reach this address, and traffic is not encrypted: see "
                    "docs/security.md, and use a tunnel"
                )

        if relaying is not None and store is not None:
            run_relay(
                listener,
                relaying,
                store,
                parse_address("announce", announce or str(where), scheme=False),
                token,
                say=say,
                ready=ready,
                stop=stop,
            )
            return
        run_host(
            listener,
            token,
            say=say,
            ready=ready,
            stop=stop,
            page=None if page is None else Address(where.host, page),
            relay=relaying,
            journal=kept,
            recover=recover,
        )
        say("ended: members train on; start it again, so that others can join")


def _ended(host: Address, run: str, token: bytes | None) -> str:
    """Ask the members of a run to leave; return who they are."""
    from thinwire.members.kv import KeyValueView
    from thinwire.members.meeting import connect  # loads torch
    from thinwire.members.watcher import END_KEY

    kv = KeyValueView(connect(f"tcp://{host}", run, token, timedelta(seconds=_END_S)))
    members = kv.get(f"members/{kv.get('gen')}")
    if members is None:
        raise ValueError(f"--end {run}: the host at {host} knows no such run")
    kv.put(END_KEY, True)
    return f"run {run}: these leave after their next averaging: {', '.join(members['ids'])}"


def _journal(path: Path | None, bind: Address, say: Callable[[str], None]) -> "Journal | None":
    """Open the file of the runs; None if there is none."""
    from thinwire.members.server import Journal

    if path is None and bind.port == 0:
        return None
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "thinwire"
    name = re.sub(r"[^0-9A-Za-z.]", "-", f"host-{bind.host}-{bind.port}")
    try:
        return Journal(path or folder / name)
    except OSError as error:
        if path is not None:
            raise ValueError(f"--journal {path}: {error.strerror or error}") from None
        say(f"the runs are not kept in a file: {error}. Give --journal")
        return None


def _print(line: str) -> None:
    """Print a line; ignore a failure, since members need the host and not its log."""
    # the reader has closed the pipe, or the disk is full; print would fail again at exit
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode(errors="backslashreplace"))


def _listener(requested: Address, *, public: bool) -> socket.socket:
    name = _EVERYWHERE.get(requested.host, requested.host)
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        raise ValueError(
            f"bind={str(requested)!r} has a name: give an address, such as 10.0.0.1, so that no "
            "other interface listens"
        ) from None
    if address.is_unspecified and not public:
        raise ValueError(
            f"bind={str(requested)!r} means all addresses of this machine, also those that the "
            "internet reaches: give the one that members use, or --public"
        )
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((name, requested.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno, error.strerror or error)
        raise ValueError(f"bind={str(requested)!r}: {reason}") from None
    return listener
