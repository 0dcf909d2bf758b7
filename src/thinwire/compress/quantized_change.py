"""Quantized changes: every entry travels in few bits, and the rounding error is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._devices import uploaded
from thinwire.compress.protocol import (
    RESIDUAL,
    AllGather,
    AllToAll,
    Arrived,
    Compression,
    Computed,
    Context,
    Kept,
    Sending,
    buffer_for,
    check_messages,
)
from thinwire.errors import PayloadCorrupt
from thinwire.kernels.reference import divided_
from thinwire.layout.message import WHOLE_BITS, WholeLayout
from thinwire.layout.shares import Piece, SplitLayout
from thinwire.layout.traffic import chosen_split
from thinwire.wire.bucket import Part
from thinwire.wire.message import pack_whole, unpack_whole
from thinwire.wire.whole import WholeReader, read_part

_NARROWEST_PLAIN = 32


@check.by_name
@dataclass(frozen=True)
class Quantized(Compression):
    """Every entry of each parameter's change is sent in a few bits, without positions.

    All parameters of floating-point type are quantized, of any size. A tensor costs its bits and a
    few float32 scales: 2 at 1 and 2 bits, 8 at 4 bits, 2 at 8 and 16 bits.

    Attributes:
        value_bits: Bits per entry: 1, 2, 4, 8 or 16. The rounding error is kept.
        decay: Factor of the kept error at the next averaging, in [0, 1]; 1 loses nothing, 0 keeps
            nothing.
        exchange: "gather": all messages go to all ranks. "split": each rank averages a part of the
            entries, sends all others the mean in as many bits, and keeps its rounding error. The
            bytes that a rank sends and receives then do not grow with the number of ranks. "auto":
            split if a rank then moves at most half of the bytes.

    Raises:
        TypeError, ValueError: A wrong value.

    Example::

        local = tw.LocalSGD(k_steps=16, compression=tw.Quantized(value_bits=1))
        strategy = tw.DistributedStrategy(localsgd=local)

    Source: error feedback, Karimireddy et al., 2019, arXiv 1901.09847; quantized changes with error
    feedback, MuLoCo, 2025, arXiv 2505.23725. Differs: levels are means of parts of the magnitudes
    (at 1 bit of each sign), not quantiles.
    """

    value_bits: int = 4
    decay: float = 1.0
    _: KW_ONLY
    exchange: Literal["auto", "gather", "split"] = "auto"

    has_checksums: ClassVar[bool] = True
    passes = 16

    def __post_init__(self) -> None:
        if self.value_bits == _NARROWEST_PLAIN:
            raise ValueError(
                f"value_bits={self.value_bits} does not compress, since a change already has "
                f"{self.value_bits} bits per entry: use compression=None, or one of "
                f"{list(WHOLE_BITS)}"
            )
        check_messages(self, WHOLE_BITS)
        check.set_fields(self, check.real, "decay", at_least=0, at_most=1)

    def layout(self, step: int, numels: Sequence[int]) -> WholeLayout:
        """See `Compression`."""
        return WholeLayout(tuple(numels), self.value_bits)

    def send(self, context: Context, folded: Computed, kept: Kept) -> Sending:
        """Send by an all-gather, perhaps after an all-to-all; see `Compression`."""
        errors = [kept[RESIDUAL][name] for name in folded]
        layout = WholeLayout(tuple(error.numel() for error in errors), self.value_bits)
        step = context.step
        plan = chosen_split(self.exchange, layout, context.sources)
        if plan is not None:
            return (yield from _by_shares(context, folded, plan, kept))
        parts = (
            ([end for _, _, end in run[-1]], (folded.read(part) for part in run))
            for run in folded.runs()
        )
        message = pack_whole(layout, step, context.bucket, parts)
        [rows] = yield [AllGather(message, f"gathering {folded.words[0]} of step {step}")]
        codes = [_unpacked(context, layout, row, source) for source, row in enumerate(rows)]
        made = _Whole(context, list(folded))
        made.received = dict(zip(folded, zip(*codes, strict=True), strict=True))
        return made


class _Whole(Arrived):
    """Codes that all ranks sent of each tensor."""

    received: Mapping[str, Sequence[WholeReader]]

    def take_part_(self, part: Part, folded: Tensor, residual: Tensor) -> Tensor:
        mean = folded
        for source, codes in enumerate(
            zip(*(self.received[name] for name, *_ in part), strict=True)
        ):
            sent = read_part(codes, part, folded.device)
            if source == self.context.source:
                torch.sub(folded, sent, out=residual)
            mean = mean.add_(sent) if source else sent.to(folded.dtype)
        return divided_(mean, self.context.sources)


def _by_shares(
    context: Context, folded: Computed, plan: SplitLayout[WholeLayout], kept: Kept
) -> Sending:
    """Send codes to their owners, and the owners' means back to all.

    An owner does not round its own part of the average. It keeps the rounding error of the mean,
    times the number of sources, so that the error counts once in a later mean.
    """
    me = context.source
    step = context.step
    names = list(folded)
    home = kept[RESIDUAL][names[0]].device
    device = folded.part(names[0], 0, 1).device

    def own_part(piece: Piece) -> Tensor:
        return folded.part(names[piece.slot], piece.start, piece.start + piece.numel)

    messages = [
        pack_whole(its, step, context.bucket, map(own_part, pieces))
        for its, pieces in zip(plan.first, plan.pieces, strict=True)
    ]
    lengths = [message.numel() for message in messages]
    purpose = f"scattering {folded.words[0]} of step {step}"
    [rows] = yield [AllToAll(torch.cat(messages), lengths, purpose)]

    refusal: PayloadCorrupt | None = None
    means = [torch.zeros_like(own_part(piece), device=home) for piece in plan.pieces[me]]
    try:
        for source, row in enumerate(rows):
            codes = _unpacked(context, plan.first[me], row, source)
            for total, code, piece in zip(means, codes, plan.pieces[me], strict=True):
                own = source == me
                total.add_(own_part(piece).to(home) if own else code.part(0, piece.numel, home))
    except PayloadCorrupt as found:  # raised after round two, in which the other sources wait
        refusal = found
    parts = (uploaded(divided_(mean, context.sources), device) for mean in means)
    message = pack_whole(plan.second[me], step, context.bucket, parts)
    row = message.new_zeros(plan.row_bytes)
    row[: message.numel()] = message
    [rows] = yield [AllGather(row, f"gathering {folded.words[1]} of step {step}")]
    if refusal is not None:
        raise refusal

    made = _Means(context, names)
    made.pieces = {name: [] for name in names}
    for owner, (its, row) in enumerate(zip(plan.second, rows, strict=True)):
        codes = _unpacked(context, its, row[: its.nbytes], owner)
        sent = unpack_whole(
            plan.first[owner], messages[owner], step=step, bucket=context.bucket, source=me
        )
        exact = means if owner == me else [None] * len(codes)
        for entry in zip(plan.pieces[owner], codes, sent, exact, strict=True):
            made.pieces[names[entry[0].slot]].append(entry)
    return made


def _unpacked(
    context: Context, layout: WholeLayout, message: Tensor, source: int
) -> list[WholeReader]:
    rank = source * context.node_size
    return unpack_whole(layout, message, step=context.step, bucket=context.bucket, source=rank)


class _Means(Arrived):
    """Means as their owners sent them."""

    pieces: dict[str, list[tuple[Piece, WholeReader, WholeReader, Tensor | None]]]
    """The mean, what this rank sent to its owner, and the exact mean where that is this rank."""

    def take_(self, name: str, folded: Computed, kept: Kept, into: Tensor | None = None) -> Tensor:
        residual = kept[RESIDUAL][name].view(-1)
        home = residual.device
        whole = folded[name].view(-1).to(home)
        mean = buffer_for(kept[RESIDUAL][name], into)
        for piece, arrived, sent, exact in self.pieces[name]:
            span = slice(piece.start, piece.start + piece.numel)
            part = mean.view(-1)[span].copy_(arrived.part(0, piece.numel, home))
            if exact is not None:
                residual[span] = (exact - part) * self.context.sources
            else:
                residual[span] = whole[span] - sent.part(0, piece.numel, home)
        return mean
