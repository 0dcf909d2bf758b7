"""Compiled loops over lists of tensors: selection, fold and sparse update in one call.

A tensor is a row of addresses. All tensors of a call have the same types, momentum and mode; see
`jit_entries` for the modes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu import jit_entries
from thinwire.kernels.cpu.intrinsics import array_at
from thinwire.kernels.cpu.jit_cache import Int, i64, jit, u64
from thinwire.kernels.cpu.jit_codes import merge
from thinwire.kernels.cpu.jit_entries import RUN, keep_largest, sample, scan

Array = NDArray[Any]

_commit = jit_entries.commit
_commit_bfloat16 = jit_entries.commit_bfloat16


@jit
def propose(
    rows: Array,
    numbers: Array,
    first: Int,
    last: Int,
    like_grad: Array,
    like_state: Array,
    m: Any,
    mode: Int,
    room_indices: Array,
    room_values: Array,
    room_bits: Array,
    marks: Array,
    words: Array,
    histogram: Array,
    indices: Array,
    values: Array,
    finite: Array,
) -> None:
    """Select the largest entries of the tensors [first, last).

    `rows` holds the addresses of gradient, residual and momentum buffer. `numbers` holds per tensor
    n, k, the offset of its k entries in `indices` and `values`, and the runs, the stride and the
    rank of `cpu_select.sampling`. The room is scratch, for the largest of the tensors; so are
    `marks`, `words` and `histogram`, see `jit_entries.scan`.
    """
    for t in range(first, last):
        n, k, start = numbers[t, 0], numbers[t, 1], numbers[t, 2]
        grad = array_at(rows[t, 0], n, like_grad)
        residual, buffer = array_at(rows[t, 1], n, like_state), array_at(rows[t, 2], n, like_state)
        floor = room_values.dtype.type(0)
        runs, stride, wanted = numbers[t, 3], numbers[t, 4], numbers[t, 5]
        if wanted < runs * RUN:
            sample(grad, residual, buffer, m, mode, i64(0), runs, stride, room_values)
            floor = keep_largest(
                room_indices, room_values, room_bits, runs * RUN, wanted, histogram
            )
        count = i64(0)
        for attempt in range(3):
            if attempt == 1:
                floor = floor * room_values.dtype.type(0.5)
            elif attempt == 2:
                floor = room_values.dtype.type(0)
            count = scan(
                grad,
                residual,
                buffer,
                m,
                mode,
                i64(0),
                n,
                k,
                floor,
                room_indices,
                room_values,
                room_bits,
                marks,
                words,
                histogram,
            )
            if count >= k:
                break
        if count > k:
            keep_largest(room_indices, room_values, room_bits, count, k, histogram)
        all_finite = True
        for i in range(u64(k)):
            indices[u64(start) + i] = room_indices[i]
            values[u64(start) + i] = room_values[i]
            all_finite &= abs(room_values[i]) < np.inf
        finite[t] = all_finite


@jit
def commit(
    rows: Array,
    numbers: Array,
    first: Int,
    last: Int,
    like_grad: Array,
    like_state: Array,
    m: Any,
    mode: Int,
) -> None:
    """Call `jit_entries.commit` for the tensors [first, last).

    `rows` holds the addresses of gradient, residual, momentum buffer, positions and sent values,
    `numbers` per tensor n and the number of sent entries.
    """
    for t in range(first, last):
        n, k = numbers[t, 0], numbers[t, 1]
        grad = array_at(rows[t, 0], n, like_grad)
        residual, buffer = array_at(rows[t, 1], n, like_state), array_at(rows[t, 2], n, like_state)
        at, sent = array_at(rows[t, 3], k, rows), array_at(rows[t, 4], k, like_state)
        _commit(grad, residual, buffer, m, mode, i64(0), n, at, sent)


@jit
def commit_bfloat16(
    rows: Array,
    numbers: Array,
    first: Int,
    last: Int,
    like_grad: Array,
    like_state: Array,
    m: Any,
    mode: Int,
    seeds: Array,
    left: Array,
) -> None:
    """Commit as `commit` does, for state in bfloat16.

    `left` is float32 scratch, as long as the longest list of sent entries.
    """
    for t in range(first, last):
        n, k = numbers[t, 0], numbers[t, 1]
        grad = array_at(rows[t, 0], n, like_grad)
        residual, buffer = array_at(rows[t, 1], n, like_state), array_at(rows[t, 2], n, like_state)
        at, sent = array_at(rows[t, 3], k, rows), array_at(rows[t, 4], k, left)
        _commit_bfloat16(grad, residual, buffer, m, mode, seeds[t], i64(0), n, at, sent, left)


@jit
def step_along(
    rows: Array,
    numbers: Array,
    first: Int,
    last: Int,
    like: Array,
    like_values: Array,
    rates: Array,
    sources: Any,
    union: Array,
    sums: Array,
    merged: Array,
    merged_sums: Array,
) -> None:
    """Take a step on the tensors [first, last) along the mean of sources: p <- p - (sum / W) rate.

    `rows` holds the address of the tensor, then of indices and values of each source; `numbers` n,
    then the number of entries of each source. The sum is that of
    `thinwire.core.feedback.sum_sparse`, in the type of the tensors. The last four are scratch, as
    long as all entries received for any tensor.
    """
    for t in range(first, last):
        param = array_at(rows[t, 0], numbers[t, 0], like)
        count = numbers[t, 1]
        positions = array_at(rows[t, 1], count, rows)
        values = array_at(rows[t, 2], count, like_values)
        for i in range(u64(count)):
            union[i] = positions[i]
            sums[i] = like.dtype.type(values[i]) + like.dtype.type(0)
        for source in range(1, numbers.shape[1] - 1):
            more = numbers[t, 1 + source]
            positions = array_at(rows[t, 1 + 2 * source], more, rows)
            values = array_at(rows[t, 2 + 2 * source], more, like_values)
            count = merge(union, sums, count, positions, values, merged, merged_sums)
            union, merged = merged, union
            sums, merged_sums = merged_sums, sums
        for i in range(u64(count)):
            at = u64(union[i])
            param[at] = param[at] - (sums[i] / sources) * rates[t]
