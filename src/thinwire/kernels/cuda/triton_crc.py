"""Triton kernels of the CRC-32: linear over GF(2), so every bit contributes on its own and the
blocks are summed.
"""

import triton
import triton.language as tl


@triton.jit
def reduce_blocks(
    rows_ptr, nbytes, lead, hole_start, hole_stop, table_ptr, blocks_ptr, BLOCK: tl.constexpr
):
    """Per row and block the sum of what its bits contribute to the block's end.

    `lead` zero bytes are thought before each row, so that the last block ends with it; the bytes of
    the hole count as zeros. Row j of the table has what bit j contributes at each place of a block.
    """
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = block * BLOCK + i - lead
    inside = (at >= 0) & (at < nbytes) & ((at < hole_start) | (at >= hole_stop))
    byte = tl.load(rows_ptr + row * nbytes + at, inside, other=0).to(tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(8):
        total ^= tl.where(((byte >> j) & 1) > 0, tl.load(table_ptr + j * BLOCK + i), 0)
    tl.store(blocks_ptr + row * tl.num_programs(0) + block, tl.xor_sum(total, 0))


@triton.jit
def combine_blocks(blocks_ptr, table_ptr, sums_ptr, block_count, BLOCK: tl.constexpr):
    """Per row the sum of what the bits of its blocks contribute to the row's end; row j of the
    table is for bit j.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(0, block_count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < block_count
        value = tl.load(blocks_ptr + row * block_count + i, inside, other=0)
        for j in tl.static_range(32):
            entry = tl.load(table_ptr + j * block_count + i, inside, other=0)
            total ^= tl.where(((value >> j) & 1) != 0, entry, 0)
    tl.store(sums_ptr + row, tl.xor_sum(total, 0))
