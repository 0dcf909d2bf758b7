"""Steps of LAMB and LARS for lists of tensors on the CPU, compiled by numba.

Moments and momentum without a ratio have the same bits as the reference implementations in torch.
LAMB's direction may differ by a rounding, where torch's root does. Norms are summed in float64
here, so a ratio has no error but its rounding to the type of the tensors, and squares neither
overflow nor underflow in float32. The reference sums n squares in that type, with a relative error
of up to about n 2^-24. All bits follow from the values and lengths alone: the number of threads
changes none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cpu import jit_steps, threads
from thinwire.kernels.rules import LambRule, LarsRule, TrustRule, bump_versions

Array = NDArray[Any]
Item = tuple[int, int, int]
"""Index of the tensor, start and stop."""

_KEPT_BYTES = 1 << 22
"""Bytes of a tensor that one thread takes whole. That much may still be in the cache once its norm
is known.
"""
_BUNDLES = 8  # for each thread: few hand-overs, and yet nobody waits long for the last one


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rule: LambRule,
) -> Tensor:
    """Update by LAMB, see `thinwire.core.lamb.lamb_list_`; return the ratios in one tensor."""
    table = _table(params, grads, exp_avgs, exp_avg_sqs)
    betas = rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2
    constants = table.floats(rule.lr, *betas, *rule.corrections, rule.eps, rule.weight_decay)
    trust, sums, ratios = _trust(rule.trust), table.empty_sums(), table.floats(*[1.0] * len(params))

    def work(items: Array, phase: int) -> None:
        longest = int(table.sizes[items[:, 0]].max()) if phase == jit_steps.WHOLE else 0
        rest = table.first_chunks, sums, ratios, *scratch(longest, table.dtype)
        jit_steps.lamb(table.rows, table.sizes, items, phase, constants, trust, *rest)

    _with_norms(table, work)
    bump_versions(params, exp_avgs, exp_avg_sqs)
    return torch.from_numpy(ratios)


def lars_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor] | None,
    rule: LarsRule,
) -> Tensor:
    """Update by LARS, see `thinwire.core.lars.lars_list_`; return the ratios in one tensor."""
    buffers = params if velocities is None else velocities
    table, kind = _table(params, grads, buffers), _kind(velocities, rule.nesterov)
    constants = table.floats(rule.lr, rule.momentum, rule.trust.weight_decay)
    trust, sums, ratios = _trust(rule.trust), table.empty_sums(), table.floats(*[1.0] * len(params))

    def work(items: Array, phase: int) -> None:
        rest = table.first_chunks, sums, ratios, scratch(0, table.dtype)[0]
        jit_steps.lars(table.rows, table.sizes, items, phase, kind, constants, trust, *rest)

    if rule.trust.weight_decay:
        _with_norms(table, work)
    else:
        _in_parts(table, partial(work, phase=jit_steps.MOVE))
    bump_versions(params, buffers)
    return torch.from_numpy(ratios)


def scratch(longest: int, dtype: Any) -> tuple[Array, Array]:
    """Return the lanes and directions of a thread; see `jit_steps.lamb`."""
    return np.zeros((2, jit_steps.LANES)), np.empty(max(longest, jit_steps.BLOCK), dtype)


class _Table(NamedTuple):
    """The tensors as the compiled loops take them."""

    rows: Array
    sizes: Array
    first_chunks: Array
    """Index of each tensor's first chunk in the list of all chunks."""
    chunks: int
    dtype: Any

    def floats(self, *values: float) -> Array:
        return np.array(values, self.dtype)

    def empty_sums(self) -> Array:
        return np.empty((self.chunks, 2))


def _table(*columns: Sequence[Tensor]) -> _Table:
    rows = np.array([[tensor.data_ptr() for tensor in column] for column in columns], np.int64).T
    sizes = np.array([tensor.numel() for tensor in columns[0]], np.int64)
    ends = np.cumsum(-(-sizes // jit_steps.CHUNK))
    dtype = np.float64 if columns[0][0].dtype == torch.float64 else np.float32
    return _Table(
        np.ascontiguousarray(rows), sizes, np.concatenate(([0], ends[:-1])), int(ends[-1]), dtype
    )


def _trust(rule: TrustRule) -> Array:
    return np.array([rule.coefficient, rule.weight_decay, rule.eps, rule.low, rule.high])


def _kind(buffers: Sequence[Tensor] | None, nesterov: bool) -> int:
    if buffers is None:
        return jit_steps.NO_MOMENTUM
    return jit_steps.NESTEROV if nesterov else jit_steps.PLAIN


def _with_norms(table: _Table, work: Callable[[Array, int], None]) -> None:
    """Run small tensors as a whole; large ones in parts, first for norms, then for the rest."""
    share, most = _share(table), _KEPT_BYTES // np.dtype(table.dtype).itemsize
    if torch.get_num_threads() > 1:
        most = min(most, max(share * _BUNDLES // 2, 2 * threads.SMALLEST_PART))
    wholes, parts = [], []
    for i, size in enumerate(table.sizes.tolist()):
        if size > most:
            parts += _partition(i, size, share)
        else:
            wholes.append((i, 0, size))
    wholes.sort(
        key=lambda item: -item[2]
    )  # the last ones to be taken are small, so that all end at once
    sums = [partial(work, items, jit_steps.SUMS) for items in _bundles(parts, share)]
    threads.run_all(
        sums + [partial(work, items, jit_steps.WHOLE) for items in _bundles(wholes, share)]
    )
    threads.run_all([partial(work, items, jit_steps.MOVE) for items in _bundles(parts, share)])


def _in_parts(table: _Table, work: Callable[[Array], None]) -> None:
    share = _share(table)
    parts = [
        part for i, size in enumerate(table.sizes.tolist()) for part in _partition(i, size, share)
    ]
    threads.run_all([partial(work, items) for items in _bundles(parts, share)])


def _share(table: _Table) -> int:
    """Return the number of entries worth a task for a thread, a multiple of the chunk."""
    share = int(table.sizes.sum()) // (torch.get_num_threads() * _BUNDLES)
    return max(share, threads.SMALLEST_PART, jit_steps.CHUNK) // jit_steps.CHUNK * jit_steps.CHUNK


def _partition(tensor: int, size: int, share: int) -> list[Item]:
    return [(tensor, start, min(start + share, size)) for start in range(0, size, share)]


def _bundles(items: Sequence[Item], share: int) -> list[Array]:
    """Group neighbouring items until there are `share` entries."""
    bundles: list[list[Item]] = []
    room = 0
    for item in items:
        if room <= 0:
            bundles.append([])
            room = share
        bundles[-1].append(item)
        room -= item[2] - item[1]
    return [np.array(bundle, np.int64) for bundle in bundles]
