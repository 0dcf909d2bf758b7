"""The primitives under the emulated network: anonymous namespaces, work inside them, and rate
limits.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from thinwire.tools.network.enter import enter_network
from thinwire.tools.network.link import Link

__all__ = ["inside", "interface_bytes", "limit_rate", "new_namespace", "quiet_ipv6", "tbf_settings"]

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_BURST_S, _QUEUE_S = 0.01, 0.1
_SMALLEST_BURST_BYTES, _LARGEST_BURST_BYTES = 4_000, 4_000_000


def new_namespace() -> int:
    """A fresh network namespace, held by the open descriptor that is returned and by nothing else.

    Raises:
        OSError: Not permitted.
    """

    def make() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
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
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="thinwire-netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def tbf_settings(rate_bit_s: float) -> dict[str, int]:
    """Arguments of pyroute2's `tbf` for a rate.

    The burst is ten milliseconds of the rate: large enough for the kernel's timer at 1 Gbit/s, and
    small enough at slow rates not to let a whole message through for free. The queue holds a tenth
    of a second.
    """
    rate_byte_s = rate_bit_s / 8
    burst = round(min(max(rate_byte_s * _BURST_S, _SMALLEST_BURST_BYTES), _LARGEST_BURST_BYTES))
    return {
        "rate": round(rate_byte_s),
        "burst": burst,
        "limit": burst + max(round(rate_byte_s * _QUEUE_S), 30_000),
    }


def limit_rate(ip: Any, index: int, link: Link, command: str = "add") -> None:
    """Limit what interface `index` sends by a token bucket; the command "change" replaces the one
    that is there.
    """
    if link.rate_bit_s is not None:
        ip.tc(command, "tbf", index, handle=0x10000, **tbf_settings(link.rate_bit_s))


def interface_bytes(interface: str) -> tuple[int, int]:
    """Bytes (sent, received) by an interface of the calling thread's network namespace, headers
    included.

    Raises:
        RuntimeError: There is no such interface.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"the interface {interface!r} is not in this network namespace")


def quiet_ipv6() -> None:
    """Keep the kernel's own IPv6 chatter out of the counters of this thread's namespace."""
    for scope in ("all", "default"):
        with contextlib.suppress(OSError):  # a kernel without IPv6 has no such file
            Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1")
