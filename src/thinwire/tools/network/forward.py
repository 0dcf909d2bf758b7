"""Carry packets between pairs of TUN devices, and delay those from the first to the second of
each pair.

Started by file name and made of the standard library alone: `python forward.py LATENCY_SECONDS
WORKER_FD HUB_FD ...`.
"""

import contextlib
import os
import select
import sys
import time
from collections import deque

__all__ = ["forward"]

_LARGEST_PACKET_BYTES = 65_536
_PACKETS_AT_A_TIME = 64


def forward(latency_s: float, pairs: list[tuple[int, int]]) -> None:
    """Carry packets for ever."""
    to_hub = dict(pairs)
    to_worker = {hub: worker for worker, hub in pairs}
    readable = [*to_hub, *to_worker]
    waiting: deque[tuple[float, int, bytes]] = (
        deque()
    )  # one latency for all: the first to come is the first to go
    while True:
        patience_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(readable, [], [], patience_s)[0]:
            for packet in _packets(end):
                if end in to_hub:
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


if __name__ == "__main__":
    descriptors = [int(argument) for argument in sys.argv[2:]]
    forward(float(sys.argv[1]), list(zip(descriptors[::2], descriptors[1::2], strict=True)))
