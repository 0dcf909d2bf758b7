"""Codes of positions and values on the device, the sum of rows, and CRC-32 of rows of bytes.

Codes are of one tensor or of several rows at once. Shapes are those of `k` entries. The number that
counts is in device memory, and entries after it are zero. All divisions are of a tensor by a
tensor: on a GPU torch divides by a plain number through its reciprocal, which may round differently
from the CPU.

Without its first and last complement the CRC is linear over GF(2). The CRC of a message is the sum
of the contributions of its bits, which depend only on a bit's distance from the end. One program
sums a block with a table of the positions in a block, another sums the blocks with a table of their
positions. The complements add the CRC of as many zero bytes. Source: Sarwate, CACM 1988 (the byte
table); the linear form is folklore.
"""

import functools
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cuda import launching, triton_codes
from thinwire.kernels.cuda.launching import blocks_of, launch
from thinwire.layout.message import SCALE_COUNT

_FLOAT32_MAX = torch.finfo(torch.float32).max
_SMALLEST_TAIL = 1024
"""Number of entries up to which one program sums a segment."""


class PositionRows(NamedTuple):
    """Decoded positions of `rows` senders, unchecked."""

    indices: Tensor
    """Shape (rows, k), int64; undefined after a row's count."""
    counts: Tensor
    """Shape (rows,), int64: number of bits set in the bitmap, which may exceed k."""
    low_fields: Tensor
    """Shape (rows, k), int64: the low bits, of all k fields."""


def encode_positions(
    indices: Tensor, count: Tensor, low_bits: int, low_bytes: int, high_bytes: int
) -> Tensor:
    """Return the code of the first `count` indices; see `thinwire.wire.codes.encode_positions`."""
    block = launching.BLOCK
    code = torch.empty(low_bytes, dtype=torch.uint8, device=indices.device)
    if low_bits:
        grid = (blocks_of(low_bytes, block),)
        given = (indices, count, code, low_bytes, low_bits)
        launch(triton_codes.pack_fields, grid, indices, *given, BLOCK=block)
    words = torch.zeros((high_bytes + 3) // 4, dtype=torch.int32, device=indices.device)
    grid = (blocks_of(indices.numel(), block),)
    launch(triton_codes.set_high_parts, grid, indices, indices, count, words, low_bits, BLOCK=block)
    return torch.cat((code, words.view(torch.uint8)[:high_bytes]))


def decode_positions(codes: Tensor, k: int, low_bits: int, low_bytes: int) -> PositionRows:
    """Return the positions of every row of `codes`, shape (rows, bytes), contiguous along a row."""
    rows, block = codes.shape[0], launching.BLOCK
    low, high = codes[:, :low_bytes], codes[:, low_bytes:]
    fields = torch.zeros((rows, k), dtype=torch.int64, device=codes.device)
    if low_bits:
        given = (low, codes.stride(0), fields, k, low_bytes, low_bits, (1 << low_bits) - 1)
        launch(triton_codes.unpack_fields, (blocks_of(k, block), rows), codes, *given, BLOCK=block)
    bit_count = 8 * high.shape[1]
    blocks = blocks_of(bit_count, block)
    counts = torch.empty((rows, blocks), dtype=torch.int64, device=codes.device)
    counted = (high, codes.stride(0), counts, bit_count)
    launch(triton_codes.count_bits, (blocks, rows), codes, *counted, BLOCK=block)
    until = counts.cumsum(1)
    indices = torch.zeros((rows, k), dtype=torch.int64, device=codes.device)
    found = (high, codes.stride(0), until - counts, indices, bit_count, k, low_bits)
    launch(triton_codes.find_high_parts, (blocks, rows), codes, *found, BLOCK=block)
    return PositionRows(indices | fields, until[:, -1], fields)


def encode_values(values: Tensor, count: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the code of the first `count` of k values; the others must be zero.

    See `wire.codes.encode_values`.
    """
    if bits == 32:
        sent = values.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).float()
        return sent.view(torch.uint8), sent
    k, block = values.numel(), launching.BLOCK
    scales = _scales(values.double().abs().clamp(max=_FLOAT32_MAX), count, bits)
    fields = torch.empty(k, dtype=torch.int32, device=values.device)
    sent = torch.empty(k, dtype=torch.float32, device=values.device)
    kernel = triton_codes.book_fields if bits <= 4 else triton_codes.grid_fields
    given = (values, count, scales, fields, sent, k, _FLOAT32_MAX)
    launch(kernel, (blocks_of(k, block),), values, *given, BITS=bits, BLOCK=block)
    nbytes = (k * bits + 7) // 8
    code = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
    grid = (blocks_of(nbytes, block),)
    launch(triton_codes.pack_fields, grid, values, fields, count, code, nbytes, bits, BLOCK=block)
    return torch.cat((scales.view(torch.uint8), code)), sent


def decode_values(codes: Tensor, counts: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the values of every row of `codes`, shape (rows, bytes).

    Args:
        codes: uint8, contiguous along a row; read only.
        counts: Shape (rows,), int64, number of valid values in each row.
        bits: Bits per value.
        k: Number of values that fit.

    Returns:
        Shape (rows, k), float32, zero after a row's count; and flags, shape (rows,), bool: the
        scales, or without scales the valid values, are finite.
    """
    rows, block = codes.shape[0], launching.BLOCK
    if bits == 32:
        there = torch.arange(k, device=codes.device) < counts.unsqueeze(1)
        decoded = _floats(codes[:, : 4 * k])
        values = torch.where(there, decoded, 0.0)
        return values, values.isfinite().all(1)
    scale_count = SCALE_COUNT[bits]
    scales = _floats(codes[:, : 4 * scale_count])
    values = torch.empty((rows, k), dtype=torch.float32, device=codes.device)
    fields = codes[:, 4 * scale_count :]
    given = (fields, codes.stride(0), scales, counts, values, k, fields.shape[1])
    constants = {"BITS": bits, "SCALES": scale_count, "BLOCK": block}
    launch(triton_codes.decode_values, (blocks_of(k, block), rows), codes, *given, **constants)
    return values, scales.isfinite().all(1)


def sum_rows(
    indices: Tensor, values: Tensor, counts: Tensor, numel: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sum of rows, of which the first `counts` entries are valid.

    See `thinwire.core.feedback.sum_sparse`.

    Returns:
        Positions and sums, shape (rows * k,) both. A position may occur several times, each time
        with the same sum: assign, never accumulate. If no row has an entry they are (0, 0).
    """
    rows, k = indices.shape
    there = torch.arange(k, device=indices.device) < counts.unsqueeze(1)
    # rows stay in order
    keys, order = torch.where(there, indices, numel).flatten().sort(stable=True)
    sums = torch.zeros(rows * k, dtype=dtype, device=indices.device)
    grid, block = (blocks_of(rows * k, launching.BLOCK),), launching.BLOCK
    given = (keys, values.flatten()[order], sums, rows * k, numel)
    launch(triton_codes.sum_runs, grid, keys, *given, BLOCK=block)
    positions = torch.arange(rows * k, device=keys.device)
    begins = torch.cat((positions[:1] == 0, keys[1:] != keys[:-1])) & (keys < numel)
    # entries behind the last run repeat it
    at = torch.where(begins, positions, 0).cummax(0).values
    at = at.clamp(max=rows * k - 1)
    return torch.where(keys[at] < numel, keys[at], 0), sums[at]


def _floats(codes: Tensor) -> Tensor:
    return codes.flatten().clone().view(torch.float32).view(codes.shape[0], codes.shape[1] // 4)


def _scales(magnitudes: Tensor, count: Tensor, bits: int) -> Tensor:
    """Return the scales that travel with the fields: mean, code book, or smallest and largest."""
    k = magnitudes.numel()
    if bits == 1:
        total = _segment_sums(magnitudes, torch.zeros_like(count).view(1), count.view(1))
        return (total / torch.full_like(total, k)).float()
    if bits <= 4:
        return _split_at_means(magnitudes, count, bits - 1).float()
    there = torch.arange(k, device=magnitudes.device) < count
    low = torch.where(there, magnitudes, torch.inf).amin()
    return torch.stack((torch.where(count > 0, low, 0.0), magnitudes.amax())).float()


def _split_at_means(magnitudes: Tensor, count: Tensor, depth: int) -> Tensor:
    """Return the ascending means of 2^depth parts; an empty part has that of its parent."""
    positions = torch.arange(magnitudes.numel(), device=magnitudes.device)
    part = (positions >= count).long()  # the last part is that of the entries that do not count
    counts, means = count.view(1), torch.zeros(1, dtype=torch.float64, device=magnitudes.device)
    for level in range(depth + 1):
        sums = _segment_sums(magnitudes.clone(), counts.cumsum(0) - counts, counts)
        means = torch.where(counts > 0, sums / counts.clamp(min=1).double(), means)
        if level == depth:
            break
        padded = torch.cat((means, torch.full_like(means[:1], torch.inf)))
        part, order = (2 * part + (magnitudes > padded[part])).sort(stable=True)
        magnitudes = magnitudes[order]
        counts = torch.zeros((4 << level) + 1, dtype=torch.int64, device=part.device)
        counts = counts.scatter_add_(0, part, torch.ones_like(part))[: 2 << level]
        means = means.unsqueeze(1).expand(-1, 2).flatten()
    return means


def _segment_sums(values: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each segment, by halves; overwrites `values`."""
    block, level = launching.BLOCK, 0
    tail, segments = max(block, _SMALLEST_TAIL), starts.numel()
    longest = values.numel()
    while longest > tail:
        grid = (blocks_of(longest // 2, block), segments)
        launch(triton_codes.halve_, grid, values, values, starts, counts, level, BLOCK=block)
        longest, level = (longest + 1) // 2, level + 1
    sums = torch.empty(segments, dtype=torch.float64, device=values.device)
    given = (values, starts, counts, sums, level)
    launch(triton_codes.halve_to_one, (segments,), values, *given, BLOCK=tail)
    return sums


_POLYNOMIAL = 0xEDB88320
Words = NDArray[Any]


def crc32(rows: Tensor, hole: tuple[int, int] = (0, 0)) -> Tensor:
    """Return `zlib.crc32` of each row, with the bytes of the hole counted as zeros.

    Args:
        rows: Shape (rows, nbytes), uint8, contiguous; read only.
        hole: First byte that counts as zero, and the one after the last.

    Returns:
        Shape (rows,), int32: the bits of the checksum. No host synchronization, except for the
        first call with a row length, whose tables are copied to the device.
    """
    count, nbytes = rows.shape
    block = launching.BLOCK
    blocks = blocks_of(nbytes, block)
    by_position, ends = _tables(blocks, block, rows.device)
    parts = torch.empty((count, blocks), dtype=torch.int32, device=rows.device)
    given = (rows, nbytes, blocks * block - nbytes, *hole, by_position, parts)
    launch(triton_codes.reduce_blocks, (blocks, count), rows, *given, BLOCK=block)
    sums = torch.empty(count, dtype=torch.int32, device=rows.device)
    launch(triton_codes.combine_blocks, (count,), rows, parts, ends, sums, blocks, BLOCK=block)
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
    bits = (states[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    applied: Words = np.bitwise_xor.reduce(bits * operator, axis=1)
    return applied


@functools.lru_cache(maxsize=64)
def _tables(blocks: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the contribution of bit j by position: (8, block), and in a sum (32, blocks)."""
    by_position, ends = np.empty((8, block), np.uint32), np.empty((32, blocks), np.uint32)
    states = _byte_table()[1 << np.arange(8)]
    for position in range(block - 1, -1, -1):
        by_position[:, position] = states
        states = _followed_by_zero(states)
    single_bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    over_a_block = functools.reduce(
        lambda bits, _: _followed_by_zero(bits), range(block), single_bits
    )
    states = single_bits
    for end in range(blocks - 1, -1, -1):
        ends[:, end] = states
        states = _applied(over_a_block, states)
    on_device = [torch.from_numpy(table.view(np.int32)).to(device) for table in (by_position, ends)]
    return on_device[0], on_device[1]


@functools.lru_cache(maxsize=64)
def _crc_of_zeros(nbytes: int) -> int:
    return zlib.crc32(bytes(nbytes))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
