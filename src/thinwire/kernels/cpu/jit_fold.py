"""Compiled loops of the fold. Arrays are flat; a part is a range of positions that one thread works
on.

What is sent comes in the type that is computed in: that of the state, or float32 where the state is
bfloat16. An array of uint16 holds bfloat16, which NumPy does not know: the upper half of a float32.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu.intrinsics import bits_of, wide
from thinwire.kernels.cpu.jit import Int, i64, jit, jit_inline, u64

Array = NDArray[Any]

VALUES, PLAIN, MOMENTUM, NESTEROV = range(4)
"""What is folded: nothing (the residual as it is), v + g, v + (m u + g), or (v + m (u + g)) + g."""

# entries that stay in the nearest cache from their fold until what was sent of them is taken off
_SPAN = 2048
_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
"""As a float32; from there on up, rounding away from zero would make infinity of a finite number.
"""


@jit
def folded(g: Any, v: Any, u: Any, m: Any, mode: Int) -> Any:
    """The folded residual of one entry, rounded after every operation."""
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
    words: Array,
    buffer_words: Array,
    sums: Array,
) -> None:
    """Fold [start, stop) for good, take off what was sent and clear the momentum there; state is
    float32 or float64.

    `indices`, strictly ascending, are all in [start, stop). `words` and `buffer_words` are residual
    and buffer as int64 as far as they fill words; their sums before and after are added to `sums`:
    residual and buffer before, after.
    """
    at = 0
    for first in range(start, stop, _SPAN):
        last = min(first + _SPAN, stop)
        low, high = u64(first * residual.itemsize // 8), u64(last * residual.itemsize // 8)
        sums[0] += _sum(words, low, high)
        if mode != PLAIN:
            sums[1] += _sum(buffer_words, low, high)
        _fold(grad, residual, buffer, m, mode, u64(first), u64(last))
        while at < len(indices) and indices[at] < last:
            i = u64(indices[at])
            residual[i] -= sent[at]
            if mode != PLAIN:
                buffer[i] = 0
            at += 1
        sums[2] += _sum(words, low, high)
        if mode != PLAIN:
            sums[3] += _sum(buffer_words, low, high)


@jit
def _sum(words: Array, low: Any, high: Any) -> Any:
    total = i64(0)
    for i in range(low, high):
        total += words[i]
    return total


@jit_inline
def _fold(
    grad: Array, residual: Array, buffer: Array, m: Any, mode: Int, first: Any, end: Any
) -> None:
    """Fold [first, end) for good, as if nothing had been sent."""
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
    """As `commit` for state in bfloat16; what was sent comes off before anything is rounded.

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
    """Round `values` of [start, stop) into `target`, bfloat16, by the random bits of a momentum
    buffer.
    """
    for i in range(u64(start), u64(stop)):
        target[i] = _rounded(values[i], _for_buffer(_mixed(i, seed)))


@jit
def _mixed(position: Any, seed: Any) -> Any:
    """See `reference.mixed`; every intermediate result is cut to 32 bits, without which nothing is
    vectorised.
    """
    x = np.uint32(np.uint32(position) ^ seed)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@jit
def _rounded(x: Any, noise: Any) -> Any:
    """A float32 rounded to bfloat16 by 16 random bits; what is not finite stays as it is."""
    bits = bits_of(x)
    finite = (bits & np.uint32(0x7FFFFFFF)) <= _LARGEST_BFLOAT16
    return np.uint16(np.uint32(bits + (noise if finite else np.uint32(0))) >> np.uint32(16))


@jit
def _for_residual(noise: Any) -> Any:
    return np.uint32(noise & np.uint32(0xFFFF))


@jit
def _for_buffer(noise: Any) -> Any:
    return np.uint32(noise >> np.uint32(16))
