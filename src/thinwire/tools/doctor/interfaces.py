"""Network of this machine: interfaces, addresses, and listening processes."""

import contextlib
import functools
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from thinwire._watchdog import addresses_of
from thinwire._wording import host_port

PROXIES = {"HTTPS_PROXY", "ALL_PROXY"}
"""Variables of programs that pass a proxy, in either case."""
LOOK_UP_S = 4.0
"""Time limit for one name. By default, resolvers try the next server after 5 s."""


class Resolved(NamedTuple):
    """Addresses of a name."""

    addresses: list[str]
    why_not: str
    """Cause of the failure; empty if there are addresses."""


@functools.cache
def resolved(host: str) -> Resolved:
    """Return the addresses of a name, or the cause of failure; wait `LOOK_UP_S` at most."""
    try:
        return Resolved([*addresses_of(host, LOOK_UP_S)], "")
    except OSError as error:
        return Resolved([], error.strerror or str(error))


_INTERNAL = re.compile(r"(docker\d+|br-[0-9a-f]{12}|virbr\d+|cni\d+|lxcbr\d+|podman\d+)")
_SOMEWHERE = "203.0.113.1"
"""An address reserved for documentation; nothing is sent to it."""


@dataclass(frozen=True)
class Interface:
    """One network interface; its MTU is 0 if unknown, link-local addresses are left out."""

    name: str
    mtu: int
    up: bool
    addresses: list[str]

    @property
    def internal(self) -> bool:
        """True for a bridge to containers or virtual machines of this machine."""
        return _INTERNAL.fullmatch(self.name) is not None


def interfaces() -> list[Interface]:
    """Return the interfaces of this network namespace."""
    held = {
        name: [
            row.address
            for row in rows
            if row.family in (socket.AF_INET, socket.AF_INET6)
            and not ipaddress.ip_address(row.address).is_link_local
        ]
        for name, rows in psutil.net_if_addrs().items()
    }
    return [
        Interface(name, row.mtu, row.isup, held.get(name, []))
        for name, row in psutil.net_if_stats().items()
    ]


def is_loopback(address: str) -> bool:
    """Return True for a loopback address, which means the local machine everywhere."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an address, for a socket."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def source_towards(host: str = "") -> str:
    """Return the source address of packets to a host, or to the internet by default."""
    for address in resolved(host or _SOMEWHERE).addresses[:1]:
        probe = socket.socket(family_of(address), socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""


class Listening(NamedTuple):
    """Processes that have torch loaded and listen."""

    everywhere: list[str]
    """Listeners on every address, such as "port 29500: pid 7 (torchrun train.py)"."""
    public: list[str]
    """Listeners on an address of the internet, such as "8.8.8.8:29400: pid 7 (thinwire host)"."""
    private: list[str]
    """Listeners on another address that is not of loopback."""


def listening() -> Listening:
    """Return the listening processes of this user, except this one."""
    everywhere, public, private = set[str](), set[str](), set[str]()
    for row in psutil.net_connections("tcp"):
        if row.status == psutil.CONN_LISTEN and row.pid not in (None, os.getpid()):
            # it may have ended meanwhile, or not let itself be looked at
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(row.pid)
                loaded = any("libtorch" in part.path for part in process.memory_maps())
                if not loaded or process.uids().real != os.getuid():
                    continue
                process_text = f"pid {row.pid} ({program_of(process.cmdline())})"
                address, port = row.laddr
                where = ipaddress.ip_address(address)
                if where.is_unspecified:
                    everywhere.add(f"port {port}: {process_text}")
                elif not where.is_loopback:
                    found = public if where.is_global else private
                    found.add(f"{host_port(address, port)}: {process_text}")
    return Listening(*map(sorted, (everywhere, public, private)))


def program_of(command: Sequence[str]) -> str:
    """Return program and script or module of a command line; the rest may be secret."""
    words = iter(command)
    program = next(words, "").partition(" ")[0]  # of some that name themselves, options follow
    name = Path(program).name
    if not name.startswith("python"):
        return name
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return f"{name} -m {next(words, '')}"
        elif word == "-c":
            return f"{name} -c"
        elif not word.startswith("-"):
            script = Path(word).name
            return f"{script} {next(words, '')}" if script == "thinwire" else f"{name} {script}"
    return name


def ports_in_use() -> int:
    """Return the number of TCP ports in use on this machine."""
    return len({row.laddr.port for row in psutil.net_connections("tcp")})
