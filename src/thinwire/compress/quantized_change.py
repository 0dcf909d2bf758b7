"""Quantized changes: every entry travels in few bits, and the rounding error is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.protocol import (
    ERRORS,
    AllGather,
    AllToAll,
    Context,
    ErrorsOnly,
    Kept,
    MeanChange,
    Sending,
)
from thinwire.errors import PayloadCorrupt
from thinwire.kernels.reference import divided_
from thinwire.layout.message import WHOLE_BITS, WholeLayout
from thinwire.layout.shares import Piece, SplitLayout
from thinwire.layout.traffic import EXCHANGES, chosen_split
from thinwire.wire.message import pack_whole, unpack_whole
from thinwire.wire.whole import decode_whole

_NARROWEST_PLAIN = 32


@dataclass(frozen=True)
class Quantized(ErrorsOnly):
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

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "value_bits")
        if self.value_bits == _NARROWEST_PLAIN:
            raise ValueError(
                f"value_bits={self.value_bits} does not compress, since a change already has "
                f"{self.value_bits} bits per entry: use compression=None, or one of "
                f"{list(WHOLE_BITS)}"
            )
        check.one_of("value_bits", self.value_bits, WHOLE_BITS)
        check.one_of("exchange", self.exchange, EXCHANGES)
        check.set_fields(self, check.real, "decay", at_least=0, at_most=1)

    def compresses(self, param: Tensor) -> bool:
        """Return True for parameters of any size."""
        return True

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """Send by an all-gather, perhaps after an all-to-all; see `ChangeCompression`."""
        numels = tuple(tensor.numel() for tensor in folded.values())
        layout = WholeLayout(numels, self.value_bits)
        step = context.step
        plan = chosen_split(self.exchange, layout, context.sources)
        if plan is not None:
            return (yield from _by_shares(context, folded, plan))
        message = pack_whole(layout, step, 0, [tensor.view(-1) for tensor in folded.values()])
        [rows] = yield [AllGather(message, f"gathering changes of step {step}")]
        codes = [
            unpack_whole(layout, row, step=step, bucket=0, source=source * context.node_size)
            for source, row in enumerate(rows)
        ]
        made = _Whole(context, list(folded))
        made.value_bits = self.value_bits
        made.received = dict(zip(folded, zip(*codes, strict=True), strict=True))
        return made


class _Whole(MeanChange):
    """Codes that all ranks sent of each tensor.

    They are kept as codes: decoded, each rank's change is as large as the model.
    """

    value_bits: int
    received: Mapping[str, Sequence[Tensor]]

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        mean = torch.zeros_like(folded)
        for source, code in enumerate(self.received[name]):
            sent = decode_whole(code, folded.numel(), self.value_bits).view_as(folded)
            if source == self.context.source:
                torch.sub(folded, sent, out=kept[ERRORS][name])
            mean += sent
        return divided_(mean, self.context.sources)


def _by_shares(
    context: Context, folded: Mapping[str, Tensor], plan: SplitLayout[WholeLayout]
) -> Sending:
    """Send codes to their owners, and the owners' means back to all.

    An owner does not round its own part of the average. It keeps the rounding error of the mean,
    times the number of sources, so that the error counts once in a later mean.
    """
    me, step, flats = context.source, context.step, [t.view(-1) for t in folded.values()]
    cut = [[_cut(flats, piece) for piece in pieces] for pieces in plan.pieces]
    messages = [pack_whole(its, step, 0, parts) for its, parts in zip(plan.first, cut, strict=True)]
    lengths = [message.numel() for message in messages]
    purpose = f"scattering changes of step {step}"
    [rows] = yield [AllToAll(torch.cat(messages), lengths, purpose)]

    refusal: PayloadCorrupt | None = None
    means = [torch.zeros_like(part) for part in cut[me]]
    try:
        for source, row in enumerate(rows):
            rank = source * context.node_size
            codes = unpack_whole(plan.first[me], row, step=step, bucket=0, source=rank)
            for total, code, own in zip(means, codes, cut[me], strict=True):
                total.add_(own if source == me else _decoded(plan.first[me], code, own))
    except PayloadCorrupt as found:  # raised after round two, in which the other sources wait
        refusal = found
    message = pack_whole(
        plan.second[me], step, 0, [divided_(mean, context.sources) for mean in means]
    )
    row = message.new_zeros(plan.row_bytes)
    row[: message.numel()] = message
    [rows] = yield [AllGather(row, f"gathering means of changes of step {step}")]
    if refusal is not None:
        raise refusal

    made = _Means(context, list(folded))
    made.means = {name: torch.empty_like(t) for name, t in folded.items()}
    made.errors = {name: torch.empty_like(t) for name, t in folded.items()}
    all_means, errors = (
        [t.view(-1) for t in by_name.values()] for by_name in (made.means, made.errors)
    )
    for owner, (its, row) in enumerate(zip(plan.second, rows, strict=True)):
        rank = owner * context.node_size
        codes = unpack_whole(its, row[: its.nbytes], step=step, bucket=0, source=rank)
        sent = unpack_whole(plan.first[owner], messages[owner], step=step, bucket=0, source=me)
        for index, piece in enumerate(plan.pieces[owner]):
            part = cut[owner][index]
            mean = _cut(all_means, piece).copy_(_decoded(its, codes[index], part))
            if owner == me:
                rest = (means[index] - mean) * context.sources
            else:
                rest = part - _decoded(plan.first[owner], sent[index], part)
            _cut(errors, piece).copy_(rest)
    return made


def _cut(flats: Sequence[Tensor], piece: Piece) -> Tensor:
    return flats[piece.slot][piece.start : piece.start + piece.numel]


def _decoded(layout: WholeLayout, code: Tensor, like: Tensor) -> Tensor:
    return decode_whole(code, like.numel(), layout.value_bits).to(like.dtype)


class _Means(MeanChange):
    means: Mapping[str, Tensor]
    errors: Mapping[str, Tensor]

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        kept[ERRORS][name].copy_(self.errors[name])
        return self.means[name]
