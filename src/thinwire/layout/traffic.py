"""How much an exchange moves, counted from the layouts that make its messages, before anything is
sent.
"""

from functools import lru_cache
from typing import NamedTuple

from thinwire.layout.message import SEAL_BYTES, Layout, WholeLayout
from thinwire.layout.shares import WholeSplit, split_plan, whole_split

__all__ = [
    "EXCHANGES",
    "GATHER",
    "SPLIT",
    "Traffic",
    "between_sources",
    "busiest",
    "chosen_exchange",
    "chosen_split",
    "first_split",
    "inside_node",
    "travels_sealed",
]

GATHER, SPLIT = "gather", "split"
EXCHANGES = ("auto", GATHER, SPLIT)
_WORTH = 2
"""How many times fewer bytes the split exchange must move to be chosen: it passes on k sums, where
a gather passes on
the entries of all, and waits for the wire twice."""
_MOST_SEALED_BYTES = 64 << 10
"""That a rank receives from all others: beyond it an all-reduce, which needs 2 / N of the bytes, is
worth more."""


class Traffic(NamedTuple):
    """What one rank gives to exchanges and gets from them; own messages are given, and not
    received.

    An entry is room for one, which is what travels. A gathered message is given once, whoever
    carries it to whom.
    """

    entries_sent: int
    entries_received: int
    bytes_sent: int
    bytes_received: int

    @property
    def entries(self) -> int:
        """In both directions."""
        return self.entries_sent + self.entries_received

    @property
    def bytes(self) -> int:
        """In both directions."""
        return self.bytes_sent + self.bytes_received


def between_sources(layout: Layout, sources: int, exchange: str, source: int) -> Traffic:
    """What one source sends and receives for one message of this layout.

    Args:
        layout: Of the message, as every source would send it to all.
        sources: W, at least 1.
        exchange: "gather" or "split"; one source alone gathers.
        source: Which of the sources, from 0; with "split" they differ a little.

    Returns:
        Agreements and dense tensors aside.
    """
    if exchange == GATHER or sources == 1:
        k, others = _entries(layout), sources - 1
        return Traffic(k, others * k, layout.nbytes, others * layout.nbytes)
    return _split(layout, sources)[source]


@lru_cache(maxsize=256)
def busiest(layout: Layout, sources: int, exchange: str) -> Traffic:
    """The traffic of the source that moves most bytes."""
    if exchange == GATHER or sources == 1:
        return between_sources(layout, sources, GATHER, 0)
    return max(_split(layout, sources), key=lambda traffic: traffic.bytes)


def chosen_exchange(exchange: str, layout: Layout, sources: int) -> str:
    """Which of "gather" and "split" is used, the same on all sources.

    Args:
        exchange: "gather", "split" or "auto": split where a source then moves at most half of the
            bytes.
        layout: Of the message.
        sources: W, at least 1; one source alone always gathers.
    """
    if sources == 1:
        return GATHER
    if exchange != "auto":
        return exchange
    ways = (busiest(layout, sources, way).bytes for way in (GATHER, SPLIT))
    return SPLIT if next(ways) >= _WORTH * next(ways) else GATHER


def chosen_split(exchange: str, layout: WholeLayout, sources: int) -> WholeSplit | None:
    """The plan by which messages of whole tensors are split; None where they are gathered.

    As in `chosen_exchange`; fewer entries than sources are gathered too.
    """
    plan = None if sources == 1 or exchange == GATHER else whole_split(layout, sources)
    if plan is None or exchange == SPLIT:
        return plan
    moved = max(
        plan.bytes_sent(source) + (sources - 1) * (plan.first[source].nbytes + plan.row_bytes)
        for source in range(sources)
    )
    return plan if sources * layout.nbytes >= _WORTH * moved else None


def travels_sealed(nbytes: int, sources: int) -> bool:
    """Whether a dense sum of so many bytes over so many sources is gathered, each part with a
    checksum.
    """
    return sources > 1 and (sources - 1) * (nbytes + SEAL_BYTES) <= _MOST_SEALED_BYTES


def first_split(layout: Layout, *, up_to: int = 256) -> int | None:
    """The smallest number of sources for which "auto" splits messages of this layout; None where
    there is none.
    """
    return next(
        (w for w in range(2, up_to + 1) if chosen_exchange("auto", layout, w) == SPLIT), None
    )


def inside_node(
    layout: Layout, sources: int, exchange: str, node: int, *, leader: bool, grad_bytes: int
) -> Traffic:
    """What one rank of a node sends and receives inside its node for one message of this layout.

    Args:
        layout: Of the message.
        sources: Nodes.
        exchange: "gather" or "split".
        node: Which of the nodes.
        leader: Whether the rank is the one that speaks to other nodes and passes on what comes.
        grad_bytes: Of the gradients that the ranks of a node average first.

    Returns:
        The average, given and received whole, and what the leader passes on. Its entries are those
        of messages.
    """
    k = _entries(layout)
    if exchange == GATHER or sources == 1:
        entries, nbytes = sources * k, sources * layout.nbytes
    else:
        plan = split_plan(layout, sources)
        entries = sources * _entries(plan.first[node]) + sum(map(_entries, plan.second))
        nbytes = sources * (plan.first[node].nbytes + plan.row_bytes)
    sent, received = (1, 0) if leader else (0, 1)
    return Traffic(
        sent * entries,
        received * entries,
        grad_bytes + sent * nbytes,
        grad_bytes + received * nbytes,
    )


def _entries(layout: Layout) -> int:
    return sum(slot.k for slot in layout.slots)


@lru_cache(maxsize=64)
def _split(layout: Layout, sources: int) -> list[Traffic]:
    plan, others = split_plan(layout, sources), sources - 1
    first, second = list(map(_entries, plan.first)), list(map(_entries, plan.second))
    first_bytes, row_bytes = [part.nbytes for part in plan.first], plan.row_bytes
    all_first, all_second, all_bytes = sum(first), sum(second), sum(first_bytes)
    return [
        Traffic(
            all_first - mine + passed_on,
            others * mine + all_second - passed_on,
            all_bytes - mine_bytes + row_bytes,
            others * (mine_bytes + row_bytes),
        )
        for mine, passed_on, mine_bytes in zip(first, second, first_bytes, strict=True)
    ]
