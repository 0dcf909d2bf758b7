"""Owners of shares and lengths of their messages; assignment of tensors to parts of a model.

Shares serve sums that owners add up; parts serve models that are averaged part by part. The tensors
of a message, laid end to end, are cut into W equal shares; a share consists of pieces, each within
one tensor; see `thinwire.compress.split`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

from thinwire.layout.message import Layout, Slot, WholeLayout

_FIRST_ROOM = 2
"""Capacity of a piece in round one, in multiples of its average number of entries."""


class Piece(NamedTuple):
    """A contiguous range of one tensor."""

    slot: int
    """Index of the tensor in the message."""
    start: int
    """First position."""
    numel: int
    """Number of positions."""


Form = TypeVar("Form", bound=Layout | WholeLayout)


@dataclass(frozen=True)
class SplitLayout(Generic[Form]):
    """Owners of pieces and lengths of all messages; the same on all sources."""

    numels: tuple[int, ...]
    """Entries of the tensors."""
    first: tuple[Form, ...]
    """Layout by owner of the message that every source sends it in round one."""
    second: tuple[Form, ...]
    """Layout by owner of the message that it sends to all in round two."""

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """Pieces by owner, in the order of the tensors."""
        return partition(self.numels, len(self.first))

    @cached_property
    def ends(self) -> list[list[int]]:
        """Return the ends of the pieces, by tensor."""
        found: list[list[int]] = []
        for piece in (piece for row in self.pieces for piece in row):
            found += [[] for _ in range(piece.slot + 1 - len(found))]
            found[piece.slot].append(piece.start + piece.numel)
        return found

    @cached_property
    def row_bytes(self) -> int:
        """Length to which all messages of round two are padded."""
        return max(layout.nbytes for layout in self.second)


@lru_cache(maxsize=64)
def split_plan(layout: Layout, sources: int) -> SplitLayout[Layout]:
    """Return the plan for messages of this layout."""
    # a piece of m positions of a tensor that sends k of n has room for ceil(2 k m / n) entries in
    # round one; in round two the pieces of a tensor have room for about k, each for one at least
    slots, bits = layout.slots, layout.value_bits
    numels = tuple(slot.numel for slot in slots)
    pieces = partition(numels, sources)
    first = [tuple(_first_room(slots[p.slot], p.numel) for p in row) for row in pieces]
    second = [tuple(_second_room(slots[p.slot], p.start, p.numel) for p in row) for row in pieces]
    return SplitLayout(
        numels,
        tuple(Layout(row, bits, f";to {owner}") for owner, row in enumerate(first)),
        tuple(Layout(row, bits, f";from {owner}") for owner, row in enumerate(second)),
    )


def partition(numels: Sequence[int], sources: int) -> list[list[Piece]]:
    """Return the equal share of each owner, as pieces within one tensor each."""
    total = sum(numels)
    owner = 0
    at = 0
    pieces: list[list[Piece]] = [[] for _ in range(sources)]
    for slot, numel in enumerate(numels):
        start = 0
        while start < numel:
            while (owner + 1) * total // sources <= at:
                owner += 1
            length = min(numel - start, (owner + 1) * total // sources - at)
            pieces[owner].append(Piece(slot, start, length))
            start, at = start + length, at + length
    return pieces


@lru_cache(maxsize=256)
def _first_room(slot: Slot, numel: int) -> Slot:
    return Slot(numel, min(numel, -(-_FIRST_ROOM * slot.k * numel // slot.numel)))


@lru_cache(maxsize=256)  # tensors are alike
def _second_room(slot: Slot, start: int, numel: int) -> Slot:
    """Return the slot of a piece in round two."""
    before, after = (
        (2 * slot.k * at + slot.numel) // (2 * slot.numel) for at in (start, start + numel)
    )
    return Slot(numel, min(numel, max(1, after - before)))


@lru_cache(maxsize=64)
def whole_split(layout: WholeLayout, sources: int) -> SplitLayout[WholeLayout] | None:
    """Return the plan for whole tensors; None if there are fewer entries than sources."""
    if sum(layout.numels) < sources:
        return None
    pieces = partition(layout.numels, sources)
    bits = layout.value_bits
    shares = [tuple(piece.numel for piece in row) for row in pieces]
    return SplitLayout(
        layout.numels,
        tuple(WholeLayout(row, bits, f";to {owner}") for owner, row in enumerate(shares)),
        tuple(WholeLayout(row, bits, f";from {owner}") for owner, row in enumerate(shares)),
    )


def contiguous(sizes: Sequence[int], parts: int) -> list[range]:
    """Return `parts` contiguous, nonempty ranges of indices that cover `sizes`."""
    if not 1 <= parts <= len(sizes):
        raise ValueError(
            f"fragments is {parts}; it must be between 1 and the {len(sizes)} tensors there are"
        )
    ends = list(accumulate(sizes))  # ends[i]: elements in the tensors up to i
    cuts = [0]
    for part in range(1, parts):
        share = ends[-1] * part / parts
        allowed = range(cuts[-1] + 1, len(sizes) - (parts - part) + 1)
        cuts.append(min(allowed, key=lambda at: abs(ends[at - 1] - share)))
    cuts.append(len(sizes))
    return [range(first, last) for first, last in pairwise(cuts)]


def assign_owners(costs: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Return rounds in which every rank has one tensor at most, the most expensive ones first."""
    # in each round the most expensive tensor goes to the rank with the least cost so far
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    load = [0] * ranks
    rounds = []
    for at in range(0, len(order), ranks):
        owned: list[int | None] = [None] * ranks
        for i, rank in zip(
            order[at : at + ranks], sorted(range(ranks), key=load.__getitem__), strict=False
        ):
            owned[rank] = i
            load[rank] += costs[i]
        rounds.append(owned)
    return rounds


def shard_lengths(length: int, ranks: int) -> list[int]:
    """Return the length of a dimension on each rank, cut as by `torch.chunk`."""
    most = -(-length // ranks)
    return [min(max(length - rank * most, 0), most) for rank in range(ranks)]
