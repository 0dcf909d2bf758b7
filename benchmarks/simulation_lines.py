"""Topology of the lines, and the end time of a collective on every rank."""

from dataclasses import dataclass
from math import ceil, inf, log2

import numpy as np
from numpy.typing import NDArray

from thinwire.layout.traffic import children, ring_bytes
from thinwire.tools.planning.network import Network, crowding, reduce_pairs

Times = NDArray[np.float64]
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Edges:
    """Links between neighbours in a ring: kinds of pairs, and the kind of each pair."""

    kinds: tuple[Network, ...]
    which: NDArray[np.int64]

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """One-way latency, by group and member."""
        return np.array([kind.latency_s for kind in self.kinds])[self.which]


@dataclass(frozen=True)
class Lines:
    """Network of ranks, each with its own line, at sites that may share one line to the others.

    Attributes:
        up_bit_s: Sending rate of each rank with headers, shape (W,).
        down_bit_s: Receiving rate of each rank, shape (W,).
        site: Site of each rank, shape (W,), ascending from 0.
        site_bit_s: Rate of a site's shared line to the others, in each direction.
        near_s: One-way latency between two ranks of a site.
        far_s: One-way latency between sites.
        call_s: Fixed cost of a collective on a rank.
    """

    up_bit_s: NDArray[np.float64]
    down_bit_s: NDArray[np.float64]
    site: Ranks
    site_bit_s: float
    near_s: float
    far_s: float
    call_s: float = Network.call_s

    def __post_init__(self) -> None:
        rates = {"up_bit_s": self.up_bit_s, "down_bit_s": self.down_bit_s}
        for name, rate in (rates | {"site_bit_s": np.array(self.site_bit_s)}).items():
            if not (rate > 0).all():
                raise ValueError(f"{name} must be above 0 bit/s, got {rate.min():g}")
        for name, latency_s in (("near_s", self.near_s), ("far_s", self.far_s)):
            if not 0 <= latency_s < inf:
                raise ValueError(
                    f"{name} must be a latency of at least 0 seconds, got {latency_s:g}"
                )

    @property
    def ranks(self) -> int:
        """Number of ranks W."""
        return len(self.site)

    def slowed(self, rank: int, times: float) -> "Lines":
        """Return a network in which the line of one rank is slower by a factor, in both
        directions.
        """
        up, down = self.up_bit_s.copy(), self.down_bit_s.copy()
        up[rank] /= times
        down[rank] /= times
        return Lines(up, down, self.site, self.site_bit_s, self.near_s, self.far_s, self.call_s)

    def edges(self, members: Ranks) -> Edges:
        """Return the links from each member to the next one in its group, shape (groups,
        members).
        """
        to = np.roll(members, -1, axis=1)
        rate = np.minimum(self.up_bit_s[members], self.down_bit_s[to])
        crosses = self.site[members] != self.site[to]
        rate = np.where(crosses, np.minimum(rate, self.site_bit_s), rate)
        latency = np.where(crosses, self.far_s, self.near_s)
        pairs = np.stack([rate.ravel(), latency.ravel()])
        kinds, which = np.unique(pairs, axis=1, return_inverse=True)
        return Edges(
            tuple(self.pair(*map(float, kind)) for kind in kinds.T),
            which.reshape(members.shape).astype(np.int64),
        )

    def pair(self, bit_s: float, latency_s: float) -> Network:
        """Return the network of two ranks."""
        return Network(bit_s, latency_s, 2, self.call_s)

    def alike(self, members: Ranks) -> Network | None:
        """Return the network of each group if all its pairs are equal, else None."""
        site = self.site[members]
        one_site = bool((site == site[:, :1]).all())
        apart = bool((np.diff(np.sort(site, axis=1), axis=1) > 0).all())
        rates = np.unique(np.minimum(self.up_bit_s[members], self.down_bit_s[members]))
        if len(rates) > 1 or not (one_site or apart):
            return None
        rate = float(rates[0]) if one_site else min(float(rates[0]), self.site_bit_s)
        latency_s = self.near_s if one_site else self.far_s
        return Network(rate, latency_s, members.shape[1], self.call_s)


def switch(ranks: int, bit_s: float, latency_s: float) -> Lines:
    """Return ranks on one switch: equal line and latency (one way, seconds) for all."""
    return _of(ranks, bit_s, bit_s, np.zeros(ranks, np.int64), inf, latency_s, latency_s)


def homes(ranks: int, up_bit_s: float, latency_s: float, *, down: float = 5.0) -> Lines:
    """Return ranks at a site each, receiving `down` times as fast as they send."""
    sites = np.arange(ranks, dtype=np.int64)
    return _of(ranks, up_bit_s, down * up_bit_s, sites, inf, latency_s, latency_s)


def sites(
    ranks: int, count: int, *, bit_s: float, near_s: float, site_bit_s: float, far_s: float
) -> Lines:
    """Return consecutive ranks at up to `count` sites; each site shares a line to the others."""
    if count < 1:
        raise ValueError(f"count={count} must be at least 1 site")
    count = min(count, ranks)
    site = np.arange(ranks, dtype=np.int64) * count // ranks
    return _of(ranks, bit_s, bit_s, site, site_bit_s, near_s, far_s)


def _of(
    ranks: int, up: float, down: float, site: Ranks, site_bit_s: float, near_s: float, far_s: float
) -> Lines:
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    return Lines(np.full(ranks, up), np.full(ranks, down), site, site_bit_s, near_s, far_s)


@dataclass(frozen=True)
class Gather:
    """Ring all-gather of `nbytes` from each rank."""

    nbytes: int

    def sent(self, size: int) -> Times:
        """Return the bytes that each of `size` ranks puts on its line; a ring forwards too."""
        return np.full(size, (size - 1) * self.nbytes, np.float64)


@dataclass(frozen=True)
class Reduce:
    """Ring all-reduce of `nbytes`."""

    nbytes: int

    def sent(self, size: int) -> Times:
        return np.full(size, ring_bytes(size, self.nbytes))


@dataclass(frozen=True)
class Deal:
    """All-to-all; `lengths` are the bytes by receiver."""

    lengths: tuple[int, ...]

    def sent(self, size: int) -> Times:
        """See `Gather`; a rank's message to itself is not counted."""
        total = sum(self.lengths)
        return np.array([total - length for length in self.lengths], np.float64)


@dataclass(frozen=True)
class Broadcast:
    """Tree broadcast of `nbytes` from the first rank."""

    nbytes: int

    def sent(self, size: int) -> Times:
        return self.nbytes * np.array([children(rank, size) for rank in range(size)], np.float64)


@dataclass(frozen=True)
class Vote(Gather):
    """Gather of a small message of `nbytes`, which goes to all ranks at once."""


Collective = Gather | Reduce | Deal | Broadcast


@dataclass(frozen=True)
class Jitter:
    """Exponentially distributed extra latency of each message between neighbours."""

    mean_s: float
    random: np.random.Generator

    def of(self, shape: tuple[int, ...]) -> Times | float:
        """Return seconds of extra latency, of this shape."""
        return self.random.exponential(self.mean_s, shape) if self.mean_s else 0.0


def finished(
    collective: Collective,
    lines: Lines,
    members: Ranks,
    begin_s: Times,
    *,
    jitter: Jitter,
    idle_s: float = 0.0,
    event_by_event: bool = False,
) -> Times:
    """Return the end time of a collective on each member of several concurrent groups.

    Args:
        collective: Collective to run.
        lines: Network of all ranks.
        members: Ranks of each group, shape (groups, members).
        begin_s: Start time of each member, same shape.
        jitter: Extra latency.
        idle_s: Seconds of silence before.
        event_by_event: Simulate every event, even if a closed form is known.
    """
    if members.shape[1] == 1:
        return begin_s
    if isinstance(collective, Vote):
        collective = Deal((collective.nbytes,) * members.shape[1])
    if not event_by_event and not jitter.mean_s and float(np.ptp(begin_s)) == 0:
        closed_s = _closed_s(collective, lines, members, idle_s)
        if closed_s is not None:
            return begin_s + closed_s
    begin_s = begin_s + lines.call_s
    if isinstance(collective, Deal):
        return _dealt(collective, lines, members, begin_s, jitter, idle_s)
    if isinstance(collective, Broadcast):
        return _broadcast(collective, lines, members, begin_s, jitter, idle_s)
    size = members.shape[1]
    pairs = size - 1
    if isinstance(collective, Reduce):
        pairs = reduce_pairs(size, collective.nbytes)
    piece = float(collective.sent(size)[0]) / (2 * pairs)
    return _ring(lines.edges(members), pairs, piece, begin_s, jitter, idle_s)


def _closed_s(collective: Collective, lines: Lines, members: Ranks, idle_s: float) -> float | None:
    """Return the end times by the formula for equal members."""
    network = lines.alike(members)
    if network is None or isinstance(collective, Broadcast):
        return None
    if isinstance(collective, Gather):
        return network.all_gather_s(collective.nbytes, idle_s)
    if isinstance(collective, Reduce):
        return network.all_reduce_s(collective.nbytes, idle_s)
    if len(set(collective.lengths)) > 1 or bool((lines.up_bit_s != lines.down_bit_s).any()):
        return None
    return network.all_to_all_s(float(collective.sent(network.ranks)[0]), idle_s)


def _ring(
    edges: Edges, pairs: int, nbytes: float, begin_s: Times, jitter: Jitter, idle_s: float
) -> Times:
    """Return the end times of a ring, piece by piece.

    A piece leaves when it has arrived, the line is free and the receiver is ready.

    Two pieces are on their way at a time. The receiver has room for the next one when that of the
    pair before is there, and to say so takes a latency.
    """
    latency_s, free = edges.latency_s, begin_s
    over = [begin_s, begin_s]
    steady = [kind.transfer_s(nbytes) for kind in edges.kinds]
    took, growing = np.array(steady)[edges.which], True
    for index in range(2 * pairs):
        if growing:  # windows are still opening
            now, before = ((index + 1) * nbytes, index * nbytes)
            took_s = [k.transfer_s(now, idle_s) - k.transfer_s(before, idle_s) for k in edges.kinds]
            growing = bool(np.abs(np.array(took_s) - steady).max() > 1e-12)
            took = np.array(took_s)[edges.which]
        own = over[index % 2]
        ready = np.roll(own, -1, axis=1) + latency_s
        free = np.maximum(np.maximum(own, free), ready) + took
        there = np.roll(free + latency_s + jitter.of(free.shape), 1, axis=1)
        over[index % 2] = np.maximum(there, free)
    return np.maximum(*over)


def _dealt(
    deal: Deal, lines: Lines, members: Ranks, begin_s: Times, jitter: Jitter, idle_s: float
) -> Times:
    """Return the end times of an all-to-all.

    The messages of a rank share its line; those that leave or reach a site share its line. Messages
    that reach a line crowd there, since senders do not agree on an order.
    """
    size, lengths = members.shape[1], np.array(deal.lengths, np.float64)
    out, into = lengths.sum() - lengths, (size - 1) * lengths
    found = np.empty_like(begin_s)
    for group, ranks in enumerate(members):
        begin, (_, site) = begin_s[group], np.unique(lines.site[ranks], return_inverse=True)
        count = np.bincount(site)
        far = count.max() < size
        latency_s = lines.far_s if far else lines.near_s
        up_s = _transfers(lines, lines.up_bit_s[ranks], latency_s, out, idle_s)
        down_s = _transfers(lines, lines.down_bit_s[ranks], latency_s, into, idle_s)
        dealt = min(max(np.count_nonzero(lengths), 1), size - 1)
        # those that receive are those that a sender deals to, and itself
        down_s = _received(_last_other(up_s), down_s, crowding(dealt + 1, size - 1))
        begin = begin + latency_s  # which it takes to hear that the others are ready
        gone = begin + up_s
        if far and np.isfinite(lines.site_bit_s):
            kept = np.bincount(site, lengths)
            leaves = count * lengths.sum() - count * kept
            comes = (size - count) * kept
            shared = np.full(len(count), lines.site_bit_s)
            leaves_s, comes_s = (
                _transfers(lines, shared, latency_s, edge, idle_s) for edge in (leaves, comes)
            )
            crowded = crowding(len(count), int((count * (size - count)).min()))
            comes_s = _received(_last_other(leaves_s), comes_s, crowded)
            down_s = np.maximum(down_s, comes_s[site])
            gone = np.maximum(gone, begin + leaves_s[site])
        found[group] = np.maximum(gone.max(), begin + down_s) + latency_s + jitter.of(begin.shape)
    return found


def _received(sent_s: Times, down_s: Times, excess: float) -> Times:
    """Return the time until all messages have reached each line, which takes `down_s` for their
    bytes.

    `excess` is what `crowding` says: the share that it takes longer where both are equal.

    Where nobody sends after `sent_s`, what is queued then is the highest point of a Brownian bridge
    over a line whose slope is the rate that the receiver has to spare. A line that is slower than
    its senders pauses in the beginning at most.
    """
    spare_s = sent_s - down_s
    spread = 4 * excess**2 * down_s * np.minimum(down_s, sent_s)
    over_s: Times = sent_s + (np.sqrt(spare_s**2 + spread) - spare_s) / 2
    return over_s


def _last_other(values: Times) -> Times:
    """Return for each entry the largest of all others."""
    first = int(values.argmax())
    found = np.full(values.shape, values[first])
    found[first] = np.delete(values, first).max(initial=0.0)
    return found


def _broadcast(
    given: Broadcast, lines: Lines, members: Ranks, begin_s: Times, jitter: Jitter, idle_s: float
) -> Times:
    """Return the end times of a tree; in round i the first 2^i members send to as many others."""
    there, free = begin_s.copy(), begin_s.copy()
    size = members.shape[1]
    for i in range(_depth(size)):
        to = np.arange(2**i, min(2 ** (i + 1), size))
        source = to - 2**i
        one, other = members[:, source], members[:, to]
        crosses = lines.site[one] != lines.site[other]
        rate = np.minimum(lines.up_bit_s[one], lines.down_bit_s[other])
        rate = np.where(crosses, np.minimum(rate, lines.site_bit_s), rate)
        latency_s = np.where(crosses, lines.far_s, lines.near_s)
        took = _transfers(lines, rate, latency_s, np.full(rate.shape, given.nbytes), idle_s)
        begun = np.maximum(there[:, source], free[:, source])
        gone = np.maximum(begun, there[:, to] + latency_s) + took
        free[:, source] = gone
        there[:, to] = gone + latency_s + jitter.of(gone.shape)
    return np.maximum(there, free)


def _transfers(
    lines: Lines, rate: Times, latency_s: Times | float, nbytes: Times, idle_s: float
) -> Times:
    """Return the seconds of one transfer each, of which few differ."""
    facts = np.stack([rate.ravel(), np.broadcast_to(latency_s, rate.shape).ravel(), nbytes.ravel()])
    kinds, which = np.unique(facts, axis=1, return_inverse=True)
    took_s = [lines.pair(bit_s, late).transfer_s(n, idle_s) for bit_s, late, n in kinds.T.tolist()]
    return np.array(took_s)[which].reshape(rate.shape)


def _depth(size: int) -> int:
    return ceil(log2(size)) if size > 1 else 0
