"""Sums of sparse vectors by shares: each source adds up the part of the index space that it owns.

The tensors of a message, laid end to end, are cut into W equal shares; a share consists of pieces,
each within one tensor. In round one every source sends each owner its proposed entries in the
owner's pieces. In round two every owner selects again and sends all sources the largest sums of its
pieces. Entries that do not fit are kept, at the source or at the owner.

Source: Ok-Topk, Li and Hoefler, 2022, arXiv 2201.07598. Differs: equal shares and fixed room
instead of balancing by the counts of entries, so that no sizes are exchanged; the owner keeps the
entries that it drops.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compress.protocol import Entries
from thinwire.core.feedback import sum_sparse, top_k
from thinwire.layout.message import Layout
from thinwire.layout.shares import SplitLayout


class Sums(NamedTuple):
    """Sums that an owner made of one of its pieces."""

    indices: Tensor
    """Positions of entries that any source sent, ascending."""
    totals: Tensor
    """The sums there, or means over the sources that sent an entry."""
    chosen: Tensor
    """Indices into `indices` of the entries that are sent in round two."""
    unsent: Tensor
    """Kept part of each entry that is not sent: the sum, or its mean over all sources."""

    @property
    def passed_on(self) -> Entries:
        """Return the entries that the owner would send."""
        return self.indices[self.chosen], self.totals[self.chosen]

    def left_over(self, sent: Tensor) -> Tensor:
        """Return the residual of the owner at `indices`."""
        rest = self.unsent.clone()
        rest[self.chosen] = self.totals[self.chosen] - sent.to(rest.dtype)
        return rest


def shares(plan: SplitLayout[Layout], parts: Sequence[Entries]) -> list[list[Entries]]:
    """Return the entries that one source sends, by owner and piece; positions are the piece's own.

    If there are too many the largest are taken, equal ones by lowest position.

    >>> from thinwire.layout.shares import split_plan
    >>> plan = split_plan(Layout.of([8], sparsity=0.5, value_bits=32), 2)
    >>> [[(_, values)], [_]] = shares(plan, [(torch.tensor([1, 5]), torch.tensor([3.0, 4.0]))])
    >>> values
    tensor([3.])
    """
    cuts = [
        [0, *torch.searchsorted(indices, torch.tensor(ends, device=indices.device)).tolist()]
        for (indices, _), ends in zip(parts, plan.ends, strict=True)
    ]
    seen = [0] * len(parts)
    given: list[list[Entries]] = []
    for pieces, layout in zip(plan.pieces, plan.first, strict=True):
        given.append([])
        for piece, slot in zip(pieces, layout.slots, strict=True):
            begin, end = cuts[piece.slot][seen[piece.slot] : seen[piece.slot] + 2]
            seen[piece.slot] += 1
            indices, values = (entries[begin:end] for entries in parts[piece.slot])
            given[-1].append(_largest(indices - piece.start, values, slot.k))
    return given


def add_up(
    layout: Layout,
    parts: Sequence[Sequence[Entries]],
    dtypes: Sequence[torch.dtype],
    *,
    over_senders: bool = False,
) -> list[Sums]:
    """Add up an owner's pieces, in the order of the sources, and select the entries to send.

    `parts`: by source and piece. `over_senders`: send means over the sources that sent an entry,
    those of the largest sums.
    """
    found = []
    for index, (slot, dtype) in enumerate(zip(layout.slots, dtypes, strict=True)):
        sent = [source[index] for source in parts]
        indices, totals = sum_sparse(sent, dtype)
        everything = torch.arange(indices.numel(), device=indices.device)
        chosen = everything if indices.numel() <= slot.k else top_k(totals, slot.k)
        if over_senders:
            means = totals / senders(sent, dtype)
            # what is kept is the mean over all: a source that sends it later is the only sender
            found.append(Sums(indices, means, chosen, totals / len(parts)))
        else:
            found.append(Sums(indices, totals, chosen, totals))
    return found


def senders(parts: Sequence[Entries], dtype: torch.dtype) -> Tensor:
    """Return the number of parts that have an entry at each position found by `sum_sparse`."""
    return sum_sparse([(indices, torch.ones_like(values)) for indices, values in parts], dtype)[1]


def joined(
    plan: SplitLayout[Layout], slots: int, parts: Sequence[Sequence[Entries]]
) -> list[Entries | None]:
    """Convert entries by owner and piece to entries by tensor, in its positions; None without."""
    by_slot: list[list[Entries]] = [[] for _ in range(slots)]
    for pieces, theirs in zip(plan.pieces, parts, strict=True):
        for piece, (indices, values) in zip(pieces, theirs, strict=False):
            by_slot[piece.slot].append((indices + piece.start, values))
    return [
        (torch.cat([i for i, _ in entries]), torch.cat([x for _, x in entries]))
        if entries
        else None
        for entries in by_slot
    ]


def _largest(indices: Tensor, values: Tensor, room: int) -> Entries:
    if indices.numel() <= room:
        return indices, values
    kept = top_k(values.contiguous(), room)
    return indices[kept], values[kept]
