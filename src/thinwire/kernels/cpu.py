"""Kernels for the CPU, compiled by numba; the bits of `reference`, but for the steps with norms.

LAMB's direction may differ by a rounding, where torch's root does. Norms are summed in float64
here, so a ratio has no error but its rounding to the type of the tensors, and squares neither
overflow nor underflow in float32. The reference sums n squares in that type, with a relative error
of up to about n 2^-24. All bits follow from values and lengths: the number of threads changes none.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels import loops, reference
from thinwire.kernels.rules import (
    Fold,
    LambRule,
    LarsRule,
    Sparse,
    Tensors,
    TrustRule,
    bump_versions,
    has_address,
)
from thinwire.kernels.threads import Item, parts_of, run_items, share_of

Array = NDArray[Any]

_SMALLEST_ROOM = 8192
"""Candidates; below, clearing the histograms costs more than sorting out."""
_SAMPLE_HITS = 64
"""Entries of the k largest in a sample: the fewer, the more candidates are needed."""
_SMALLEST_SAMPLE = 1024


def top_k(values: Tensor, k: int) -> Tensor:
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    flat = wide.detach().contiguous()
    kind = _Kind(flat.dtype, flat.dtype, loops.VALUES, 0.0)
    return _largest(kind, [Fold(flat, flat, None, 0.0, False)], [k])[0][0]


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[tuple[Tensor, Tensor, bool]]:
    found: dict[int, tuple[Tensor, Tensor, bool]] = {}
    for kind, members in _by_kind(folds).items():
        chosen, its_ks = [folds[i] for i in members], [ks[i] for i in members]
        its = _largest(kind, chosen, its_ks) if kind else reference.propose_list(chosen, its_ks)
        found.update(zip(members, its, strict=True))
    return [found[i] for i in range(len(folds))]


def commit_list_(folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]) -> None:
    for kind, members in _by_kind(folds).items():
        chosen = zip(*((folds[i], sent[i], seeds[i]) for i in members), strict=True)
        if kind is None:
            reference.commit_list_(*chosen)
        else:
            _commit_(kind, *chosen)


def lamb_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, rule: LambRule
) -> Tensor:
    """Update by LAMB, see `thinwire.core.layerwise.lamb_list_`; return the ratios in one tensor."""
    betas = rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2
    constants = rule.lr, *betas, *rule.corrections, rule.eps, rule.weight_decay
    columns = params, grads, exp_avgs, exp_avg_sqs
    return _with_norms(loops.lamb, columns, constants, rule.trust)


def lars_(params: Tensors, grads: Tensors, velocities: Tensors | None, rule: LarsRule) -> Tensor:
    """Update by LARS, see `thinwire.core.layerwise.lars_list_`; return the ratios in one tensor."""
    kind = loops.NO_MOMENTUM
    if velocities is not None:
        kind = loops.LOOKAHEAD if rule.nesterov else loops.HEAVY_BALL
    columns = params, grads, params if velocities is None else velocities
    constants = rule.lr, rule.momentum, rule.trust.weight_decay

    def lars(rows: Array, sizes: Array, items: Array, phase: int, rest: loops.Rest) -> None:
        loops.lars(rows, sizes, items, phase, kind, rest)

    return _with_norms(lars, columns, constants, rule.trust)


def _with_norms(
    step: Callable[..., None],
    columns: Sequence[Tensors],
    constants: Sequence[float],
    rule: TrustRule,
) -> Tensor:
    """Take a step on small tensors as a whole; on large ones in parts, first for their norms."""
    rows, sizes = _addresses(list(zip(*columns, strict=True))), _sizes(columns[0])
    like, chunks = _like(columns[0][0].dtype), -(-sizes // loops.CHUNK)
    trust = np.array([rule.coefficient, rule.weight_decay, rule.eps, rule.low, rule.high])
    ratios = np.ones(len(sizes), like.dtype)
    rest = (
        np.array(constants, like.dtype),
        trust,
        np.cumsum(chunks) - chunks,
        np.empty((int(chunks.sum()), 2)),
        ratios,
    )
    items, share = parts_of(sizes), share_of(sizes)
    whole = [item for item in items if item[2] - item[1] == sizes[item[0]]]
    parts = [item for item in items if item[2] - item[1] < sizes[item[0]]]

    def run(phase: int, its: Sequence[Item]) -> None:
        run_items(its, share, lambda bundle: step(rows, sizes, bundle, phase, rest))

    run(loops.SUMS, parts)
    run(loops.WHOLE, whole)
    run(loops.MOVE, parts)
    bump_versions(columns[0], *columns[2:])
    return torch.from_numpy(ratios)


class _Kind(NamedTuple):
    """Tensors that one call of a loop takes."""

    grad: torch.dtype
    """Type in which the loop reads a gradient: bfloat16, or that of the computation."""
    state: torch.dtype
    mode: int
    momentum: float

    @property
    def wide(self) -> torch.dtype:
        """Type of the computation."""
        return torch.float64 if self.state == torch.float64 else torch.float32

    @property
    def facts(self) -> loops.Facts:
        """Return what the loops want to know of all tensors."""
        momentum = _like(self.wide).dtype.type(self.momentum)
        return _like(self.grad), _like(self.state), momentum, self.mode


def _by_kind(folds: Sequence[Fold]) -> dict[_Kind | None, list[int]]:
    """Group tensors; under None those whose state has no memory that a loop can take."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, (grad, state, buffer, momentum, nesterov) in enumerate(folds):
        plain = has_address(state, state.dtype) and (
            buffer is None or has_address(buffer, state.dtype)
        )
        key = plain, grad.dtype, state.dtype, buffer is None, momentum, nesterov
        alike.setdefault(key, []).append(i)
    kinds: dict[_Kind | None, list[int]] = {}
    for (plain, grad_dtype, dtype, without, momentum, nesterov), members in alike.items():
        kind = None
        if plain and dtype in _DTYPES:
            read = grad_dtype if grad_dtype == torch.bfloat16 else torch.float32
            mode = loops.NESTEROV if nesterov else loops.MOMENTUM
            kind = _Kind(
                torch.float64 if dtype == torch.float64 else read,
                dtype,
                loops.PLAIN if without else mode,
                0.0 if without else momentum,
            )
        kinds.setdefault(kind, []).extend(members)
    return kinds


def _rows(kind: _Kind, folds: Sequence[Fold]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return g, v and u of each tensor; memory stays valid as long as they are kept."""
    rows = []
    for grad, state, buffer, _, _ in folds:
        read = grad
        if grad.dtype != kind.grad or not has_address(grad, kind.grad):
            read = grad.detach().to(kind.grad).contiguous()
        rows.append((read, state, state if buffer is None else buffer))
    return rows


def _largest(
    kind: _Kind, folds: Sequence[Fold], ks: Sequence[int]
) -> list[tuple[Tensor, Tensor, bool]]:
    """Return the largest folded entries: candidates above an estimated floor, then the best."""
    tensors, facts, dtype = _rows(kind, folds), kind.facts, _like(kind.wide).dtype
    rows, sizes = _addresses(tensors), _sizes([fold.residual for fold in folds])
    share, floors = share_of(sizes), np.empty(len(folds), dtype)
    samples = np.array([_sampling(n, k) for n, k in zip(sizes.tolist(), ks, strict=True)], np.int64)
    whole = [(t, 0, n) for t, n in enumerate(sizes.tolist())]
    run_items(whole, share, lambda items: loops.floors(rows, sizes, samples, items, facts, floors))
    found: dict[int, tuple[Array, Array]] = {}
    left = parts_of(sizes)
    for factor in (1.0, 0.5, 0.0):  # where neighbours are alike, a sample may mislead
        floors *= dtype.type(factor)
        found |= _candidates((rows, sizes, floors, facts), left, ks, share)
        left = [item for item in left if item[0] not in found]
        if not left:
            break
    indices = [torch.from_numpy(found[t][0]) for t in range(len(folds))]
    values = [torch.from_numpy(found[t][1]) for t in range(len(folds))]
    # whatever is not finite counts as larger than all that is, so it is among the k
    finite = np.logical_and.reduceat(
        np.isfinite(np.concatenate([found[t][1] for t in range(len(folds))])),
        np.cumsum([0, *ks[:-1]]),
    )
    return [
        (i, x, True) if fine else (i[:0], x[:0], False)
        for i, x, fine in zip(indices, values, finite.tolist(), strict=True)
    ]


def _candidates(
    call: tuple[Array, Array, Array, loops.Facts],
    parts: Sequence[tuple[int, int, int]],
    ks: Sequence[int],
    share: int,
) -> dict[int, tuple[Array, Array]]:
    """Return the k largest of each tensor of which enough entries reach the floor."""
    rows, sizes, floors, facts = call
    rooms = np.cumsum([0, *(min(stop - start, ks[t]) for t, start, stop in parts)])
    indices, values = np.empty(rooms[-1], np.int64), np.empty(rooms[-1], floors.dtype)
    counts = np.empty(len(parts), np.int64)
    items = [
        (*part, ks[part[0]], j, at)
        for j, (part, at) in enumerate(zip(parts, rooms.tolist()[:-1], strict=True))
    ]

    def work(bundle: Array) -> None:
        room = int(
            np.minimum(
                bundle[:, 2] - bundle[:, 1],
                np.maximum(2 * bundle[:, 3], _SMALLEST_ROOM) + loops.BLOCK,
            ).max()
        )
        loops.candidates(rows, sizes, bundle, floors, facts, room, indices, values, counts)

    run_items(items, share, work)
    pieces: dict[int, list[slice]] = {}
    for (t, _, _), at, count in zip(parts, rooms.tolist(), counts.tolist(), strict=False):
        pieces.setdefault(t, []).append(slice(at, at + count))
    found: dict[int, tuple[Array, Array]] = {}
    for t, its in pieces.items():
        i, x, k = indices[its[0]], values[its[0]], ks[t]
        if len(its) > 1:
            i, x = (
                np.concatenate([of_all[piece] for piece in its]) for of_all in (indices, values)
            )
        if len(i) > k:
            loops.keep_largest(i, x, len(i), k)
        if len(i) >= k:
            found[t] = i[:k], x[:k]
    return found


def _sampling(n: int, k: int) -> tuple[int, int, int]:
    """Return the sample that estimates the `k`-th largest of `n`.

    It is a number of runs of neighbours, their stride, and a rank. Somewhat more than `k` entries
    are as large as the one of that rank in the sample: by six standard deviations of an independent
    sample, since neighbours are alike, which increases the variance. No runs if a sample would not
    help.
    """
    if n < 16 * _SMALLEST_SAMPLE:
        return 0, 0, 4
    length = loops.RUN
    wanted = max(_SAMPLE_HITS * (n // k), 16 * _SMALLEST_SAMPLE)
    runs = min(wanted, max(n // 64, _SMALLEST_SAMPLE)) // length
    stride = n // runs // length * length
    runs = (n - length) // stride + 1
    hits = runs * length * k / n
    return runs, stride, int(hits + 6 * hits**0.5 + 4)


def _commit_(
    kind: _Kind, folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]
) -> None:
    pairs = [_plain(i, x, kind.wide) for i, x in sent]
    tensors = [(*row, *pair) for row, pair in zip(_rows(kind, folds), pairs, strict=True)]
    rows = _addresses(tensors)
    sizes = _sizes([fold.residual for fold in folds])
    items = []
    for t, start, stop in parts_of(sizes):
        positions = pairs[t][0]
        first, last = 0, positions.numel()
        if stop - start < folds[t].residual.numel():
            first, last = np.searchsorted(positions.numpy(), (start, stop)).tolist()
        items.append((t, start, stop, first, last))
    rest = kind.facts, _like(kind.wide), np.array(seeds, np.uint32)
    run_items(items, share_of(sizes), lambda bundle: loops.commit(rows, sizes, bundle, *rest))
    bump_versions([tensor for fold in folds for tensor in fold[1:3] if tensor is not None])


def _plain(indices: Tensor, values: Tensor, dtype: torch.dtype) -> Sparse:
    if not (has_address(indices, torch.int64) and has_address(values, dtype)):
        indices, values = indices.contiguous(), values.detach().to(dtype).contiguous()
    return indices, values


_DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16}


def _like(dtype: torch.dtype) -> Array:
    return np.empty(0, _DTYPES[dtype])


def _addresses(rows: Sequence[Tensors]) -> Array:
    return np.array([[tensor.data_ptr() for tensor in row] for row in rows], np.int64)


def _sizes(tensors: Tensors) -> Array:
    return np.array([tensor.numel() for tensor in tensors], np.int64)
