"""Exact selection of the largest folded entries, by several threads."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cpu import jit_entries
from thinwire.kernels.cpu.threads import in_parts, run_all
from thinwire.kernels.rules import Fold

Array = NDArray[Any]
_Part = tuple[Array, Array]

_SMALLEST_ROOM = 8192  # candidates; below, clearing the histograms costs more than sorting out
_FEW = 1 << 17  # candidates; below, handing them to threads costs more than sorting them out
_SAMPLE_HITS = (
    64  # of the k largest, how many a sample should hold: the fewer, the more candidates are needed
)
_SMALLEST_SAMPLE = 1024
_BINS_BITS = 13  # of the histogram of all keys: 2^this many bins


class Folding(NamedTuple):
    """Inputs and mode of the fold, as the compiled loops take them."""

    grad: Array
    residual: Array
    buffer: Array
    momentum: Any
    mode: int

    @property
    def dtype(self) -> Any:
        """Type of the computation."""
        return self.momentum.dtype


def folding(fold: Fold) -> Folding:
    """Return the fold as arrays."""
    v = as_array(fold.residual)
    wide = np.float64 if fold.residual.dtype == torch.float64 else np.float32
    g = as_array(fold.grad.to(read_as(fold)))
    if fold.momentum_buffer is None:
        return Folding(g, v, v, wide(0), jit_entries.PLAIN)
    mode = jit_entries.NESTEROV if fold.nesterov else jit_entries.MOMENTUM
    return Folding(g, v, as_array(fold.momentum_buffer), wide(fold.momentum), mode)


def read_as(fold: Fold) -> torch.dtype:
    """Return the type in which loops read a gradient: bfloat16, or that of the computation."""
    if fold.residual.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if fold.grad.dtype == torch.bfloat16 else torch.float32


def largest(folded: Folding, k: int) -> _Part:
    """Return positions and values of the `k` largest, ascending, from each part's candidates."""
    estimate = _estimated_floor(folded, k)
    for floor in (
        estimate,
        estimate / 2,
        folded.dtype.type(0),
    ):  # where neighbours are alike, a sample may mislead
        parts = _candidates(folded, k, floor)
        count = sum(len(indices) for indices, _ in parts)
        if count >= k:
            break
    if count > max(k, _FEW):
        return _best(parts, k)
    indices, values = (np.concatenate(of_all) for of_all in zip(*parts, strict=True))
    if count > k:
        jit_entries.keep_largest(
            indices, values, bits_of(values), count, k, np.empty(jit_entries.DIGITS, np.int64)
        )
    return indices[:k], values[:k]


def room_for(n: int, k: int) -> int:
    """Return the length of scratch for the candidates of the `k` largest of `n`."""
    return min(n, max(2 * k, _SMALLEST_ROOM) + jit_entries.BLOCK)


def sampling(n: int, k: int) -> tuple[int, int, int]:
    """Return the sample that estimates the `k`-th largest of `n`.

    It is a number of runs, their stride, and a rank.

    A run is a number of neighbours. Somewhat more than `k` entries are as large as the one of that
    rank in the sample: by six standard deviations of an independent sample, since neighbours are
    alike, which increases the variance. No runs if a sample would not help.
    """
    if n < 16 * _SMALLEST_SAMPLE:
        return 0, 0, 4
    length = jit_entries.RUN
    runs = (
        min(max(_SAMPLE_HITS * (n // k), 16 * _SMALLEST_SAMPLE), max(n // 64, _SMALLEST_SAMPLE))
        // length
    )
    stride = n // runs // length * length
    runs = (n - length) // stride + 1
    hits = runs * length * k / n
    return runs, stride, int(hits + 6 * hits**0.5 + 4)


def marks() -> tuple[Array, Array]:
    """Return scratch of `jit_entries.scan`: bytes, and the same memory as words."""
    room = np.empty(jit_entries.BLOCK, np.uint8)
    return room, room.view(np.uint64)


def as_array(tensor: Tensor) -> Array:
    """Return the tensor's memory as an array; bfloat16, which NumPy does not know, as uint16."""
    plain = tensor.detach().contiguous()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def bits_of(values: Array) -> Array:
    """Return the same memory as integers."""
    return values.view(np.int32 if values.dtype == np.float32 else np.int64)


def _estimated_floor(folded: Folding, k: int) -> Any:
    """Estimate a magnitude that somewhat more than `k` reach; 0 if a sample would not help."""
    runs, stride, wanted = sampling(len(folded.residual), k)
    length = jit_entries.RUN
    values = np.empty(runs * length, folded.dtype)
    if wanted >= len(values):
        return folded.dtype.type(0)
    in_parts(
        len(values),
        lambda a, b: jit_entries.sample(*folded, a // length, b // length, stride, values),
    )
    np.abs(values, out=values)
    values.partition(len(values) - wanted)
    return np.fmin(values[len(values) - wanted], folded.dtype.type(np.inf))  # nothing is below NaN


def _candidates(folded: Folding, k: int, floor: Any) -> list[_Part]:
    def work(start: int, stop: int) -> _Part:
        room = room_for(stop - start, k)
        indices, values = np.empty(room, np.int64), np.empty(room, folded.dtype)
        scratch = *marks(), np.empty(jit_entries.DIGITS, np.int64)
        count = jit_entries.scan(
            *folded, start, stop, k, floor, indices, values, bits_of(values), *scratch
        )
        return indices[:count], values[:count]

    return in_parts(len(folded.residual), work)


def _best(parts: list[_Part], k: int) -> _Part:
    bits = [bits_of(values) for _, values in parts]
    shift = 8 * bits[0].itemsize - 1 - _BINS_BITS
    bins = np.zeros((len(parts), 1 << _BINS_BITS), np.int64)
    _of_all(lambda own, counts: jit_entries.count_keys(own, shift, counts), bits, bins)
    from_top = bins.sum(axis=0)[::-1].cumsum()[::-1]
    edge_bin = int(np.flatnonzero(from_top >= k)[-1])  # where the k-th largest is
    edge, end = edge_bin << shift, (edge_bin + 1) << shift
    inside = [np.empty(count, np.int64) for count in bins[:, edge_bin]]
    _of_all(lambda own, keys: jit_entries.keys_between(own, edge, end, keys), bits, inside)
    above = bins[:, edge_bin + 1 :].sum(axis=1)
    keys = np.concatenate(inside)
    index = len(keys) - (k - int(above.sum()))
    keys.partition(index)
    key = int(keys[index])
    above += [int((own > key).sum()) for own in inside]
    ties = k - int(above.sum())
    tied = np.diff([min(ties, x) for x in np.cumsum([0, *((own == key).sum() for own in inside)])])
    ends = np.cumsum(above + tied)[:-1]
    indices, values = np.empty(k, np.int64), np.empty(k, parts[0][1].dtype)
    _of_all(
        lambda part, own, its_ties, to, x: jit_entries.keep_above(
            part[0], part[1], own, len(own), key, its_ties, to, x, len(to)
        ),
        parts,
        bits,
        tied.tolist(),
        np.split(indices, ends),
        np.split(values, ends),
    )
    return indices, values


def _of_all(work: Callable[..., None], *columns: Iterable[Any]) -> None:
    run_all([partial(work, *row) for row in zip(*columns, strict=True)])
