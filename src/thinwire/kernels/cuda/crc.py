"""CRC-32 of rows of bytes on the device, the checksum of zlib.

Without its first and last complement the CRC is linear over GF(2): that of a message is the sum of
what each of its bits contributes, which depends on the bit's distance from the end only. One
program sums a block with a table of the places in a block, another the blocks with a table of their
places; the complements add the CRC of as many zero bytes.

Source: Sarwate, CACM 1988 (the byte table); the linear form is folklore.
"""

import functools
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cuda import launching, triton_crc
from thinwire.kernels.cuda.launching import blocks_of, launch

__all__ = ["crc32"]

_POLYNOMIAL = 0xEDB88320
Words = NDArray[Any]


def crc32(rows: Tensor, hole: tuple[int, int] = (0, 0)) -> Tensor:
    """`zlib.crc32` of each row, the bytes of the hole counted as zeros.

    Args:
        rows: Shape (rows, nbytes), uint8, contiguous; read only.
        hole: First byte that counts as zero, and the one after the last.

    Returns:
        Shape (rows,), int32: the bits of the checksum. No host synchronization, but for the first
        row length of a kind, whose tables are copied to the device.
    """
    count, nbytes = rows.shape
    block = launching.BLOCK
    blocks = blocks_of(nbytes, block)
    places, ends = _tables(blocks, block, rows.device)
    parts = torch.empty((count, blocks), dtype=torch.int32, device=rows.device)
    given = (rows, nbytes, blocks * block - nbytes, *hole, places, parts)
    launch(triton_crc.reduce_blocks, (blocks, count), rows, *given, BLOCK=block)
    sums = torch.empty(count, dtype=torch.int32, device=rows.device)
    launch(triton_crc.combine_blocks, (count,), rows, parts, ends, sums, blocks, BLOCK=block)
    return sums ^ _signed(_crc_of_zeros(nbytes))


@functools.cache
def _byte_table() -> Words:
    table: Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (np.uint32(_POLYNOMIAL) * (table & 1))
    return table


def _followed_by_zero(states: Words) -> Words:
    followed: Words = (states >> 8) ^ _byte_table()[states & 0xFF]
    return followed


def _applied(operator: Words, states: Words) -> Words:
    """The linear operator, as what it makes of the 32 single bits, on each of the states."""
    bits = (states[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    applied: Words = np.bitwise_xor.reduce(bits * operator, axis=1)
    return applied


@functools.lru_cache(maxsize=64)
def _tables(blocks: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What bit j contributes at each place in a block, shape (8, block), and in each block's sum,
    (32, blocks).
    """
    places, ends = np.empty((8, block), np.uint32), np.empty((32, blocks), np.uint32)
    states = _byte_table()[1 << np.arange(8)]
    for place in range(block - 1, -1, -1):
        places[:, place] = states
        states = _followed_by_zero(states)
    single_bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    over_a_block = functools.reduce(
        lambda bits, _: _followed_by_zero(bits), range(block), single_bits
    )
    states = single_bits
    for end in range(blocks - 1, -1, -1):
        ends[:, end] = states
        states = _applied(over_a_block, states)
    on_device = [torch.from_numpy(table.view(np.int32)).to(device) for table in (places, ends)]
    return on_device[0], on_device[1]


@functools.lru_cache(maxsize=64)
def _crc_of_zeros(nbytes: int) -> int:
    return zlib.crc32(bytes(nbytes))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
