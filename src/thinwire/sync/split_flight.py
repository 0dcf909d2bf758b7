"""One bucket on its way through the split exchange: to the owners, and what they make of it back to all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm import Pending, Sources
from thinwire.core.message import Layout, pack, pack_nonfinite, unpack
from thinwire.core.split import Entries, Sums, add_up, joined, shares, split_plan
from thinwire.errors import PayloadCorrupt

__all__ = ["SplitFlight"]


class SplitFlight:
    """The two rounds of one message; see `thinwire.core.split`.

    An owner that cannot use what came takes part in round two with a message that says so, and raises afterwards: no
    source waits for another one.

    Communication: `launch` one exchange of parts, `forward` one all-gather. All sources must launch, and forward, the
    same flights in the same order.
    """

    def __init__(self, sources: Sources, layout: Layout, *, step: int, bucket: int) -> None:
        self.kept: list[Entries | None] = []
        """By tensor, what the owner drops or rounds off of the sum over the sources: it stays, at the owner."""
        self._sources, self._layout, self._step, self._bucket = sources, layout, step, bucket
        self._plan = split_plan(layout, sources.size)
        self.not_finite: int | None = None
        """Place of the first tensor of which an owner had no finite sum, once it has been read."""
        self._refusal: PayloadCorrupt | None = None

    @property
    def _what(self) -> str:
        return f"step {self._step}, bucket {self._bucket}"

    def launch(self, parts: Sequence[Entries]) -> tuple[Pending[Tensor], list[Entries]]:
        """Send every owner its share of `parts`, per tensor (indices, values).

        Returns:
            What comes from all sources to this one, for `forward`; and per tensor what the owners decode of `parts`,
            in float32; entries for which there was no room are not among them.
        """
        given = shares(self._plan, parts)
        packed = [
            pack(layout, self._step, self._bucket, mine) for layout, mine in zip(self._plan.first, given, strict=True)
        ]
        sent = [
            [(indices, values) for (indices, _), values in zip(mine, decoded, strict=True)]
            for mine, (_, decoded) in zip(given, packed, strict=True)
        ]
        arriving = self._deal([message for message, _ in packed])
        return arriving, [entries for entries in joined(self._plan, len(parts), sent) if entries is not None]

    def launch_nonfinite(self, culprit: int, device: torch.device) -> Pending[Tensor]:
        """Say to every owner that a gradient is not finite, instead."""
        return self._deal([pack_nonfinite(p, self._step, self._bucket, culprit).to(device) for p in self._plan.first])

    def forward(self, rows: Tensor, dtypes: Sequence[torch.dtype]) -> Pending[Tensor]:
        """Add up what came, row by row, and send all sources the largest sums.

        Args:
            rows: What `launch` brought.
            dtypes: float32 or float64 by tensor, in which sums are computed and kept.
        """
        me = self._sources.rank
        layout = self._plan.second[me]
        message = None
        try:
            sums = self._sums(rows, dtypes)
        except PayloadCorrupt as refusal:
            self._refusal, sums = refusal, None
        if sums is not None:
            message, sent = pack(layout, self._step, self._bucket, [each.passed_on for each in sums])
            rest = [(each.indices, each.left_over(values)) for each, values in zip(sums, sent, strict=True)]
            self.kept = joined(self._plan, len(dtypes), [rest if o == me else [] for o in range(self._sources.size)])
        else:
            message = pack_nonfinite(layout, self._step, self._bucket, 0).to(rows.device)
        row = message.new_zeros(self._plan.row_bytes)
        row[: message.numel()] = message
        return self._sources.gather(row, what=f"gathering sums of {self._what}")

    def read(self, rows: Tensor) -> list[Entries | None]:
        """Per tensor, the sum over the sources as all of them decode it; None where an owner had none to give.

        Raises:
            PayloadCorrupt: A message of either round is damaged or belongs elsewhere; names its source.
        """
        if self._refusal is not None:
            raise self._refusal
        told: list[list[Entries]] = []
        for owner, (layout, row) in enumerate(zip(self._plan.second, rows, strict=True)):
            told.append(self._unpacked(layout, row[: layout.nbytes], owner))
            mine = self._plan.pieces[owner]
            if len(told[-1]) < len(mine) and self.not_finite is None:
                self.not_finite = mine[0].slot
        return joined(self._plan, len(self._layout.slots), told)

    def _sums(self, rows: Tensor, dtypes: Sequence[torch.dtype]) -> list[Sums] | None:
        """Of the pieces that this source owns; None where a source has no finite values, or they have no finite sum."""
        me = self._sources.rank
        mine = self._plan.pieces[me]
        parts = [self._unpacked(self._plan.first[me], row, source) for source, row in enumerate(rows)]
        if any(len(part) < len(mine) for part in parts):
            return None
        sums = add_up(self._plan.second[me], parts, [dtypes[piece.slot] for piece in mine])
        return sums if all(bool(each.totals.isfinite().all()) for each in sums) else None

    def _deal(self, messages: Sequence[Tensor]) -> Pending[Tensor]:
        lengths = [message.numel() for message in messages]
        return self._sources.deal(torch.cat(list(messages)), lengths, what=f"dealing messages of {self._what}")

    def _unpacked(self, layout: Layout, message: Tensor, source: int) -> list[Entries]:
        rank = source * self._sources.node_size
        return unpack(layout, message, step=self._step, bucket=self._bucket, source=rank).parts
