"""Compiled loops that find the largest entries of what is folded; see `jit_fold` for the modes.

Without its sign, the bit pattern of a number is in the order of the magnitudes: the key of an entry. What is not
finite has the largest keys.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels.intrinsics import trailing_zeros
from thinwire.core.kernels.jit import jit
from thinwire.core.kernels.jit_fold import MOMENTUM, PLAIN, VALUES, folded, wide

Array = NDArray[Any]

BLOCK = 64
"""Neighbours of which one bit each makes a word."""
RUN = 16
"""Neighbours that are sampled together: they share a cache line."""
_DIGIT_BITS = 11
_SAMPLE_HITS = 64  # of the k largest, how many a sample should hold: the fewer, the more candidates are needed
_SMALLEST_SAMPLE = 1024


@jit
def _key(bits: Any) -> Any:
    """Of the integer view of a float32 or float64."""
    if isinstance(bits, np.int32):
        return bits & np.int32(0x7FFFFFFF)
    return bits & np.int64(0x7FFFFFFFFFFFFFFF)


@jit
def _mark(
    grad: Array, residual: Array, buffer: Array, m: Any, mode: int, first: Any, length: Any, floor: Any, marks: Array
) -> None:
    """Set `marks` to whether the folded residual from `first` on reaches `floor`, or is not a number."""
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
def scan(
    grad: Array,
    residual: Array,
    buffer: Array,
    m: Any,
    mode: int,
    start: int,
    stop: int,
    k: int,
    floor: Any,
    indices: Array,
    values: Array,
    bits: Array,
) -> int:
    """Candidates for the `k` largest of [start, stop) that are at least `floor`, ascending; returns how many.

    Once the room is used up only the `k` largest so far stay, and later ones have to exceed the last of them.
    Values that are not finite are candidates always. `floor` is not NaN; `bits` is the integer view of `values`.
    """
    marks = np.zeros(BLOCK, np.uint8)
    words = marks.view(np.uint64)
    count = np.uint64(0)
    first = np.uint64(start)
    end = np.uint64(stop)
    block = np.uint64(BLOCK)
    while first < end:
        length = min(block, end - first)
        if length < block:
            marks[:] = 0
        _mark(grad, residual, buffer, m, mode, first, length, floor, marks)
        marked = np.uint64(0)
        for word in words:
            marked |= word
        if marked:
            if count + length > len(indices):
                floor = np.nextafter(keep_largest(indices, values, bits, int(count), k), values.dtype.type(np.inf))
                count = np.uint64(k)
            marked = np.uint64(0)
            for eighth in range(np.uint64(8)):  # eight bytes of one bit each become one byte
                byte = (words[eighth] * np.uint64(0x0102040810204080)) >> np.uint64(56)
                marked |= byte << (np.uint64(8) * eighth)
            while marked:
                i = first + trailing_zeros(marked)
                indices[count] = i
                values[count] = folded(grad[i], residual[i], buffer[i], m, mode)
                count += np.uint64(1)
                marked &= marked - np.uint64(1)
        first += block
    return int(count)


@jit
def keep_largest(indices: Array, values: Array, bits: Array, count: int, k: int) -> Any:
    """Move the `k` largest of the first `count` candidates to the front, in order.

    Returns the k-th magnitude, infinity in place of NaN, which could be the floor of nothing.
    Of equal magnitudes the first ones stay. `bits` is the integer view of `values`.
    """
    high = 31 if bits.itemsize == 4 else 63
    prefix = np.int64(0)
    wanted = k
    while high > 0:
        low = max(high - _DIGIT_BITS, 0)
        digit_mask = (1 << (high - low)) - 1
        histogram = np.zeros(digit_mask + 1, np.int64)
        for i in range(count):
            key = _key(bits[i])
            if (key >> high) == prefix:
                histogram[(key >> low) & digit_mask] += 1
        digit = digit_mask
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix = (prefix << (high - low)) | digit
        high = low
    keep_above(indices[:count], values[:count], bits[:count], int(prefix), wanted, indices[:k], values[:k])
    return np.fmin(np.array([prefix], bits.dtype).view(values.dtype)[0], values.dtype.type(np.inf))


@jit
def count_keys(bits: Array, shift: int, bins: Array) -> None:
    """Histogram of the keys, into the zeroed `bins` of 2^shift keys each."""
    for own in bits:
        bins[_key(own) >> shift] += 1


@jit
def keys_between(bits: Array, low: int, high: int, keys: Array) -> None:
    """The keys in [low, high), for which there is just room in `keys`."""
    count = 0
    for own in bits:
        key = np.int64(_key(own))
        if low <= key < high:
            keys[count] = key
            count += 1


@jit
def keep_above(
    indices: Array, values: Array, bits: Array, key: int, ties: int, kept_indices: Array, kept_values: Array
) -> None:
    """Those of larger keys, and the first `ties` of the very key, in order; as many as there is room for.

    What is kept may lie in the memory of the candidates, from their beginning on.
    """
    kept = np.uint64(0)
    for i in range(np.uint64(len(indices))):
        if kept == len(kept_indices):
            break
        own = _key(bits[i])
        kept_indices[kept] = indices[i]  # written always and kept by the counter, since a branch would be mispredicted
        kept_values[kept] = values[i]
        keep = own > key
        if own == key and ties > 0:
            ties -= 1
            keep = True
        kept += np.uint64(keep)


@jit
def sample_shape(n: int, k: int) -> tuple[int, int]:
    """How many runs of neighbours a sample of `n` entries consists of, if `k` are wanted, and how far apart they begin.

    Nothing where a sample is no use.
    """
    if n < 16 * _SMALLEST_SAMPLE:
        return 0, 0
    runs = min(max(_SAMPLE_HITS * (n // k), 16 * _SMALLEST_SAMPLE), max(n // 64, _SMALLEST_SAMPLE)) // RUN
    stride = n // runs // RUN * RUN
    return (n - RUN) // stride + 1, stride


@jit
def floor_rank(count: int, n: int, k: int) -> int:
    """The place in a sample of `count` of `n` entries that somewhat more than `k` entries of all reach.

    Six standard deviations of an independent sample more: neighbours are alike, which widens the spread.
    """
    hits = count * k / n
    return int(hits + 6 * hits**0.5 + 4)


@jit
def sample(
    grad: Array, residual: Array, buffer: Array, m: Any, mode: int, first: int, last: int, stride: int, values: Array
) -> None:
    """Folded residual of the runs [first, last), each in its place in `values`."""
    for run in range(np.uint64(first), np.uint64(last)):
        for i in range(np.uint64(RUN)):
            at = run * np.uint64(stride) + i
            values[run * np.uint64(RUN) + i] = folded(grad[at], residual[at], buffer[at], m, mode)
