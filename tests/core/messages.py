"""Messages that tests make and change; imports no package that a bare GPU machine lacks."""

import struct
import zlib

import torch


def entries(slot, seed=0, with_zeros=False):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(slot.numel, generator=generator)[: slot.k].sort().values
    values = torch.randn(slot.k, generator=generator).abs() + 0.1
    values[::3] *= -1
    if with_zeros:
        values[1::2] = 0
    return indices, values


def resealed(raw):
    """The bytes with a checksum that fits, as only a sender could have made it."""
    body = bytes(raw[:28]) + bytes(4) + bytes(raw[32:])
    sealed = bytes(raw[:28]) + struct.pack("<I", zlib.crc32(body)) + bytes(raw[32:])
    return torch.tensor(list(sealed), dtype=torch.uint8)
