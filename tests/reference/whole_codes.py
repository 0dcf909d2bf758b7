"""Slow oracle of messages in which every entry travels, from the written format."""

import math
import struct
import zlib

from tests.reference import dgc_codec

SCALES = {1: 2, 2: 2, 4: 8, 8: 2, 16: 2}


def means_of_signs(values):
    """The two scales at 1 bit: over the entries that are not negative, and over the others."""
    upper, lower = [v for v in values if v >= 0], [-v for v in values if v < 0]
    return tuple(
        dgc_codec.float32(math.fsum(half) / len(half) if half else 0.0) for half in (upper, lower)
    )


def sent(values, bits):
    """What the receivers decode."""
    if bits == 1:
        upper, lower = means_of_signs(values)
        return [upper if v >= 0 else -lower for v in values]
    return dgc_codec.sent(values, bits, len(values))


def message_bytes(numels, bits):
    """32 bytes of header; for each tensor scales of 4 bytes and its bits, in whole bytes."""
    return 32 + sum(4 * SCALES[bits] + math.ceil(n * bits / 8) for n in numels)


def signs_message(tensors, step, digest):
    """The whole message at 1 bit, byte for byte."""
    payload = b""
    for values in tensors:
        bitmap = sum(1 << i for i, v in enumerate(values) if v < 0)
        payload += struct.pack("<ff", *means_of_signs(values))
        payload += bitmap.to_bytes(math.ceil(len(values) / 8), "little")
    head = struct.pack("<4sBBHQQI", b"thwr", 2, 0, 0, step, digest, 0)
    return head + struct.pack("<I", zlib.crc32(head + bytes(4) + payload)) + payload
