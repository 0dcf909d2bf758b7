"""Run a command inside a network namespace, or forward packets between TUN devices.

The command and its children end with the process that asked for them.

Started by file name and made of the standard library alone, so that it costs milliseconds:
`python enter.py NAMESPACE_FD PARENT_PID COMMAND ...`; a NAMESPACE_FD of -1 stays in the namespace
of the caller. `python enter.py forward LATENCY_SECONDS LOSS WORKER_FD HUB_FD ...` carries packets.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections import deque
from random import random

_LARGEST_PACKET_BYTES = 65_536
_PACKETS_AT_A_TIME = 64

_PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, or end at once."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def take_group_along() -> None:
    """End the process group of this process when it ends, in whatever way."""
    # by a separate process, which is no child: the command may wait for all its children
    if not hasattr(os, "pidfd_open"):  # Linux alone has it
        return
    leader = os.getpid()
    ended = os.pidfd_open(leader)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(ended)
        return
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, ended)
        os.closerange(ended + 1, 1 << 20)  # pipes and namespaces of the rank's
        select.select([ended], [], [])
        os.killpg(leader, signal.SIGKILL)
    os._exit(0)


def enter_network(namespace_fd: int) -> None:
    """Move the calling thread into the network namespace behind an open file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace_fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))


def forward(latency_s: float, loss: float, pairs: list[tuple[int, int]]) -> None:
    """Forward packets between pairs of TUN devices; those to the second are delayed."""
    to_hub = dict(pairs)
    to_worker = {hub: worker for worker, hub in pairs}
    readable = [*to_hub, *to_worker]
    # one latency for all: the first to come is the first to go
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        patience_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(readable, [], [], patience_s)[0]:
            for packet in _packets(end):
                if end in to_hub:
                    if loss and random() < loss:
                        continue
                    waiting.append((time.monotonic() + latency_s, to_hub[end], packet))
                else:
                    _send(to_worker[end], packet)
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, packet = waiting.popleft()
            _send(end, packet)


def _packets(end: int) -> list[bytes]:
    packets: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        for _ in range(_PACKETS_AT_A_TIME):
            packets.append(os.read(end, _LARGEST_PACKET_BYTES))
    return packets


def _send(end: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a full or closed device loses packets, as networks do
        os.write(end, packet)


def main(arguments: list[str]) -> None:
    """Enter the namespace and become the command, which ends with the parent."""
    if arguments[0] == "forward":
        ends = list(map(int, arguments[3:]))
        pairs = list(zip(ends[::2], ends[1::2], strict=True))
        forward(float(arguments[1]), float(arguments[2]), pairs)
    namespace_fd, parent_pid = int(arguments[0]), int(arguments[1])
    die_with_parent(parent_pid)
    take_group_along()
    if namespace_fd >= 0:
        enter_network(namespace_fd)
        os.close(namespace_fd)
    os.execvp(arguments[2], arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
