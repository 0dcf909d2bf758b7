"""The network interfaces of this machine, their addresses, and which one leads to another."""

import contextlib
import functools
import importlib.util
import ipaddress
import re
import socket
import sys
from dataclasses import dataclass
from typing import NamedTuple

from thinwire._aside import addresses_of

__all__ = [
    "LOOK_UP_S",
    "Interface",
    "Resolved",
    "interfaces",
    "is_loopback",
    "resolved",
    "source_towards",
]

LOOK_UP_S = 4.0
"""For one name. Resolvers begin again with the next server after 5 s, where nobody says else."""


class Resolved(NamedTuple):
    """The addresses of a name."""

    addresses: tuple[str, ...]
    why_not: str
    """Empty where there are addresses."""


@functools.cache
def resolved(host: str) -> Resolved:
    """The addresses of a name, or why there are none; waits `LOOK_UP_S` at most."""
    try:
        return Resolved(addresses_of(host, LOOK_UP_S), "")
    except OSError as error:
        return Resolved((), error.strerror or str(error))


_INTERNAL = re.compile(r"(docker\d+|br-[0-9a-f]{12}|virbr\d+|cni\d+|lxcbr\d+|podman\d+)")
_SOMEWHERE = "203.0.113.1"
"""An address kept for documentation: nobody has it, and nothing is sent to it."""


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        name: Such as eth0.
        mtu: Bytes of the largest packet; 0 where it cannot be seen.
        up: Whether it is switched on.
        addresses: Of IPv4 and IPv6, without those of a link.
    """

    name: str
    mtu: int
    up: bool
    addresses: tuple[str, ...]

    @property
    def internal(self) -> bool:
        """Whether it is a bridge for the containers or virtual machines of this machine."""
        return _INTERNAL.fullmatch(self.name) is not None


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this network namespace; without addresses where there is no Linux, or no
    pyroute2.
    """
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
    """Whether the address means this machine on every machine."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def source_towards(host: str = "") -> str:
    """The address of this machine that packets to `host` leave from; empty where there is no way.

    Args:
        host: Name or address; empty for whatever is outside. Nothing is sent to it.
    """
    for address in resolved(host or _SOMEWHERE).addresses[:1]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return ""
