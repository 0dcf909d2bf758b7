"""One step's exchange of gradients: sparse messages and dense sums, launched together, checked before they are used."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm import Group, Pending
from thinwire.core.feedback import Proposal
from thinwire.core.merge import sum_sparse
from thinwire.core.message import Layout, Slot, pack, pack_nonfinite, unpack

__all__ = ["Round", "SparseGradient"]


class SparseGradient(NamedTuple):
    """What one rank wants to send of one tensor."""

    proposal: Proposal
    numel: int
    k: int


@dataclass(slots=True)
class _Flight:
    """One message or one dense buffer on its way."""

    bucket: int
    keys: list[int]
    pending: Pending[Tensor]
    layout: Layout | None = None
    shapes: list[torch.Size] = field(default_factory=list)


class Round:
    """The exchange of one step; tensors are known by integer keys, the same on all ranks.

    `launch` may be called once per bucket while the backward pass goes on; `finish` waits for all of them and checks
    every message. Nothing is written but this object, so that a failed exchange leaves no trace.

    Communication: per bucket one all-gather of equally long messages (where it has sparse tensors) and one all-reduce
    per dtype (where it has dense ones).
    """

    def __init__(self, group: Group, *, step: int, value_bits: int, row_sparse: Collection[int] = frozenset()) -> None:
        self.step = step
        self.row_sparse = row_sparse
        """Tensors whose gradient is row-sparse on some rank; they travel densely."""
        self._group = group
        self._value_bits = value_bits
        self._flights: list[_Flight] = []
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._dense: dict[int, Tensor] = {}

    @property
    def keys(self) -> set[int]:
        """The tensors that have been launched."""
        return {key for flight in self._flights for key in flight.keys}

    def launch(self, bucket: int, sparse: Mapping[int, SparseGradient], dense: Mapping[int, Tensor]) -> None:
        """Put one bucket on the wire.

        A proposal that is not finite makes the whole message say so, and its place among `sparse`, instead of values.
        `dense` gradients are copied, never changed.
        """
        if sparse:
            self._launch_sparse(bucket, sparse)
        for dtype in dict.fromkeys(grad.dtype for grad in dense.values()):
            self._launch_dense(bucket, {key: grad for key, grad in dense.items() if grad.dtype == dtype})

    def _launch_sparse(self, bucket: int, sparse: Mapping[int, SparseGradient]) -> None:
        layout = Layout(tuple(Slot(item.numel, item.k) for item in sparse.values()), self._value_bits)
        bad = [place for place, item in enumerate(sparse.values()) if not item.proposal.finite]
        if bad:
            device = next(iter(sparse.values())).proposal.values.device
            message = pack_nonfinite(layout, self.step, bucket, bad[0]).to(device)
        else:
            parts = [(item.proposal.indices, item.proposal.values) for item in sparse.values()]
            message, sent = pack(layout, self.step, bucket, parts)
            for key, (indices, _), values in zip(sparse, parts, sent, strict=True):
                self._sent[key] = (indices, values)
        pending = self._group.gather(message, what=f"gathering messages of step {self.step}, bucket {bucket}")
        self._flights.append(_Flight(bucket, list(sparse), pending, layout=layout))

    def _launch_dense(self, bucket: int, dense: Mapping[int, Tensor]) -> None:
        flat = torch.cat([grad.reshape(-1) for grad in dense.values()])
        if flat.dtype == torch.float16:
            # a sum of finite halves may pass 65504, which would look like an overflow of every rank
            flat = flat.float()
        pending = self._group.sum_(flat, what=f"averaging dense tensors of step {self.step}, bucket {bucket}")
        shapes = [grad.shape for grad in dense.values()]
        self._flights.append(_Flight(bucket, list(dense), pending, shapes=shapes))

    def finish(self) -> None:
        """Wait for everything and check it.

        Raises:
            PayloadCorrupt: A message is damaged or belongs elsewhere; names its source.
            PeerLost, PeerStalled: See `Group`.
        """
        arrived = [flight.pending.wait() for flight in self._flights]  # all first: no rank may leave others waiting
        for flight, tensor in zip(self._flights, arrived, strict=True):
            if flight.layout is None:
                self._split_dense(flight, tensor)
            else:
                self._read_messages(flight, flight.layout, tensor)

    def _read_messages(self, flight: _Flight, layout: Layout, rows: Tensor) -> None:
        for source, row in enumerate(rows):
            message = unpack(layout, row, step=self.step, bucket=flight.bucket, source=source)
            for key, part in zip(flight.keys, message.parts, strict=False):  # no parts in one that says "not finite"
                self._parts.setdefault(key, []).append(part)

    def _split_dense(self, flight: _Flight, total: Tensor) -> None:
        mean = total.div_(self._group.size)
        pieces = torch.split(mean, [shape.numel() for shape in flight.shapes])
        for key, piece, shape in zip(flight.keys, pieces, flight.shapes, strict=True):
            self._dense[key] = piece.view(shape)

    def is_sparse(self, key: int) -> bool:
        """Whether this tensor travelled in a message."""
        return key in self._sent

    def sent(self, key: int) -> tuple[Tensor, Tensor]:
        """Indices (k,) and float32 values (k,) that this rank gave to the others, as they decode them."""
        return self._sent[key]

    def sparse_mean(self, key: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Indices (u,) ascending and values (u,) of the mean over the ranks, added in rank order; zero elsewhere."""
        indices, total = sum_sparse(self._parts[key], dtype)
        return indices, total.div_(self._group.size)

    def dense_mean(self, key: int) -> Tensor:
        """The mean over the ranks, in the gradient's shape and dtype (float32 for float16)."""
        return self._dense[key]
