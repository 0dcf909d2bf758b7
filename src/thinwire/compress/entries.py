"""Exchange of a few entries of each tensor: gathered by all sources, or added up by owners.

With "gather" every source sends all of its entries to every other one, and each adds them up in the
order of the sources. With "split" the index space is cut into parts, each with an owner. Every
source sends each owner the entries of its part, and owners send all sources the largest sums; see
`thinwire.compress.split`.
"""

import functools
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from thinwire._devices import moved
from thinwire.compress.protocol import (
    RESIDUAL,
    AllGather,
    AllToAll,
    Arrived,
    Collective,
    Computed,
    Context,
    Entries,
    Kept,
    Sending,
    buffer_for,
)
from thinwire.compress.split import Sums, add_up, joined, shares
from thinwire.core.feedback import Proposal, rounding_seed, store_, sum_sparse
from thinwire.errors import PayloadCorrupt
from thinwire.kernels.reference import divided_
from thinwire.layout.message import Layout, Slot
from thinwire.layout.shares import split_plan
from thinwire.layout.traffic import chosen_split
from thinwire.wire.message import pack, pack_nonfinite, unpack

_KEPT = 1 << 31
"""Added to a seed's key where an owner's residual is rounded: these bits are unused by the
commit.
"""


class Proposed(NamedTuple):
    """Entries of one tensor that one rank proposes to send."""

    proposal: Proposal
    numel: int
    k: int


class ArrivedEntries(Arrived):
    """Entries of each tensor from all sources, or the sums that its owners made of them.

    They stay on the CPU, where messages are written and read, until they are applied.
    """

    def __init__(
        self,
        context: Context,
        words: tuple[str, str],
        names: Sequence[str],
        *,
        over_senders: bool = False,
    ) -> None:
        super().__init__(context, names)
        self.given_word, self.sums_word = words
        self.over_senders = over_senders
        """True if an entry's mean is over the sources that sent it."""
        self.given: dict[str, Entries] = {}
        """Entries that this rank sent, as the others decode them: values (j,) in float32, j at most
        k.
        """
        self.parts: dict[str, list[Entries]] = {}
        """Entries of each source, or of the sum over all sources: float32."""
        self.owned = False
        """True if owners added the entries up."""
        self.kept: dict[str, Entries] = {}
        """Residual of the sums owned by this rank's source."""

    def overflowed(self) -> str | None:
        """Return the first tensor whose sum exceeds float32, though no part does."""
        for name, parts in self.parts.items():
            if not sum_sparse(parts, torch.float32)[1].isfinite().all():
                return name
        return None

    def take_(self, name: str, folded: Computed, kept: Kept, into: Tensor | None = None) -> Tensor:
        self.leave_(name, folded, kept)
        mean = buffer_for(kept[RESIDUAL][name], into).zero_()
        flat = mean.view(-1)
        counts = torch.zeros_like(flat) if self.over_senders and not self.owned else None
        # in the order of the sources, as in `sum_sparse`; none if owners sent no entry
        for part in self.parts.get(name, ()):
            indices, values = moved(part, flat.device)
            flat[indices] += values.to(flat.dtype)
            if counts is not None:
                counts[indices] += 1
        if counts is not None:
            flat.div_(counts.clamp_(min=1))
        elif not self.over_senders:
            divided_(flat, self.context.sources)
        return mean

    def leave_(self, name: str, folded: Computed, kept: Kept) -> None:
        """Take what was sent out of the residual, and add what this source's sums have left."""
        residual = kept[RESIDUAL][name].view(-1)
        indices, values = moved(self.given[name], residual.device)
        folded.leave_(name, (indices, values), kept)
        if name in self.kept:
            indices, values = moved(self.kept[name], residual.device)
            added = residual[indices].to(values.dtype) + values
            stored = torch.empty_like(added, dtype=residual.dtype)
            seed = rounding_seed(self.context.step, folded.key(name) + _KEPT)
            store_(stored, added, seed)
            residual[indices] = stored


def send_entries(
    context: Context,
    proposed: Mapping[str, Proposed],
    arrived: ArrivedEntries,
    value_bits: int,
    exchange: str,
) -> Sending:
    """Send entries of several tensors, which are on the CPU, in one message; read only."""
    layout = _layout(tuple(Slot(item.numel, item.k) for item in proposed.values()), value_bits)
    arrived.finite = {name: item.proposal.finite for name, item in proposed.items()}
    arrived.owned = chosen_split(exchange, layout, context.sources) is not None
    if arrived.owned:
        yield from _split(context, proposed, layout, arrived)
    else:
        yield from _gathered(context, proposed, layout, arrived)
    return arrived


_layout = functools.lru_cache(maxsize=256)(Layout)
_Steps: TypeAlias = Generator[list[Collective], Sequence[Tensor], None]


def _gathered(
    context: Context, proposed: Mapping[str, Proposed], layout: Layout, arrived: ArrivedEntries
) -> _Steps:
    bad = _first_bad(proposed)
    if bad is None:
        parts = [item.proposal[:2] for item in proposed.values()]
        message, sent = pack(layout, context.step, context.bucket, parts)
        for (name, item), values in zip(proposed.items(), sent, strict=True):
            arrived.given[name] = (item.proposal.indices, values)
    else:
        message = pack_nonfinite(layout, context.step, context.bucket, bad)
    [rows] = yield [AllGather(message, _purpose(f"gathering {arrived.given_word}", context))]
    largest = 0.0
    for source, row in enumerate(rows):
        parts = _unpacked(context, layout, row, source)
        for name, part in zip(proposed, parts, strict=False):  # no parts if one is not finite
            arrived.parts.setdefault(name, []).append(part)
        values = torch.cat([values for _, values in parts]) if parts else rows.new_empty(0)
        largest += float(values.abs().max()) if values.numel() else 0.0
    if not largest < torch.finfo(torch.float32).max:
        arrived.bad_sum = arrived.overflowed()


def _split(
    context: Context,
    proposed: Mapping[str, Proposed],
    layout: Layout,
    arrived: ArrivedEntries,
) -> _Steps:
    """Send entries to their owners, and the owners' results back to all sources."""
    names = list(proposed)
    me = context.source
    plan = split_plan(layout, context.sources)
    # round one: to the owners
    messages, given = _for_owners(context, proposed, layout)
    for name, entries in zip(names, given, strict=False):
        arrived.given[name] = entries
    lengths = [message.numel() for message in messages]
    purpose = _purpose(f"scattering {arrived.given_word}", context)
    [rows] = yield [AllToAll(torch.cat(messages), lengths, purpose)]

    # round two happens in any case: the other sources wait in it
    refusal: PayloadCorrupt | None = None
    sums: list[Sums] | None = None
    try:
        sums = _added(context, proposed, layout, rows, arrived.over_senders)
    except PayloadCorrupt as found:
        refusal = found
    if sums is None:
        message = pack_nonfinite(plan.second[me], context.step, context.bucket, 0)
    else:
        passed = [total.passed_on for total in sums]
        message, sent = pack(plan.second[me], context.step, context.bucket, passed)
        left = [(s.indices, s.left_over(values)) for s, values in zip(sums, sent, strict=True)]
        stays = joined(plan, len(names), [left if o == me else [] for o in range(context.sources)])
        arrived.kept = {n: kept for n, kept in zip(names, stays, strict=True) if kept is not None}
    row = message.new_zeros(plan.row_bytes)
    row[: message.numel()] = message
    [rows] = yield [AllGather(row, _purpose(f"gathering {arrived.sums_word}", context))]

    if refusal is not None:
        raise refusal
    received: list[list[Entries]] = []
    for owner, (its, row) in enumerate(zip(plan.second, rows, strict=True)):
        received.append(_unpacked(context, its, row[: its.nbytes], owner))
        if len(received[-1]) < len(plan.pieces[owner]) and arrived.bad_sum is None:
            arrived.bad_sum = names[plan.pieces[owner][0].slot]
    for name, total in zip(names, joined(plan, len(names), received), strict=True):
        if total is not None:
            arrived.parts[name] = [total]


def _for_owners(
    context: Context, proposed: Mapping[str, Proposed], layout: Layout
) -> tuple[list[Tensor], list[Entries]]:
    """Return a message for each owner, and the entries that the owners decode."""
    plan = split_plan(layout, context.sources)
    bad = _first_bad(proposed)
    step, bucket = context.step, context.bucket
    if bad is not None:
        return [pack_nonfinite(its, step, bucket, bad) for its in plan.first], []
    given = shares(plan, [item.proposal[:2] for item in proposed.values()])
    packed = [pack(its, step, bucket, part) for its, part in zip(plan.first, given, strict=True)]
    sent = [
        [(indices, values) for (indices, _), values in zip(part, decoded, strict=True)]
        for part, (_, decoded) in zip(given, packed, strict=True)
    ]
    entries = joined(plan, len(proposed), sent)
    return [message for message, _ in packed], [entry for entry in entries if entry is not None]


def _added(
    context: Context,
    proposed: Mapping[str, Proposed],
    layout: Layout,
    rows: Tensor,
    over_senders: bool,
) -> list[Sums] | None:
    """Return the sums of the pieces that this source owns."""
    plan = split_plan(layout, context.sources)
    me = context.source
    own = plan.pieces[me]
    its = plan.first[me]
    parts = [_unpacked(context, its, row, source) for source, row in enumerate(rows)]
    if any(len(part) < len(own) for part in parts):
        return None
    values = [item.proposal.values for item in proposed.values()]
    dtypes = [torch.promote_types(values[piece.slot].dtype, torch.float32) for piece in own]
    sums = add_up(plan.second[me], parts, dtypes, over_senders=over_senders)
    return sums if all(bool(piece_sum.totals.isfinite().all()) for piece_sum in sums) else None


def _unpacked(context: Context, layout: Layout, message: Tensor, source: int) -> list[Entries]:
    rank = source * context.node_size
    return unpack(layout, message, step=context.step, bucket=context.bucket, source=rank).parts


def _first_bad(proposed: Mapping[str, Proposed]) -> int | None:
    items = enumerate(proposed.values())
    return next((index for index, item in items if not item.proposal.finite), None)


def _purpose(verb: str, context: Context) -> str:
    return f"{verb} of step {context.step}, bucket {context.bucket}"
