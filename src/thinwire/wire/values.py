"""Codes of the values that are sent, in 1, 2, 4, 8, 16 or 32 bits each, with scales of this tensor
only.

| bits | scales, float32 | one value |
|---|---|---|
| 1 | mean magnitude over all k | sign |
| 2, 4 | 2, 8 levels: the magnitudes are split at their mean, each part at its own, 1 or 3 times; means of the parts | sign, level |
| 8, 16 | smallest and largest magnitude | sign, one of 128, 32768 equidistant levels |
| 32 | none | float32 |

The code is the scales, then k fields, least significant bit first, the sign (1: negative) in a
field's highest bit. A level is the nearest one, the lower of two. Magnitudes beyond float32
saturate. Sums are float64 in a fixed order.
"""  # noqa: E501 (a table row)

import torch
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.kernels import for_device
from thinwire.layout.message import SCALE_COUNT, value_bytes

__all__ = ["decode_values", "encode_values"]


def encode_values(values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    """Code of the values, and what its receivers will decode.

    Args:
        values: Shape (j,), j at most `k`, floating-point, finite; at 1 bit none may be 0, since one
            bit is a sign.
        bits: One of 1, 2, 4, 8, 16, 32.
        k: Values for which there is room; at 1 bit the mean is over `k`, values that are absent
            count as 0.

    Returns:
        The code, shape (value_bytes(k, bits),), uint8; and shape (j,), float32, bit for bit
        `decode_values` of it.

    Raises:
        ValueError: More than `k` values, another number of bits, or a 0 at 1 bit.

    Source: arXiv 1802.04434 (signs with one scale), 1901.09847 (error feedback). Differs: levels
    from means of parts.
    """
    value_bytes(k, bits)
    kernels = for_device(values.device)
    if values.numel() > k:
        raise ValueError(f"values has {values.numel()} entries; at most k = {k} fit")
    if bits == 1 and kernels.count_nonzero(values) < values.numel():
        raise ValueError("values holds a 0, which one bit cannot express; leave its position out")
    return kernels.encode_values(values, bits, k)


def decode_values(code: Tensor, count: int, bits: int, k: int) -> Tensor:
    """Values in the code; the same bits on every rank and device.

    Args:
        code: uint8, one dimension; read only.
        count: Values that were coded, at most `k`.
        bits: One of 1, 2, 4, 8, 16, 32.
        k: Values for which there is room.

    Returns:
        Shape (count,), float32, finite, on `code.device`.

    Raises:
        PayloadCorrupt: No sender writes this code: wrong length, too many values, not finite.
        ValueError: Another number of bits.
    """
    nbytes = value_bytes(k, bits)
    if code.numel() != nbytes:
        raise PayloadCorrupt(f"the code of values has {code.numel()} bytes, expected {nbytes}")
    if not 0 <= count <= k:
        raise PayloadCorrupt(f"{count} values came, expected at most k = {k}")
    # From finite scales only finite values follow; without scales the values speak for themselves.
    floats = code[: 4 * (SCALE_COUNT[bits] or count)].clone().view(torch.float32)
    if not bool(torch.isfinite(floats).all()):
        raise PayloadCorrupt("values came that are not finite")
    return for_device(code.device).decode_values(code, count, bits)
