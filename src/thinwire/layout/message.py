"""Contents and lengths of messages."""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("<4sBBHQQII")
HEADER_BYTES = HEADER.size
CULPRIT = struct.Struct("<I")
VALUE_BITS = (1, 2, 4, 8, 16, 32)
WHOLE_BITS = (1, 2, 4, 8, 16)
SCALE_COUNT = {1: 1, 2: 2, 4: 8, 8: 2, 16: 2, 32: 0}
"""Number of float32 scales per tensor, by the bits of a value."""
SCALE_BYTES = 4
CHECKSUM_BYTES = 8
"""Bytes of the checksum with which a small part of a dense sum travels."""
SKETCH_NUMEL = 64
"""Number of float32 sums that represent a change where not all of it is applied in time."""


def count_sent(numel: int, sparsity: float) -> int:
    """Return the number of entries that are sent: max(1, round(numel * (1 - sparsity)))."""
    # float64 and Python's `round` (halves to even); the paper truncates
    # Source: arXiv 1712.01887. Differs: rounded instead of truncated, at least one.
    return max(1, round(numel * (1 - sparsity)))


class PositionParts(NamedTuple):
    """Sizes of the parts of a position code."""

    low_bits: int
    """Low bits of each position, l."""
    low_bytes: int
    """Length of the low bits of all positions."""
    high_bytes: int
    """Length of the bitmap."""


def position_bytes(numel: int, k: int) -> int:
    """Return the length in bytes of the code of up to `k` positions, at least 1, out of `numel`."""
    parts = position_parts(numel, k)
    return parts.low_bytes + parts.high_bytes


def position_parts(numel: int, k: int) -> PositionParts:
    """Return the sizes of the parts of the code of up to `k` positions out of `numel`."""
    low_bits = (numel // k).bit_length() - 1
    high_bits = k + ((numel - 1) >> low_bits) + 1
    return PositionParts(low_bits, (k * low_bits + 7) // 8, (high_bits + 7) // 8)


def value_bytes(k: int, bits: int) -> int:
    """Return the length in bytes of the code of up to `k` values, scales included."""
    return 4 * SCALE_COUNT[bits] + (k * bits + 7) // 8


class Slot(NamedTuple):
    """Space of one tensor in a message."""

    numel: int
    """Entries of the tensor."""
    k: int
    """Number of entries that fit, between 1 and `numel`."""


@dataclass(frozen=True)
class Layout:
    """Contents of a message of positions and values; equal on all ranks."""

    slots: tuple[Slot, ...]
    """One per tensor, in order."""
    value_bits: int
    """Bits per value: 1, 2, 4, 8, 16 or 32."""
    part: str = ""
    """Part of a split exchange; empty for a whole message. A part has spare room, so that at 1 bit
    its scale is the mean over the values sent.
    """

    @classmethod
    def of(cls, numels: Iterable[int], sparsity: float, value_bits: int) -> Self:
        """Return the layout for tensors of these sizes, sent without the fraction `sparsity`."""
        slot = cache(lambda numel: Slot(numel, count_sent(numel, sparsity)))
        return cls(tuple(map(slot, numels)), value_bits)

    @cached_property
    def nbytes(self) -> int:
        """Length of a message, header included; a function of the layout only."""
        payload = sum(
            count * (position_bytes(*slot) + value_bytes(slot.k, self.value_bits))
            for slot, count in Counter(self.slots).items()
        )
        return HEADER_BYTES + max(payload, CULPRIT.size)

    @cached_property
    def slot_table(self) -> NDArray[np.int64]:
        """Sizes and offsets of the codes of every slot, shape (slots, 7)."""
        # columns: numel, k, low bits of a position, bytes of the low bits, of the high parts, of
        # the values, first byte
        rows = []
        at = HEADER_BYTES
        for slot in self.slots:
            row = (
                slot.numel,
                slot.k,
                *position_parts(slot.numel, slot.k),
                value_bytes(slot.k, self.value_bits),
            )
            rows.append((*row, at))
            at += sum(row[3:])
        return np.array(rows, np.int64).reshape(-1, 7)

    @cached_property
    def digest(self) -> int:
        """64 bits that identify the layout in the header."""
        slots = ",".join(f"{s.k}/{s.numel}" for s in self.slots)
        return _digest(f"elias-fano;{self.value_bits};{slots}{self.part}")


@dataclass(frozen=True)
class WholeLayout:
    """Contents of a message of whole tensors; equal on all ranks."""

    numels: tuple[int, ...]
    """Entries of each tensor, in order; at least one tensor, none of them empty."""
    value_bits: int
    """Bits per entry: 1, 2, 4, 8 or 16."""
    part: str = ""
    """Part of a split exchange; empty for whole tensors."""

    @cached_property
    def nbytes(self) -> int:
        """Length of a message, header included; a function of the layout only."""
        counts = Counter(self.numels).items()
        return HEADER_BYTES + sum(n * whole_bytes(numel, self.value_bits) for numel, n in counts)

    @cached_property
    def digest(self) -> int:
        """64 bits that identify the layout in the header."""
        return _digest(f"whole;{self.value_bits};{','.join(map(str, self.numels))}{self.part}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def whole_bytes(numel: int, bits: int) -> int:
    """Return the length in bytes of the code of a whole tensor; at 1 bit each sign has a scale."""
    return value_bytes(numel, bits) + (SCALE_BYTES if bits == 1 else 0)


def factor_numels(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the numbers of entries of the two factors of `rank` columns that represent a
    matrix.
    """
    return rank * prod(shape[:1]), rank * prod(shape[1:])
