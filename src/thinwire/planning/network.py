"""How long the collectives of gloo take between ranks of a network."""

from dataclasses import dataclass
from math import ceil, inf, log, log2

__all__ = ["FRAMES", "Network"]

_FIRST_WINDOW_BYTES = 14_600
FRAMES = 1448 / 1514
"""The part of what travels over Ethernet that is payload."""
_IDLE_S = 0.2
_LN2 = log(2)


@dataclass(frozen=True)
class Network:
    """Ranks that each have a line of their own into one network.

    Attributes:
        bit_s: Of each rank's line, in each direction, headers included.
        latency_s: One way between any two.
        ranks: W, at least 1.
        call_s: What a collective costs a rank beside its bytes and latency.
        node: Consecutive ranks that share a machine, as a network of their own; None where each
            has one to itself, or nothing is known of it.

    Source: Thakur, Rabenseifner and Gropp, 2005 (rings); RFC 6928 (the first window), RFC 5681
    (idle connections begin anew).
    """

    bit_s: float
    latency_s: float
    ranks: int
    call_s: float = 3e-4
    node: "Network | None" = None

    @property
    def node_size(self) -> int:
        """Ranks of a machine; 1 where nothing is known of that."""
        return 1 if self.node is None else self.node.ranks

    @property
    def bytes_s(self) -> float:
        """Payload in a second; the rest of each frame is headers."""
        return self.bit_s / 8 * FRAMES

    def all_reduce_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """A ring: each rank sends 2(W-1)/W of the buffer, after `idle_s` seconds of silence."""
        return self._ring_s(2 * (self.ranks - 1), nbytes / self.ranks, idle_s)

    def all_gather_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """A ring: each rank passes on W-1 messages of `nbytes`, after `idle_s` seconds of
        silence.
        """
        return self._ring_s(self.ranks - 1, nbytes, idle_s)

    def all_to_all_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """Each rank sends `nbytes` in all, to the others at once, after `idle_s` seconds of
        silence.
        """
        return self._ring_s(min(1, self.ranks - 1), nbytes, idle_s)

    def broadcast_s(self, nbytes: float) -> float:
        """A tree: in each round all who have it pass it on; the last round may need a little
        less.
        """
        if self.ranks == 1:
            return 0.0
        once_s, more = self.transfer_s(nbytes), ceil(log2(self.ranks)) - 1
        return (
            self.call_s
            + max(once_s, self.latency_s)
            + self.latency_s
            + more * (once_s + self.latency_s)
        )

    def transfer_s(self, nbytes: float, idle_s: float = 0.0) -> float:
        """One way, without latency; windows of connections that were idle grow from ten segments.

        The rate doubles every round trip until it is that of the line.
        """
        rtt = 2 * self.latency_s
        first = _FIRST_WINDOW_BYTES * _LN2 / rtt if rtt else inf
        if idle_s < _IDLE_S or first >= self.bytes_s:
            return nbytes / self.bytes_s
        grown = (self.bytes_s - first) * rtt / _LN2
        if nbytes <= grown:
            return rtt * log2(1 + nbytes / _FIRST_WINDOW_BYTES)
        return rtt * log2(self.bytes_s / first) + (nbytes - grown) / self.bytes_s

    def _ring_s(self, turns: int, nbytes: float, idle_s: float) -> float:
        if not turns:
            return 0.0
        # gloo sends a piece when the receiver has said that it is ready, a latency later; of large
        # buffers it says so ahead
        flight_s = turns * self.latency_s
        return self.call_s + flight_s + max(flight_s, self.transfer_s(turns * nbytes, idle_s))
