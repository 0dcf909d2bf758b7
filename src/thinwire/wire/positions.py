"""Elias-Fano code of the positions that are sent: size known from (n, k) alone, about 2 + log2(n/k)
bits each.

The code of k ascending positions out of n, with l = max(0, floor(log2(n / k))): first the k * l low
bits, packed one position after the other, least significant bit first; then a bitmap of k + ((n -
1) >> l) + 1 bits, in which the i-th position p sets bit (p >> l) + i. Each part is padded with
zeros to whole bytes. Fewer than k positions are allowed: the bitmap shows how many there are, and
what they leave of the first part is zero.

Source: Elias, JACM 1974; Fano, MIT memorandum 61, 1971. Differs: the length is that of k positions,
however many came.
"""

import torch
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.kernels import for_device
from thinwire.layout.message import position_parts

__all__ = [
    "decode_positions",
    "encode_positions",
]


def encode_positions(indices: Tensor, numel: int, k: int) -> Tensor:
    """Code of the positions.

    Args:
        indices: Shape (j,), j at most `k`, int64, strictly ascending, in [0, numel); read only.
        numel: Entries of the tensor.
        k: Positions for which there is room.

    Returns:
        Shape (position_bytes(numel, k),), uint8, on `indices.device`.

    Raises:
        ValueError: More than `k` positions, or one outside [0, numel).
    """
    parts = position_parts(numel, k)
    count = indices.numel()
    if count > k:
        raise ValueError(f"indices has {count} entries; at most k = {k} fit")
    if count:
        first, last = int(indices[0]), int(indices[-1])
        if first < 0 or last >= numel:
            raise ValueError(f"indices reach from {first} to {last}; allowed is [0, {numel})")
    return for_device(indices.device).encode_positions(indices, *parts)


def decode_positions(code: Tensor, numel: int, k: int) -> Tensor:
    """Positions in the code; whatever the bytes are, nothing is read or written out of bounds.

    Args:
        code: uint8, one dimension; read only.
        numel: Entries of the tensor.
        k: Positions for which there is room.

    Returns:
        Shape (j,), j at most `k`, int64, strictly ascending, all in [0, numel), on `code.device`.

    Raises:
        PayloadCorrupt: No sender writes this code: wrong length, too many positions, order, range,
            padding.
    """
    parts = position_parts(numel, k)
    nbytes = parts.low_bytes + parts.high_bytes
    if code.numel() != nbytes:
        raise PayloadCorrupt(f"the code of positions has {code.numel()} bytes, expected {nbytes}")
    kernels = for_device(code.device)
    indices, count = kernels.decode_positions(code, k, parts.low_bits, parts.low_bytes)
    if count > k:
        raise PayloadCorrupt(f"{count} positions came, expected at most k = {k}")
    if not kernels.is_ascending(indices):
        raise PayloadCorrupt("the positions are not strictly ascending")
    if count and int(indices[-1]) >= numel:
        raise PayloadCorrupt(f"position {int(indices[-1])} came, expected less than {numel}")
    if _has_bits_after(code[: parts.low_bytes], count * parts.low_bits):
        raise PayloadCorrupt(f"low bits came for more than the {count} positions of the bitmap")
    return indices


def _has_bits_after(code: Tensor, used_bits: int) -> bool:
    whole, rest = divmod(used_bits, 8)
    if rest and int(code[whole]) >> rest:
        return True
    return bool(torch.any(code[whole + (rest > 0) :]))
