"""Selection, fold, codes and sparse update of many tensors in few calls into compiled loops.

Bit for bit what one call for each tensor gives, without the way from Python into the loops for each
of them, which for tensors of 100,000 entries costs more than the loops do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.core.kernels import cpu, has_address, jit_lists, jit_select, share_memory
from thinwire.core.kernels.changed import tell_autograd
from thinwire.core.kernels.cpu_select import bits_of, folding, marks, read_as, room_for, sampling
from thinwire.core.kernels.cpu_slots import decode_slots, encode_slots
from thinwire.core.kernels.fold import Fold
from thinwire.core.kernels.threads import SMALLEST_PART, in_spans

__all__ = ["commit_list_", "decode_slots", "encode_slots", "propose_list", "step_along_list_"]

Array = NDArray[Any]
_Item = TypeVar("_Item")
Sparse = tuple[Tensor, Tensor]


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[tuple[Tensor, Tensor, bool]]:
    """Per tensor what `cpu.propose` says."""
    found: dict[int, tuple[Tensor, Tensor, bool]] = {}
    for kind, places in _by_kind(folds).items():
        if kind is None:
            for place in places:
                fold = folds[place]
                found[place] = cpu.propose(
                    *fold[:3], ks[place], momentum=fold.momentum, nesterov=fold.nesterov
                )
        else:
            its_ks = [ks[place] for place in places]
            found.update(
                zip(places, _propose_kind([folds[place] for place in places], its_ks), strict=True)
            )
    return [found[place] for place in range(len(folds))]


def commit_list_(
    folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]
) -> list[NDArray[np.int64] | None]:
    """Changes residuals and momentum buffers: `cpu.commit_` of each tensor, with the sums that it
    gives.
    """
    found: dict[int, NDArray[np.int64] | None] = {}
    for kind, places in _by_kind(folds, [values.dtype for _, values in sent]).items():
        if kind is None:
            for place in places:
                fold, seed = folds[place], seeds[place]
                rule = {"momentum": fold.momentum, "nesterov": fold.nesterov, "seed": seed}
                # by name
                found[place] = cpu.commit_(*fold[:3], *sent[place], **rule)  # type: ignore[arg-type]
        else:
            chosen = [folds[place] for place in places]
            sums = _commit_kind(
                chosen, [sent[place] for place in places], [seeds[place] for place in places]
            )
            found.update(zip(places, sums, strict=True))
    return [found[place] for place in range(len(folds))]


def step_along_list_(
    params: Sequence[Tensor],
    parts: Sequence[Sequence[Sparse]],
    rates: Sequence[float],
    sources: int,
) -> None:
    """Changes `params`, contiguous, float32 or float64 and all alike: p <- p - (sum of the parts /
    sources) rate.

    Args:
        params: Any shape.
        parts: Per tensor (indices, values) of each source, contiguous, values float32 for all or of
            the params' type.
        rates: Per tensor.
        sources: What the sum is divided by.
    """
    rows = [
        [p.data_ptr(), *(x.data_ptr() for part in own for x in part)]
        for p, own in zip(params, parts, strict=True)
    ]
    numbers = [
        [p.numel(), *(i.numel() for i, _ in own)] for p, own in zip(params, parts, strict=True)
    ]
    like, like_values = _like(params[0].dtype), _like(parts[0][0][1].dtype)
    table, counts = np.array(rows, np.int64), np.array(numbers, np.int64)
    typed_rates, came = np.array(rates, like.dtype), counts[:, 1:].sum(axis=1)

    def work(first: int, last: int) -> None:
        divisor, room = like.dtype.type(sources), int(came[first:last].max())
        scratch = [np.empty(room, dtype) for dtype in (np.int64, like.dtype, np.int64, like.dtype)]
        jit_lists.step_along(
            table, counts, first, last, like, like_values, typed_rates, divisor, *scratch
        )

    if share_memory(params):
        work(0, len(params))
    else:
        in_spans(came, work)
    tell_autograd(params)


def _by_kind(folds: Sequence[Fold], more: Sequence[object] | None = None) -> dict[Any, list[int]]:
    """Places of the tensors that one call can take; None: those that are worth several threads
    each.
    """
    total = sum(fold.residual.numel() for fold in folds)
    large = max(2 * SMALLEST_PART, total // (2 * torch.get_num_threads()))
    kinds: dict[Any, list[int]] = {}
    for place, fold in enumerate(folds):
        tensors = [tensor for tensor in fold[:3] if tensor is not None]
        plain = all(has_address(tensor, tensor.dtype) for tensor in tensors)
        alone = fold.residual.numel() > large or not plain or len(folds) == 1
        kind = (
            fold.grad.dtype,
            fold.residual.dtype,
            fold.momentum_buffer is None,
            fold.momentum,
            fold.nesterov,
            more and more[place],
        )
        kinds.setdefault(None if alone else kind, []).append(place)
    return kinds


class _Kind(NamedTuple):
    """Tensors of one kind as the compiled loops take them; `grads` are there so that their memory
    stays.
    """

    grads: list[Tensor]
    rows: list[tuple[int, int, int]]
    like_grad: Array
    like_state: Array
    momentum: Any
    mode: int


def _kind_of(folds: Sequence[Fold]) -> _Kind:
    first = folding(*folds[0])
    dtype = read_as(folds[0].grad, folds[0].residual)
    grads = [fold.grad.to(dtype) for fold in folds]
    rows = [
        (
            g.data_ptr(),
            f.residual.data_ptr(),
            (f.residual if f.momentum_buffer is None else f.momentum_buffer).data_ptr(),
        )
        for g, f in zip(grads, folds, strict=True)
    ]
    return _Kind(grads, rows, first.grad[:0], first.residual[:0], first.momentum, first.mode)


def _propose_kind(folds: Sequence[Fold], ks: Sequence[int]) -> list[tuple[Tensor, Tensor, bool]]:
    kind = _kind_of(folds)
    rows, sizes = np.array(kind.rows, np.int64), [fold.residual.numel() for fold in folds]
    starts = np.cumsum([0, *ks])
    samples = [sampling(n, k) for n, k in zip(sizes, ks, strict=True)]
    numbers = np.column_stack((sizes, ks, starts[:-1], samples)).astype(np.int64)
    indices, values = np.empty(starts[-1], np.int64), np.empty(starts[-1], kind.momentum.dtype)
    finite = np.empty(len(folds), np.bool_)

    def work(first: int, last: int) -> None:
        largest = zip(sizes[first:last], ks[first:last], samples[first:last], strict=True)
        room = max(max(runs * jit_select.RUN, room_for(n, k)) for n, k, (runs, _, _) in largest)
        room_values, digits = np.empty(room, values.dtype), np.empty(jit_select.DIGITS, np.int64)
        scratch = np.empty(room, np.int64), room_values, bits_of(room_values), *marks(), digits
        kinds = kind.like_grad, kind.like_state, kind.momentum, kind.mode
        jit_lists.propose(rows, numbers, first, last, *kinds, *scratch, indices, values, finite)

    in_spans(sizes, work)
    all_indices, all_values = (
        torch.split(torch.from_numpy(found), list(ks)) for found in (indices, values)
    )
    return [
        (i, x, True) if is_finite else (i[:0], x[:0], False)
        for i, x, is_finite in zip(all_indices, all_values, finite.tolist(), strict=True)
    ]


def _commit_kind(
    folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]
) -> list[NDArray[np.int64] | None]:
    kind = _kind_of(folds)
    state = torch.float64 if kind.momentum.dtype == np.float64 else torch.float32
    if any(values.dtype != state for _, values in sent):
        sent = [(indices, values.to(state)) for indices, values in sent]
    pairs = [(indices.contiguous(), values.contiguous()) for indices, values in sent]
    rows = np.array(
        [(*row, i.data_ptr(), x.data_ptr()) for row, (i, x) in zip(kind.rows, pairs, strict=True)],
        np.int64,
    )
    sizes, counts = (
        [fold.residual.numel() for fold in folds],
        [indices.numel() for indices, _ in pairs],
    )
    sums = np.zeros((len(folds), 4), np.int64)
    numbers, all_seeds = (
        np.column_stack((sizes, counts)).astype(np.int64),
        np.array(seeds, np.uint32),
    )

    def work(first: int, last: int) -> None:
        rest = rows, numbers, first, last, kind.like_grad, kind.like_state, kind.momentum, kind.mode
        if folds[0].residual.dtype == torch.bfloat16:
            jit_lists.commit_bfloat16(
                *rest, all_seeds, np.empty(max(counts[first:last]), np.float32)
            )
        else:
            jit_lists.commit(*rest, sums)

    in_spans(sizes, work)
    tell_autograd([tensor for fold in folds for tensor in fold[1:3] if tensor is not None])
    return [None] * len(folds) if folds[0].residual.dtype == torch.bfloat16 else list(sums)


def _like(dtype: torch.dtype) -> Array:
    return np.empty(0, np.float64 if dtype == torch.float64 else np.float32)
