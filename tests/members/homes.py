"""Networks of homes: a router each, whose masquerade lets connections out and none in."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.api import Link, inside, network, new_namespace
from tests.api import netns_Network as Network
from tests.faults.lines import blackhole
from tests.lab.namespaces import entered, needs_netns
from tests.ranks import Pool

__all__ = ["at_home", "homes", "needs_homes", "walled"]

_ROUTER, _HOME = "192.168.1.1", "192.168.1.2"
_MASQUERADE = (
    "table ip home {\nchain out { type nat hook postrouting priority 100; "
    'oifname "eth0" masquerade; }\n}'
)


def needs_homes(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs namespaces and the command `nft`."""
    missing = shutil.which("nft") is None
    return needs_netns(pytest.mark.skipif(missing, reason="needs the command nft")(test))


@contextlib.contextmanager
def homes(count: int, link: Link) -> Iterator[tuple[Network, list[int]]]:
    """Yield a network, whose first worker is open, and namespaces behind the others' routers."""
    with network(1 + count, link) as net, contextlib.ExitStack() as ends:
        found = []
        for router in net.namespace_fds[1:]:
            found.append(new_namespace())
            ends.callback(os.close, found[-1])
            inside(router, partial(_make_router, found[-1]))
            inside(found[-1], _settle)
        yield net, found


def _make_router(home: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("add", ifname="lan", kind="veth", peer={"ifname": "eth0", "net_ns_fd": home})
        lan = ip.link_lookup(ifname="lan")[0]
        ip.addr("add", index=lan, address=_ROUTER, prefixlen=24)
        ip.link("set", index=lan, state="up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    subprocess.run(["nft", "-f", "-"], input=_MASQUERADE, text=True, check=True)


def _settle() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        wire = ip.link_lookup(ifname="eth0")[0]
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        ip.addr("add", index=wire, address=_HOME, prefixlen=24)
        ip.link("set", index=wire, state="up")
        ip.route("add", dst="default", gateway=_ROUTER)


@contextlib.contextmanager
def walled(count: int, link: Link) -> Iterator[tuple[Network, list[int]]]:
    """Yield the same, where there is no masquerade: the others' packets are lost instead."""
    with network(1 + count, link) as net:
        members = range(1, 1 + count)
        for own in members:
            others = [net.addresses[other] for other in members if other != own]
            blackhole(net.namespace_fds[own], others)
        yield net, list(net.namespace_fds[1:])


def at_home(
    ranks: Pool, namespaces: list[int], function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """`function(rank, size, *args)` of one rank in each namespace."""
    paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in namespaces]
    return ranks.run(_inside, paths, function, args, size=len(paths), group=False, **options)


def _inside(
    rank: int, size: int, paths: list[str], function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    with entered(paths[rank]):
        return function(rank, size, *args)
