"""Compiled steps of LAMB and LARS, for many contiguous tensors in one call.

A row of `table` holds the addresses of one tensor's arrays, `sizes` their length. An item (tensor,
start, stop) is a part of a tensor that begins at a multiple of CHUNK. Norms are summed in float64
in an order that follows from the length alone: over lanes within a chunk, then chunk after chunk.
So the bits depend neither on the number of threads nor on the width of the processor's registers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu.intrinsics import array_at
from thinwire.kernels.cpu.jit_cache import jit

Array = NDArray[Any]

CHUNK = 1 << 15
"""Number of entries whose squares have a sum of their own."""
WHOLE, SUMS, MOVE = range(3)
"""Phases of work on the items: all of it, for whole tensors; only the sums for the norms; only the
rest.
"""
NO_MOMENTUM, PLAIN, NESTEROV = range(3)
"""The kinds of momentum."""
BLOCK = 1024
"""Number of entries that stay in the first-level cache from direction to square."""
LANES = 128
"""Number of sums that are accumulated in parallel."""
_ROWS = BLOCK // LANES // 2


@jit
def lamb(
    table: Array,
    sizes: Array,
    items: Array,
    phase: int,
    constants: Array,
    trust: Array,
    first_chunks: Array,
    sums: Array,
    ratios: Array,
    lanes: Array,
    directions: Array,
) -> None:
    """Update p, g, m, v by LAMB; changes p, m, v, `sums` and `ratios`.

    `constants`: lr, b1, 1 - b1, b2, 1 - b2, 1/(1 - b1^t), 1/(1 - b2^t), eps, wd. `trust`: see
    `_trust_ratio`. Scratch: `lanes`, zeros of shape (2, LANES), and `directions`, as long as a
    block, and as the longest tensor for WHOLE.
    """
    for item in range(len(items)):
        tensor = items[item, 0]
        start, stop = np.uint64(items[item, 1]), np.uint64(items[item, 2])
        n = sizes[tensor]
        p, g = array_at(table[tensor, 0], n, constants), array_at(table[tensor, 1], n, constants)
        m, v = array_at(table[tensor, 2], n, constants), array_at(table[tensor, 3], n, constants)
        if phase != MOVE:
            first = start
            while first < stop:
                last = min(first + np.uint64(BLOCK), stop)
                # a direction that is kept stands where its entry does; others take turns in the
                # first block
                shift = np.uint64(0) if phase == WHOLE else first
                _lamb_block(p, g, m, v, constants, first, last, directions, shift)
                _add_squares(p, first, last, lanes[0])
                _add_squares(directions, first - shift, last - shift, lanes[1])
                first = last
                if first % np.uint64(CHUNK) == 0 or first == stop:
                    _drain(lanes, sums[first_chunks[tensor] + (np.int64(first) - 1) // CHUNK])
        if phase != SUMS:
            ratio = constants.dtype.type(_trust_ratio(sums, first_chunks[tensor], n, trust))
            ratios[tensor] = ratio
            if phase == WHOLE:
                _subtract(p, directions, constants[0] * ratio)
            else:
                _lamb_move(p, m, v, constants, ratio, start, stop)


@jit
def _lamb_block(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    constants: Array,
    first: Any,
    last: Any,
    r: Array,
    shift: Any,
) -> None:
    """Update the moments of [first, last); write directions `shift` entries further ahead."""
    b1, rest1, b2, rest2 = constants[1], constants[2], constants[3], constants[4]
    scale1, scale2, eps, wd = constants[5], constants[6], constants[7], constants[8]
    for i in range(first, last):
        mean = b1 * m[i] + rest1 * g[i]
        square = b2 * v[i] + rest2 * (g[i] * g[i])
        m[i] = mean
        v[i] = square
        r[i - shift] = scale1 * mean / (np.sqrt(scale2 * square) + eps) + wd * p[i]


@jit
def _lamb_move(
    p: Array, m: Array, v: Array, constants: Array, ratio: Any, first: Any, last: Any
) -> None:
    """Compute the directions again: reading m and v twice costs no more than storing them."""
    rate = constants[0] * ratio
    scale1, scale2, eps, wd = constants[5], constants[6], constants[7], constants[8]
    for i in range(first, last):
        p[i] = p[i] - rate * (scale1 * m[i] / (np.sqrt(scale2 * v[i]) + eps) + wd * p[i])


@jit
def _subtract(p: Array, directions: Array, rate: Any) -> None:
    for i in range(np.uint64(len(p))):
        p[i] = p[i] - rate * directions[i]


@jit
def lars(
    table: Array,
    sizes: Array,
    items: Array,
    phase: int,
    kind: int,
    constants: Array,
    trust: Array,
    first_chunks: Array,
    sums: Array,
    ratios: Array,
    lanes: Array,
) -> None:
    """Update p, g and, with momentum, b by LARS; changes p, b, `sums` and `ratios`.

    `constants`: lr, momentum, wd. Without wd there is no ratio, and MOVE needs no sums. `lanes`:
    zeros of shape (2, LANES), scratch.
    """
    for item in range(len(items)):
        tensor = items[item, 0]
        start, stop = np.uint64(items[item, 1]), np.uint64(items[item, 2])
        n = sizes[tensor]
        p, g = array_at(table[tensor, 0], n, constants), array_at(table[tensor, 1], n, constants)
        b = array_at(table[tensor, 2], n, constants)
        if phase != MOVE:
            first = start
            while first < stop:
                last = min(first + np.uint64(BLOCK), stop)
                _add_squares(p, first, last, lanes[0])
                _add_squares(g, first, last, lanes[1])
                first = last
                if first % np.uint64(CHUNK) == 0 or first == stop:
                    _drain(lanes, sums[first_chunks[tensor] + (np.int64(first) - 1) // CHUNK])
        if phase != SUMS:
            if constants[2] != 0:
                ratios[tensor] = _trust_ratio(sums, first_chunks[tensor], n, trust)
            _lars_move(p, g, b, constants, ratios[tensor], kind, start, stop)


@jit
def _lars_move(
    p: Array, g: Array, b: Array, constants: Array, ratio: Any, kind: int, first: Any, last: Any
) -> None:
    rate, momentum, wd = constants[0] * ratio, constants[1], constants[2]
    if kind == NO_MOMENTUM:
        for i in range(first, last):
            p[i] = p[i] - rate * (g[i] + wd * p[i])
    elif kind == PLAIN:
        for i in range(first, last):
            velocity = momentum * b[i] + rate * (g[i] + wd * p[i])
            b[i] = velocity
            p[i] = p[i] - velocity
    else:
        for i in range(first, last):
            step = rate * (g[i] + wd * p[i])
            velocity = momentum * b[i] + step
            b[i] = velocity
            p[i] = p[i] - (step + momentum * velocity)


@jit
def _trust_ratio(sums: Array, first_chunk: int, n: int, trust: Array) -> float:
    """Return `core.norms.trust_ratio` from squares; `trust`: coefficient, wd, eps, low, high."""
    param, update = 0.0, 0.0
    for chunk in range(first_chunk, first_chunk + (n + CHUNK - 1) // CHUNK):
        param += sums[chunk, 0]
        update += sums[chunk, 1]
    param, update = np.sqrt(param), np.sqrt(update)
    if not (param > 0 and update > 0):
        return 1.0
    ratio = trust[0] * param / (update + trust[1] * param + trust[2])
    if ratio < trust[3]:
        ratio = trust[3]
    elif ratio > trust[4]:
        ratio = trust[4]
    return ratio  # type: ignore[no-any-return]


@jit
def _add_squares(x: Array, first: Any, last: Any, lanes: Array) -> None:
    """Add the squares of [first, last), at most a block, to `lanes`: each takes every 128th."""
    if last - first == BLOCK:
        for j in range(np.uint64(LANES)):
            upper = 0.0
            lower = 0.0
            for row in range(np.uint64(_ROWS)):  # unrolled by the compiler
                a = np.float64(x[first + (np.uint64(2) * row) * np.uint64(LANES) + j])
                lower += a * a
                b = np.float64(
                    x[first + (np.uint64(2) * row + np.uint64(1)) * np.uint64(LANES) + j]
                )
                upper += b * b
            lanes[j] += lower + upper
    else:
        for i in range(last - first):
            a = np.float64(x[first + i])
            lanes[i % np.uint64(LANES)] += a * a


@jit
def _drain(lanes: Array, sums: Array) -> None:
    """Sum the lanes by halves into `sums`, and set them to zero."""
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[0, j] += lanes[0, half + j]
            lanes[1, j] += lanes[1, half + j]
        half //= 2
    sums[0] = lanes[0, 0]
    sums[1] = lanes[1, 0]
    lanes[:] = 0.0
