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
    "Messages",
    "begin_step",
    "chosen_split",
    "first_split",
    "messages",
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
    "low_rank": (BUCKET_BYTES, BUCKET_BYTES),  # a small first one does not pay in two rounds
}
"""Gradient bytes that travel together in the first bucket of an update and in the others, by the
field of the compression; None for dense ones, measured at 1 Gbit/s."""
_WORTH = 2
"""How many times fewer bytes the split exchange must move to be chosen: it passes on k sums, where
a gather passes on the entries of all, and waits for the wire twice."""
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


class Messages(NamedTuple):
    """Bytes of what one source gives to an exchange; agreements and dense tensors aside."""

    to_owners: tuple[int, ...]
    """By owner of sums, which gets it; empty where messages are gathered."""
    to_all: int
    """Given once, whoever carries it to whom."""

    def sent(self, source: int) -> int:
        """What a source gives; what it deals to itself is not given."""
        return sum(self.to_owners) - self._own(source) + self.to_all

    def received(self, source: int, sources: int) -> int:
        """What it gets from the others."""
        return (sources - 1) * (self._own(source) + self.to_all)

    def _own(self, source: int) -> int:
        return self.to_owners[source] if self.to_owners else 0


def messages(layout: Layout | WholeLayout, exchange: str, sources: int) -> Messages:
    """What each of `sources` gives for messages of this layout; arguments as in `chosen_split`."""
    plan = chosen_split(exchange, layout, sources)
    if plan is None:
        return Messages((), layout.nbytes)
    return Messages(tuple(part.nbytes for part in plan.first), plan.row_bytes)


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
    dealt = [part.nbytes for part in plan.first]
    # sent and received by the source that moves most
    moved = sum(dealt) + sources * plan.row_bytes + (sources - 2) * max(dealt)
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
