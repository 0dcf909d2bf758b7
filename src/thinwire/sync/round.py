"""One step's exchange of gradients: sparse messages and dense sums, launched together, checked before they are used."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from thinwire.comm import Pending, Sources
from thinwire.core.feedback import Proposal
from thinwire.core.kernels import is_static
from thinwire.core.merge import checked_mean_, divided_, sum_sparse
from thinwire.core.message import Layout, Slot, pack, pack_nonfinite, unpack
from thinwire.core.rounding import rounding_seed, store_
from thinwire.core.sealed import opened_sum, sealed, travels_sealed
from thinwire.errors import PayloadCorrupt
from thinwire.sync.flags import Flags, read_flags
from thinwire.sync.split_flight import SplitFlight
from thinwire.sync.traffic import GATHER, SPLIT, chosen_exchange

if TYPE_CHECKING:
    from thinwire.core.device_message import Rows

__all__ = ["Round", "SparseGradient"]

_KEPT = 1 << 31
"""Added to a tensor's key where what an owner keeps is rounded, for random bits that the commit has not used."""


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
    split: SplitFlight | None = None
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    sealed: torch.dtype | None = None
    """Of a dense buffer whose parts are gathered with checksums; None where it is an all-reduce."""

    def go_on(self, arrived: Tensor) -> Pending[Tensor]:
        """The second round, where there is one."""
        return Pending(lambda: arrived) if self.split is None else self.split.forward(arrived, self.dtypes)


@functools.lru_cache(maxsize=256)
def _layout(slots: tuple[Slot, ...], value_bits: int) -> Layout:
    """The same one for every step, since lengths and digest are computed once for each."""
    return Layout(slots, value_bits)


class Round:
    """The exchange of one step; tensors are known by integer keys, the same on all ranks.

    `launch` may be called once per bucket while the backward pass goes on; `finish` waits for all of them and checks
    every message. Nothing is written but this object, so that a failed exchange leaves no trace. Where the kernels have
    static shapes (on CUDA) messages are made, checked and summed on the device, and `finish` is the one place where the
    host waits for it.

    Communication: per bucket one all-gather of equally long messages (where it has sparse tensors) and one all-reduce
    per dtype (where it has dense ones); where the dense tensors of all other ranks have at most 64 KiB together, an
    all-gather with a checksum for each. With `exchange="split"` an exchange of parts takes the place of the all-gather
    of messages, and `finish` adds an all-gather of sums. Where `group` is `Nodes`, all ranks of a node must launch the
    same bits.
    """

    def __init__(
        self,
        group: Sources,
        *,
        step: int,
        value_bits: int,
        row_sparse: Collection[int] = frozenset(),
        rows_only: Collection[int] = frozenset(),
        exchange: str = GATHER,
        read_sums: bool = True,
    ) -> None:
        self.step = step
        self.row_sparse = row_sparse
        """Tensors whose gradient is row-sparse on some rank; they travel densely."""
        self.rows_only = rows_only
        """Those of them whose gradient is row-sparse on every rank."""
        self.node_means: dict[int, Tensor] = {}
        """The gradients that were folded in, where they are means over a node and not the rank's own."""
        self.sum_non_finite: int | None = None
        """The first tensor of which a sum over the sources is not finite, once finished."""
        self.dense_non_finite: int | None = None
        """Likewise among those that travelled densely, where a rank's own may be what is not finite."""
        self.refused: str | None = None
        """What arrived damaged before it went into this exchange; `finish` refuses all of it for that."""
        self.dense_digest = 0
        """Of the bits of all dense sums, once finished: the same on all ranks. 0 without `read_sums`."""
        self._group = group
        self._value_bits = value_bits
        self._exchange = exchange
        self._read_sums = read_sums and group.size > 1
        self._flights: list[_Flight] = []
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: dict[int, tuple[Rows, int]] = {}
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
        layout = _layout(tuple(Slot(item.numel, item.k) for item in sparse.values()), self._value_bits)
        if chosen_exchange(self._exchange, layout, self._group.size) == SPLIT:
            self._launch_split(bucket, sparse, layout)
            return
        make = self._device_message if is_static(_device(sparse)) else self._host_message
        message, sent = make(layout, bucket, [item.proposal for item in sparse.values()])
        for (key, item), values in zip(sparse.items(), sent, strict=False):  # nothing in one that says "not finite"
            self._sent[key] = (item.proposal.indices, values)
        pending = self._group.gather(message, what=f"gathering messages of step {self.step}, bucket {bucket}")
        self._flights.append(_Flight(bucket, list(sparse), pending, layout=layout))

    def _host_message(self, layout: Layout, bucket: int, proposals: list[Proposal]) -> tuple[Tensor, list[Tensor]]:
        bad = [place for place, proposal in enumerate(proposals) if not proposal.finite]
        if bad:
            message = pack_nonfinite(layout, self.step, bucket, bad[0])
            return message.to(proposals[0].values.device), []
        return pack(layout, self.step, bucket, [(p.indices, p.values) for p in proposals])

    def _device_message(self, layout: Layout, bucket: int, proposals: list[Proposal]) -> tuple[Tensor, list[Tensor]]:
        from thinwire.core import device_message

        return device_message.pack(layout, self.step, bucket, proposals)

    def _launch_split(self, bucket: int, sparse: Mapping[int, SparseGradient], layout: Layout) -> None:
        flight = SplitFlight(self._group, layout, step=self.step, bucket=bucket)
        values = [item.proposal.values for item in sparse.values()]
        bad = [place for place, item in enumerate(sparse.values()) if not item.proposal.finite]
        if bad:
            pending = flight.launch_nonfinite(bad[0], values[0].device)
        else:
            parts = [(item.proposal.indices, item.proposal.values) for item in sparse.values()]
            pending, sent = flight.launch(parts)
            self._sent.update(zip(sparse, sent, strict=True))
        dtypes = [torch.promote_types(v.dtype, torch.float32) for v in values]
        self._flights.append(_Flight(bucket, list(sparse), pending, layout=layout, split=flight, dtypes=dtypes))

    def _launch_dense(self, bucket: int, dense: Mapping[int, Tensor]) -> None:
        flat = torch.cat([grad.reshape(-1) for grad in dense.values()])
        if flat.dtype == torch.float16:
            # a sum of finite halves may pass 65504, which would look like an overflow of every rank
            flat = flat.float()
        flight_of = functools.partial(_Flight, bucket, list(dense), shapes=[grad.shape for grad in dense.values()])
        what = f"averaging dense tensors of step {self.step}, bucket {bucket}"
        if travels_sealed(flat, self._group.size):
            pending = self._group.gather(sealed(flat, self._place(bucket)), what=what)
            self._flights.append(flight_of(pending, sealed=flat.dtype))
        else:
            self._flights.append(flight_of(self._group.sum_(flat, what=what)))

    def _place(self, bucket: int) -> int:
        return (self.step << 20) + bucket

    def finish(self, *flags: Flags) -> list[int | None]:
        """Wait for everything and check it.

        Args:
            flags: Sets of flags by key, which may still lie on a device; read together with the verdicts on all
                messages, in one copy.

        Returns:
            Per set the first key whose flag is not true, or None.

        Raises:
            PayloadCorrupt: A message is damaged or belongs elsewhere; names its source.
            PeerLost, PeerStalled: See `Group`.
        """
        arrived: list[Tensor] = []
        means: list[tuple[_Flight, Tensor]] = []
        for flight in self._flights:  # all first: no rank may leave others waiting
            arrived.append(flight.pending.wait())
            if flight.layout is None and flight.sealed is None:  # while the next ones are still on their way
                means.append((flight, self._take_mean(flight, arrived[-1])))
        onward = [flight.go_on(tensor) for flight, tensor in zip(self._flights, arrived, strict=True)]
        arrived = [pending.wait() for pending in onward]
        verdicts: list[tuple[_Flight, Tensor, Tensor]] = []
        for flight, tensor in zip(self._flights, arrived, strict=True):
            if flight.sealed is not None:
                total, damaged = opened_sum(tensor, flight.sealed, self._place(flight.bucket))
                verdicts.append((flight, tensor, damaged))
                means.append((flight, self._take_mean(flight, total)))
            elif flight.split is not None:
                self._take_sums(flight, flight.split, tensor)
            elif flight.layout is not None and is_static(tensor.device):
                verdicts.append((flight, tensor, self._read_on_device(flight, flight.layout, tensor)))
            elif flight.layout is not None:
                self._read_messages(flight, flight.layout, tensor)
        bad, read = read_flags(flags, [*(verdict for *_, verdict in verdicts), *(found for _, found in means)])
        for (flight, rows, _), verdict in zip(verdicts, read[: len(verdicts)], strict=True):
            self._refuse(flight, rows, verdict)
        if self.refused is not None:
            raise PayloadCorrupt(self.refused)
        for (flight, _), (finite, bits) in zip(means, read[len(verdicts) :], strict=True):
            self.dense_digest = (self.dense_digest * 1_000_003 + bits) % (1 << 64)
            if not finite and self._group.size > 1:
                self._look_for_dense_overflow(flight)
        return bad

    def _read_messages(self, flight: _Flight, layout: Layout, rows: Tensor) -> None:
        largest = 0.0
        for source, row in enumerate(rows):
            rank = source * self._group.node_size
            message = unpack(layout, row, step=self.step, bucket=flight.bucket, source=rank)
            for key, part in zip(flight.keys, message.parts, strict=False):  # no parts in one that says "not finite"
                self._parts.setdefault(key, []).append(part)
            values = torch.cat([values for _, values in message.parts]) if message.parts else rows.new_empty(0)
            largest += float(values.abs().max()) if values.numel() else 0.0
        if not largest < torch.finfo(torch.float32).max:
            self._look_for_overflow(flight.keys)

    def _look_for_overflow(self, keys: list[int]) -> None:
        """Note the first tensor whose sum over the sources passes what float32 holds, though no part does."""
        for key in keys:
            parts = self._parts.get(key)
            if self.sum_non_finite is None and parts and not sum_sparse(parts, torch.float32)[1].isfinite().all():
                self.sum_non_finite = key

    def _read_on_device(self, flight: _Flight, layout: Layout, rows: Tensor) -> Tensor:
        """Everything but the verdicts, one per message, which the host has not seen yet."""
        from thinwire.core import device_message

        arrived = device_message.read(layout, rows, step=self.step, bucket=flight.bucket)
        for key, part, slot in zip(flight.keys, arrived.parts, layout.slots, strict=True):
            self._rows[key] = (part, slot.numel)
        return arrived.verdicts

    def _refuse(self, flight: _Flight, rows: Tensor, verdicts: list[int]) -> None:
        for source, verdict in enumerate(verdicts):
            if verdict and flight.layout is None:
                raise PayloadCorrupt(
                    f"the dense tensors of rank {source * self._group.node_size} for bucket {flight.bucket} of step "
                    f"{self.step} were refused: they do not fit their checksum"
                )
            if verdict:
                from thinwire.core import device_message

                assert flight.layout is not None
                where = {"step": self.step, "bucket": flight.bucket, "source": source * self._group.node_size}
                device_message.explain(flight.layout, rows[source], verdict, **where)

    def _take_sums(self, flight: _Flight, split: SplitFlight, rows: Tensor) -> None:
        for key, entries in zip(flight.keys, split.read(rows), strict=True):
            if entries is not None:
                self._parts[key] = [entries]
        if split.not_finite is not None and self.sum_non_finite is None:
            self.sum_non_finite = flight.keys[split.not_finite]
        for key, kept in zip(flight.keys, split.kept, strict=False):  # nothing is kept of what is not finite
            if kept is not None:
                self._kept[key] = kept

    def _take_mean(self, flight: _Flight, total: Tensor) -> Tensor:
        """What `checked_mean_` found, which the host has not seen yet."""
        pieces = torch.split(total, [shape.numel() for shape in flight.shapes])
        for key, piece, shape in zip(flight.keys, pieces, flight.shapes, strict=True):
            self._dense[key] = piece.view(shape)
        return checked_mean_(total, self._group.size, bits=self._read_sums)

    def _look_for_dense_overflow(self, flight: _Flight) -> None:
        if self.dense_non_finite is None:
            bad = (key for key in flight.keys if not bool(self._dense[key].isfinite().all()))
            self.dense_non_finite = next(bad, None)

    def is_sparse(self, key: int) -> bool:
        """Whether this tensor travelled in a message."""
        return key in self._sent

    def sent(self, key: int) -> tuple[Tensor, Tensor]:
        """Indices (j,) and float32 values (j,) that this rank gave to the others, as they decode them; j at most k."""
        return self._sent[key]

    def gradient(self, key: int, own: Tensor) -> Tensor:
        """The gradient that this rank's source folds in: its own, or the mean over its node."""
        return self.node_means.get(key, own)

    def add_kept_(self, key: int, residual: Tensor) -> None:
        """Add to a flat `residual` what this rank's source keeps of the sum over the sources, with "split"."""
        if key in self._kept:
            indices, values = self._kept[key]
            added = residual[indices].to(values.dtype) + values
            stored = torch.empty_like(added, dtype=residual.dtype)
            store_(stored, added, rounding_seed(self.step, key + _KEPT))
            residual[indices] = stored

    @property
    def sources(self) -> int:
        """By how many a sum is divided for the mean."""
        return self._group.size

    def parts(self, key: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Indices and float32 values of each source, or of the sum over them all: with "split", and on CUDA in `dtype`.

        On CUDA an index may be there several times, each time with the same value: assign, do not accumulate.
        """
        if key in self._rows:
            from thinwire.core import device_message

            return [device_message.sum_rows(*self._rows[key], dtype)]
        return self._parts[key]

    def sparse_mean(self, key: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Indices (u,) ascending and values (u,) of the mean over the sources, added in their order; zero elsewhere.

        On CUDA as with `parts`.
        """
        indices, total = sum_sparse(self.parts(key, dtype), dtype)
        return indices, divided_(total, self._group.size)

    def dense_mean(self, key: int) -> Tensor:
        """The mean over the sources, in the gradient's shape and dtype (float32 for float16)."""
        return self._dense[key]


def _device(sparse: Mapping[int, SparseGradient]) -> torch.device:
    return next(iter(sparse.values())).proposal.values.device
