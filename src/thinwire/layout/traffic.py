"""Bytes that an exchange moves, computed from message layouts before anything is sent."""

from operator import attrgetter
from typing import NamedTuple, cast

from thinwire.layout.message import CHECKSUM_BYTES, Layout, WholeLayout
from thinwire.layout.shares import Form, SplitLayout, split_plan, whole_split

GATHER, SPLIT = "gather", "split"
EXCHANGES = ("auto", GATHER, SPLIT)
BUCKET_BYTES = 25 * 2**20
"""Gradient bytes of a bucket whose message is compressed. Fewer messages cost less latency."""
FIRST_BUCKET_BYTES = 2**20
"""Gradient bytes of the first bucket. It is small, so that the link does not idle at the beginning
of the backward pass.
"""
BUCKETS = FIRST_BUCKET_BYTES, BUCKET_BYTES
"""Gradient bytes of the first bucket of an update and of the others."""
DENSE_BUCKETS = FIRST_BUCKET_BYTES, 5 * 2**20  # the backward pass cannot hide the last bucket
TWO_ROUND_BUCKETS = BUCKET_BYTES, BUCKET_BYTES  # a small first one does not pay in two rounds
_WORTH = 2
"""Factor by which the split exchange must reduce the bytes to be chosen. It passes on k sums, where
a gather passes on the entries of all sources, but it waits for the wire twice.
"""
_MOST_CHECKSUMMED_BYTES = 64 << 10
"""Limit of the bytes that a rank receives from all others. Above it an all-reduce is better, which
needs 2 / N of the bytes.
"""

AGREEING_DELAY = 3
"""Smallest delay, in local steps, that also hides the agreements before and after the messages of
an averaging: each has one step.
"""


STREAMS, _MOST_STREAMS = 32, 64
"""Most connections to one rank for large messages, and to all ranks together, by default."""


def streams_between(ranks: int) -> int:
    """Return the default number of connections between two of these ranks."""
    return min(max(_MOST_STREAMS // ranks, 1), STREAMS)


def ring_bytes(ranks: int, nbytes: float) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `nbytes`."""
    return 2 * (ranks - 1) / ranks * nbytes


def children(rank: int, ranks: int) -> int:
    """Return how many ranks get a broadcast of rank 0 from this one, by a tree."""
    # Source: gloo/broadcast.cc
    return sum(rank + 2**i < ranks for i in range(rank.bit_length(), ranks.bit_length()))


class Messages(NamedTuple):
    """Lengths of the messages of one source, without agreements and dense tensors."""

    to_owners: tuple[int, ...]
    """Bytes for each owner of sums; empty if messages are gathered."""
    to_all: int
    """Bytes for all others; sources pass them on in a ring."""
    sums: tuple[int, ...] = ()
    """Bytes of each all-reduce; one follows another."""

    def sent(self, source: int, sources: int) -> int:
        """Return the bytes that a source sends, each copy. Its own part does not count."""
        own = self.to_owners[source] if self.to_owners else 0
        summed = round(ring_bytes(sources, sum(self.sums)))
        return sum(self.to_owners) - own + (sources - 1) * self.to_all + summed


def messages(layout: Layout | WholeLayout, exchange: str, sources: int) -> Messages:
    """Return the bytes that each of `sources` sends in messages of this layout."""
    plan = chosen_split(exchange, layout, sources)
    if plan is None:
        return Messages((), layout.nbytes)
    return Messages(tuple(part.nbytes for part in plan.first), plan.row_bytes)


def chosen_split(exchange: str, layout: Form, sources: int) -> SplitLayout[Form] | None:
    """Return the plan by which messages of this layout are split; None if they are gathered."""
    if sources == 1 or exchange == GATHER:
        return None
    whole = isinstance(layout, WholeLayout)
    found = whole_split(layout, sources) if whole else split_plan(layout, sources)
    plan = cast("SplitLayout[Form] | None", found)
    if plan is None or exchange == SPLIT:
        return plan
    dealt = [*map(attrgetter("nbytes"), plan.first)]
    # bytes sent and received of the busiest source, where a message to all counts as sent once
    moved = sum(dealt) + sources * plan.row_bytes + (sources - 2) * max(dealt)
    return plan if sources * layout.nbytes >= _WORTH * moved else None


def travels_checksummed(nbytes: int, sources: int) -> bool:
    """Return True if a dense sum of this size is gathered, each part with a checksum."""
    return sources > 1 and (sources - 1) * (nbytes + CHECKSUM_BYTES) <= _MOST_CHECKSUMMED_BYTES


def first_split(layout: Layout) -> int | None:
    """Return the least number of sources, up to 256, for which "auto" splits messages, or None."""
    return next((w for w in range(2, 257) if chosen_split("auto", layout, w) is not None), None)
