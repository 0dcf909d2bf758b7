"""Compiled loops of the fold. Arrays are flat; a part is a range of positions that one thread works on.

An array of uint16 holds bfloat16, which NumPy does not know: the upper half of a float32.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels.jit import jit

Array = NDArray[Any]

VALUES, PLAIN, MOMENTUM, NESTEROV = range(4)
"""What is folded: nothing (the residual as it is), v + g, v + (m u + g), or (v + m (u + g)) + g."""

_SPAN = 2048  # entries that stay in the nearest cache from their fold until what was sent of them is taken off
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
def _fold(grad: Array, residual: Array, buffer: Array, m: Any, mode: int, seed: Any, start: int, stop: int) -> None:
    """Fold [start, stop) for good, as if nothing had been sent."""
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
def commit(
    grad: Array,
    residual: Array,
    buffer: Array,
    m: Any,
    mode: int,
    seed: Any,
    start: int,
    stop: int,
    indices: Array,
    sent: Array,
) -> None:
    """Fold [start, stop) for good, take off what was sent and clear the momentum there.

    `indices` are strictly ascending; those outside [start, stop) are left alone.
    """
    before, until = np.searchsorted(indices, start), np.searchsorted(indices, stop)
    indices, sent, at = indices[before:until], sent[before:until], 0
    left = np.empty(len(indices) if residual.itemsize == 2 else 0, np.float32)
    for first in range(start, stop, _SPAN):
        last = min(first + _SPAN, stop)
        end = at
        while end < len(indices) and indices[end] < last:
            end += 1
        if residual.itemsize == 2:  # what was sent comes off before anything is rounded
            for j in range(at, end):
                i = np.uint64(indices[j])
                left[j] = folded(grad[i], residual[i], buffer[i], m, mode) - np.float32(sent[j])
        _fold(grad, residual, buffer, m, mode, seed, first, last)
        for j in range(at, end):
            i = np.uint64(indices[j])
            if residual.itemsize == 2:
                residual[i] = _kept(residual[i], left[j], _for_residual(_mixed(i, seed)))
            else:
                residual[i] -= residual.dtype.type(sent[j])
            if mode != PLAIN:
                buffer[i] = 0
        at = end


@jit
def store(target: Array, values: Array, seed: Any, start: int, stop: int) -> None:
    """Round `values` of [start, stop) into `target`, by the random bits of a momentum buffer."""
    for i in range(np.uint64(start), np.uint64(stop)):
        target[i] = _kept(target[i], values[i], _for_buffer(_mixed(i, seed)))
