"""Compiled loops of selection and fold. Arrays are flat; a part is a range of positions that one thread works on.

An array of uint16 holds bfloat16, which NumPy does not know: the upper half of a float32.
"""

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
_SAMPLE_HITS = 128  # of the k largest, how many a sample should hold: the fewer, the more candidates are needed
_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
"""As a float32; from there on up, rounding away from zero would make infinity of a finite number."""


@jit
def wide(x: Any) -> Any:
    """An entry in the type that is computed in."""
    if isinstance(x, np.uint16):
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return x


@jit
def _mixed(position: Any, seed: Any) -> Any:
    """See `reference.mixed`; every intermediate result is cut to 32 bits, without which nothing is vectorised."""
    x = np.uint32(np.uint32(position) ^ seed)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@jit
def _kept(before: Any, x: Any, noise: Any) -> Any:
    """`x` as it is stored in the place of `before`: itself, or rounded to bfloat16 by 16 random bits."""
    if isinstance(before, np.uint16):
        bits = np.float32(x).view(np.uint32)
        finite = (bits & np.uint32(0x7FFFFFFF)) <= _LARGEST_BFLOAT16
        return np.uint16(np.uint32(bits + (noise if finite else np.uint32(0))) >> np.uint32(16))
    return x


@jit
def _for_residual(noise: Any) -> Any:
    return np.uint32(noise & np.uint32(0xFFFF))


@jit
def _for_buffer(noise: Any) -> Any:
    return np.uint32(noise >> np.uint32(16))


@jit
def folded(g: Any, v: Any, u: Any, m: Any, mode: int) -> Any:
    """The folded residual of one entry, rounded after every operation."""
    if mode == VALUES:
        return wide(v)
    if mode == PLAIN:
        return wide(v) + wide(g)
    if mode == MOMENTUM:
        return wide(v) + (m * wide(u) + wide(g))
    return (wide(v) + m * (wide(u) + wide(g))) + wide(g)


@jit
def _reaches(grad: Array, residual: Array, buffer: Array, m: Any, mode: int, first: Any, last: Any, floor: Any) -> bool:
    """Whether the folded residual reaches `floor` anywhere in [first, last), or is not a number."""
    hit = False
    if mode == VALUES:
        for i in range(first, last):
            hit |= not (abs(wide(residual[i])) < floor)
    elif mode == PLAIN:
        for i in range(first, last):
            hit |= not (abs(wide(residual[i]) + wide(grad[i])) < floor)
    elif mode == MOMENTUM:
        for i in range(first, last):
            hit |= not (abs(wide(residual[i]) + (m * wide(buffer[i]) + wide(grad[i]))) < floor)
    else:
        for i in range(first, last):
            g = wide(grad[i])
            hit |= not (abs((wide(residual[i]) + m * (wide(buffer[i]) + g)) + g) < floor)
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
def runs_to_sample(n: int, k: int) -> int:
    """Of how many runs of neighbours a sample of `n` entries consists, if `k` are wanted; 0 where it is no use."""
    runs = min(max(_SAMPLE_HITS * (n // k), 1024), n // 16) // RUN
    return runs if runs >= 64 else 0


@jit
def floor_rank(count: int, n: int, k: int) -> int:
    """The place in a sample of `count` of `n` entries that somewhat more than `k` entries of all reach.

    Six standard deviations of an independent sample more: neighbours are alike, which widens the spread.
    """
    hits = count * k / n
    return int(hits + 6 * hits**0.5 + 4)


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
def gather(grad: Array, residual: Array, buffer: Array, m: Any, mode: int, indices: Array, values: Array) -> None:
    """Folded residual at `indices`, into `values`."""
    for j in range(len(indices)):
        i = np.uint64(indices[j])
        values[j] = folded(grad[i], residual[i], buffer[i], m, mode)


@jit
def commit(grad: Array, residual: Array, buffer: Array, m: Any, mode: int, seed: Any, start: int, stop: int) -> None:
    """Fold [start, stop) for good; changes `residual` and `buffer`."""
    first = np.uint64(start)
    end = np.uint64(stop)
    if mode == PLAIN:
        for i in range(first, end):
            residual[i] = _kept(residual[i], wide(residual[i]) + wide(grad[i]), _for_residual(_mixed(i, seed)))
    elif mode == MOMENTUM:
        for i in range(first, end):
            noise = _mixed(i, seed)
            u = m * wide(buffer[i]) + wide(grad[i])
            buffer[i] = _kept(buffer[i], u, _for_buffer(noise))
            residual[i] = _kept(residual[i], wide(residual[i]) + u, _for_residual(noise))
    else:
        for i in range(first, end):
            noise, g = _mixed(i, seed), wide(grad[i])
            u = m * (wide(buffer[i]) + g)
            buffer[i] = _kept(buffer[i], u, _for_buffer(noise))
            residual[i] = _kept(residual[i], (wide(residual[i]) + u) + g, _for_residual(noise))


@jit
def store(target: Array, values: Array, seed: Any, start: int, stop: int) -> None:
    """Round `values` of [start, stop) into `target`, by the random bits of a momentum buffer."""
    for i in range(np.uint64(start), np.uint64(stop)):
        target[i] = _kept(target[i], values[i], _for_buffer(_mixed(i, seed)))


@jit
def store_at(target: Array, indices: Array, values: Array, seed: Any) -> None:
    """Round `values` into `target` at `indices`, by the random bits of a residual."""
    for j in range(len(indices)):
        i = np.uint64(indices[j])
        target[i] = _kept(target[i], values[j], _for_residual(_mixed(i, seed)))
