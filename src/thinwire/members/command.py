"""`thinwire host`: addresses and the token are checked before torch is loaded."""

import contextlib
import errno
import getpass
import ipaddress
import os
import re
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.members.code import (
    CODE_VARIABLE,
    Code,
    certificate,
    code_of_file,
    fingerprint_of,
    is_code,
    make_certificate,
    read_code,
)
from thinwire.members.credentials import Address, parse_address, read_token, write_private
from thinwire.members.credentials import new_token as make_token
from thinwire.members.host import require_run_name, run_host

if TYPE_CHECKING:
    from thinwire.members.relay import Relay
    from thinwire.members.server import Journal

EXAMPLES = """Examples:

thinwire host --run llm --bind 203.0.113.7:443 --relay

thinwire host --new-token token

thinwire host --bind 10.0.0.1:29400 --token-file token --page 8080

thinwire host --bind 10.0.0.1:443 --token-file token --relay --cert cert.pem

thinwire host --bind 10.0.0.2:443 --relay --store tcp://10.0.0.1:29400
"""
JOIN_EXAMPLES = """Examples:

thinwire join -- python train.py

thinwire join --code-file code -- python train.py --lr 0.01
"""
_BACKLOG = 512
_END_S = 10.0
_TOKEN = re.compile(rb"[0-9a-f]{64}")
_EVERYWHERE = {"*": "0.0.0.0"}
_REASONS: dict[int | None, str] = {
    errno.EADDRINUSE: "the port is in use: take another one, or end the process that uses it",
    errno.EADDRNOTAVAIL: "not an address of this machine: `ip address` lists its addresses",
    errno.EACCES: "not allowed: use a port from 1024 on, or run it as root",
}


def host(
    *,
    bind: str | None = None,
    run: str | None = None,
    token_file: Path | None = None,
    new_token: Path | None = None,
    public: bool = False,
    relay: bool = False,
    store: str | None = None,
    announce: str | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    page: int | None = None,
    journal: Path | None = None,
    recover: bool = False,
    end: str | None = None,
    quiet: bool = False,
) -> None:
    """Run the meeting place of runs whose members join and leave: tw.join names its address.

    It listens on the given address only, prints a line when the members of a run change, and ends
    on Ctrl-C; members train on meanwhile. Started again at the same address with the same token,
    it goes on with its runs. Without --run traffic is not encrypted: see docs/security.md.

    Args:
        bind: ADDRESS:PORT of this machine; IPv6 addresses in brackets; port 0 takes a free one.
        run: Print the line with which other machines join this run, and its code: a secret. Only
            on a terminal; else the code is written to a file.
        token_file: Secret of all members. Without it, and --run, anyone who reaches the port can
            join.
        new_token: Make such a file, readable by its owner only, and exit. With --run, replace it,
            which ends the old code, and go on.
        public: Allow listening on all addresses.
        relay: Relay the messages of members that join with relay=True, which then need no open
            port.
        store: tcp://HOST:PORT of the meeting place, on another machine: only relay for its members.
            Two members use the relay that both reach soonest.
        announce: ADDRESS:PORT at which members reach this relay, or this host with --run, if it is
            not --bind.
        cert: Certificate in PEM form for the relay, so that its traffic is encrypted; members pass
            its CA as ca=. With --run it is made if it is not given, and members know it by the
            code.
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
    if new_token is not None and run is None:
        if bind is not None or token_file is not None or relay:
            raise ValueError("--new-token makes a file and ends: leave the other options out")
        make_token(new_token)
        print(f"{new_token}: mode 600, copy it to every machine, such as with scp -p")
        return
    if bind is None:
        raise ValueError("--bind is missing: an address of this machine, such as 10.0.0.1:29400")
    requested = parse_address("bind", bind, scheme=False)
    if (cert or key or store) and not (relay or run):
        raise ValueError("--cert, --key and --store are for the relay: give --relay too")
    _require_one_source(token_file, new_token, cert, key)
    is_host = any((run, journal, recover, end, page is not None))
    _require_fitting(run, store, announce, is_host=is_host, public=public)
    kept_at = _state(requested)
    if end is not None:
        print(
            _ended(
                requested,
                end,
                token_file or new_token or (_beside(kept_at, "token") if run else None),
            )
        )
        return
    stop = threading.Event()
    with _listener(requested, public=public) as listener:
        where = Address(*listener.getsockname()[:2])
        shown = parse_address("announce", announce or str(where), scheme=False)

        def say(line: str) -> None:
            if not quiet:
                _print(line)

        # before the secrets: a host that runs has this port or this file, and keeps its token
        kept = None if store else _journal(journal, requested, kept_at, say)
        if run is not None:
            token_file, cert = _secrets(run, kept_at, token_file, new_token, cert, key)
        if kept is not None and new_token is not None:
            kept.clear()  # of the old token
        token = None if token_file is None else read_token(token_file)
        tls = certificate(cert, key) if cert else None
        relaying = _relay(token, tls, cert) if relay else None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())

        def ready(url: str) -> None:
            _print(f"listening on tcp://{where}")
            if kept is not None and kept.values:
                say(f"going on with the runs of {kept.path}")
            if relay:
                say(f"relaying for members with relay=True{f' of {store}' if store else ''}")
            if url:
                _print(f"page of the members: {url}")
            if run is not None and cert is not None and token is not None:
                _share(Code(shown, run, token, fingerprint_of(cert), relay), kept_at, say)
            else:
                _warn(where, token, say)

        if relaying is not None and store is not None:
            from thinwire.members.relay import run_relay

            run_relay(listener, relaying, store, shown, token, say=say, ready=ready, stop=stop)
            return
        run_host(
            listener,
            token,
            say=say,
            ready=ready,
            stop=stop,
            page=None if page is None else Address(where.host, page),
            relay=relaying,
            tls=tls,
            journal=kept,
            recover=recover,
        )
        say("ended: members train on; start it again, so that others can join")


def _relay(token: bytes | None, tls: ssl.SSLContext | None, cert: Path | None) -> "Relay":
    from thinwire.members.relay import Relay, relay_key  # loads torch

    return Relay(relay_key(token), tls, fingerprint_of(cert) if cert else b"")


def _require_one_source(
    token_file: Path | None, new_token: Path | None, cert: Path | None, key: Path | None
) -> None:
    if key and not cert:
        raise ValueError("--cert is missing: the certificate that belongs to --key")
    if new_token and token_file:
        raise ValueError("--new-token makes the token of the run: leave --token-file out")


def _require_fitting(
    run: str | None, store: str | None, announce: str | None, *, is_host: bool, public: bool
) -> None:
    if announce and not (store or run):
        raise ValueError("--announce is for --run, and for a relay with --store")
    if public and (store or run) and not announce:
        raise ValueError("--announce is missing: the ADDRESS:PORT at which members reach this host")
    if store and is_host:
        raise ValueError(
            "--store takes no --run, --journal, --recover, --page or --end: these are for the host "
            "of the store"
        )


def _warn(where: Address, token: bytes | None, say: Callable[[str], None]) -> None:
    """Say who can join or read."""
    if token is None:
        say(
            "no --token-file: anyone who reaches this port can join and write values that members "
            "read. Make a token with --new-token"
        )
    address = ipaddress.ip_address(where.host)
    if address.is_global or address.is_unspecified:
        say(
            "the internet may reach this address, and traffic is not encrypted: see "
            "docs/security.md, and use a tunnel, or --run"
        )


def join(*command: str, code_file: Path | None = None) -> None:
    """Start a command as a member of the run of a code, which `thinwire host --run` prints.

    The code is asked for, unless THINWIRE_CODE or --code-file has it. It is a secret. The script
    joins with tw.join() without an address.

    Args:
        command: The command and its arguments, after --. A code before it works too, but other
            users of this machine see command lines.
        code_file: File with the code, of mode 600.
    """
    given = command[:1] if command and is_code(command[0]) else ()
    program = command[len(given) :]
    if not program:
        raise ValueError("no command: thinwire join -- python train.py")
    if given:
        sys.stderr.write("thinwire: other users of this machine see the code; use --code-file\n")
        code = read_code(given[0])
    elif code_file is not None:
        code = code_of_file(code_file)
    elif text := os.environ.get(CODE_VARIABLE):
        code = read_code(text)
    elif sys.stdin.isatty():
        code = read_code(getpass.getpass("Code of the run: "))
    else:
        raise ValueError(f"no code: give --code-file FILE, or set {CODE_VARIABLE}")
    sys.stderr.write(f"thinwire: joining run {code.run} at {code.address}\n")
    try:
        os.execvpe(program[0], program, {**os.environ, CODE_VARIABLE: code.text()})
    except OSError as error:
        raise ValueError(f"{program[0]}: {error.strerror}") from None


def _secrets(
    run: str,
    kept_at: Path,
    token_file: Path | None,
    new_token: Path | None,
    cert: Path | None,
    key: Path | None,
) -> tuple[Path, Path]:
    """Return the files of token and certificate of a host; make those that are not there."""
    require_run_name(run)
    if cert is not None:
        certificate(cert, key)  # refused before the old token goes
    kept_at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if new_token is not None and new_token.exists():
        if not _TOKEN.fullmatch(read_token(new_token)):
            raise ValueError(f"{new_token} holds no token of --new-token, and was not changed")
        new_token.unlink()
    token = new_token or token_file or _beside(kept_at, "token")
    if token_file is None and not token.exists():
        make_token(token)
    if cert is None:
        cert = _beside(kept_at, "pem")
        if not cert.exists():
            make_certificate(cert)
    return token, cert


def _share(code: Code, kept_at: Path, say: Callable[[str], None]) -> None:
    """Show how others join: on a terminal, else in a file for its owner only."""
    say(f"others join run {code.run} with: thinwire join -- python train.py")
    if sys.stdout.isatty():
        say(f"the code, a secret that lets anyone in:\n{code.text()}")
        return
    file = _beside(kept_at, "code")
    file.unlink(missing_ok=True)
    write_private(file, f"{code.text()}\n".encode())
    say(f"the code, a secret that lets anyone in, is in {file}")


def _ended(host: Address, run: str, token_file: Path | None) -> str:
    """Ask the members of a run to leave; return who they are."""
    from thinwire.members.kv import KeyValueView
    from thinwire.members.meeting import connect  # loads torch
    from thinwire.members.watcher import END_KEY

    token = None if token_file is None else read_token(token_file)
    kv = KeyValueView(connect(f"tcp://{host}", run, token, timedelta(seconds=_END_S)))
    members = kv.get(f"members/{kv.get('gen')}")
    if members is None:
        raise ValueError(f"--end {run}: the host at {host} knows no such run")
    kv.put(END_KEY, True)
    return f"run {run}: these leave after their next averaging: {', '.join(members['ids'])}"


def _state(bind: Address) -> Path:
    """Return the file of the runs of a host; its secrets have the same name with a suffix."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "thinwire"
    return folder / re.sub(r"[^0-9A-Za-z.]", "-", f"host-{bind.host}-{bind.port}")


def _beside(kept_at: Path, suffix: str) -> Path:
    return kept_at.with_name(f"{kept_at.name}.{suffix}")


def _journal(
    path: Path | None, bind: Address, default: Path, say: Callable[[str], None]
) -> "Journal | None":
    """Open the file of the runs; None if there is none."""
    from thinwire.members.server import Journal

    if path is None and bind.port == 0:
        return None
    try:
        return Journal(path or default)
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
