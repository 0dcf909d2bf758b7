"""Cutting what is large, so that a slow line can show that it makes progress."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["piece_bytes", "pieces_of", "rows_of", "shares_of"]

_LARGEST_BYTES, _SMALLEST_BYTES = 4 << 20, 64 << 10
_BYTES_PER_S = 32 << 10


def piece_bytes(timeout_s: float) -> int:
    """The largest piece, in bytes: one that a line of 0.5 Mbit/s carries within the time-out, two
    being on their way.

    The time-out must be the same on all ranks. Larger pieces than 4 MiB gain nothing on a fast
    line.
    """
    wanted = int(min(timeout_s, 1e6)) * _BYTES_PER_S
    return min(max(wanted, _SMALLEST_BYTES), _LARGEST_BYTES)


def pieces_of(buffer: Tensor, limit_bytes: int) -> Sequence[Tensor]:
    """Views of `buffer`, one after the other; itself where it is small or not contiguous."""
    if buffer.numel() * buffer.element_size() <= limit_bytes or not buffer.is_contiguous():
        return [buffer]
    return torch.split(buffer.view(-1), limit_bytes // buffer.element_size())


def rows_of(
    out: Tensor, message: Tensor, limit_bytes: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """For every piece of `message`, where it goes in the rows of `out` and the piece itself."""
    for at in range(0, message.numel(), limit_bytes):
        yield [row[at : at + limit_bytes] for row in out], message[at : at + limit_bytes]


def shares_of(
    parts: Tensor, lengths: Sequence[int], limit_bytes: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """Rounds of an exchange in which every rank gives every rank a string of its own.

    Yields:
        What this rank gives in a round, string after string, and the lengths by receiver.
    """
    width = max(limit_bytes // len(lengths), 1)
    strings = torch.split(parts, list(lengths))
    for at in range(0, max(lengths), width):
        given = [string[at : at + width] for string in strings]
        yield torch.cat(given), [piece.numel() for piece in given]
