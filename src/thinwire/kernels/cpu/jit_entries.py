"""Compiled loops over the entries of one tensor: the fold, and the largest folded entries.

Arrays are flat; a part is a range of positions that one thread works on. Sent values have the type
of the computation: that of the state, or float32 if the state is bfloat16. An array of uint16 holds
bfloat16, which NumPy does not know: the upper half of a float32.

The key of an entry is its bit pattern without the sign. Keys have the same order as magnitudes.
Values that are not finite have the largest keys.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu.intrinsics import bits_of, magnitude_of, trailing_zeros, wide
from thinwire.kernels.cpu.jit_cache import Int, i64, jit, jit_inline, u64

Array = NDArray[Any]

VALUES, PLAIN, MOMENTUM, NESTEROV = range(4)
"""Modes of the fold: none (the residual itself), v + g, v + (m u + g), or (v + m (u + g)) + g."""

# entries that stay in the nearest cache from their fold until what was sent of them is taken off
_SPAN = 2048
_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
"""Bits of the largest bfloat16 as a float32. From there on, rounding away from zero would turn a
finite number into infinity.
"""


@jit
def folded(g: Any, v: Any, u: Any, m: Any, mode: Int) -> Any:
    """Return the folded residual of one entry, rounded after every operation."""
    if mode == VALUES:
        return wide(v)
    if mode == PLAIN:
        return wide(v) + wide(g)
    if mode == MOMENTUM:
        return wide(v) + (m * wide(u) + wide(g))
    return (wide(v) + m * (wide(u) + wide(g))) + wide(g)


@jit
def commit(
    grad: Array,
    residual: Array,
    buffer: Array,
    m: Any,
    mode: Int,
    start: Int,
    stop: Int,
    indices: Array,
    sent: Array,
) -> None:
    """Fold [start, stop), subtract the sent values and clear the momentum there.

    The state is float32 or float64. `indices`, strictly ascending, are all in [start, stop).
    """
    at = 0
    for first in range(start, stop, _SPAN):
        last = min(first + _SPAN, stop)
        _fold(grad, residual, buffer, m, mode, u64(first), u64(last))
        while at < len(indices) and indices[at] < last:
            i = u64(indices[at])
            residual[i] -= sent[at]
            if mode != PLAIN:
                buffer[i] = 0
            at += 1


@jit_inline
def _fold(
    grad: Array, residual: Array, buffer: Array, m: Any, mode: Int, first: Any, end: Any
) -> None:
    """Fold [first, end) as if nothing had been sent."""
    if mode == PLAIN:
        for i in range(first, end):
            residual[i] = residual[i] + wide(grad[i])
    elif mode == MOMENTUM:
        for i in range(first, end):
            u = m * buffer[i] + wide(grad[i])
            buffer[i] = u
            residual[i] = residual[i] + u
    else:
        for i in range(first, end):
            g = wide(grad[i])
            u = m * (buffer[i] + g)
            buffer[i] = u
            residual[i] = (residual[i] + u) + g


@jit
def commit_bfloat16(
    grad: Array,
    residual: Array,
    buffer: Array,
    m: Any,
    mode: Int,
    seed: Any,
    start: Int,
    stop: Int,
    indices: Array,
    sent: Array,
    left: Array,
) -> None:
    """Commit as `commit` does, for state in bfloat16; sent values are subtracted before rounding.

    `left` is scratch, as long as `indices`.
    """
    at = 0
    for first in range(start, stop, _SPAN):
        last = min(first + _SPAN, stop)
        end = at
        while end < len(indices) and indices[end] < last:
            i = u64(indices[end])
            left[end] = folded(grad[i], residual[i], buffer[i], m, mode) - sent[end]
            end += 1
        _fold_bfloat16(grad, residual, buffer, m, mode, seed, u64(first), u64(last))
        for j in range(at, end):
            i = u64(indices[j])
            residual[i] = _rounded(left[j], _for_residual(_mixed(i, seed)))
            if mode != PLAIN:
                buffer[i] = 0
        at = end


@jit_inline
def _fold_bfloat16(
    grad: Array, residual: Array, buffer: Array, m: Any, mode: Int, seed: Any, first: Any, end: Any
) -> None:
    if mode == PLAIN:
        for i in range(first, end):
            residual[i] = _rounded(
                wide(residual[i]) + wide(grad[i]), _for_residual(_mixed(i, seed))
            )
    elif mode == MOMENTUM:
        for i in range(first, end):
            noise = _mixed(i, seed)
            u = m * wide(buffer[i]) + wide(grad[i])
            buffer[i] = _rounded(u, _for_buffer(noise))
            residual[i] = _rounded(wide(residual[i]) + u, _for_residual(noise))
    else:
        for i in range(first, end):
            noise, g = _mixed(i, seed), wide(grad[i])
            u = m * (wide(buffer[i]) + g)
            buffer[i] = _rounded(u, _for_buffer(noise))
            residual[i] = _rounded((wide(residual[i]) + u) + g, _for_residual(noise))


@jit
def store(target: Array, values: Array, seed: Any, start: Int, stop: Int) -> None:
    """Round `values` of [start, stop) into `target`, bfloat16, with the random bits of a buffer."""
    for i in range(u64(start), u64(stop)):
        target[i] = _rounded(values[i], _for_buffer(_mixed(i, seed)))


@jit
def _mixed(position: Any, seed: Any) -> Any:
    """Mix bits as `reference.mixed` does, cut to 32 bits, which allows vectorisation."""
    x = np.uint32(np.uint32(position) ^ seed)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@jit
def _rounded(x: Any, noise: Any) -> Any:
    """Round a float32 to bfloat16 by 16 random bits; values that are not finite stay unchanged."""
    bits = bits_of(x)
    finite = (bits & np.uint32(0x7FFFFFFF)) <= _LARGEST_BFLOAT16
    return np.uint16(np.uint32(bits + (noise if finite else np.uint32(0))) >> np.uint32(16))


@jit
def _for_residual(noise: Any) -> Any:
    return np.uint32(noise & np.uint32(0xFFFF))


@jit
def _for_buffer(noise: Any) -> Any:
    return np.uint32(noise >> np.uint32(16))


BLOCK = 64
"""Number of neighbours that form a word, one bit each."""
RUN = 16
"""Number of neighbours that are sampled together: they share a cache line."""
_DIGIT_BITS = 11
DIGITS = 1 << _DIGIT_BITS
"""Length of the scratch that `keep_largest` and `scan` need."""


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
    """Find candidates for the `k` largest of [start, stop) that are at least `floor`, ascending.

    Returns their number. When the room is full, only the `k` largest so far stay, and later ones
    must exceed the last of them. Values that are not finite are always candidates. `floor` is not
    NaN; `bits` is the integer view of `values`. Scratch: `marks`, of BLOCK bytes, of which `words`
    is the view as uint64, and `histogram`, of DIGITS numbers.
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
    """Mark the entries from `first` on whose folded residual reaches `floor` or is NaN."""
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

    Returns the k-th magnitude. Infinity replaces NaN, which cannot serve as a floor. Of equal
    magnitudes the first ones stay. `bits` is the integer view of `values`; `histogram` is scratch
    of DIGITS.
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
    """Keep those of the first `count` with larger keys, and the first `ties` with this key.

    The order stays, and at most `room` are kept. The result may overlap the beginning of the
    candidates' memory.
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
    """Add a histogram of the keys to the zeroed `bins` of 2^shift keys each."""
    mask = i64(0x7FFFFFFF if bits.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    for i in range(u64(len(bits))):
        bins[u64((i64(bits[i]) & mask) >> shift)] += 1


@jit
def keys_between(bits: Array, low: Int, high: Int, keys: Array) -> None:
    """Write the keys in [low, high) to `keys`, which has exactly their number."""
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
    """Write the folded residual of the runs [first, last) to their positions in `values`."""
    for run in range(u64(first), u64(last)):
        for i in range(u64(RUN)):
            at = run * u64(stride) + i
            values[run * u64(RUN) + i] = folded(grad[at], residual[at], buffer[at], m, mode)
