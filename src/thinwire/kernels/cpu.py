"""Kernels for the CPU, compiled by numba; the bits of `reference`, but for the steps with norms.

LAMB's direction may differ by a rounding, where torch's root does. Norms are summed in float64
here, so a ratio has no error but its rounding to the type of the tensors, and squares neither
overflow nor underflow in float32. The reference sums n squares in that type, with a relative error
of up to about n 2^-24. All bits follow from values and lengths: the number of threads changes none.

numba's own threads are not used: its layer must not be entered by two threads, and exchanges run on
a thread of their own beside the training.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels import loops, reference
from thinwire.kernels.rules import Fold, LambRule, Largest, LarsRule, Sparse, Tensors, TrustRule

Array = NDArray[Any]
_Item = tuple[int, int, int]
"""Index of the tensor, start and stop."""

_SMALLEST_ROOM = 8192
"""Candidates; below, clearing the histograms costs more than sorting out."""
_SAMPLE_HITS = 64
"""Entries of the k largest in a sample: the fewer, the more candidates are needed."""
_SMALLEST_SAMPLE = 1024


def top_k(values: Tensor, k: int) -> Tensor:
    flat = _addressed(values, _wide(values.dtype))
    kind = _Kind(flat.dtype, flat.dtype, loops.VALUES, 0.0)
    return _largest(kind, [Fold(flat, flat, None, 0.0, False)], [k])[0][0]


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[Largest]:
    found: dict[int, Largest] = {}
    for kind, members in _by_kind(folds).items():
        chosen, its_ks = [folds[i] for i in members], [ks[i] for i in members]
        its = _largest(kind, chosen, its_ks) if kind else reference.propose_list(chosen, its_ks)
        found.update(zip(members, its, strict=True))
    return [found[i] for i in range(len(folds))]


def commit_list_(folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]) -> None:
    for kind, members in _by_kind(folds).items():
        chosen = [folds[i] for i in members]
        its_sent = [sent[i] for i in members]
        its_seeds = [seeds[i] for i in members]
        if kind is None:
            reference.commit_list_(chosen, its_sent, its_seeds)
            continue
        wide = _wide(kind.state)
        pairs = [(_addressed(i, torch.int64), _addressed(x, wide)) for i, x in its_sent]
        tensors = [(*row, *pair) for row, pair in zip(_rows(kind, chosen), pairs, strict=True)]
        rows, sizes = _table(tensors)
        items = []
        for t, start, stop in _parts_of(sizes):
            positions = pairs[t][0]
            first, last = 0, positions.numel()
            if stop - start < sizes[t]:
                first, last = np.searchsorted(positions.numpy(), (start, stop)).tolist()
            items.append((t, start, stop, first, last))
        rest = kind.facts, _like(wide), np.array(its_seeds, np.uint32)
        _run_items(items, partial(loops.commit, rows, sizes, *rest))
        states = (state for fold in chosen for state in fold[1:3] if state is not None)
        torch.autograd.graph.increment_version(list(states))


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
    return _with_norms(partial(loops.lars, kind), columns, constants, rule.trust)


def _with_norms(
    step: Callable[..., None],
    columns: Sequence[Tensors],
    constants: Sequence[float],
    rule: TrustRule,
) -> Tensor:
    """Take a step on small tensors as a whole; on large ones in parts, first for their norms."""
    rows, sizes = _table(list(zip(*columns, strict=True)))
    dtype = _DTYPES[columns[0][0].dtype]
    chunks = -(-sizes // loops.CHUNK)
    trust = np.array([rule.coefficient, rule.weight_decay, rule.eps, rule.low, rule.high])
    ratios = np.ones(len(sizes), dtype)
    sums = np.empty((int(chunks.sum()), 2))
    rest = np.array(constants, dtype), trust, np.cumsum(chunks) - chunks, sums, ratios
    items = _parts_of(sizes)
    whole = [item for item in items if item[2] - item[1] == sizes[item[0]]]
    parts = [item for item in items if item[2] - item[1] < sizes[item[0]]]

    for phase, its in ((loops.SUMS, parts), (loops.WHOLE, whole), (loops.MOVE, parts)):
        _run_items(its, partial(step, rows, sizes, phase, rest))
    torch.autograd.graph.increment_version([*columns[0], *chain(*columns[2:])])
    return torch.from_numpy(ratios)


class _Kind(NamedTuple):
    """Tensors that one call of a loop takes."""

    grad: torch.dtype
    """Type in which the loop reads a gradient: bfloat16, or that of the computation."""
    state: torch.dtype
    mode: int
    momentum: float

    @property
    def facts(self) -> loops.Facts:
        """What the loops want to know of all tensors."""
        momentum = _DTYPES[_wide(self.state)](self.momentum)
        return _like(self.grad), _like(self.state), momentum, self.mode


def _by_kind(folds: Sequence[Fold]) -> dict[_Kind | None, list[int]]:
    """Group tensors; under None those whose state has no memory that a loop can take."""
    kinds: dict[_Kind | None, list[int]] = {}
    for i, (grad, state, buffer, momentum, nesterov) in enumerate(folds):
        kind = None
        dtype = state.dtype
        held = state if buffer is None else buffer
        if dtype in _DTYPES and has_address(state, dtype) and has_address(held, dtype):
            half = grad.dtype == torch.bfloat16 and dtype != torch.float64
            read = torch.bfloat16 if half else _wide(dtype)
            mode = loops.NESTEROV if nesterov else loops.MOMENTUM
            if buffer is None:
                kind = _Kind(read, dtype, loops.PLAIN, 0.0)
            else:
                kind = _Kind(read, dtype, mode, momentum)
        kinds.setdefault(kind, []).append(i)
    return kinds


def _rows(kind: _Kind, folds: Sequence[Fold]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return g, v and u of each tensor; memory stays valid as long as they are kept."""
    return [
        (_addressed(grad, kind.grad), state, state if buffer is None else buffer)
        for grad, state, buffer, _, _ in folds
    ]


def _largest(
    kind: _Kind, folds: Sequence[Fold], ks: Sequence[int]
) -> list[tuple[Tensor, Tensor, bool]]:
    """Return the largest folded entries: candidates above an estimated floor, then the best."""
    tensors = _rows(kind, folds)
    facts = kind.facts
    dtype = _DTYPES[_wide(kind.state)]
    rows, sizes = _table(tensors)
    floors = np.empty(len(folds), dtype)
    samples = np.array([_sampling(n, k) for n, k in zip(sizes.tolist(), ks, strict=True)], np.int64)
    whole = [(t, 0, n) for t, n in enumerate(sizes.tolist())]
    _run_items(whole, partial(loops.floors, rows, sizes, samples, facts, floors))
    found: dict[int, tuple[Array, Array]] = {}
    left = _parts_of(sizes)
    for factor in (1.0, 0.5, 0.0):  # where neighbours are alike, a sample may mislead
        floors *= dtype(factor)
        found |= _candidates((rows, sizes, floors, facts), left, ks)
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
    parts: Sequence[_Item],
    ks: Sequence[int],
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

    _run_items(items, work)
    pieces: dict[int, list[slice]] = {}
    for (t, _, _), at, count in zip(parts, rooms.tolist(), counts.tolist(), strict=False):
        pieces.setdefault(t, []).append(slice(at, at + count))
    found: dict[int, tuple[Array, Array]] = {}
    for t, its in pieces.items():
        i = indices[its[0]]
        x = values[its[0]]
        k = ks[t]
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


_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.uint16,
}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the computation for state of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _like(dtype: torch.dtype) -> Array:
    return np.empty(0, _DTYPES[dtype])


def _table(rows: Sequence[Tensors]) -> tuple[Array, Array]:
    """Return the addresses of tensors, and the lengths of the first of each row."""
    addresses = [[tensor.data_ptr() for tensor in row] for row in rows]
    return np.array(addresses, np.int64), np.array([row[0].numel() for row in rows], np.int64)


_PLAIN_CLASSES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def has_address(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return True for a contiguous tensor of torch's own classes in the CPU's memory."""
    plain = tensor.is_cpu and type(tensor) in _PLAIN_CLASSES and tensor.dtype == dtype
    strided = (
        plain and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
    )
    # a storage that was freed has address 0
    return strided and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def _addressed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor, or a copy of this type that loops can read."""
    plain = has_address(tensor, dtype)
    return tensor if plain else tensor.detach().to(dtype).contiguous()


def share_memory(tensors: Tensors) -> bool:
    """Return True if two of these contiguous tensors overlap."""
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.numel())
    return any(following[0] < one[1] for one, following in pairwise(ends))


def takes(*lists: Tensors) -> bool:
    """Return True if steps can be computed here on these lists, the first not empty.

    All tensors must be contiguous, all float32 or all float64, on the CPU, of torch's own classes:
    shards and tensors of a compiler's trace have no memory that may be written to. No tensor of the
    first list may share memory with another one, since several threads work on them.
    """
    dtype = lists[0][0].dtype
    fit = dtype in (torch.float32, torch.float64) and all(
        has_address(tensor, dtype) for group in lists for tensor in group
    )
    return fit and not share_memory(lists[0])


SMALLEST = 1 << 16
"""Entries; below, starting a thread costs more than the loop."""
# for each thread: few hand-overs, and still no long wait for one that must share its core
_BUNDLES = 8


@cache
def _pool() -> ThreadPoolExecutor:
    """One executor per process. A forked child inherits the object, but not its threads."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="thinwire-kernel")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def run_all(works: Sequence[Callable[[], object]]) -> None:
    """Run all `works` on up to torch.get_num_threads() threads, each taking the next one left.

    An error is raised after all threads have finished.
    """
    left = deque(works)

    def take() -> None:
        while left:
            try:
                work = left.popleft()
            except IndexError:  # another thread took the last one
                return
            work()

    helpers = min(torch.get_num_threads(), len(works)) - 1
    futures = [_pool().submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        # helpers that have not started are not needed; the others must end before buffers go
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


def _share_of(entries: int) -> int:
    """Return the number of entries worth a task for a thread, a multiple of SMALLEST."""
    return max(1, entries // (torch.get_num_threads() * _BUNDLES) // SMALLEST) * SMALLEST


def _parts_of(sizes: Array) -> list[_Item]:
    """Return the tensors; those that one thread would hold up the others with in several parts."""
    share = _share_of(sizes.sum())
    most = max(2 * SMALLEST, 4 * share)
    if torch.get_num_threads() == 1 or sizes.max() <= most:
        return [(i, 0, size) for i, size in enumerate(sizes.tolist())]
    items: list[_Item] = []
    for i, size in enumerate(sizes.tolist()):
        step = share if size > most else max(1, size)
        items += [(i, start, min(start + step, size)) for start in range(0, max(1, size), step)]
    return items


def _run_items(items: Sequence[tuple[int, ...]], work: Callable[[Array], object]) -> None:
    """Run `work` on bundles of neighbouring items on a few threads.

    An item begins with the index of a tensor, start and stop.
    """
    if not items:
        return
    table = np.array(items, np.int64)
    ends = np.cumsum(table[:, 2] - table[:, 1])
    share = _share_of(ends[-1])
    if torch.get_num_threads() == 1 or ends[-1] <= share:
        work(table)
        return
    cuts = np.flatnonzero(np.diff((ends - 1) // share)) + 1
    run_all([partial(work, bundle) for bundle in np.split(table, cuts)])
