"""Kernels in torch operations for any device, and those of codes in NumPy.

The former run on every device but the CPU, and are the reference for the numba body.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.rules import Fold, Largest, Sparse

Array = NDArray[Any]
_LOW_32 = (1 << 32) - 1
_LARGEST_BFLOAT16 = 0x7F7F0000
"""The bits of the largest bfloat16, as a float32."""
_PART = 1 << 13
"""Entries for which random numbers are held at a time."""


def top_k(values: Tensor, k: int) -> Tensor:
    magnitudes = values.abs()
    threshold = torch.topk(magnitudes, k, sorted=False).values.amin()
    above = magnitudes > threshold
    # of equal ones the first; a device is not asked how many they are
    late = torch.arange(k, device=above.device) >= k - above.sum()
    first = _positions(above, k)
    tied = _positions(magnitudes == threshold, k).masked_fill_(late, values.numel())
    del above, magnitudes  # before the sort takes memory
    return torch.cat((first, tied)).sort().values[:k].clamp_(max=values.numel() - 1)


def _positions(mask: Tensor, k: int) -> Tensor:
    """Return the first `k` positions that are set, followed by the length if there are fewer."""
    try:
        return mask.nonzero_static(size=k, fill_value=mask.numel()).squeeze(1)
    except NotImplementedError:
        found = mask.nonzero().squeeze(1)[:k]
        return torch.nn.functional.pad(found, (0, k - found.numel()), value=mask.numel())


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[Largest]:
    found: list[Largest] = []
    for fold, k in zip(folds, ks, strict=True):
        folded, _ = _folded(fold)
        indices = top_k(folded, k)
        found.append((indices, folded[indices], folded.isfinite().all()))
    return found


def commit_list_(folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]) -> None:
    for fold, (indices, values), seed in zip(folds, sent, seeds, strict=True):
        v, u = _folded(fold)
        v[indices] -= values.to(v.dtype)
        half = fold.residual.dtype == torch.bfloat16
        fold.residual.copy_(_rounded(v, seed, 0, for_buffer=False) if half else v)
        if fold.momentum_buffer is not None:
            u[indices] = 0
            fold.momentum_buffer.copy_(_rounded(u, seed, 0, for_buffer=True) if half else u)


def divided_(total: Tensor, count: int) -> Tensor:
    """Divide `total` by `count` in place; the same bits on every device.

    The divisor is a tensor: on a GPU torch divides by a plain number through its reciprocal, which
    rounds differently.
    """
    return total.div_(torch.full((), count, dtype=total.dtype, device=total.device))


def mixed(x: Any) -> Any:
    """Return a pseudorandom number from 0 to 2^32 - 1 for every integer.

    Only the lowest 32 bits of `x` count.

    Args:
        x: An int, or int64 of any shape.

    >>> mixed(1) == mixed(1 + 2**32)
    True

    Source: multiplications and shifts as in the finalizer of MurmurHash3 (Appleby), with the
    constants that Wellons, "Prospecting for hash functions", 2018, found to leave the least bias.
    """
    x = x & _LOW_32
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW_32
    x = x ^ (x >> 15)
    x = (
        x * (0x846CA68B - (1 << 32))
    ) & _LOW_32  # minus 2^32: equal in 32 bits, and int64 cannot overflow
    return x ^ (x >> 16)


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    for start in range(0, values.numel(), _PART):
        part = slice(start, start + _PART)
        target[part] = _rounded(values[part], seed, start, for_buffer=True)


def _rounded(values: Tensor, seed: int, start: int, *, for_buffer: bool) -> Tensor:
    """Round a float32 stochastically to bfloat16; values that are not finite stay unchanged."""
    noise = mixed(torch.arange(start, start + values.numel(), device=values.device) ^ seed)
    noise = noise >> 16 if for_buffer else noise & 0xFFFF
    bits = values.view(torch.int32).long() & _LOW_32
    # above the largest bfloat16 there is only infinity, and infinity and NaN must not move at all
    noise = noise.masked_fill_((bits & 0x7FFFFFFF) > _LARGEST_BFLOAT16, 0)
    rounded: Tensor = ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    return rounded


def _widened(state: Tensor) -> Tensor:
    """Return state in the type of the computation: itself, or a copy in float32."""
    return state.float() if state.dtype == torch.bfloat16 else state


def _folded(fold: Fold) -> tuple[Tensor, Tensor]:
    """Return v' and u', new tensors in the type of the computation; v' twice without a buffer."""
    v = _widened(fold.residual)
    g = fold.grad.to(v.dtype)
    if fold.momentum_buffer is None:
        folded = v + g
        return folded, folded
    u = _widened(fold.momentum_buffer)
    # separate operations: a fused multiply-add would round once
    if fold.nesterov:
        moved = (u + g).mul_(fold.momentum)
        return (v + moved).add_(g), moved
    moved = (u * fold.momentum).add_(g)
    return v + moved, moved


def sum_sparse(indices: list[Tensor], values: list[Tensor], dtype: torch.dtype) -> Sparse:
    union, inverse = torch.unique(torch.cat(indices), return_inverse=True)
    sums = torch.zeros(union.numel(), dtype=dtype, device=union.device)
    for position, value in zip(inverse.split([i.numel() for i in indices]), values, strict=True):
        sums[position] += value.to(dtype)
    return union, sums


def put_fields(code: Array, at: Array, fields: Array, width: int) -> None:
    """Add fields of up to `width` bits, the lowest one at bit `at`."""
    shifted = fields << (at & 7)
    for byte in range((width + 14) // 8):
        of_byte = (shifted >> 8 * byte) & 255
        code += np.bincount((at >> 3) + byte, of_byte, len(code))[: len(code)].astype(np.uint8)


def fields_at(code: Array, at: Array, width: Any, widest: int) -> Any:
    """Return fields of `width` bits, see `put_fields`."""
    found = np.zeros_like(at)
    for byte in range((widest + 14) // 8):
        found |= code.take((at >> 3) + byte, mode="clip").astype(np.int64) << 8 * byte
    return (found >> (at & 7)) & ((1 << width) - 1)


def ones_of(code: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Return the bits set in each part of the code, counted from its start, and their parts."""
    parts = [code[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    bits = np.unpackbits(np.concatenate(parts), bitorder="little")
    ones = np.flatnonzero(bits.view(bool))
    lengths = 8 * (ends - starts)
    until = np.cumsum(lengths)
    part = np.arange(len(parts)).repeat(np.diff(np.searchsorted(ones, until), prepend=0))
    return ones - (until - lengths)[part], part


def numbers_of(slot: Array, counts: Array) -> Any:
    """Return each entry's number in its slot."""
    return np.arange(len(slot)) - (np.cumsum(counts) - counts)[slot]
