"""Findings, and the checks of a single machine; without torch."""

from __future__ import annotations

import contextlib
import errno
import socket
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from thinwire._wording import closest
from thinwire.tools.doctor.interfaces import PROXIES, is_loopback, resolved

if TYPE_CHECKING:
    from thinwire.tools.doctor.machine import Machine

Level = Literal["ok", "note", "wrong"]
_LEVEL_WIDTH, _CHECK_WIDTH, _LEAST_WIDTH = 7, 13, 60


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    level: Level
    check: str
    found: str
    advice: str = ""


ok, note = partial(Finding, "ok"), partial(Finding, "note")
wrong = partial(Finding, "wrong")
"""Constructors of findings by level: correct, harmless, and to be fixed."""


def judged(good: bool, check: str, found: str, advice: str) -> Finding:
    """Return a finding that is correct, or harmless with an advice."""
    return ok(check, found) if good else note(check, found, advice)


def status_of(findings: Iterable[Finding]) -> int:
    """Return the exit status: 1 if something is wrong, else 0."""
    return int(any(finding.level == "wrong" for finding in findings))


def as_text(findings: Iterable[Finding], *, quiet: bool, width: int) -> str:
    """Return lines for the terminal; `quiet` keeps only those that are wrong."""
    # names, ports and commands stay in one piece
    wrap = partial(
        textwrap.wrap,
        width=max(width, _LEAST_WIDTH),
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = list[str]()
    for one in findings:
        if not quiet or one.level == "wrong":
            head = f"{one.level:<{_LEVEL_WIDTH}}{one.check:<{_CHECK_WIDTH}}"
            blank = " " * len(head)
            lines += wrap(one.found, initial_indent=head, subsequent_indent=blank)
            if one.advice:
                advice = f"-> {one.advice}"
                lines += wrap(advice, initial_indent=blank, subsequent_indent=f"{blank}   ")
    return "\n".join(lines)


def document(title: str, found: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the findings as JSON data."""
    return {
        "title": title,
        "status": status_of(found),
        "seconds": round(seconds, 2),
        "findings": [*map(asdict, found)],
    }


_FEWEST_FILES, _FILES_PER_RANK = 1024, 16
_FEWEST_PORTS = 1000
_SLOW_NAMING_S = 0.5
_BY_TORCHRUN = "in the environment of torchrun on this machine"


def machine_findings(
    machine: Machine, *, ranks: int = 1, ranks_here: int = 1, others: bool | None = None
) -> Iterator[Finding]:
    """Return the findings on a machine; `others` is True if ranks are on other machines too."""
    yield from _naming(machine)
    up = [one for one in machine.interfaces if one.up and one.addresses]
    texts = [f"{one.name} {', '.join(one.addresses)} (MTU {one.mtu})" for one in up]
    yield ok("interfaces", "; ".join(texts) or ", ".join(one.name for one in machine.interfaces))
    yield from _gloo(machine, others)
    yield from _listeners(machine)
    if machine.congestion:
        yield ok("congestion", f"TCP uses {machine.congestion}")
    yield from _limits(machine, ranks)
    yield _threads(machine, ranks_here)
    yield from _environment(machine)
    yield ok("versions", ", ".join(f"{name} {value}" for name, value in machine.versions.items()))


def has_remote_ranks(meeting: str, own: tuple[str, ...]) -> bool | None:
    """Return True if ranks are on other machines, judged by MASTER_ADDR; None if unknown."""
    # no address is a finding of its own
    addresses = resolved(meeting).addresses[:1] if meeting else ()
    return True if any(a not in own and not is_loopback(a) for a in addresses) else None


def _naming(machine: Machine) -> Iterator[Finding]:
    if machine.names_error:
        yield note(
            "host",
            f"the name of this host, {machine.host}, does not resolve: {machine.names_error}",
            f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME {_BY_TORCHRUN}",
        )
    else:
        yield ok("host", f"{machine.host} resolves to {', '.join(machine.names)}")
    if machine.naming_s >= _SLOW_NAMING_S:
        yield note(
            "name server",
            f"takes {machine.naming_s:.1f} s or more to answer that an address has no name: "
            "torch asks for each connection to its store and waits (pytorch 159596)",
            "fix /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1' in the environment",
        )


def _gloo(machine: Machine, others: bool | None) -> Iterator[Finding]:
    named = machine.environment.get("GLOO_SOCKET_IFNAME", "")
    by = f"by GLOO_SOCKET_IFNAME={named}" if named else "by the name of the host"
    if machine.gloo_error:
        yield wrong("gloo", f"gloo has no address, {by}: {machine.gloo_error}", _cure(machine))
    for address in machine.gloo:
        one = machine.interface_of(address)
        announced = f"gloo announces {address}{f' of {one.name}' if one else ''}, {by}"
        bridge = one is not None and one.internal
        if others is False or not (bridge or is_loopback(address)):
            yield ok("gloo", announced)
            continue
        why = "ranks on other machines cannot reach it"
        if bridge:
            why = "a bridge inside this machine, which others cannot reach"
        cure = f"for several machines: {_cure(machine)}"
        yield (wrong if others else note)("gloo", f"{announced}: {why}", cure)
    if "TP_SOCKET_IFNAME" in machine.environment and not named:
        yield note(
            "gloo",
            "TP_SOCKET_IFNAME is set, GLOO_SOCKET_IFNAME is not: only torch's RPC reads the first",
            f"set GLOO_SOCKET_IFNAME {_BY_TORCHRUN}",
        )


def _cure(machine: Machine) -> str:
    named = machine.environment.get("GLOO_SOCKET_IFNAME", "")
    outward = machine.interface_of(machine.route)
    if outward is not None and not is_loopback(machine.route):
        name = f"GLOO_SOCKET_IFNAME={outward.name}"
        return f"set {name} {_BY_TORCHRUN}: this interface leads to the others"
    up = [one for one in machine.interfaces if one.up and one.addresses]
    usable = [one.name for one in up or machine.interfaces]
    return (
        f"set GLOO_SOCKET_IFNAME {_BY_TORCHRUN} to the interface that leads to the others, one of "
        f"{', '.join(usable)}{closest(named, usable)}"
    )


def _listeners(machine: Machine) -> Iterator[Finding]:
    if machine.listeners:
        yield note(
            "listeners",
            f"on all addresses: {'; '.join(machine.listeners)}",
            "torch's store has no authentication: let a firewall admit only your machines",
        )
    else:
        yield ok("listeners", "no torch process of this user listens on all addresses")
    if machine.public:
        yield note(
            "listeners",
            f"on an address that the internet may reach: {'; '.join(machine.public)}",
            "torch does not encrypt its traffic: use a tunnel, or let a firewall admit only "
            "your machines",
        )
    if machine.private:
        yield ok("listeners", f"on one address: {'; '.join(machine.private)}")


def _limits(machine: Machine, ranks: int) -> Iterator[Finding]:
    first, last = machine.ports
    if last:
        free = last - first + 1 - machine.ports_used
        ports = f"gloo takes ports {first} to {last} (net.ipv4.ip_local_port_range), {free} free"
        widen = "widen the range: sysctl net.ipv4.ip_local_port_range"
        yield judged(free >= _FEWEST_PORTS, "ports", ports, widen)
    needed = max(_FEWEST_FILES, _FILES_PER_RANK * ranks)
    files = f"a process may have {machine.open_files} files and sockets open"
    yield judged(machine.open_files >= needed, "open files", files, f"ulimit -n {needed}")


def _threads(machine: Machine, ranks_here: int) -> Finding:
    named = machine.environment.get("OMP_NUM_THREADS", "")
    setting = f"{machine.cores} cores, OMP_NUM_THREADS is {named or 'not set'}"
    if not named.isdigit():
        return ok("threads", f"{setting}; torchrun sets 1 for several ranks on a machine")
    setting = f"{setting} for each of {ranks_here} ranks here"
    fair = max(machine.cores // ranks_here, 1)
    change = f"set OMP_NUM_THREADS={fair}"
    if int(named) * ranks_here > machine.cores:
        fewer = change if int(named) > fair else "start fewer ranks here"
        return note("threads", f"{setting}: more threads than cores", fewer)
    if 4 * int(named) <= fair:
        return note("threads", f"{setting}: cores stay idle if the CPU trains", change)
    return ok("threads", setting)


def _environment(machine: Machine) -> Iterator[Finding]:
    set_ones = ", ".join(f"{k}={v}" for k, v in machine.environment.items() if "TIMEOUT" in k)
    yield ok("time-outs", set_ones or "none in the environment; gloo's default is 30 minutes")
    if machine.environment.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        yield note(
            "environment",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: with torch 2.13, DDP crashes under it on CPUs",
            "unset it; thinwire has checks of its own",
        )
    if PROXIES & {name.upper() for name in machine.environment}:
        yield note(
            "proxy",
            "a proxy is set, such as of a tunnel in user space: torch and gloo do not use it",
            "train with members: `thinwire join` passes the proxy of HTTPS_PROXY",
        )
    if machine.clock_kept is False:
        yield note(
            "clock",
            "no time service sets this machine's clock",
            "start chrony or systemd-timesyncd; training needs no clock, but logs and "
            "certificates do",
        )
    else:
        yield ok("clock", "a time service sets it" if machine.clock_kept else "unknown")


_CHECK = "store"
_CURES_OF_STORE = {
    "no route": "run `ip route get` with that address, or use an address that has a route",
    "refused": "torchrun on rank 0's machine has ended, or a firewall there refuses this port",
}
_OPEN_STORE = "let the firewalls between accept TCP on this port at rank 0's machine"
_REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "time-out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.EADDRNOTAVAIL: "no route",
    errno.EINVAL: "no route",  # what a blackhole route answers
    errno.EACCES: "forbidden by this machine",
    errno.EPERM: "forbidden by this machine",
}


def one_wait_s(limit_s: float) -> float:
    """Return seconds for one connection, if all checks together may take `limit_s`."""
    return min(0.1 * limit_s, 5.0)


def why_not(error: OSError) -> str:
    """Return the cause of a failed connection, in a word or two."""
    if isinstance(error, TimeoutError):
        return "time-out"
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


def meeting_point(
    environment: Mapping[str, str], own: tuple[str, ...], patience_s: float, *, started: bool
) -> Finding:
    """Check the address of the ranks' store in the environment."""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not host and not port:
        return ok(_CHECK, "MASTER_ADDR and MASTER_PORT are not set; torchrun sets them")
    if not host or not port:
        there, away = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        return wrong(
            _CHECK, f"{there} is set and {away} is not", f"set {away}, or start with torchrun"
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return wrong(_CHECK, f"MASTER_PORT is {port!r}", "use a number from 1 to 65535")
    addresses, why_not_found = resolved(host)
    if not addresses:
        return wrong(
            _CHECK,
            f"MASTER_ADDR={host} does not resolve: {why_not_found}",
            "set the address of rank 0's machine, or a name that every machine resolves",
        )
    address = addresses[0]
    where = f"{host}:{port}" if host == address else f"{host}:{port} ({address})"
    here = address in own or is_loopback(address)
    return _tried(where, (address, int(port)), patience_s, started=started, here=here)


def _tried(
    where: str, address: tuple[str, int], patience_s: float, *, started: bool, here: bool
) -> Finding:
    try:
        with socket.create_connection(address, timeout=patience_s):
            return ok(_CHECK, f"{where} answers")
    except OSError as error:
        reason = why_not(error)
    if reason != "refused" or started:
        text = f"{where} cannot be reached from this machine: {reason}"
        return wrong(_CHECK, text, _CURES_OF_STORE.get(reason, _OPEN_STORE))
    if here:
        with contextlib.suppress(OSError), socket.create_server(address):
            return ok(_CHECK, f"{where} is this machine, and the port is free")
        text = f"{where} is this machine, and the port is taken"
        return wrong(_CHECK, text, "choose another port")
    return note(
        _CHECK,
        f"{where} refuses connections: nothing listens there yet",
        "if torchrun already runs there, a firewall refuses: let it accept this port",
    )
