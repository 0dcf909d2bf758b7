"""Forward packets as `enter.py` does, some of them twice and some of them later than others."""

import sys
from collections import defaultdict
from pathlib import Path
from random import random

sys.path.insert(0, str(Path(__file__).parents[2] / "src/thinwire/tools/network"))

import enter

DOUBLED, LATE = 0.05, 0.05
"""Shares of the packets that come twice, and after the next three."""

send, held = enter._send, defaultdict[int, list[tuple[int, bytes]]](list)


def disordered(end: int, packet: bytes) -> None:
    """Send a packet, or hold it back; then those that have waited long enough."""
    late, held[end] = held[end], []
    for left, one in late:
        if left:
            held[end].append((left - 1, one))
        else:
            send(end, one)
    if random() < LATE:
        held[end].append((2, packet))
        return
    send(end, packet)
    if random() < DOUBLED:
        send(end, packet)


if __name__ == "__main__":
    enter._send = disordered
    enter.main(sys.argv[1:])
