"""Coding of all slots of a message in one call.

The result is bit for bit that of coding them one by one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cpu import jit_slots
from thinwire.kernels.cpu.threads import SMALLEST_PART, in_spans
from thinwire.kernels.rules import has_address
from thinwire.layout.message import SCALE_COUNT

Array = NDArray[Any]
Parts = Sequence[tuple[Tensor, Tensor]]

_LARGEST_SLOT = 2 * SMALLEST_PART
"""Number of entries above which a slot is worth several threads of its own."""
_LEVELS = 8
"""Largest number of levels of a book."""


def encode_slots(
    slots: Array, parts: Parts, bits: int, *, spare: bool, code: Array
) -> tuple[list[Tensor], int] | None:
    """Write the codes of all parts into the zeroed bytes `code`.

    Args:
        slots: Shape (T, 7), int64, the fields of `jit_slots.FIELDS`.
        parts: Per slot (indices, values).
        bits: Bits per value.
        spare: True: a scale at 1 bit is the mean over the sent values, instead of over k.
        code: uint8, contiguous.

    Returns:
        Per slot the decoded values at the indices, float32; and the number of entries. None if the
        parts must be coded one by one.
    """
    dtype = parts[0][1].dtype if parts else torch.float32
    if not _worth_it(slots) or not all(_plain(*part, dtype) for part in parts):
        return None
    table = np.array([(i.data_ptr(), x.data_ptr(), x.numel()) for i, x in parts], np.int64).reshape(
        -1, 3
    )
    starts = _starts(table[:, 2])
    like = np.empty(0, np.float64 if dtype == torch.float64 else np.float32)
    sent = np.empty(int(table[:, 2].sum()), np.float32)
    kept = np.zeros(len(slots), np.int64)
    nonzero: dict[int, Tensor] = {}
    compact: list[Parts] = []

    def work(first: int, last: int) -> None:
        jit_slots.encode_positions(slots, table, first, last, like, code, kept)
        for t in (first + np.flatnonzero(kept[first:last] != table[first:last, 2])).tolist():
            indices, values = parts[t]
            nonzero[t] = values != 0
            some = indices[nonzero[t]], values[nonzero[t]]
            compact.append([some])  # so that their memory stays
            table[t] = some[0].data_ptr(), some[1].data_ptr(), kept[t]
            jit_slots.encode_positions(slots, table, t, t + 1, like, code, kept)
        room, rest = int(table[first:last, 2].max()), (like, code, sent, starts)
        if bits == 1:
            jit_slots.encode_signs(slots, table, first, last, spare, *rest, np.empty(room))
        elif bits == 32:
            jit_slots.encode_floats(slots, table, first, last, *rest)
        else:
            levels = (
                np.empty(room),
                np.empty(_LEVELS + 1, np.int64),
                np.empty(_LEVELS),
                np.empty(room, np.int64),
            )
            jit_slots.encode_levels(
                slots, table, first, last, bits, _scales(bits), *rest, np.empty(room), *levels
            )

    in_spans(slots[:, 1], work)
    all_sent = list(torch.split(torch.from_numpy(sent), [values.numel() for _, values in parts]))
    for t, positions in nonzero.items():
        decoded = all_sent[t][: int(kept[t])].clone()
        all_sent[t].zero_()[positions] = decoded
    return all_sent, int(kept.sum())


def decode_slots(slots: Array, code: Array, bits: int) -> list[tuple[Tensor, Tensor]] | None:
    """Return the parts in `code`, or None if they must be decoded one by one.

    That also describes invalid codes.

    Args:
        slots: Shape (T, 7), int64, the fields of `jit_slots.FIELDS`.
        code: uint8, as long as the layout says.
        bits: Bits per value.
    """
    if not _worth_it(slots):
        return None
    ks = slots[:, 1]
    starts, counts, room = _starts(ks), np.empty(len(ks), np.int64), int(ks.sum())
    indices, values, right = np.empty(room, np.int64), np.empty(room, np.float32), []

    def work(first: int, last: int) -> None:
        if not jit_slots.decode_positions(slots, first, last, code, starts, indices, counts):
            right.append(False)
        elif bits == 1:
            right.append(jit_slots.decode_signs(slots, first, last, code, starts, values, counts))
        elif bits == 32:
            right.append(jit_slots.decode_floats(slots, first, last, code, starts, values, counts))
        else:
            rest = code, starts, values, counts
            right.append(jit_slots.decode_levels(slots, first, last, bits, _scales(bits), *rest))

    in_spans(ks, work)
    if not all(right):
        return None
    if counts.sum() == room:
        sizes = ks.tolist()
        return list(
            zip(
                torch.split(torch.from_numpy(indices), sizes),
                torch.split(torch.from_numpy(values), sizes),
                strict=True,
            )
        )
    spans = list(zip(starts.tolist(), (starts + counts).tolist(), strict=True))
    return [(torch.from_numpy(indices[a:b]), torch.from_numpy(values[a:b])) for a, b in spans]


def _scales(bits: int) -> Array:
    return np.empty(SCALE_COUNT[bits], np.float32)


def _worth_it(slots: Array) -> bool:
    return bool(len(slots)) and int(slots[:, 1].max()) <= _LARGEST_SLOT


def _plain(indices: Tensor, values: Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype in (torch.float32, torch.float64)
        and has_address(indices, torch.int64)
        and has_address(values, dtype)
        and indices.shape == values.shape
    )


def _starts(counts: Array) -> Array:
    starts: Array = np.zeros(len(counts), np.int64)
    np.cumsum(counts[:-1], out=starts[1:])
    return starts
