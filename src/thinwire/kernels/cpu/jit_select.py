"""Compiled loops that find the largest entries of what is folded; see `jit_fold` for the modes.

Without its sign, the bit pattern of a number is in the order of the magnitudes: the key of an
entry. What is not finite has the largest keys.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu.intrinsics import magnitude_of, trailing_zeros, wide
from thinwire.kernels.cpu.jit import Int, i64, jit, jit_inline, u64
from thinwire.kernels.cpu.jit_fold import MOMENTUM, PLAIN, VALUES, folded

Array = NDArray[Any]

BLOCK = 64
"""Neighbours of which one bit each makes a word."""
RUN = 16
"""Neighbours that are sampled together: they share a cache line."""
_DIGIT_BITS = 11
DIGITS = 1 << _DIGIT_BITS
"""Numbers of scratch that `keep_largest` and `scan` need."""


@jit
def scan(
    grad: Array,
    residual: Array,
    buffer: Array,
    m: Any,
    mode: Int,
    start: Int,
    stop: Int,
    k: Int,
    floor: Any,
    indices: Array,
    values: Array,
    bits: Array,
    marks: Array,
    words: Array,
    histogram: Array,
) -> Int:
    """Candidates for the `k` largest of [start, stop) that are at least `floor`, ascending; returns
    how many.

    Once the room is used up only the `k` largest so far stay, and later ones have to exceed the
    last of them. Values that are not finite are candidates always. `floor` is not NaN; `bits` is
    the integer view of `values`. Scratch: `marks`, of BLOCK bytes, of which `words` is the view as
    uint64, and `histogram`, of DIGITS numbers.
    """
    count = u64(0)
    first = u64(start)
    end = u64(stop)
    block = u64(BLOCK)
    while first < end:
        length = min(block, end - first)
        if length < block:
            marks[:] = 0
        _mark(grad, residual, buffer, m, mode, first, length, floor, marks)
        marked = u64(0)
        for eighth in range(u64(8)):
            marked |= words[eighth]
        if marked:
            if count + length > u64(len(indices)):
                floor = np.nextafter(
                    keep_largest(indices, values, bits, i64(count), k, histogram),
                    values.dtype.type(np.inf),
                )
                count = u64(k)
            marked = u64(0)
            for eighth in range(u64(8)):  # eight bytes of one bit each become one byte
                byte = (words[eighth] * u64(0x0102040810204080)) >> u64(56)
                marked |= byte << (u64(8) * eighth)
            while marked:
                i = first + trailing_zeros(marked)
                indices[count] = i
                values[count] = folded(grad[i], residual[i], buffer[i], m, mode)
                count += u64(1)
                marked &= marked - u64(1)
        first += block
    return i64(count)


@jit_inline
def _mark(
    grad: Array,
    residual: Array,
    buffer: Array,
    m: Any,
    mode: Int,
    first: Any,
    length: Any,
    floor: Any,
    marks: Array,
) -> None:
    """Set `marks` to whether the folded residual from `first` on reaches `floor`, or is not a
    number.
    """
    if mode == VALUES:
        for i in range(length):
            marks[i] = not (abs(wide(residual[first + i])) < floor)
    elif mode == PLAIN:
        for i in range(length):
            marks[i] = not (abs(wide(residual[first + i]) + wide(grad[first + i])) < floor)
    elif mode == MOMENTUM:
        for i in range(length):
            u = m * wide(buffer[first + i]) + wide(grad[first + i])
            marks[i] = not (abs(wide(residual[first + i]) + u) < floor)
    else:
        for i in range(length):
            g = wide(grad[first + i])
            u = m * (wide(buffer[first + i]) + g)
            marks[i] = not (abs((wide(residual[first + i]) + u) + g) < floor)


@jit
def keep_largest(
    indices: Array, values: Array, bits: Array, count: Int, k: Int, histogram: Array
) -> Any:
    """Move the `k` largest of the first `count` candidates to the front, in order.

    Returns the k-th magnitude, infinity in place of NaN, which could be the floor of nothing.
    Of equal magnitudes the first ones stay. `bits` is the integer view of `values`; `histogram`
    scratch of DIGITS.
    """
    mask = i64(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    high = i64(31 if bits.itemsize == 4 else 63)
    prefix = i64(0)
    wanted = k
    while high > 0:
        low = max(high - _DIGIT_BITS, 0)
        digit_mask = (i64(1) << (high - low)) - 1
        histogram[:] = 0
        for i in range(u64(count)):
            key = i64(bits[i]) & mask
            if (key >> high) == prefix:
                histogram[u64((key >> low) & digit_mask)] += 1
        digit = digit_mask
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix = (prefix << (high - low)) | digit
        high = low
    keep_above(indices, values, bits, count, prefix, wanted, indices, values, k)
    floor = magnitude_of(prefix, values)
    return floor if floor < values.dtype.type(np.inf) else values.dtype.type(np.inf)


@jit
def keep_above(
    indices: Array,
    values: Array,
    bits: Array,
    count: Int,
    key: Int,
    ties: Int,
    kept_indices: Array,
    kept_values: Array,
    room: Int,
) -> None:
    """Of the first `count` those of larger keys, and the first `ties` of just this key, in order;
    at
    most `room`.

    What is kept may lie in the memory of the candidates, from their beginning on.
    """
    mask = i64(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    kept, most = u64(0), u64(room)
    for i in range(u64(count)):
        if kept == most:
            break
        own = i64(bits[i]) & mask
        kept_indices[kept] = indices[
            i
        ]  # written always and kept by the counter, since a branch would be mispredicted
        kept_values[kept] = values[i]
        keep = own > key
        if own == key and ties > 0:
            ties -= 1
            keep = True
        kept += u64(keep)


@jit
def count_keys(bits: Array, shift: Int, bins: Array) -> None:
    """Histogram of the keys, into the zeroed `bins` of 2^shift keys each."""
    mask = i64(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    for i in range(u64(len(bits))):
        bins[u64((i64(bits[i]) & mask) >> shift)] += 1


@jit
def keys_between(bits: Array, low: Int, high: Int, keys: Array) -> None:
    """The keys in [low, high), for which there is just room in `keys`."""
    mask = i64(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    count = u64(0)
    for i in range(u64(len(bits))):
        key = i64(bits[i]) & mask
        if low <= key < high:
            keys[count] = key
            count += u64(1)


@jit
def sample(
    grad: Array,
    residual: Array,
    buffer: Array,
    m: Any,
    mode: Int,
    first: Int,
    last: Int,
    stride: Int,
    values: Array,
) -> None:
    """Folded residual of the runs [first, last), each in its place in `values`."""
    for run in range(u64(first), u64(last)):
        for i in range(u64(RUN)):
            at = run * u64(stride) + i
            values[run * u64(RUN) + i] = folded(grad[at], residual[at], buffer[at], m, mode)
