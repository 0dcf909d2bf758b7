"""Model the duration of gloo's collectives between ranks of a network."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, inf, log, log2, sqrt

from thinwire.layout.traffic import ring_bytes

_FIRST_WINDOW_BYTES = 14_600
FRAMES = 1448 / 1514
"""Fraction of Ethernet traffic that is payload."""
_LEAST_TIMEOUT_S = 0.2
_PIECE_BYTES = 2**20
_LN2 = log(2)


def reduce_pairs(ranks: int, nbytes: float) -> int:
    """Return the pairs of pieces that a rank sends: at least two of its share, of at most 1 MiB."""
    return (ranks - 1) * max(2, ceil(nbytes / ranks / _PIECE_BYTES))


def crowding(receivers: int, strings: int) -> float:
    """Return the excess time of an all-to-all, relative to the time of one receiver's bytes."""
    # senders do not agree on an order, so a line gets several strings at once and none at another
    # time, and ends late by what is queued when the last one has been sent: with random orders the
    # highest point of a Brownian bridge
    return sqrt((receivers - 2) / (receivers - 1) * log(receivers) / (2 * strings))


_SEGMENT_BITS, _LEAST_RTT_S = 8 * 1448, 1e-3


def filled_bit_s(latency_s: float, loss: float, streams: int) -> float:
    """Return the rate at which CUBIC sends where packets are lost, over several connections.

    Source: RFC 9438, 5.1 and 4.3, with C = 0.4.
    """
    if not loss:
        return inf
    rtt_s = max(2 * latency_s, _LEAST_RTT_S)
    segments: float = max(sqrt(1.5 / loss), 1.054 * (rtt_s / loss) ** 0.75)
    return streams * segments * _SEGMENT_BITS / rtt_s


@dataclass(frozen=True)
class Network:
    """Ranks that each have a line of their own into one network."""

    # Source: Thakur, Rabenseifner and Gropp, 2005 (rings); gloo/allreduce.cc and gloo/allgather.cc
    # (two pieces on their way at a time); RFC 6928 (the first window); RFC 2861 and Linux,
    # net/ipv4/tcp_output.c (the window of an idle connection halves with every time-out).

    bit_s: float
    latency_s: float
    ranks: int
    call_s: float = 3e-4
    restarts: bool = True
    node: "Network | None" = None
    down_bit_s: float | None = None
    relay: bool = False
    """Messages go through a host, which sends them on to all others; sums are gathered there."""

    @property
    def down(self) -> float:
        """Receiving rate of each rank, in bits per second."""
        return self.bit_s if self.down_bit_s is None else self.down_bit_s

    @property
    def node_size(self) -> int:
        """Ranks of a machine; 1 if unknown."""
        return 1 if self.node is None else self.node.ranks

    @cached_property
    def bytes_s(self) -> float:
        """Payload bytes per second between two ranks: the slower direction, without headers."""
        return min(self.bit_s, self.down) / 8 * FRAMES

    def all_reduce_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """Return the seconds of a ring all-reduce of `nbytes` after `idle_s` seconds of silence."""
        if self.relay:
            return self.relayed_s(nbytes, idle_s)
        sent = ring_bytes(self.ranks, nbytes)
        return self._ring_s(reduce_pairs(self.ranks, nbytes), sent, idle_s)

    def all_gather_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """Return the seconds of a ring all-gather after a silence: W - 1 messages of each rank."""
        if self.relay:
            return self.relayed_s(nbytes, idle_s)
        return self._ring_s(self.ranks - 1, (self.ranks - 1) * nbytes, idle_s)

    def all_to_all_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """Return the seconds of an all-to-all after a silence; each rank sends `nbytes` in all."""
        if self.ranks == 1:
            return 0.0
        # strings meet where they are received, and wait for that line
        received_s = nbytes / (self.down / 8 * FRAMES)
        waiting_s = crowding(self.ranks, self.ranks - 1) * received_s
        return self.call_s + 2 * self.latency_s + self.transfer_s(nbytes, idle_s) + waiting_s

    def relayed_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """Return the seconds of a gather through a relay after `idle_s` seconds of silence."""
        up = replace(self, down_bit_s=None)
        down = replace(self, bit_s=self.down, down_bit_s=None)
        sending_s = up.transfer_s(nbytes, idle_s)
        receiving_s = down.transfer_s((self.ranks - 1) * nbytes, idle_s)
        return self.call_s + 2 * self.latency_s + max(sending_s, receiving_s)

    def broadcast_s(self, nbytes: float) -> float:
        """Return the seconds of a tree broadcast: in each round all that have it pass it on."""
        if self.ranks == 1:
            return 0.0
        once_s = self.transfer_s(nbytes)
        more = ceil(log2(self.ranks)) - 1
        return self.call_s + 2 * self.latency_s + once_s + more * (once_s + self.latency_s)

    @lru_cache(maxsize=4096)  # noqa: B019  # buckets and fragments are alike; networks are small
    def transfer_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """Return the seconds one way, without latency."""
        # the window of an idle connection halves with every time-out, down to ten segments; the
        # rate then doubles every round trip
        rtt = 2 * self.latency_s
        if not self.restarts:
            return nbytes / self.bytes_s
        halvings = int(idle_s / (rtt + _LEAST_TIMEOUT_S))
        slowest_s = self._growing_s(nbytes, rtt, halvings)
        # where latency is lower there are more halvings; it must not look slower
        while self.bytes_s * rtt > _FIRST_WINDOW_BYTES * 2.0 ** min(halvings, 64):
            halvings += 1
            rtt = max(0.0, idle_s / halvings - _LEAST_TIMEOUT_S)
            slowest_s = max(slowest_s, self._growing_s(nbytes, rtt, halvings))
        return slowest_s

    def _growing_s(self, nbytes: float, rtt: float, halvings: int) -> float:
        """Return the seconds one way, with a window that was halved `halvings` times."""
        window = max(_FIRST_WINDOW_BYTES, self.bytes_s * rtt / 2.0 ** min(halvings, 64))
        if not halvings or window * _LN2 >= self.bytes_s * rtt:
            return nbytes / self.bytes_s
        first = window * _LN2 / rtt
        grown = (self.bytes_s - first) * rtt / _LN2
        if nbytes <= grown:
            return rtt * log2(1 + nbytes / window)
        return rtt * log2(self.bytes_s / first) + (nbytes - grown) / self.bytes_s

    def _ring_s(self, pairs: int, sent: float, idle_s: float) -> float:
        """Return the seconds of a ring; a piece leaves once the receiver has room, for two."""
        if not pairs:
            return 0.0
        piece_s = self.transfer_s(sent) / (2 * pairs)
        waiting_s = pairs * (2 * self.latency_s + piece_s) + piece_s
        sending_s = 2 * self.latency_s + self.transfer_s(sent, idle_s)
        return self.call_s + max(waiting_s, sending_s)
