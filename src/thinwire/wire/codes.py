"""Codes of the positions and values that are sent of a tensor.

**Positions**: Elias-Fano, of a size that is known from (n, k) alone, about 2 + log2(n/k) bits each.

The code of k ascending positions out of n, with l = max(0, floor(log2(n / k))), has two parts.
First the k * l low bits, packed one position after the other, least significant bit first. Then a
bitmap of k + ((n - 1) >> l) + 1 bits, in which the i-th position p sets bit (p >> l) + i. Each part
is padded with zeros to whole bytes. Fewer than k positions are allowed: the bitmap gives their
number, and the unused low bits are zero.

Source: Elias, JACM 1974; Fano, MIT memorandum 61, 1971. Differs: the length is that of k positions,
however many were sent.

**Values**: 1, 2, 4, 8, 16 or 32 bits each, with scales of this tensor only.

| bits | scales, float32 | one value |
|---|---|---|
| 1 | mean magnitude over all k | sign |
| 2, 4 | 2, 8 levels: the magnitudes are split at their mean, each part at its own, 1 or 3 times; means of the parts | sign, level |
| 8, 16 | smallest and largest magnitude | sign, one of 128, 32768 equidistant levels |
| 32 | none | float32 |

The code is the scales, then k fields, least significant bit first, the sign (1: negative) in a
field's highest bit. A value takes the nearest level, the lower of two equally near. Magnitudes
beyond float32 saturate. Sums are float64 in a fixed order.
"""  # noqa: E501 (a table row)

import torch
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.kernels import for_device
from thinwire.layout.message import SCALE_COUNT, position_parts, value_bytes


def encode_positions(indices: Tensor, numel: int, k: int) -> Tensor:
    """Return the code, shape (position_bytes(numel, k),), of positions.

    They are int64, strictly ascending, in [0, numel), at most `k`.

    >>> code = encode_positions(torch.tensor([3, 500]), 1000, 2)
    >>> decode_positions(code, 1000, 2)
    tensor([  3, 500])
    """
    return for_device(indices.device).encode_positions(indices, *position_parts(numel, k))


def decode_positions(code: Tensor, numel: int, k: int) -> Tensor:
    """Return the positions in the code: int64, ascending, in [0, numel), at most `k`."""
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


def encode_values(values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the code of the values, and the values that receivers will decode.

    Args:
        values: Shape (j,), j at most `k`, floating-point, finite; at 1 bit none may be 0, since one
            bit is a sign.
        bits: One of 1, 2, 4, 8, 16, 32.
        k: Number of values that fit. At 1 bit the mean is over `k`; missing values count as 0.

    Returns:
        The code, shape (value_bytes(k, bits),), uint8; and shape (j,), float32, bit for bit
        `decode_values` of it.

    >>> code, decoded = encode_values(torch.tensor([1.0, -3.0]), 1, 2)
    >>> decoded
    tensor([ 2., -2.])

    Source: arXiv 1802.04434 (signs with one scale), 1901.09847 (error feedback). Differs: levels
    from means of parts.
    """
    return for_device(values.device).encode_values(values, bits, k)


def decode_values(code: Tensor, count: int, bits: int, k: int) -> Tensor:
    """Return the `count` values in the code of at most `k`, float32, finite.

    >>> code, _ = encode_values(torch.tensor([0.5, -2.0]), 32, 2)
    >>> decode_values(code, 2, 32, 2)
    tensor([ 0.5000, -2.0000])
    """
    nbytes = value_bytes(k, bits)
    if code.numel() != nbytes:
        raise PayloadCorrupt(f"the code of values has {code.numel()} bytes, expected {nbytes}")
    if not 0 <= count <= k:
        raise PayloadCorrupt(f"{count} values came, expected at most k = {k}")
    # Finite scales give finite values; without scales the values themselves are checked.
    floats = code[: 4 * (SCALE_COUNT[bits] or count)].clone().view(torch.float32)
    if not bool(torch.isfinite(floats).all()):
        raise PayloadCorrupt("values came that are not finite")
    return for_device(code.device).decode_values(code, count, bits)
