"""Messages of `wire.message`, byte for byte, on a device without host synchronization.

All shapes follow from the layout. Values that depend on data stay in device memory: the number of
entries, the flag of a gradient that was not finite, the checksum. Where `unpack` would raise, the
verdict of a message is a mask of `FAULTS`. The host reads it later and explains it with `explain`;
until then nothing of the message may be applied. Import it only if `kernels.is_static` is True,
since it needs Triton.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from thinwire.core.feedback import Proposal
from thinwire.errors import PayloadCorrupt
from thinwire.kernels.cuda import codes
from thinwire.kernels.cuda.codes import crc32
from thinwire.layout.message import (
    HEADER_BYTES,
    Layout,
    position_bytes,
    position_parts,
    value_bytes,
)
from thinwire.wire.message import CHECKSUM, header_words, unpack

FAULTS = ("header", "checksum", "flags", "positions", "values", "number of entries")
"""Meaning of bit i of a verdict."""
_FLAGS_SHIFT = 40
_FLAGS_MASK = 0xFF << _FLAGS_SHIFT
_CHECKSUM_SHIFT = 32


class Rows(NamedTuple):
    """Entries of one tensor from all ranks."""

    indices: Tensor
    """Shape (ranks, k), int64, undefined after a rank's count."""
    values: Tensor
    """Shape (ranks, k), float32."""
    counts: Tensor
    """Shape (ranks,), int64: number of entries of each rank, 0 if it reported a gradient that was
    not finite.
    """


class Arrived(NamedTuple):
    """Content of the messages of all ranks. Use it only if all verdicts are 0."""

    verdicts: Tensor
    """Shape (ranks,), int64: 0, or a mask of the faults of a rank's message."""
    parts: list[Rows]
    """Entries per slot."""


def pack(
    layout: Layout, step: int, bucket: int, proposals: Sequence[Proposal]
) -> tuple[Tensor, list[Tensor]]:
    """Return the message of the proposals, or of the number of the first one that is not finite.

    See `wire.message` for the format.

    Args:
        layout: Of the message.
        step: Update this belongs to, in [0, 2^64).
        bucket: Number of the bucket, in [0, 65536).
        proposals: One per slot, of exactly the slot's k entries; `finite` may be a tensor of shape
            ().

    Returns:
        The message, shape (layout.nbytes,), uint8; and per slot the sent values at the given
        indices, shape (k,), float32. No host synchronization.
    """
    device = proposals[0].values.device
    words = header_words(layout, step, bucket)
    finite = torch.stack([_flag(p.finite, device) for p in proposals])
    codes, all_sent, counts = [], [], []
    for slot, proposal in zip(layout.slots, proposals, strict=True):
        values = torch.where(proposal.values.isfinite(), proposal.values, 0.0)
        code, sent, count = _encoded(
            slot.numel, slot.k, layout.value_bits, proposal.indices, values
        )
        codes += code
        all_sent.append(sent)
        counts.append(count)
    all_finite = finite.all()
    culprit = finite.logical_not().int().argmax().int().view(1)
    payload = torch.cat(codes)
    alarm = torch.zeros_like(payload)
    alarm[:4] = culprit.view(torch.uint8)
    carried = torch.where(all_finite, torch.stack(counts).sum(), 0)
    flags = all_finite.logical_not().long() << _FLAGS_SHIFT
    header = torch.stack([*(torch.full_like(carried, word) for word in words), carried])
    header[0] |= flags
    message = torch.cat((header.view(torch.uint8), torch.where(all_finite, payload, alarm)))
    message[slice(*CHECKSUM)] = crc32(message.unsqueeze(0), hole=CHECKSUM).view(torch.uint8)
    return message, all_sent


def read(layout: Layout, rows: Tensor, *, step: int, bucket: int) -> Arrived:
    """Return the content of the messages of all ranks, and a verdict per message.

    The verdict covers all checks of `wire.message.unpack`; no host synchronization.

    Args:
        layout: That they must have.
        rows: Shape (ranks, layout.nbytes), uint8, contiguous; read only.
        step: Update that they must belong to.
        bucket: Bucket that they must belong to.

    Raises:
        PayloadCorrupt: The messages are of another length.
    """
    if rows.shape[1] != layout.nbytes:
        raise PayloadCorrupt(f"length in bytes {rows.shape[1]} came, expected {layout.nbytes}")
    words = rows[:, :HEADER_BYTES].flatten().clone().view(torch.int64).view(-1, HEADER_BYTES // 8)
    flags = (words[:, 0] & _FLAGS_MASK) >> _FLAGS_SHIFT
    wanted = header_words(layout, step, bucket)
    wrong_header = torch.stack([words[:, 0] & ~_FLAGS_MASK, words[:, 1], words[:, 2]])
    wrong_header = torch.stack(
        [came != word for came, word in zip(wrong_header, wanted, strict=True)]
    ).any(0)
    checksum = (words[:, 3] >> _CHECKSUM_SHIFT).int()
    carried, alarm = words[:, 3] & 0xFFFFFFFF, flags == 1
    parts, wrong_positions, wrong_values = _decoded(layout, rows, alarm)
    total = torch.stack([part.counts for part in parts]).sum(0)
    faults = torch.stack(
        [
            wrong_header,
            checksum != crc32(rows, hole=CHECKSUM),
            (flags != 0) & (flags != 1),
            wrong_positions & ~alarm,
            wrong_values & ~alarm,
            (total != carried) & ~alarm,
        ]
    )
    weights = torch.arange(len(FAULTS), device=rows.device).unsqueeze(1)
    return Arrived((faults.long() << weights).sum(0), parts)


def explain(
    layout: Layout, message: Tensor, verdict: int, *, step: int, bucket: int, source: int
) -> NoReturn:
    """Raise the error of `wire.message.unpack` for a message with a verdict other than 0.

    The message is read on the host.

    Raises:
        PayloadCorrupt: Always.
    """
    unpack(layout, message.cpu(), step=step, bucket=bucket, source=source)
    wrong = ", ".join(name for bit, name in enumerate(FAULTS) if verdict >> bit & 1)
    raise PayloadCorrupt(
        f"the message of rank {source} for bucket {bucket} of step {step} was refused on "
        f"{message.device} and nothing applied: {wrong} found wrong there, nothing on the host"
    )


def sum_rows(rows: Rows, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum over the ranks with verdict 0; the bits of `core.feedback.sum_sparse`.

    Returns:
        Positions, int64, ascending but for repetitions, and sums, shape (ranks * k,) both. A
        repeated position has the same sum each time: assign, never accumulate. (0, 0.0) everywhere
        if no rank has an entry. No host synchronization.
    """
    return codes.sum_rows(*rows, numel, dtype)


def _flag(finite: bool | Tensor, device: torch.device) -> Tensor:
    return (
        finite
        if isinstance(finite, Tensor)
        else torch.full((), finite, dtype=torch.bool, device=device)
    )


def _encoded(
    numel: int, k: int, value_bits: int, indices: Tensor, values: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return codes of positions and values that are not 0, the decoded values, and their number."""
    carried = values != 0
    count = carried.sum()
    rank = carried.cumsum(0) - 1
    target = torch.where(carried, rank, k)
    dense_indices = indices.new_zeros(k + 1).scatter_(0, target, indices)[:k]
    dense_values = values.new_zeros(k + 1).scatter_(0, target, values)[:k]
    position_code = codes.encode_positions(dense_indices, count, *position_parts(numel, k))
    value_code, sent = codes.encode_values(dense_values, count, value_bits)
    return [position_code, value_code], torch.where(carried, sent[rank.clamp(min=0)], 0.0), count


def _decoded(layout: Layout, rows: Tensor, alarm: Tensor) -> tuple[list[Rows], Tensor, Tensor]:
    """Return the entries per slot, and per row a flag: some position or value is wrong."""
    parts = []
    wrong_positions, wrong_values = torch.zeros_like(alarm), torch.zeros_like(alarm)
    at = HEADER_BYTES
    for slot in layout.slots:
        middle = at + position_bytes(slot.numel, slot.k)
        end = middle + value_bytes(slot.k, layout.value_bits)
        low_bits, low_bytes, _ = position_parts(slot.numel, slot.k)
        positions = codes.decode_positions(rows[:, at:middle], slot.k, low_bits, low_bytes)
        wrong_positions |= _wrong(
            positions, rows[:, at : at + low_bytes], slot.numel, slot.k * low_bits
        )
        counts = torch.where(alarm, 0, positions.counts)
        values, finite = codes.decode_values(rows[:, middle:end], counts, layout.value_bits, slot.k)
        wrong_values |= ~finite
        parts.append(Rows(positions.indices, values, counts))
        at = end
    return parts, wrong_positions, wrong_values


def _wrong(
    positions: tuple[Tensor, Tensor, Tensor], low: Tensor, numel: int, low_bits_of_all: int
) -> Tensor:
    """Return True per row for invalid positions.

    Invalid are too many, not ascending, out of range, or excess low bits.
    """
    indices, counts, low_fields = positions
    there = torch.arange(indices.shape[1], device=indices.device) < counts.unsqueeze(1)
    wrong = counts > indices.shape[1]
    wrong |= (there[:, 1:] & (indices[:, 1:] <= indices[:, :-1])).any(1)
    wrong |= (there & ((indices >= numel) | (indices < 0))).any(1)
    wrong |= (~there & (low_fields != 0)).any(1)
    if low_bits_of_all % 8:
        wrong |= (low[:, -1] >> (low_bits_of_all % 8)) != 0
    return wrong
