"""Network of this machine: interfaces, addresses, and listening processes."""

import contextlib
import functools
import importlib.util
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from thinwire._watchdog import addresses_of

LOOK_UP_S = 4.0
"""Time limit for one name. By default, resolvers try the next server after 5 s."""


class Resolved(NamedTuple):
    """Addresses of a name."""

    addresses: tuple[str, ...]
    why_not: str
    """Cause of the failure; empty if there are addresses."""


@functools.cache
def resolved(host: str) -> Resolved:
    """Return the addresses of a name, or the cause of failure; wait `LOOK_UP_S` at most."""
    try:
        return Resolved(addresses_of(host, LOOK_UP_S), "")
    except OSError as error:
        return Resolved((), error.strerror or str(error))


_INTERNAL = re.compile(r"(docker\d+|br-[0-9a-f]{12}|virbr\d+|cni\d+|lxcbr\d+|podman\d+)")
_SOMEWHERE = "203.0.113.1"
"""An address reserved for documentation; nothing is sent to it."""


@dataclass(frozen=True)
class Interface:
    """One network interface; its MTU is 0 if unknown, link-local addresses are left out."""

    name: str
    mtu: int
    up: bool
    addresses: tuple[str, ...]

    @property
    def internal(self) -> bool:
        """True for a bridge to containers or virtual machines of this machine."""
        return _INTERNAL.fullmatch(self.name) is not None


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces of this network namespace; addresses need Linux and pyroute2."""
    if sys.platform != "linux" or importlib.util.find_spec("pyroute2") is None:
        return tuple(Interface(name, 0, True, ()) for _, name in socket.if_nameindex())
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        held: dict[int, list[str]] = {}
        for row in ip.get_addr():
            address = row.get("IFA_LOCAL") or row.get("IFA_ADDRESS")
            if not ipaddress.ip_address(address).is_link_local:
                held.setdefault(row["index"], []).append(address)
        return tuple(
            Interface(
                row.get("IFLA_IFNAME"),
                int(row.get("IFLA_MTU")),
                bool(row["flags"] & 1),
                tuple(held.get(row["index"], ())),
            )
            for row in ip.get_links()
        )


def is_loopback(address: str) -> bool:
    """Return True for a loopback address, which means the local machine everywhere."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def source_towards(host: str = "") -> str:
    """Return the source address of packets to a host, or to the internet by default."""
    for address in resolved(host or _SOMEWHERE).addresses[:1]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""


_LISTEN = "0A"
_PROC = Path("/proc")


class Listening(NamedTuple):
    """Processes that have torch loaded and listen."""

    everywhere: tuple[str, ...]
    """Listeners on every address, such as "port 29500: pid 7 (torchrun train.py)"."""
    outward: tuple[str, ...]
    """Listeners on an external address, such as "10.0.0.1:29400: pid 7 (thinwire host ...)"."""


def listening() -> Listening:
    """Return the listening processes of this user, except this one."""
    ends = {
        inode: (_as_text(address), port)
        for address, port, state, inode in _sockets()
        if state == _LISTEN
    }
    found: list[tuple[str, int, str]] = []
    for folder in _PROC.glob("[0-9]*"):
        try:
            found += _sockets_of(folder, ends)
        except OSError:  # it has ended meanwhile, or does not let itself be looked at
            continue
    everywhere: dict[str, set[int]] = {}
    outward = set()
    for address, port, process in found:
        if ipaddress.ip_address(address).is_unspecified:
            everywhere.setdefault(process, set()).add(port)
        elif not is_loopback(address):
            where = f"[{address}]" if ":" in address else address
            outward.add(f"{where}:{port}: {process}")
    return Listening(
        tuple(
            sorted(
                f"port {', '.join(map(str, sorted(ports)))}: {process}"
                for process, ports in everywhere.items()
            )
        ),
        tuple(sorted(outward)),
    )


def _sockets_of(folder: Path, ends: Mapping[str, tuple[str, int]]) -> list[tuple[str, int, str]]:
    """Return address, port and name of each socket on which a torch process of ours listens."""
    if folder.stat().st_uid != os.getuid() or folder.name == str(os.getpid()):
        return []
    links = {str(link.readlink()) for link in (folder / "fd").iterdir()}
    own = {endpoint for inode, endpoint in ends.items() if f"socket:[{inode}]" in links}
    if not own or "libtorch" not in (folder / "maps").read_text():
        return []
    program = program_of((folder / "cmdline").read_bytes().decode(errors="replace").split("\0"))
    return [(*endpoint, f"pid {folder.name} ({program})") for endpoint in own]


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


def _as_text(address: str) -> str:
    """Decode an address of /proc/net: hexadecimal 32-bit words in native byte order."""
    raw = bytes.fromhex(address)
    words = [int.from_bytes(raw[at : at + 4], "big") for at in range(0, len(raw), 4)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed)


def ports_in_use() -> int:
    """Return the number of TCP ports in use on this machine."""
    return len({port for _, port, _, _ in _sockets()})


def _sockets() -> Iterator[tuple[str, int, str, str]]:
    """Yield local address, port, state and inode of every TCP socket."""
    for name in ("tcp", "tcp6"):
        path = _PROC / "net" / name
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                words = line.split()
                address, _, port = words[1].partition(":")
                yield address, int(port, 16), words[3], words[9]
