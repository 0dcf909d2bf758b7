"""Codes of positions and values on the device, of one tensor or of several rows at once, and the
sum of all rows.

Shapes are those of `k` entries; how many of them count is a number in device memory, and what lies
behind it is zero. All divisions are of a tensor by a tensor: torch multiplies by the reciprocal
where a GPU divides by a plain number, which may round otherwise than the CPU does.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.cuda import launching, triton_codes
from thinwire.kernels.cuda.launching import blocks_of, launch
from thinwire.layout.message import SCALE_COUNT

__all__ = [
    "PositionRows",
    "decode_positions",
    "decode_values",
    "encode_positions",
    "encode_values",
    "sum_rows",
]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_SMALLEST_TAIL = 1024
"""Segments of at most so many entries are summed by one program."""


class PositionRows(NamedTuple):
    """What the codes of `rows` senders say, in no way checked."""

    indices: Tensor
    """Shape (rows, k), int64; of no meaning behind a row's count."""
    counts: Tensor
    """Shape (rows,), int64: how many bits the bitmap has set, which may be more than k."""
    low_fields: Tensor
    """Shape (rows, k), int64: the low bits, of all k fields."""


def encode_positions(
    indices: Tensor, count: Tensor, low_bits: int, low_bytes: int, high_bytes: int
) -> Tensor:
    """See `thinwire.wire.positions.encode_positions`, for the first `count` of the indices."""
    block = launching.BLOCK
    code = torch.empty(low_bytes, dtype=torch.uint8, device=indices.device)
    if low_bits:
        grid = (blocks_of(low_bytes, block),)
        launch(
            triton_codes.pack_fields,
            grid,
            indices,
            indices,
            count,
            code,
            low_bytes,
            low_bits,
            BLOCK=block,
        )
    words = torch.zeros((high_bytes + 3) // 4, dtype=torch.int32, device=indices.device)
    grid = (blocks_of(indices.numel(), block),)
    launch(triton_codes.set_high_parts, grid, indices, indices, count, words, low_bits, BLOCK=block)
    return torch.cat((code, words.view(torch.uint8)[:high_bytes]))


def decode_positions(codes: Tensor, k: int, low_bits: int, low_bytes: int) -> PositionRows:
    """Positions of every row of `codes`, shape (rows, bytes), whose rows lie anywhere but are
    contiguous.
    """
    rows, block = codes.shape[0], launching.BLOCK
    low, high = codes[:, :low_bytes], codes[:, low_bytes:]
    fields = torch.zeros((rows, k), dtype=torch.int64, device=codes.device)
    if low_bits:
        given = (low, codes.stride(0), fields, k, low_bytes, low_bits, (1 << low_bits) - 1)
        launch(triton_codes.unpack_fields, (blocks_of(k, block), rows), codes, *given, BLOCK=block)
    bit_count = 8 * high.shape[1]
    blocks = blocks_of(bit_count, block)
    counts = torch.empty((rows, blocks), dtype=torch.int64, device=codes.device)
    launch(
        triton_codes.count_bits,
        (blocks, rows),
        codes,
        high,
        codes.stride(0),
        counts,
        bit_count,
        BLOCK=block,
    )
    until = counts.cumsum(1)
    indices = torch.zeros((rows, k), dtype=torch.int64, device=codes.device)
    found = (high, codes.stride(0), until - counts, indices, bit_count, k, low_bits)
    launch(triton_codes.find_high_parts, (blocks, rows), codes, *found, BLOCK=block)
    return PositionRows(indices | fields, until[:, -1], fields)


def encode_values(values: Tensor, count: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """See `thinwire.wire.values.encode_values`, for the first `count` of the k values; the
    others must be zero.
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
    """Values of every row of `codes`, shape (rows, bytes).

    Args:
        codes: uint8, contiguous along a row; read only.
        counts: Shape (rows,), int64, how many of a row's values count.
        bits: Cost of one value.
        k: Values for which there is room.

    Returns:
        Shape (rows, k), float32, zero behind a row's count; and shape (rows,), bool: whether the
        scales, or without scales the values that count, are finite.
    """
    rows, block = codes.shape[0], launching.BLOCK
    if bits == 32:
        there = torch.arange(k, device=codes.device) < counts.unsqueeze(1)
        came = _floats(codes[:, : 4 * k])
        values = torch.where(there, came, 0.0)
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
    """See `thinwire.core.feedback.sum_sparse`, for rows of which the first `counts` entries count.

    Returns:
        Positions and sums, shape (rows * k,) both. A position may occur several times, each time
        with the same sum, so that an assignment to these positions is right; where no row has an
        entry they are (0, 0).
    """
    rows, k = indices.shape
    there = torch.arange(k, device=indices.device) < counts.unsqueeze(1)
    keys, order = (
        torch.where(there, indices, numel).flatten().sort(stable=True)
    )  # rows stay in order
    sums = torch.zeros(rows * k, dtype=dtype, device=indices.device)
    grid, block = (blocks_of(rows * k, launching.BLOCK),), launching.BLOCK
    launch(
        triton_codes.sum_runs,
        grid,
        keys,
        keys,
        values.flatten()[order],
        sums,
        rows * k,
        numel,
        BLOCK=block,
    )
    place = torch.arange(rows * k, device=keys.device)
    begins = torch.cat((place[:1] == 0, keys[1:] != keys[:-1])) & (keys < numel)
    at = torch.where(begins, place, 0).cummax(0).values  # entries behind the last run repeat that
    at = at.clamp(max=rows * k - 1)
    return torch.where(keys[at] < numel, keys[at], 0), sums[at]


def _floats(codes: Tensor) -> Tensor:
    """Rows of bytes as rows of float32; a copy, since a view must be aligned."""
    return codes.flatten().clone().view(torch.float32).view(codes.shape[0], codes.shape[1] // 4)


def _scales(magnitudes: Tensor, count: Tensor, bits: int) -> Tensor:
    """The float32 numbers that travel with the fields: the mean, the code book, or the smallest and
    the largest.
    """
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
    """Means of the 2^depth parts that splitting at the mean gives, ascending; an empty part has its
    parent's.
    """
    place = torch.arange(magnitudes.numel(), device=magnitudes.device)
    part = (place >= count).long()  # the last part is that of the entries that do not count
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
    """Per segment the sum by adding the upper half to the lower until one is left; overwrites
    `values`.
    """
    block, level = launching.BLOCK, 0
    tail, segments = max(block, _SMALLEST_TAIL), starts.numel()
    longest = values.numel()
    while longest > tail:
        grid = (blocks_of(longest // 2, block), segments)
        launch(triton_codes.halve_, grid, values, values, starts, counts, level, BLOCK=block)
        longest, level = (longest + 1) // 2, level + 1
    sums = torch.empty(segments, dtype=torch.float64, device=values.device)
    launch(
        triton_codes.halve_to_one,
        (segments,),
        values,
        values,
        starts,
        counts,
        sums,
        level,
        BLOCK=tail,
    )
    return sums
