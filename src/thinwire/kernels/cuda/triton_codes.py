"""Triton kernels of the codes for positions and values, of the sparse sum, and of the CRC-32.

A code is a string of bytes. Several codes, one per row, are `stride` bytes apart, and the second
axis of the grid counts the rows. Counts that depend on data are read from device memory. Arbitrary
bytes never cause an access out of bounds. Launched without contraction of a * b + c, as
`triton_select` is.
"""

import triton
import triton.language as tl


@triton.jit
def _field_at(code_ptr, i, inside, nbytes, width_bits, field_mask):
    """Return the i-th field of `width_bits` (at most 56); missing bytes count as zero."""
    bit = i * width_bits
    first = bit >> 3
    value = tl.zeros_like(bit)
    for byte in range((width_bits + 14) // 8):
        there = inside & (first + byte < nbytes)
        value |= tl.load(code_ptr + first + byte, there, other=0).to(tl.int64) << (8 * byte)
    return (value >> (bit & 7)) & field_mask


@triton.jit
def pack_fields(fields_ptr, count_ptr, code_ptr, nbytes, width_bits, BLOCK: tl.constexpr):
    """Write the low `width_bits` of each of the counted fields, lowest bit first; then zeros."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < nbytes
    count = tl.load(count_ptr)
    packed = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(8):
        i = (byte * 8 + j) // width_bits
        field = tl.load(fields_ptr + i, inside & (i < count), other=0).to(tl.int64)
        packed |= (((field >> ((byte * 8 + j) % width_bits)) & 1) << j).to(tl.int32)
    tl.store(code_ptr + byte, packed.to(tl.uint8), inside)


@triton.jit
def unpack_fields(
    code_ptr, stride, fields_ptr, k, nbytes, width_bits, field_mask, BLOCK: tl.constexpr
):
    """Read all `k` fields of every row."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < k
    field = _field_at(code_ptr + row * stride, i, inside, nbytes, width_bits, field_mask)
    tl.store(fields_ptr + row * k + i, field, inside)


@triton.jit
def set_high_parts(indices_ptr, count_ptr, words_ptr, low_bits, BLOCK: tl.constexpr):
    """Set the unary high parts of the counted positions in zeroed words of 32 bits."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(count_ptr)
    bit = (tl.load(indices_ptr + i, inside, other=0) >> low_bits) + i
    tl.atomic_or(
        words_ptr + (bit >> 5),
        tl.full([BLOCK], 1, tl.int32) << (bit & 31).to(tl.int32),
        mask=inside,
    )


@triton.jit
def _bits(code_ptr, bit, bit_count):
    """Return bits of a row of bytes as 0 and 1; 0 after the end."""
    byte = tl.load(code_ptr + (bit >> 3), bit < bit_count, other=0).to(tl.int64)
    return (byte >> (bit & 7)) & 1


@triton.jit
def count_bits(code_ptr, stride, counts_ptr, bit_count, BLOCK: tl.constexpr):
    """Count the set bits per row and block."""
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    bits = _bits(code_ptr + row * stride, block * BLOCK + tl.arange(0, BLOCK), bit_count)
    tl.store(counts_ptr + row * tl.num_programs(0) + block, tl.sum(bits, 0))


@triton.jit
def find_high_parts(
    code_ptr, stride, before_ptr, indices_ptr, bit_count, k, low_bits, BLOCK: tl.constexpr
):
    """Find the high parts of the first `k` set bits.

    `before_ptr` has the sum of `count_bits` over the blocks before each.
    """
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    bit = block * BLOCK + tl.arange(0, BLOCK)
    is_set = _bits(code_ptr + row * stride, bit, bit_count)
    i = tl.load(before_ptr + row * tl.num_programs(0) + block) + tl.cumsum(is_set, 0) - is_set
    tl.store(indices_ptr + row * k + i, (bit - i) << low_bits, (is_set > 0) & (i < k))


@triton.jit
def halve_(values_ptr, starts_ptr, counts_ptr, level, BLOCK: tl.constexpr):
    """Add the upper half of each segment, halved `level` times before, to its lower one."""
    segment = tl.program_id(1)
    length = (tl.load(counts_ptr + segment) + (1 << level) - 1) >> level
    half = (length + 1) // 2
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length - half
    lower = values_ptr + tl.load(starts_ptr + segment) + i
    tl.store(
        lower, tl.load(lower, inside, other=0.0) + tl.load(lower + half, inside, other=0.0), inside
    )


@triton.jit
def halve_to_one(values_ptr, starts_ptr, counts_ptr, sums_ptr, level, BLOCK: tl.constexpr):
    """Halve each segment of at most BLOCK entries until its sum is left; 0 without entries."""
    segment = tl.program_id(0)
    length = (tl.load(counts_ptr + segment) + (1 << level) - 1) >> level
    i = tl.arange(0, BLOCK)
    x = tl.load(values_ptr + tl.load(starts_ptr + segment) + i, i < length, other=0.0)
    while length > 1:
        half = (length + 1) // 2
        upper = tl.gather(x, tl.minimum(i + half, BLOCK - 1).to(tl.int32), 0)
        x = tl.where(i < length - half, x + upper, x)
        length = half
    tl.store(sums_ptr + segment, tl.sum(tl.where(i == 0, x, 0.0), 0))


@triton.jit
def _signed(magnitude, negative):
    return tl.where(negative, -magnitude, magnitude)


@triton.jit
def book_fields(
    values_ptr,
    count_ptr,
    book_ptr,
    fields_ptr,
    sent_ptr,
    k,
    cap,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write sign and number of the nearest level of the ascending book, and the decoded value.

    Entries after the count are zero.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(count_ptr)
    x = tl.load(values_ptr + i, inside, other=0.0).to(tl.float64)
    magnitude = tl.minimum(tl.abs(x), cap)
    level = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range((1 << (BITS - 1)) - 1):
        middle = (
            tl.load(book_ptr + j).to(tl.float64) + tl.load(book_ptr + j + 1).to(tl.float64)
        ) * 0.5
        level += (magnitude > middle).to(tl.int32)
    negative = x < 0
    sent = _signed(tl.load(book_ptr + level), negative)
    tl.store(fields_ptr + i, level | (negative.to(tl.int32) << (BITS - 1)), i < k)
    tl.store(sent_ptr + i, tl.where(inside, sent, 0.0), i < k)


@triton.jit
def _level_width(low, high, BITS: tl.constexpr):
    # float64, since a float32 division is only approximate on a GPU
    return (high - low) / tl.full([], (1 << (BITS - 1)) - 1, tl.float64)


@triton.jit
def grid_fields(
    values_ptr,
    count_ptr,
    scales_ptr,
    fields_ptr,
    sent_ptr,
    k,
    cap,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write fields as `book_fields` does, for equidistant levels between two scales."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(count_ptr)
    x = tl.load(values_ptr + i, inside, other=0.0).to(tl.float64)
    low = tl.load(scales_ptr).to(tl.float64)
    high = tl.load(scales_ptr + 1).to(tl.float64)
    top = tl.full([], (1 << (BITS - 1)) - 1, tl.float64)
    position = (tl.minimum(tl.abs(x), cap) - low) * top / tl.where(high > low, high - low, 1.0)
    position = tl.minimum(tl.maximum(tl.ceil(position - 0.5), 0.0), top)
    level = tl.where(high > low, position, 0.0)
    negative = x < 0
    sent = _signed((level * _level_width(low, high, BITS) + low).to(tl.float32), negative)
    tl.store(fields_ptr + i, level.to(tl.int32) | (negative.to(tl.int32) << (BITS - 1)), i < k)
    tl.store(sent_ptr + i, tl.where(inside, sent, 0.0), i < k)


@triton.jit
def decode_values(
    code_ptr,
    stride,
    scales_ptr,
    counts_ptr,
    values_ptr,
    k,
    nbytes,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode the fields of every row; entries after the row's count are zero."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < k) & (i < tl.load(counts_ptr + row))
    field = _field_at(code_ptr + row * stride, i, inside, nbytes, BITS, (1 << BITS) - 1)
    level = field & ((1 << (BITS - 1)) - 1)
    scales_ptr += row * SCALES
    if BITS <= 4:
        magnitude = tl.load(scales_ptr + level)
    else:
        low = tl.load(scales_ptr).to(tl.float64)
        high = tl.load(scales_ptr + 1).to(tl.float64)
        magnitude = (level.to(tl.float64) * _level_width(low, high, BITS) + low).to(tl.float32)
    value = _signed(magnitude, (field >> (BITS - 1)) > 0)
    tl.store(values_ptr + row * k + i, tl.where(inside, value, 0.0), i < k)


@triton.jit
def sum_runs(keys_ptr, values_ptr, sums_ptr, length, limit, BLOCK: tl.constexpr):
    """Write the sum of each run of equal keys below `limit` at its beginning.

    Values are added in order.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    key = tl.load(keys_ptr + i, inside, other=limit)
    before = tl.load(keys_ptr + i - 1, inside & (i > 0), other=-1)
    total = tl.load(sums_ptr + i, inside, other=0.0)  # zeros, of the dtype of the sum
    going = (key != before) & (key < limit)
    offset = 0
    while tl.max(going.to(tl.int32), 0) > 0:
        value = tl.load(values_ptr + i + offset, going, other=0.0).to(total.dtype)
        total = tl.where(going, total + value, total)
        offset += 1
        going = going & (i + offset < length)
        going = going & (tl.load(keys_ptr + i + offset, going, other=limit) == key)
    tl.store(sums_ptr + i, total, inside)


@triton.jit
def reduce_blocks(
    rows_ptr, nbytes, lead, hole_start, hole_stop, table_ptr, blocks_ptr, BLOCK: tl.constexpr
):
    """Sum the contributions of bits to the end of their block, per row and block.

    The kernel assumes `lead` zero bytes before each row, so that the last block ends with it. The
    bytes of the hole count as zeros. Row j of the table has the contribution of bit j at each
    position of a block.
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
    """Sum the contributions of blocks to the end of their row; row j of the table is for bit j."""
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
