"""Anonymous network namespaces, one per worker, joined by a bridge in another one.

A namespace here has no name and no process of its own: an open file descriptor of the caller holds
it, and the workers inside do. When both are gone, by whatever way (an exception, Ctrl-C, SIGKILL),
the kernel takes the namespace away and with it every interface inside. The network of the host is
never touched, so nothing can be left behind in it.

    worker 0  eth0 [tbf] ------ port0 [tbf]  bridge  port1 [tbf] ------ [tbf] eth0  worker 1

Kernels without `netem` cannot delay packets. With a latency each worker's interface is a TUN device
whose other end is a file; so is its port at the hub, which routes between the ports. `enter.py`
moves packets between the two ends and holds those on their way to the hub for the latency.
"""

import contextlib
import ctypes
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Self, TypeVar

from thinwire.tools.network import enter
from thinwire.tools.network.enter import CLONE_NEWNET, enter_network

_UNITS_BIT_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z/%]*)")
_SLOWEST_BIT_S = 1e4
FASTEST_BIT_S = 3e10  # the kernel's rate field ends at 2**32 bytes a second
_LATEST_S = 5.0
_MOST_LOST = 0.5
CONGESTIONS = ("cubic", "bbr")
"""Congestion controls that links know."""
_EXAMPLES = "write a number and a unit, such as 500kbit, 100mbit or 1gbit"


@dataclass(frozen=True)
class Link:
    """Limits of what one worker sends and receives over the emulated network."""

    rate_bit_s: float | None
    latency_s: float = 0.0
    emulated: bool = True
    down_bit_s: float | None = None
    loss: float = 0.0
    """Share of the packets that is lost, each way."""
    congestion: str | None = None
    """Congestion control of TCP; None for the machine's own."""

    @classmethod
    def parse(
        cls,
        link: str | None = None,
        latency: str = "0ms",
        *,
        up: str | None = None,
        down: str | None = None,
        loss: str = "0%",
        congestion: str | None = None,
        at_most: float = FASTEST_BIT_S,
    ) -> Self:
        """Read a link as the command line writes it: a rate ("100mbit", the default), "none"
        (emulated, but as fast as the machine) or "loopback"; or a rate for each direction.
        """
        if (up is None) != (down is None):
            given, missing = ("down", "up") if up is None else ("up", "down")
            raise ValueError(
                f"{given}={up or down!r} is given without {missing}; give both, or link"
            )
        if up is not None and link is not None:
            raise ValueError(f"link={link!r} and up={up!r}: link sets both directions; omit it")
        text = "100mbit" if link is None else link
        word = text.strip().lower()
        down_bit_s = None if down is None else parse_rate(down, at_most, "down")
        if up is not None:
            rate_bit_s: float | None = parse_rate(up, at_most, "up")
        else:
            rate_bit_s = None if word in ("none", "loopback") else parse_rate(text, at_most)
        made = cls(
            rate_bit_s,
            parse_latency(latency),
            word != "loopback",
            down_bit_s,
            parse_loss(loss),
            congestion,
        )
        if not made.emulated and (made.latency_s or made.loss or congestion is not None):
            raise ValueError(
                "latency, loss and congestion cannot be added to the link 'loopback'; use 'none' "
                "or a rate"
            )
        if congestion not in (None, *CONGESTIONS):
            raise ValueError(
                f"congestion={congestion!r} is not known; use {' or '.join(CONGESTIONS)}"
            )
        return made

    @property
    def receiving(self) -> Self:
        """The link at the rate at which a worker receives."""
        return self if self.down_bit_s is None else replace(self, rate_bit_s=self.down_bit_s)

    @property
    def slower_bit_s(self) -> float | None:
        """Rate of the slower direction, which an exchange among equals waits for."""
        return min(filter(None, (self.rate_bit_s, self.down_bit_s)), default=None)

    def seconds(self, sent_bytes: float) -> float:
        """Return the seconds of `sent_bytes` on this link at the full rate, without latency."""
        return 8 * sent_bytes / (self.slower_bit_s or inf)

    def __str__(self) -> str:
        """Return the link as written on the command line."""
        delay = f" + {self.latency_s * 1e3:g}ms" if self.latency_s else ""
        delay += f", {100 * self.loss:g}% lost" if self.loss else ""
        delay += f", {self.congestion}" if self.congestion else ""
        if not self.emulated:
            return "loopback"
        if self.down_bit_s is not None:
            return f"{_rate_text(self.rate_bit_s)} up and {_rate_text(self.down_bit_s)} down{delay}"
        return _rate_text(self.rate_bit_s) + delay


def parse_rate(text: str, at_most: float = FASTEST_BIT_S, name: str = "link") -> float:
    """Return bits per second from text such as "100mbit"; at least 10kbit."""
    rate = _number_with_unit(text, _UNITS_BIT_S)
    if rate is None:
        meant = _meant(text, _UNITS_BIT_S)
        raise ValueError(f"{name}={text!r} is not a rate; {meant}{_EXAMPLES}, or none, or loopback")
    if not _SLOWEST_BIT_S <= rate <= at_most:
        raise ValueError(
            f"{name}={text!r} is out of range; a rate from 10kbit to {_rate_text(at_most)} is "
            f"allowed; {_EXAMPLES}"
        )
    return rate


def parse_latency(text: str) -> float:
    """Return seconds from text such as "10ms"; at most 5s."""
    delay = 0.0 if text.strip() == "0" else seconds_of(text)
    if delay is None:
        raise ValueError(
            f"latency={text!r} is not a delay; {_meant(text, _UNITS_S)}write a number and a unit, "
            "such as 500us, 10ms or 0.1s"
        )
    if delay > _LATEST_S:
        raise ValueError(f"latency={text!r} is out of range; 0ms to 5s is allowed")
    return delay


def parse_loss(text: str) -> float:
    """Return a share from text such as "0.2%"; at most 50%."""
    share = _number_with_unit(text, {"%": 0.01})
    if share is None:
        raise ValueError(f"loss={text!r} is not a share of packets; write a percentage, as 0.2%")
    if share > _MOST_LOST:
        raise ValueError(f"loss={text!r} is out of range; 0% to {_MOST_LOST:.0%} is allowed")
    return share


def seconds_of(text: str) -> float | None:
    """Return seconds from text such as "10ms", or None."""
    return _number_with_unit(text, _UNITS_S)


def _meant(text: str, units: dict[str, float]) -> str:
    """Return a question about a number with the nearest unit, or an empty string."""
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None:
        return ""
    typed = match[2] or list(units)[1]  # of a number alone: mbit, or ms
    number = float(match[1]) * (8 if "B" in text else 1)  # bytes
    near = [unit for unit in units if unit.startswith(typed) or typed.startswith(unit[:2])]
    return f"did you mean {number:g}{near[0]}? " if near else ""


def _number_with_unit(text: str, units: dict[str, float]) -> float | None:
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]


def _rate_text(rate_bit_s: float | None) -> str:
    if rate_bit_s is None:
        return "none"
    unit = [unit for unit, factor in _UNITS_BIT_S.items() if rate_bit_s >= factor][-1]
    return f"{rate_bit_s / _UNITS_BIT_S[unit]:g}{unit}"


T = TypeVar("T")
_BURST_S, _QUEUE_S = 0.01, 0.1
_SMALLEST_BURST_BYTES, _LARGEST_BURST_BYTES = 4_000, 4_000_000


def new_namespace() -> int:
    """Create a network namespace; only the returned descriptor keeps it alive."""

    def make() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(make)


def inside(namespace_fd: int, work: Callable[[], T]) -> T:
    """Run `work` inside a namespace, on a thread of its own, and return its result."""

    def enter_and_work() -> T:
        enter_network(namespace_fd)
        return work()

    return _in_thread(enter_and_work)


def _in_thread(work: Callable[[], T]) -> T:
    # A namespace belongs to a thread: a thread that changes its own and ends leaves the process
    # where it was.
    with ThreadPoolExecutor(1, thread_name_prefix="thinwire-netns") as thread:
        return thread.submit(work).result()


def tbf_settings(rate_bit_s: float) -> dict[str, int]:
    """Return the arguments of pyroute2's `tbf` for a rate."""
    # a burst of ten milliseconds: large enough for the kernel's timer at 1 Gbit/s, and too small to
    # let a whole message through for free at slow rates
    rate_byte_s = rate_bit_s / 8
    burst = round(min(max(rate_byte_s * _BURST_S, _SMALLEST_BURST_BYTES), _LARGEST_BURST_BYTES))
    return {
        "rate": round(rate_byte_s),
        "burst": burst,
        "limit": burst + max(round(rate_byte_s * _QUEUE_S), 30_000),
    }


def limit_rate(ip: Any, index: int, link: Link, command: str = "add") -> None:
    """Limit the sending rate of an interface by a token bucket; "change" replaces its limit."""
    if link.rate_bit_s is not None:
        ip.tc(command, "tbf", index, handle=0x10000, **tbf_settings(link.rate_bit_s))


def interface_bytes(interface: str) -> int:
    """Return the bytes that an interface in this thread's namespace has sent, with headers."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): numbers.split() for name, numbers in (x.split(":") for x in lines)}
    return int(counts[interface][8])


def quiet_ipv6() -> None:
    """Keep the kernel's own IPv6 chatter out of the counters of this thread's namespace."""
    for scope in ("all", "default"):
        with contextlib.suppress(OSError):  # a kernel without IPv6 has no such file
            Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1")


_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Large packets, since a process that moves every one of them must not become the bottleneck; small
# ones on slow links, whose token bucket would never let a large one through.
_MTU, _SLOW_MTU, _SLOW_BIT_S = 9000, 1500, 2e7
_QUEUE_PACKETS = 10_000


def delayed_links(
    stack: contextlib.ExitStack,
    hub_fd: int,
    worker_fds: Sequence[int],
    addresses: tuple[str, ...],
    link: Link,
) -> None:
    """Build the links and run the forwarder until `stack` ends; the devices vanish with it."""
    ends: list[int] = []
    for rank, (fd, address) in enumerate(zip(worker_fds, addresses, strict=True)):
        ends.append(inside(fd, partial(_worker_end, address, link)))
        stack.callback(os.close, ends[-1])
        ends.append(inside(hub_fd, partial(_hub_end, rank, address, link)))
        stack.callback(os.close, ends[-1])
    program = [sys.executable, "-P", enter.__file__]
    carry = [*program, "forward", repr(link.latency_s), repr(link.loss), *map(str, ends)]
    forwarder = subprocess.Popen(
        [*program, "-1", str(os.getpid()), *carry],
        stdin=subprocess.DEVNULL,
        pass_fds=ends,
        start_new_session=True,
    )
    stack.callback(forwarder.wait)
    stack.callback(forwarder.kill)


def _worker_end(address: str, link: Link) -> int:
    end = _open_tun("eth0")
    _build_worker_side(address, link, mtu=_mtu(link), txqlen=_QUEUE_PACKETS)
    return end


def _hub_end(rank: int, address: str, link: Link) -> int:
    from pyroute2 import IPRoute

    quiet_ipv6()
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    end = _open_tun(f"port{rank}")
    with IPRoute() as ip:
        port = ip.link_lookup(ifname=f"port{rank}")[0]
        ip.link("set", index=port, state="up", mtu=_mtu(link), txqlen=_QUEUE_PACKETS)
        ip.route("add", dst=f"{address}/32", oif=port)
        limit_rate(ip, port, link.receiving)
    return end


def _mtu(link: Link) -> int:
    slow = (link.slower_bit_s or inf) < _SLOW_BIT_S
    return _SLOW_MTU if slow or link.loss else _MTU


def _open_tun(name: str) -> int:
    import fcntl  # not on Windows, where this file is imported too

    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end


_PREFIX = "10.77.0."
_DELAYED_BIT_S = 1e8  # what the process that delays packets carries without losing any


@dataclass(frozen=True)
class Network:
    """The network that workers run in."""

    namespace_fds: tuple[int, ...]
    addresses: tuple[str, ...]
    hub_fd: int
    link: Link
    interface: str = "eth0"

    def lift(self) -> None:
        """Lift the limits of every link."""
        fast_bit_s = _DELAYED_BIT_S if self.link.latency_s else FASTEST_BIT_S
        rates = (fast_bit_s, self.link.rate_bit_s or 0, self.link.down_bit_s or 0)
        self._limit(replace(self.link, rate_bit_s=max(rates), down_bit_s=None))

    def limit(self) -> None:
        """Restore the rate limit."""
        self._limit(self.link)

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each worker has sent over its link, with all headers."""
        return [inside(fd, lambda: interface_bytes(self.interface)) for fd in self.namespace_fds]

    def _limit(self, link: Link) -> None:
        if self.link.rate_bit_s is None:
            return
        for fd in self.namespace_fds:
            inside(fd, lambda: _change_rates((self.interface,), link))
        ports = [f"port{rank}" for rank in range(len(self.addresses))]
        inside(self.hub_fd, lambda: _change_rates(ports, link.receiving))


def why_unavailable() -> str | None:
    """Return the reason why this process cannot make namespaces; None if it can."""
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
    """Create one network per worker, joined and limited in both directions."""
    with contextlib.ExitStack() as stack:
        fds = []
        for _ in range(workers + 1):
            fds.append(new_namespace())
            stack.callback(os.close, fds[-1])
        hub_fd, *worker_fds = fds
        addresses = tuple(f"{_PREFIX}{rank + 1}" for rank in range(workers))
        if link.latency_s or link.loss:
            delayed_links(stack, hub_fd, worker_fds, addresses, link)
        else:
            inside(hub_fd, lambda: _build_bridge(worker_fds, link))
            for fd, address in zip(worker_fds, addresses, strict=True):
                inside(fd, partial(_build_worker_side, address, link))
        yield Network(tuple(worker_fds), addresses, hub_fd, link)


def _change_rates(interfaces: Iterable[str], link: Link) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        for name in interfaces:
            limit_rate(ip, ip.link_lookup(ifname=name)[0], link, "change")


def _build_bridge(worker_fds: Sequence[int], link: Link) -> None:
    from pyroute2 import IPRoute

    quiet_ipv6()
    with IPRoute() as ip:
        ip.link("add", ifname="bridge", kind="bridge")
        bridge = ip.link_lookup(ifname="bridge")[0]
        ip.link("set", index=bridge, state="up")
        for rank, fd in enumerate(worker_fds):
            peer = {"ifname": "eth0", "net_ns_fd": fd}
            ip.link("add", ifname=f"port{rank}", kind="veth", peer=peer)
            port = ip.link_lookup(ifname=f"port{rank}")[0]
            ip.link("set", index=port, master=bridge, state="up")
            limit_rate(ip, port, link.receiving)


def _build_worker_side(address: str, link: Link, **wire_settings: int) -> None:
    from pyroute2 import IPRoute

    quiet_ipv6()
    with IPRoute() as ip:
        loopback = ip.link_lookup(ifname="lo")[0]
        wire = ip.link_lookup(ifname="eth0")[0]
        ip.link("set", index=loopback, state="up")
        ip.addr("add", index=wire, address=address, prefixlen=24)
        ip.link("set", index=wire, state="up", **wire_settings)
        if link.congestion is not None:
            route = {"dst": f"{_PREFIX}0/24", "oif": wire, "prefsrc": address, "scope": 253}
            ip.route("replace", **route, metrics={"cc_algo": link.congestion})
        limit_rate(ip, wire, link)
