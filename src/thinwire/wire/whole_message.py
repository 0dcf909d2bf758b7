"""One message with every entry of several tensors in few bits each: no positions, since none is
left out.

The header is that of `wire.message`, with no flag and no count of entries. Then comes the code of
one tensor after the other. At 2, 4, 8 and 16 bits that is the code of `wire.values`. At 1 bit
it has two scales in float32, the mean of the entries that are not negative and the mean magnitude
of the negative ones, and one bit an entry, set where the entry is negative, the least significant
bit first: each half stands at its own mean, so that what is lost never has a larger norm than what
was to be sent, however lopsided the entries are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import PayloadCorrupt
from thinwire.layout.message import HEADER_BYTES, SCALE_BYTES, WholeLayout, value_bytes, whole_bytes
from thinwire.wire.message import opened, refused, sealed
from thinwire.wire.values import decode_values, encode_values

__all__ = ["decode", "pack", "unpack"]


def pack(layout: WholeLayout, step: int, bucket: int, tensors: Sequence[Tensor]) -> Tensor:
    """Message of the tensors.

    Args:
        layout: Of the message.
        step: Update this belongs to, in [0, 2^64).
        bucket: Number of the bucket, in [0, 65536).
        tensors: Shape (n,) each, n as in the layout, floating-point and finite; read only.

    Returns:
        Shape (layout.nbytes,), uint8, on the device of the tensors.

    Raises:
        ValueError: Tensors do not fit the layout, or step or bucket their fields.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if shapes != [(numel,) for numel in layout.numels] or not shapes:
        raise ValueError(
            f"tensors have the shapes {shapes}; the layout has one dimension each, of "
            f"{layout.numels}"
        )
    return sealed(layout, step, bucket, [_encoded(tensor, layout.value_bits) for tensor in tensors])


def unpack(
    layout: WholeLayout, message: Tensor, *, step: int, bucket: int, source: int
) -> list[Tensor]:
    """The codes in a message, once everything about it has been checked.

    Args:
        layout: That it must have.
        message: uint8, one dimension; read only.
        step: Update that it must belong to.
        bucket: Bucket that it must belong to.
        source: Rank that it came from, for the error.

    Returns:
        One per tensor for `decode`, which refuses none of them; views of the message.

    Raises:
        PayloadCorrupt: The message is damaged or belongs elsewhere; names the rank, what was
            expected and what came.
    """
    try:
        _, flags, carried = opened(layout, message, step, bucket)
        if (flags, carried) != (0, 0):
            raise PayloadCorrupt(f"flags {flags} and {carried} entries came, expected 0 and 0")
        lengths = [whole_bytes(numel, layout.value_bits) for numel in layout.numels]
        codes = list(torch.split(message[HEADER_BYTES:], lengths))
        scales = torch.cat([code[: _scale_bytes(layout.value_bits)] for code in codes]).view(
            torch.float32
        )
        if not bool(scales.isfinite().all()):
            raise PayloadCorrupt("scales came that are not finite")
    except PayloadCorrupt as refusal:
        raise refused(refusal, step=step, bucket=bucket, source=source) from None
    return codes


def decode(code: Tensor, numel: int, value_bits: int) -> Tensor:
    """The entries of one tensor.

    Args:
        code: What `unpack` gave; read only.
        numel: Entries of the tensor.
        value_bits: Of the layout.

    Returns:
        Shape (numel,), float32, finite, on `code.device`; the same bits on every rank and device.
    """
    if value_bits != 1:
        return decode_values(code, numel, value_bits, numel)
    bitmap = code[2 * SCALE_BYTES :]
    upper, lower = (
        decode_values(torch.cat([scale, bitmap]), numel, 1, numel)
        for scale in torch.split(code[: 2 * SCALE_BYTES], SCALE_BYTES)
    )
    return torch.where(torch.signbit(upper), lower, upper)


def _scale_bytes(bits: int) -> int:
    return value_bytes(0, bits) + (SCALE_BYTES if bits == 1 else 0)


def _encoded(values: Tensor, bits: int) -> Tensor:
    if bits != 1:
        return encode_values(values, bits, values.numel())[0]
    negative = values < 0
    lower = values[negative]
    scales = [
        _mean(values[values > 0], values.numel() - lower.numel()),
        _mean(lower, lower.numel()),
    ]
    signs = torch.where(negative, -1.0, 1.0).to(values.dtype)
    return torch.cat([*scales, encode_values(signs, 1, values.numel())[0][SCALE_BYTES:]])


def _mean(values: Tensor, count: int) -> Tensor:
    """The float32 mean magnitude of `count` entries, of which those that are not given are 0, as 4
    bytes.
    """
    return encode_values(values, 1, max(1, count))[0][:SCALE_BYTES]
