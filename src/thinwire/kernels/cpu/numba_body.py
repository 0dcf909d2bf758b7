"""Kernels for the CPU, compiled by numba; bit for bit the results of `reference`.

Several threads work where it pays.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cpu import jit_codes, jit_entries, jit_lists
from thinwire.kernels.cpu.select import (
    Folding,
    as_array,
    bits_of,
    folding,
    largest,
    marks,
    read_as,
    room_for,
    sampling,
)
from thinwire.kernels.cpu.slots import decode_slots, encode_slots
from thinwire.kernels.cpu.threads import SMALLEST_PART, in_parts, in_spans
from thinwire.kernels.rules import Fold, bump_versions, has_address, share_memory
from thinwire.layout.message import SCALE_COUNT

__all__ = [
    "commit_list_",
    "count_nonzero",
    "decode_positions",
    "decode_slots",
    "decode_values",
    "encode_positions",
    "encode_slots",
    "encode_values",
    "is_ascending",
    "propose_list",
    "step_along_list_",
    "store_",
    "sum_sparse",
    "top_k",
]

Array = NDArray[Any]
Sparse = tuple[Tensor, Tensor]
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def top_k(values: Tensor, k: int) -> Tensor:
    x = _floats(values)
    return torch.from_numpy(largest(Folding(x, x, x, x.dtype.type(0), jit_entries.VALUES), k)[0])


def propose(fold: Fold, k: int) -> tuple[Tensor, Tensor, bool]:
    positions, found = largest(folding(fold), k)
    indices, values = torch.from_numpy(positions), torch.from_numpy(found)
    # Whatever is not finite counts as larger than all that is, so it is among the k, and no extreme
    # hides it.
    if not np.isfinite([found.min(), found.max()]).all():
        return indices[:0], values[:0], False
    return indices, values, True


def commit_(fold: Fold, indices: Tensor, sent: Tensor, seed: int) -> None:
    folded, residual, buffer = folding(fold), fold.residual, fold.momentum_buffer
    positions, values = as_array(indices), as_array(sent).astype(folded.dtype, copy=False)
    narrow = residual.dtype == torch.bfloat16

    def work(start: int, stop: int) -> None:
        first, last = np.searchsorted(positions, (start, stop))
        part = start, stop, positions[first:last], values[first:last]
        if narrow:
            jit_entries.commit_bfloat16(
                *folded, np.uint32(seed), *part, np.empty(last - first, np.float32)
            )
        else:
            jit_entries.commit(*folded, *part)

    in_parts(residual.numel(), work)
    bump_versions([residual] if buffer is None else [residual, buffer])


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    out, x, bits = as_array(target), as_array(values), np.uint32(seed)
    in_parts(len(out), lambda start, stop: jit_entries.store(out, x, bits, start, stop))
    bump_versions([target])


def count_nonzero(values: Tensor) -> int:
    # NumPy, since torch would wake all its threads for a count: expensive where several ranks share
    # the cores.
    return int(np.count_nonzero(_floats(values)))


def is_ascending(indices: Tensor) -> bool:
    x = as_array(indices)
    return bool((x[1:] > x[:-1]).all())


def encode_positions(indices: Tensor, low_bits: int, low_bytes: int, high_bytes: int) -> Tensor:
    code, positions = np.zeros(low_bytes + high_bytes, np.uint8), as_array(indices)
    if low_bits:
        in_parts(
            len(positions),
            lambda start, stop: jit_codes.pack_fields(positions, low_bits, start, stop, code, 0),
        )
    jit_codes.set_high_parts(positions, low_bits, code, low_bytes)
    return torch.from_numpy(code)


def decode_positions(code: Tensor, k: int, low_bits: int, low_bytes: int) -> tuple[Tensor, int]:
    raw, room = as_array(code), np.empty(k, np.int64)
    count = jit_codes.find_high_parts(raw, low_bytes, len(raw) - low_bytes, low_bits, room)
    indices = room[:count]
    if low_bits:
        in_parts(
            len(indices),
            lambda start, stop: jit_codes.add_low_fields(raw, 0, low_bits, start, stop, indices),
        )
    return torch.from_numpy(indices), count


def encode_values(values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    x = _floats(values)
    scale_bytes = 4 * SCALE_COUNT[bits]
    code = np.zeros(scale_bytes + (k * bits + 7) // 8, np.uint8)
    if bits == 32:
        sent = x.clip(-_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
        code[: sent.nbytes] = sent.view(np.uint8)
        return torch.from_numpy(code), torch.from_numpy(sent)
    scales, sent = _scales(x, bits, k), np.empty(len(x), np.float32)
    code[:scale_bytes] = scales.view(np.uint8)

    def work(start: int, stop: int) -> None:
        part, its_sent, at = x[start:stop], sent[start:stop], scale_bytes + start * bits // 8
        if bits == 1:
            jit_codes.sign_fields(part, scales[0], code, at, its_sent)
            return
        fields = np.empty(stop - start, np.int64)
        if bits <= 4:
            jit_codes.book_fields(part, scales, bits - 1, fields, its_sent)
        else:
            jit_codes.grid_fields(
                part, float(scales[0]), float(scales[1]), bits - 1, fields, its_sent
            )
        jit_codes.pack_fields(fields, bits, 0, stop - start, code, at)

    in_parts(len(x), work)
    return torch.from_numpy(code), torch.from_numpy(sent)


def decode_values(code: Tensor, count: int, bits: int) -> Tensor:
    raw, values = as_array(code), np.empty(count, np.float32)
    if bits == 32:
        values.view(np.uint8)[:] = raw[: values.nbytes]
        return torch.from_numpy(values)
    scale_bytes = 4 * SCALE_COUNT[bits]
    scales = np.empty(SCALE_COUNT[bits], np.float32)
    scales.view(np.uint8)[:] = raw[:scale_bytes]  # a copy, since the bytes may lie anywhere

    def work(start: int, stop: int) -> None:
        if bits == 1:
            jit_codes.decode_signs(raw, scale_bytes, scales[0], start, stop, values)
        elif bits <= 4:
            jit_codes.decode_book(raw, scale_bytes, bits, scales, start, stop, values)
        else:
            levels = float(scales[0]), float(scales[1])
            jit_codes.decode_grid(raw, scale_bytes, bits, *levels, start, stop, values)

    in_parts(count, work)
    return torch.from_numpy(values)


def sum_sparse(
    indices: list[Tensor], values: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    union = as_array(indices[0])
    sums = as_array(values[0].to(dtype) + 0.0)  # + 0: the sum starts from zero, not minus zero
    for more_indices, more_values in zip(
        map(as_array, indices[1:]), map(as_array, values[1:]), strict=True
    ):
        room = len(union) + len(more_indices)
        merged, merged_sums = np.empty(room, np.int64), np.empty(room, sums.dtype)
        count = jit_codes.merge(
            union, sums, len(union), more_indices, more_values, merged, merged_sums
        )
        union, sums = merged[:count], merged_sums[:count]
    return torch.from_numpy(union), torch.from_numpy(sums)


def _scales(x: Array, bits: int, k: int) -> Array:
    magnitudes, scales = np.empty(len(x)), np.zeros(SCALE_COUNT[bits])
    jit_codes.capped_magnitudes(x, magnitudes)
    if bits == 1:
        scales[0] = jit_codes.halving_sum(magnitudes, 0, len(x)) / k
    elif bits <= 4:
        edges = np.empty(len(scales) + 1, np.int64)
        jit_codes.split_at_means(magnitudes, bits - 1, np.empty(len(x)), edges, scales)
    elif len(x):
        scales[:] = magnitudes.min(), magnitudes.max()
    return scales.astype(np.float32)


def _floats(values: Tensor) -> Array:
    return as_array(values if values.dtype in {torch.float32, torch.float64} else values.float())


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[tuple[Tensor, Tensor, bool]]:
    """Return the result of `propose` for each tensor."""
    found: dict[int, tuple[Tensor, Tensor, bool]] = {}
    for kind, members in _by_kind(folds).items():
        if kind is None:
            for index in members:
                found[index] = propose(folds[index], ks[index])
        else:
            its_ks = [ks[index] for index in members]
            found.update(
                zip(
                    members, _propose_kind([folds[index] for index in members], its_ks), strict=True
                )
            )
    return [found[index] for index in range(len(folds))]


def commit_list_(folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]) -> None:
    """Commit each tensor as `commit_` does; changes residuals and momentum buffers."""
    for kind, members in _by_kind(folds, [values.dtype for _, values in sent]).items():
        if kind is None:
            for index in members:
                commit_(folds[index], *sent[index], seeds[index])
        else:
            chosen = [folds[index] for index in members]
            _commit_kind(
                chosen, [sent[index] for index in members], [seeds[index] for index in members]
            )


def step_along_list_(
    params: Sequence[Tensor],
    parts: Sequence[Sequence[Sparse]],
    rates: Sequence[float],
    sources: int,
) -> None:
    """Take a step along the mean of sources: p <- p - (sum of the parts / sources) rate.

    Changes `params`, which are contiguous and all float32 or all float64.

    Args:
        params: Any shape.
        parts: Per tensor (indices, values) of each source, contiguous, values all float32 or all of
            the params' type.
        rates: Per tensor.
        sources: Divisor of the sum.
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
    typed_rates, totals = np.array(rates, like.dtype), counts[:, 1:].sum(axis=1)

    def work(first: int, last: int) -> None:
        divisor, room = like.dtype.type(sources), int(totals[first:last].max())
        scratch = [np.empty(room, dtype) for dtype in (np.int64, like.dtype, np.int64, like.dtype)]
        jit_lists.step_along(
            table, counts, first, last, like, like_values, typed_rates, divisor, *scratch
        )

    if share_memory(params):
        work(0, len(params))
    else:
        in_spans(totals, work)
    bump_versions(params)


def _by_kind(folds: Sequence[Fold], more: Sequence[object] | None = None) -> dict[Any, list[int]]:
    """Group tensors that one call can take; under None those worth several threads each."""
    total = sum(fold.residual.numel() for fold in folds)
    large = max(2 * SMALLEST_PART, total // (2 * torch.get_num_threads()))
    kinds: dict[Any, list[int]] = {}
    for index, fold in enumerate(folds):
        tensors = [tensor for tensor in fold[:3] if tensor is not None]
        plain = all(has_address(tensor, tensor.dtype) for tensor in tensors)
        single = fold.residual.numel() > large or not plain or len(folds) == 1
        kind = (
            fold.grad.dtype,
            fold.residual.dtype,
            fold.momentum_buffer is None,
            fold.momentum,
            fold.nesterov,
            more and more[index],
        )
        kinds.setdefault(None if single else kind, []).append(index)
    return kinds


class _Kind(NamedTuple):
    """Tensors of one kind as the loops take them; `grads` keeps their memory alive."""

    grads: list[Tensor]
    rows: list[tuple[int, int, int]]
    like_grad: Array
    like_state: Array
    momentum: Any
    mode: int


def _kind_of(folds: Sequence[Fold]) -> _Kind:
    first = folding(folds[0])
    dtype = read_as(folds[0])
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
        room = max(max(runs * jit_entries.RUN, room_for(n, k)) for n, k, (runs, _, _) in largest)
        room_values, digits = np.empty(room, values.dtype), np.empty(jit_entries.DIGITS, np.int64)
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


def _commit_kind(folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]) -> None:
    kind = _kind_of(folds)
    state = torch.float64 if kind.momentum.dtype == np.float64 else torch.float32
    if any(values.dtype != state for _, values in sent):
        sent = [(indices, values.to(state)) for indices, values in sent]
    pairs = [(indices.contiguous(), values.contiguous()) for indices, values in sent]
    rows = np.array(
        [(*row, i.data_ptr(), x.data_ptr()) for row, (i, x) in zip(kind.rows, pairs, strict=True)],
        np.int64,
    )
    sizes = [fold.residual.numel() for fold in folds]
    counts = [indices.numel() for indices, _ in pairs]
    numbers = np.column_stack((sizes, counts)).astype(np.int64)
    all_seeds = np.array(seeds, np.uint32)

    def work(first: int, last: int) -> None:
        rest = rows, numbers, first, last, kind.like_grad, kind.like_state, kind.momentum, kind.mode
        if folds[0].residual.dtype == torch.bfloat16:
            jit_lists.commit_bfloat16(
                *rest, all_seeds, np.empty(max(counts[first:last]), np.float32)
            )
        else:
            jit_lists.commit(*rest)

    in_spans(sizes, work)
    bump_versions([tensor for fold in folds for tensor in fold[1:3] if tensor is not None])


def _like(dtype: torch.dtype) -> Array:
    return np.empty(0, np.float64 if dtype == torch.float64 else np.float32)
