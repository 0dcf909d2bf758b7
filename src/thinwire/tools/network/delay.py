"""Links with latency: every worker gets a TUN device, and one small process carries the packets,
late.

Kernels without `netem` cannot delay packets. Here each worker's interface is a TUN device whose
other end is a file; so is its port at the hub, which routes between the ports. `forward.py` moves
packets between the two ends and holds those on their way to the hub for the latency. The token
buckets sit where they sit without latency, on both ends of the link.

    worker 0  eth0 [tbf] -- file -- forward.py -- file -- port0 [tbf]  routing
        port1 [tbf] -- ...  eth0  worker 1
"""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from thinwire.tools.network import enter, forward
from thinwire.tools.network.link import Link
from thinwire.tools.network.namespaces import inside, limit_rate, quiet_ipv6

__all__ = ["delayed_links"]

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Large packets, since a process that moves every one of them must not become the bottleneck; small
# ones on slow links, whose token bucket would never let a large one through.
_MTU, _SLOW_MTU, _SLOW_BIT_S = 9000, 1500, 2e7
_QUEUE_PACKETS = 10_000


@contextlib.contextmanager
def delayed_links(
    hub_fd: int, worker_fds: tuple[int, ...], addresses: tuple[str, ...], link: Link
) -> Iterator[None]:
    """Build the links and run the forwarder; the devices vanish with it.

    Raises:
        OSError: The kernel refused, for example because it has no TUN devices.
    """
    with contextlib.ExitStack() as stack:
        ends: list[int] = []
        for rank, (fd, address) in enumerate(zip(worker_fds, addresses, strict=True)):
            ends.append(inside(fd, partial(_worker_end, address, link)))
            stack.callback(os.close, ends[-1])
            ends.append(inside(hub_fd, partial(_hub_end, rank, address, link)))
            stack.callback(os.close, ends[-1])
        forwarder = _start_forwarder(ends, link.latency_s)
        stack.callback(forwarder.wait)
        stack.callback(forwarder.kill)
        yield


def _start_forwarder(ends: list[int], latency_s: float) -> subprocess.Popen[bytes]:
    trampoline = [sys.executable, "-P", str(Path(enter.__file__)), "-1", str(os.getpid())]
    program = [sys.executable, "-P", str(Path(forward.__file__)), repr(latency_s), *map(str, ends)]
    return subprocess.Popen(
        [*trampoline, *program], stdin=subprocess.DEVNULL, pass_fds=ends, start_new_session=True
    )


def _worker_end(address: str, link: Link) -> int:
    from pyroute2 import IPRoute

    quiet_ipv6()
    end = _open_tun("eth0")
    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        wire = ip.link_lookup(ifname="eth0")[0]
        ip.addr("add", index=wire, address=address, prefixlen=24)
        ip.link("set", index=wire, state="up", mtu=_mtu(link), txqlen=_QUEUE_PACKETS)
        limit_rate(ip, wire, link)
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
        limit_rate(ip, port, link)
    return end


def _mtu(link: Link) -> int:
    return _SLOW_MTU if link.rate_bit_s is not None and link.rate_bit_s < _SLOW_BIT_S else _MTU


def _open_tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(end)
        raise
    return end
