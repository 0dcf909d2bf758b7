"""Compiled loops over lists of tensors: selection, fold and sparse update of many tensors in one call.

A tensor is a row of addresses. All of one call have the same types, momentum and mode; see `jit_fold` for the modes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.kernels import jit_fold
from thinwire.core.kernels.intrinsics import array_at
from thinwire.core.kernels.jit import jit
from thinwire.core.kernels.jit_codes import merge
from thinwire.core.kernels.jit_select import RUN, floor_rank, keep_largest, sample, sample_shape, scan

Array = NDArray[Any]

_commit = jit_fold.commit


@jit
def propose(
    rows: Array,
    numbers: Array,
    first: int,
    last: int,
    like_grad: Array,
    like_state: Array,
    m: Any,
    mode: int,
    room_indices: Array,
    room_values: Array,
    room_bits: Array,
    indices: Array,
    values: Array,
    finite: Array,
) -> None:
    """The largest entries of the tensors [first, last).

    `rows` holds the addresses of gradient, residual and momentum buffer, `numbers` per tensor n, k and where in
    `indices` and `values` its k entries begin. The room is scratch, for the largest of the tensors.
    """
    for t in range(first, last):
        n, k, start = numbers[t, 0], numbers[t, 1], numbers[t, 2]
        grad = array_at(rows[t, 0], n, like_grad)
        residual, buffer = array_at(rows[t, 1], n, like_state), array_at(rows[t, 2], n, like_state)
        floor = room_values.dtype.type(0)
        runs, stride = sample_shape(n, k)
        count = runs * RUN
        wanted = floor_rank(count, n, k)
        if wanted < count:
            sample(grad, residual, buffer, m, mode, 0, runs, stride, room_values)
            floor = keep_largest(room_indices, room_values, room_bits, count, wanted)
        for share in (1.0, 0.5, 0.0):
            floor = floor * room_values.dtype.type(share) if share else room_values.dtype.type(0)
            count = scan(grad, residual, buffer, m, mode, 0, n, k, floor, room_indices, room_values, room_bits)
            if count >= k:
                break
        if count > k:
            keep_largest(room_indices, room_values, room_bits, count, k)
        finite[t] = True
        for i in range(k):
            indices[start + i] = room_indices[i]
            values[start + i] = room_values[i]
            finite[t] &= np.isfinite(room_values[i])


@jit
def commit(
    rows: Array,
    numbers: Array,
    first: int,
    last: int,
    like_grad: Array,
    like_state: Array,
    like_sent: Array,
    m: Any,
    mode: int,
    seeds: Array,
) -> None:
    """Fold the tensors [first, last) for good, take off what was sent and clear the momentum there.

    `rows` holds the addresses of gradient, residual, momentum buffer, positions and sent values, `numbers` per tensor n
    and how many were sent.
    """
    for t in range(first, last):
        n, k, seed = numbers[t, 0], numbers[t, 1], np.uint32(seeds[t])
        grad = array_at(rows[t, 0], n, like_grad)
        residual, buffer = array_at(rows[t, 1], n, like_state), array_at(rows[t, 2], n, like_state)
        at, sent = array_at(rows[t, 3], k, rows), array_at(rows[t, 4], k, like_sent)
        _commit(grad, residual, buffer, m, mode, seed, 0, n, at, sent)


@jit
def step_along(
    rows: Array, numbers: Array, first: int, last: int, like: Array, like_values: Array, rates: Array, sources: Any
) -> None:
    """Take rate times the mean over the sources off the tensors [first, last): p <- p - (sum / W) rate.

    `rows` holds the address of the tensor, then of indices and values of each source; `numbers` n, then how many
    entries came from each. The sum is that of `thinwire.core.merge.sum_sparse`, in the type of the tensors.
    """
    for t in range(first, last):
        param = array_at(rows[t, 0], numbers[t, 0], like)
        room = numbers[t, 1:].sum()
        union, sums = np.empty(room, np.int64), np.empty(room, like.dtype)
        merged, merged_sums = np.empty(room, np.int64), np.empty(room, like.dtype)
        count = numbers[t, 1]
        union[:count] = array_at(rows[t, 1], count, rows)
        came = array_at(rows[t, 2], count, like_values)
        for i in range(count):
            sums[i] = sums.dtype.type(came[i]) + sums.dtype.type(0)
        for source in range(1, numbers.shape[1] - 1):
            more = numbers[t, 1 + source]
            positions = array_at(rows[t, 1 + 2 * source], more, rows)
            came = array_at(rows[t, 2 + 2 * source], more, like_values)
            count = merge(union[:count], sums[:count], positions, came, merged, merged_sums)
            union, merged = merged, union
            sums, merged_sums = merged_sums, sums
        for i in range(count):
            at = union[i]
            param[at] = param[at] - (sums[i] / sources) * rates[t]
