"""The kernels for the CPU: compiled by numba, several threads where it pays, bit for bit what
`reference` gives.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.core.kernels import jit_codes, jit_fold
from thinwire.core.kernels.changed import tell_autograd
from thinwire.core.kernels.cpu_select import Folding, as_array, folding, largest
from thinwire.core.kernels.reference import SCALE_COUNT
from thinwire.core.kernels.threads import in_parts

__all__ = [
    "commit_",
    "count_nonzero",
    "decode_positions",
    "decode_values",
    "encode_positions",
    "encode_values",
    "is_ascending",
    "propose",
    "store_",
    "sum_sparse",
    "top_k",
]

Array = NDArray[Any]

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def top_k(values: Tensor, k: int) -> Tensor:
    """See `thinwire.core.select.top_k`."""
    x = _floats(values)
    return torch.from_numpy(largest(Folding(x, x, x, x.dtype.type(0), jit_fold.VALUES), k)[0])


def propose(
    grad: Tensor,
    residual: Tensor,
    momentum_buffer: Tensor | None,
    k: int,
    *,
    momentum: float,
    nesterov: bool,
) -> tuple[Tensor, Tensor, bool]:
    """See `thinwire.core.feedback.propose`."""
    places, found = largest(folding(grad, residual, momentum_buffer, momentum, nesterov), k)
    indices, values = torch.from_numpy(places), torch.from_numpy(found)
    # Whatever is not finite counts as larger than all that is, so it is among the k, and no extreme
    # hides it.
    if not np.isfinite([found.min(), found.max()]).all():
        return indices[:0], values[:0], False
    return indices, values, True


def commit_(
    grad: Tensor,
    residual: Tensor,
    momentum_buffer: Tensor | None,
    indices: Tensor,
    sent: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    seed: int,
) -> NDArray[np.int64] | None:
    """See `thinwire.core.feedback.commit_`; the sums of the words of residual and buffer before,
    then after.

    None for bfloat16. The last entry is left out of the sums where it fills no word.
    """
    what = folding(grad, residual, momentum_buffer, momentum, nesterov)
    places, values = as_array(indices), as_array(sent).astype(what.dtype, copy=False)
    narrow = residual.dtype == torch.bfloat16
    words, buffer_words = _words(what.residual), _words(what.buffer)

    def work(start: int, stop: int) -> NDArray[np.int64]:
        sums = np.zeros(4, np.int64)
        first, last = np.searchsorted(places, (start, stop))
        part = start, stop, places[first:last], values[first:last]
        if narrow:
            jit_fold.commit_bfloat16(
                *what, np.uint32(seed), *part, np.empty(last - first, np.float32)
            )
        else:
            jit_fold.commit(*what, *part, words, buffer_words, sums)
        return sums

    sums = np.sum(in_parts(residual.numel(), work), axis=0)
    tell_autograd([residual] if momentum_buffer is None else [residual, momentum_buffer])
    return None if narrow else sums


def _words(array: Array) -> Array:
    """As int64, as far as it fills words."""
    return array[: array.nbytes // 8 * 8 // array.itemsize].view(np.int64)


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    """See `thinwire.core.rounding.store_`."""
    place, x, bits = as_array(target), as_array(values), np.uint32(seed)
    in_parts(len(place), lambda start, stop: jit_fold.store(place, x, bits, start, stop))
    tell_autograd([target])


def count_nonzero(values: Tensor) -> int:
    """See `thinwire.core.kernels.reference.count_nonzero`."""
    # NumPy, since torch would wake all its threads for a count: dear where several ranks share the
    # cores.
    return int(np.count_nonzero(_floats(values)))


def is_ascending(indices: Tensor) -> bool:
    """See `thinwire.core.kernels.reference.is_ascending`."""
    x = as_array(indices)
    return bool((x[1:] > x[:-1]).all())


def encode_positions(indices: Tensor, low_bits: int, low_bytes: int, high_bytes: int) -> Tensor:
    """See `thinwire.core.index_code.encode_positions`."""
    code, positions = np.zeros(low_bytes + high_bytes, np.uint8), as_array(indices)
    if low_bits:
        in_parts(
            len(positions),
            lambda start, stop: jit_codes.pack_fields(positions, low_bits, start, stop, code, 0),
        )
    jit_codes.set_high_parts(positions, low_bits, code, low_bytes)
    return torch.from_numpy(code)


def decode_positions(code: Tensor, k: int, low_bits: int, low_bytes: int) -> tuple[Tensor, int]:
    """See `thinwire.core.kernels.reference.decode_positions`."""
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
    """See `thinwire.core.value_code.encode_values`."""
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
    """See `thinwire.core.value_code.decode_values`."""
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
    """See `thinwire.core.merge.sum_sparse`."""
    union, sums = (
        as_array(indices[0]),
        as_array(values[0].to(dtype) + 0.0),
    )  # + 0: the sum starts from zero, not minus zero
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
    """Values in a type that NumPy knows."""
    return as_array(values if values.dtype in {torch.float32, torch.float64} else values.float())
