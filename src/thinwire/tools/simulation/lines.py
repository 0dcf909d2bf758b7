"""Who is connected to whom, how fast and how far: the lines of all ranks."""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from thinwire.tools.planning.network import Network

__all__ = ["Edges", "Lines", "homes", "sites", "switch"]

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Edges:
    """What lies between each member of a ring and the next one.

    Attributes:
        kinds: The pairs of ranks that there are, each as a network of two.
        which: Which of them, by group and member.
    """

    kinds: tuple[Network, ...]
    which: NDArray[np.int64]

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """One way, by group and member."""
        return np.array([kind.latency_s for kind in self.kinds])[self.which]


@dataclass(frozen=True)
class Lines:
    """A network of ranks, each with a line of its own, at sites that may share one to the others.

    Attributes:
        up_bit_s: What each rank sends at most, shape (W,), headers included.
        down_bit_s: What each rank receives at most, shape (W,).
        site: Where each rank is, shape (W,), ascending from 0.
        site_bit_s: Of the line of a site to all others, in each direction, which its ranks share.
        near_s: Latency, one way, between two ranks of a site.
        far_s: The same between sites.
        call_s: What a collective costs a rank beside its bytes and latency.
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
                raise ValueError(f"{name} must be a latency in seconds from 0, got {latency_s:g}")

    @property
    def ranks(self) -> int:
        """W."""
        return len(self.site)

    def slowed(self, rank: int, times: float) -> "Lines":
        """The same with the line of one rank so many times slower, both ways."""
        up, down = self.up_bit_s.copy(), self.down_bit_s.copy()
        up[rank] /= times
        down[rank] /= times
        return Lines(up, down, self.site, self.site_bit_s, self.near_s, self.far_s, self.call_s)

    def edges(self, members: Ranks) -> Edges:
        """From each member of each group to the next one, shape (groups, members)."""
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
        """Two ranks."""
        return Network(bit_s, latency_s, 2, self.call_s)

    def alike(self, members: Ranks) -> Network | None:
        """The network of each group, where all pairs in it are alike; else None."""
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
    """All at one place: the same line and latency for all, one way in seconds."""
    return _of(ranks, bit_s, bit_s, np.zeros(ranks, np.int64), inf, latency_s, latency_s)


def homes(ranks: int, up_bit_s: float, latency_s: float, *, down: float = 5.0) -> Lines:
    """Each at a site of its own, which receives `down` times as fast as it sends."""
    places = np.arange(ranks, dtype=np.int64)
    return _of(ranks, up_bit_s, down * up_bit_s, places, inf, latency_s, latency_s)


def sites(
    ranks: int,
    count: int,
    *,
    bit_s: float,
    near_s: float,
    site_bit_s: float,
    far_s: float,
) -> Lines:
    """Consecutive ranks at `count` sites, or at one each where they are fewer.

    Args:
        ranks: W.
        count: Sites.
        bit_s: Of each rank's line inside its site.
        near_s: Latency inside a site.
        site_bit_s: Of the line of a site to the others, each way.
        far_s: Latency between sites.
    """
    if count < 1:
        raise ValueError(f"count is {count}; there must be at least 1 site")
    count = min(count, ranks)
    places = np.arange(ranks, dtype=np.int64) * count // ranks
    return _of(ranks, bit_s, bit_s, places, site_bit_s, near_s, far_s)


def _of(
    ranks: int, up: float, down: float, site: Ranks, site_bit_s: float, near_s: float, far_s: float
) -> Lines:
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1")
    return Lines(np.full(ranks, up), np.full(ranks, down), site, site_bit_s, near_s, far_s)
