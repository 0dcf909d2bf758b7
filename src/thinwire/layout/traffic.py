"""How much an exchange moves, counted from the layouts that make its messages, before anything is
sent.
"""

from functools import lru_cache
from typing import NamedTuple, overload

from thinwire.layout.message import SEAL_BYTES, Layout, WholeLayout
from thinwire.layout.shares import SplitPlan, split_plan, whole_split

__all__ = [
    "BUCKETS",
    "BUCKET_BYTES",
    "EXCHANGES",
    "FIRST_BUCKET_BYTES",
    "GATHER",
    "SPLIT",
    "Traffic",
    "begin_step",
    "between_sources",
    "busiest",
    "chosen_split",
    "first_split",
    "settled_step",
    "travels_sealed",
]

GATHER, SPLIT = "gather", "split"
EXCHANGES = ("auto", GATHER, SPLIT)
BUCKET_BYTES = 25 * 2**20
"""Gradient bytes of a bucket whose message is compressed: the fewer messages, the less each costs
in latency."""
FIRST_BUCKET_BYTES = 2**20
"""Of the bucket that is ready first: small, so that the link does not idle while the backward pass
begins."""
BUCKETS = {
    None: (FIRST_BUCKET_BYTES, 5 * 2**20),  # the backward pass cannot hide the last bucket
    "dgc": (FIRST_BUCKET_BYTES, BUCKET_BYTES),
    "low_rank": (
        BUCKET_BYTES,
        BUCKET_BYTES,
    ),  # a small first one does not pay in two rounds
}
"""Gradient bytes that travel together in the first bucket of an update and in the others, by the
field of the compression; None for dense ones, measured at 1 Gbit/s."""
_WORTH = 2
"""How many times fewer bytes the split exchange must move to be chosen: it passes on k sums, where
a gather passes on
the entries of all, and waits for the wire twice."""
_MOST_SEALED_BYTES = 64 << 10
"""That a rank receives from all others: beyond it an all-reduce, which needs 2 / N of the bytes, is
worth more."""


def begin_step(config: object, default: int = 0) -> int:
    """Updates, or local steps, before a method begins to compress, by the fields of its config;
    `default` where it has no such field.
    """
    begin: int = getattr(config, "rampup_begin_step", getattr(config, "begin_step", default))
    return begin


def settled_step(config: object) -> int:
    """The update, from 1, from which on messages of gradients have their last length."""
    levels = max(1, len(getattr(config, "sparsity", ())))
    length = getattr(config, "rampup_step", 1)
    return 1 + begin_step(config) - (-length * (levels - 1) // levels)


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


@overload
def chosen_split(exchange: str, layout: Layout, sources: int) -> SplitPlan[Layout] | None: ...
@overload
def chosen_split(
    exchange: str, layout: WholeLayout, sources: int
) -> SplitPlan[WholeLayout] | None: ...
def chosen_split(
    exchange: str, layout: Layout | WholeLayout, sources: int
) -> SplitPlan[Layout] | SplitPlan[WholeLayout] | None:
    """The plan by which messages of this layout are split; None where they are gathered.

    Args:
        exchange: "gather", "split" or "auto": split where a source then moves at most half of the
            bytes.
        layout: Of the message, as every source would send it to all.
        sources: W, at least 1; one source alone always gathers. Fewer entries than sources are
            gathered too.
    """
    return None if sources == 1 or exchange == GATHER else _plan(exchange, layout, sources)


@lru_cache(maxsize=256)
def _plan(
    exchange: str, layout: Layout | WholeLayout, sources: int
) -> SplitPlan[Layout] | SplitPlan[WholeLayout] | None:
    plan: SplitPlan[Layout] | SplitPlan[WholeLayout] | None
    whole = isinstance(layout, WholeLayout)
    plan = whole_split(layout, sources) if whole else split_plan(layout, sources)
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
        (w for w in range(2, up_to + 1) if chosen_split("auto", layout, w) is not None), None
    )


def _entries(layout: Layout) -> int:
    return sum(slot.k for slot in layout.slots)


@lru_cache(maxsize=64)
def _split(layout: Layout, sources: int) -> list[Traffic]:
    plan, others = split_plan(layout, sources), sources - 1
    first, second = list(map(_entries, plan.first)), list(map(_entries, plan.second))
    all_first, all_second = sum(first), sum(second)
    return [
        Traffic(
            all_first - mine + passed_on,
            others * mine + all_second - passed_on,
            plan.bytes_sent(source),
            others * (plan.first[source].nbytes + plan.row_bytes),
        )
        for source, (mine, passed_on) in enumerate(zip(first, second, strict=True))
    ]
