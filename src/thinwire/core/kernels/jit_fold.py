"""Compiled loops of selection and fold. Arrays are flat; a part is a range of positions that one thread works on."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels.threads import jit

Array = NDArray[Any]

VALUES, PLAIN, MOMENTUM, NESTEROV = range(4)
"""What is folded: nothing (the residual as it is), v + g, v + (m u + g), or (v + m (u + g)) + g."""

BLOCK = np.uint64(64)
RUN = 16
"""Neighbours that are sampled together: they share a cache line."""
_DIGIT_BITS = 11


@jit
def folded(g: Any, v: Any, u: Any, m: Any, mode: int) -> Any:
    """The folded residual of one entry, rounded after every operation."""
    if mode == VALUES:
        return v
    if mode == PLAIN:
        return v + g
    if mode == MOMENTUM:
        return v + (m * u + g)
    return (v + m * (u + g)) + g


@jit
def _reaches(grad: Array, residual: Array, buffer: Array, m: Any, mode: int, first: Any, last: Any, floor: Any) -> bool:
    """Whether the folded residual reaches `floor` anywhere in [first, last), or is not a number."""
    hit = False
    if mode == VALUES:
        for i in range(first, last):
            hit |= not (abs(residual[i]) < floor)
    elif mode == PLAIN:
        for i in range(first, last):
            hit |= not (abs(residual[i] + grad[i]) < floor)
    elif mode == MOMENTUM:
        for i in range(first, last):
            hit |= not (abs(residual[i] + (m * buffer[i] + grad[i])) < floor)
    else:
        for i in range(first, last):
            hit |= not (abs((residual[i] + m * (buffer[i] + grad[i])) + grad[i]) < floor)
    return hit


@jit
def keep_largest(indices: Array, values: Array, bits: Array, count: int, k: int) -> Any:
    """Move the `k` largest of the first `count` candidates to the front, in order; returns the k-th magnitude.

    Of equal magnitudes the first ones stay. `bits` is the integer view of `values`: without the sign it is in the
    order of the magnitudes.
    """
    unsigned = np.int64(0x7FFFFFFF) if bits.itemsize == 4 else np.int64(0x7FFFFFFFFFFFFFFF)
    high = 31 if bits.itemsize == 4 else 63
    prefix = np.int64(0)
    wanted = k
    while high > 0:
        low = max(high - _DIGIT_BITS, 0)
        digit_mask = (1 << (high - low)) - 1
        histogram = np.zeros(digit_mask + 1, np.int64)
        for i in range(count):
            key = bits[i] & unsigned
            if (key >> high) == prefix:
                histogram[(key >> low) & digit_mask] += 1
        digit = digit_mask
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix = (prefix << (high - low)) | digit
        high = low
    kept = 0
    threshold = values[0]
    for i in range(count):
        key = bits[i] & unsigned
        if key < prefix or (key == prefix and wanted == 0):
            continue
        if key == prefix:
            wanted -= 1
            threshold = abs(values[i])
        indices[kept] = indices[i]
        values[kept] = values[i]
        kept += 1
    return threshold


@jit
def sample(
    grad: Array, residual: Array, buffer: Array, m: Any, mode: int, start: int, stop: int, stride: int, values: Array
) -> int:
    """Folded residual of every `stride`-th run of entries of [start, stop); returns how many were written."""
    count = 0
    for first in range(start, stop, stride):
        for i in range(np.uint64(first), np.uint64(min(first + RUN, stop))):
            values[count] = folded(grad[i], residual[i], buffer[i], m, mode)
            count += 1
    return count


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
    Values that are not finite are candidates always.
    """
    count = 0
    first = np.uint64(start)
    end = np.uint64(stop)
    while first < end:
        last = min(first + BLOCK, end)
        if _reaches(grad, residual, buffer, m, mode, first, last, floor):
            if count + np.int64(last - first) > len(indices):
                floor = np.nextafter(keep_largest(indices, values, bits, count, k), values.dtype.type(np.inf))
                count = k
            for i in range(first, last):
                x = folded(grad[i], residual[i], buffer[i], m, mode)
                # Written always and kept by the counter: a branch would be mispredicted where many are kept.
                indices[count] = i
                values[count] = x
                count += not (abs(x) < floor)
        first = last
    return count


@jit
def commit(grad: Array, residual: Array, buffer: Array, m: Any, mode: int, start: int, stop: int) -> None:
    """Fold [start, stop) for good; changes `residual` and `buffer`."""
    first = np.uint64(start)
    end = np.uint64(stop)
    if mode == PLAIN:
        for i in range(first, end):
            residual[i] = residual[i] + grad[i]
    elif mode == MOMENTUM:
        for i in range(first, end):
            u = m * buffer[i] + grad[i]
            buffer[i] = u
            residual[i] = residual[i] + u
    else:
        for i in range(first, end):
            u = m * (buffer[i] + grad[i])
            buffer[i] = u
            residual[i] = (residual[i] + u) + grad[i]
