"""Anonymous network namespaces, one per worker, joined by a bridge in one of their own.

A namespace here has no name and no process of its own: an open file descriptor of the caller holds
it, and the workers inside do. When both are gone, by whatever way (an exception, Ctrl-C, SIGKILL),
the kernel takes the namespace away and with it every interface inside. The network of the host is
never touched, so nothing can be left behind in it.

    worker 0  eth0 [tbf] ------ port0 [tbf]  bridge  port1 [tbf] ------ [tbf] eth0  worker 1
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from thinwire.tools.network.link import FASTEST_BIT_S, Link
from thinwire.tools.network.namespaces import (
    inside,
    interface_bytes,
    limit_rate,
    new_namespace,
    quiet_ipv6,
)

__all__ = ["Network", "network", "why_unavailable"]

_PREFIX = "10.77.0."
_DELAYED_BIT_S = 1e8  # what the process that delays packets carries without losing any


@dataclass(frozen=True)
class Network:
    """The network that workers run in.

    Attributes:
        namespace_fds: One open descriptor per worker, for `enter_network`.
        addresses: IPv4 address of each worker.
        hub_fd: Namespace in which the far ends of the links are.
        link: What the links are limited to; their limits can be lifted for a while.
        interface: Name of the interface inside every worker's namespace.
    """

    namespace_fds: tuple[int, ...]
    addresses: tuple[str, ...]
    hub_fd: int
    link: Link
    interface: str = "eth0"

    def lift(self) -> None:
        """Make both ends of every link fast, or leave them as they are where they are faster."""
        fast_bit_s = _DELAYED_BIT_S if self.link.latency_s else FASTEST_BIT_S
        self._limit(replace(self.link, rate_bit_s=max(fast_bit_s, self.link.rate_bit_s or 0)))

    def limit(self) -> None:
        """Put the limit of the rate back."""
        self._limit(self.link)

    def bytes_sent(self) -> list[int]:
        """Bytes that each worker has sent over its link so far, with the headers of all layers."""
        return [inside(fd, lambda: interface_bytes(self.interface)[0]) for fd in self.namespace_fds]

    def _limit(self, link: Link) -> None:
        if self.link.rate_bit_s is None:
            return
        for fd in self.namespace_fds:
            inside(fd, lambda: _change_rates((self.interface,), link))
        inside(
            self.hub_fd,
            lambda: _change_rates([f"port{rank}" for rank in range(len(self.addresses))], link),
        )


def why_unavailable() -> str | None:
    """None where this process may make namespaces, or the reason why it may not, in a few words."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    try:
        import pyroute2  # noqa: F401
    except ImportError:
        return "needs the package pyroute2"
    try:
        os.close(new_namespace())
    except OSError as error:
        return f"needs root (CAP_SYS_ADMIN): {error.strerror}"
    return None


@contextlib.contextmanager
def network(workers: int, link: Link) -> Iterator[Network]:
    """Namespaces for `workers`, joined and limited both ways; they vanish with their last user.

    Yields:
        The network, ready for use.

    Raises:
        OSError: The kernel refused; `why_unavailable` tells beforehand.
    """
    with contextlib.ExitStack() as stack:
        fds = []
        for _ in range(workers + 1):
            fds.append(new_namespace())
            stack.callback(os.close, fds[-1])
        hub_fd, worker_fds = fds[0], tuple(fds[1:])
        addresses = tuple(f"{_PREFIX}{rank + 1}" for rank in range(workers))
        if link.latency_s:
            from thinwire.tools.network.delay import delayed_links

            stack.enter_context(delayed_links(hub_fd, worker_fds, addresses, link))
        else:
            inside(hub_fd, lambda: _build_bridge(worker_fds, link))
            for fd, address in zip(worker_fds, addresses, strict=True):
                inside(fd, lambda address=address: _build_worker_side(address, link))  # type: ignore[misc]
        yield Network(worker_fds, addresses, hub_fd, link)


def _change_rates(interfaces: Iterable[str], link: Link) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        for name in interfaces:
            limit_rate(ip, ip.link_lookup(ifname=name)[0], link, "change")


def _build_bridge(worker_fds: tuple[int, ...], link: Link) -> None:
    from pyroute2 import IPRoute

    quiet_ipv6()
    with IPRoute() as ip:
        ip.link("add", ifname="bridge", kind="bridge")
        bridge = ip.link_lookup(ifname="bridge")[0]
        ip.link("set", index=bridge, state="up")
        for rank, fd in enumerate(worker_fds):
            ip.link(
                "add", ifname=f"port{rank}", kind="veth", peer={"ifname": "eth0", "net_ns_fd": fd}
            )
            port = ip.link_lookup(ifname=f"port{rank}")[0]
            ip.link("set", index=port, master=bridge, state="up")
            limit_rate(ip, port, link)


def _build_worker_side(address: str, link: Link) -> None:
    from pyroute2 import IPRoute

    quiet_ipv6()
    with IPRoute() as ip:
        loopback, wire = ip.link_lookup(ifname="lo")[0], ip.link_lookup(ifname="eth0")[0]
        ip.link("set", index=loopback, state="up")
        ip.addr("add", index=wire, address=address, prefixlen=24)
        ip.link("set", index=wire, state="up")
        limit_rate(ip, wire, link)
