"""Error feedback for sparse messages: accumulation, selection, residual and the sparse step.

Throughout: g gradient, u momentum buffer, v residual, S the entries that are sent, m the momentum.
All are flat, contiguous and on one device; u and v are float32, float64 or bfloat16, g may be of
any floating-point type. The arithmetic rounds after every operation, so a proposal and the commit
that follows it see the same bits. u and v in bfloat16 are converted to float32 for computing, and
rounded stochastically when they are stored.

bfloat16 is the upper half of a float32: 8 bits of significand, with the range of a float32. For x
between two neighbours a < x < b in magnitude, b is stored with the probability (x - a) / (b - a).
So the expectation is exactly x, down to the denormals. Values that are representable in bfloat16 do
not change, including zeros. Beyond the largest bfloat16, 3.39e38, x becomes that value and never
infinity. The random bits of position i are a hash of i and a seed, 32 per position: the lower 16
for a residual, the upper 16 for a momentum buffer. Positions i and i + 2^32 of one tensor share
their bits.

Source: Lin et al., 2018, arXiv 1712.01887, sections 3.1 and 3.2; stochastic rounding as in Gupta et
al., 2015, arXiv 1502.02551, section 3. Differs: a counter-based hash instead of a generator, so
there is no generator to save, and the order of the work changes no bit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire._devices import moved
from thinwire.kernels import for_device, reference, require_lengths
from thinwire.kernels.reference import divided_, mixed
from thinwire.kernels.rules import Fold

_CHUNK = 1 << 22
"""Entries of all tensors of one call."""
_Key = TypeVar("_Key")


class Proposal(NamedTuple):
    """Entries that one tensor would send."""

    indices: Tensor
    """Shape (k,), int64, ascending; undefined if not finite."""
    values: Tensor
    """Shape (k,), the folded residual at `indices`, in the type of the computation."""
    finite: bool | Tensor
    """True if gradient and folded residual are finite; a tensor if no CPU has read it."""


def in_chunks(sizes: Mapping[_Key, int]) -> Iterator[list[_Key]]:
    """Yield groups of tensors for one call each, whose temporary tensors stay small.

    >>> list(in_chunks({"a": 1 << 22, "b": 10, "c": 10}))
    [['a'], ['b', 'c']]
    """
    chunk: list[_Key] = []
    room = _CHUNK
    for key, size in sizes.items():
        if chunk and size > room:
            yield chunk
            chunk = []
            room = _CHUNK
        chunk.append(key)
        room -= size
    if chunk:
        yield chunk


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[Proposal]:
    """Return per tensor the `k` largest entries of the folded residual; nothing changes.

    Without a momentum buffer v' = v + g, with one v' = v + (m * u + g). With Nesterov u' = m * (u +
    g) and v' = v + u' + g.

    Args:
        folds: Per tensor g, v and u or None, shape (n,) each, m and Nesterov; all on one device.
        ks: Number of entries of each tensor, between 1 and n.

    Returns:
        Positions and values, and a flag: all numbers were finite. Of equal magnitudes the lowest
        positions.

    >>> fold = Fold(torch.tensor([3.0, -5.0, 1.0]), torch.zeros(3), None, 0.0, False)
    >>> propose_list([fold], [2])[0].indices
    tensor([0, 1])

    Source: arXiv 1712.01887, algorithms 1 and 4. Differs: exact selection.
    """
    require_lengths(folds)
    found = for_device(folds[0].residual.device).propose_list(folds, ks)
    return [Proposal(*one) for one in found]


def commit_list_(
    folds: Sequence[Fold], sent: Sequence[tuple[Tensor, Tensor]], seeds: Sequence[int]
) -> None:
    """Fold gradients into u and v, subtract the sent values and mask the momentum.

    They become u' and v' of `propose_list`; then v[S] -= sent and u[S] = 0. `sent` has per tensor
    S, int64, strictly ascending, and the values that receivers decode there; `seeds` are those of
    `rounding_seed`, without effect where u and v are wider than bfloat16.

    Source: arXiv 1712.01887, algorithm 4. Differs: the rounding error of the values stays in v.

    >>> residual = torch.zeros(3)
    >>> fold = Fold(torch.tensor([3.0, -5.0, 1.0]), residual, None, 0.0, False)
    >>> commit_list_([fold], [(torch.tensor([1]), torch.tensor([-4.0]))], [0])
    >>> residual
    tensor([ 3., -1.,  1.])
    """
    require_lengths(folds)
    for_device(folds[0].residual.device).commit_list_(folds, sent, seeds)


def compile_loops(params: Iterable[Tensor], state_dtype: object = None) -> None:
    """Call the loops for these parameters once, so that no step waits for a compiler."""
    for dtype in {p.dtype for p in params if p.is_cpu and p.is_floating_point()}:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        stored = torch.bfloat16 if state_dtype == "bfloat16" else wide
        grad, state, one = (torch.ones(1, dtype=x, device="cpu") for x in (dtype, stored, wide))
        fold = Fold(grad, state, state.clone(), 0.5, False)
        part = propose_list([fold], [1])[0].indices, one.float()
        commit_list_([fold], [part], [0])
        top_k(one, 1)


def rounding_seed(step: int, key: int) -> int:
    """Return the rounding seed, 0 to 2^32 - 1, of tensor `key` in a step: equal on all ranks."""
    return int(mixed(mixed(step) + key))


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    """Store `values`, float32 or float64, in `target`."""
    if target.dtype.itemsize == 2:
        reference.store_(target, values.float(), seed)
    else:
        target.copy_(values)


def sum_sparse(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum of sparse vectors, positions (int64, strictly ascending) and values (float32),
    added in the order of `parts`: bit-identical on every rank.

    >>> a = (torch.tensor([0, 2]), torch.tensor([1.0, 2.0]))
    >>> b = (torch.tensor([2, 5]), torch.tensor([3.0, 4.0]))
    >>> sum_sparse([a, b], torch.float32)
    (tensor([0, 2, 5]), tensor([1., 5., 4.]))
    """
    if len(parts) == 1:
        return parts[0][0], parts[0][1].to(dtype) + 0.0  # from zero: no minus zero, as with several
    indices, values = map(list, zip(*parts, strict=True))
    return reference.sum_sparse(indices, values, dtype)


def step_along_list_(
    params: Sequence[Tensor],
    parts: Sequence[Sequence[tuple[Tensor, Tensor]]],
    rates: Sequence[float],
    sources: int,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Take a step along the mean of sparse vectors: p <- p - rate * mean, in place, computed in
    `dtypes`; `parts` as for `sum_sparse`, on the CPU, with positions in the flat tensor.

    >>> param = torch.ones(3)
    >>> parts = [(torch.tensor([0]), torch.tensor([4.0])), (torch.tensor([2]), torch.tensor([2.0]))]
    >>> step_along_list_([param], [parts], [0.5], 2, [torch.float32])
    >>> param
    tensor([0.0000, 1.0000, 0.5000])
    """
    for dtype in set(dtypes):
        its = [index for index, other in enumerate(dtypes) if other == dtype]
        starts = [0, *accumulate(params[index].numel() for index in its)]
        joined = []  # one vector of each source for all tensors
        for source in range(max(len(parts[index]) for index in its)):
            pairs = zip(its, starts, strict=False)
            own = [(start, *parts[i][source]) for i, start in pairs if parts[i][source:]]
            positions = torch.cat([at + start for start, at, _ in own])
            joined.append((positions, torch.cat([values for *_, values in own])))
        touched, total = sum_sparse(joined, dtype)
        cuts = torch.searchsorted(touched, touched.new_tensor(starts[1:-1])).tolist()
        here = moved([touched, divided_(total, sources)], params[its[0]].device)
        columns = (column.tensor_split(cuts) for column in here)
        for index, start, positions, step in zip(its, starts, *columns, strict=False):
            param = params[index]
            at = positions - start
            flat = param.view(-1) if param.is_contiguous() else param.reshape(-1)
            flat[at] = (flat[at].to(dtype) - step * rates[index]).to(param.dtype)
            if not param.is_contiguous():
                param.copy_(flat.view(param.shape))


def top_k(values: Tensor, k: int) -> Tensor:
    """Return the positions, ascending, of the `k` entries of largest magnitude.

    The selection is exact; of equal magnitudes the lowest positions.

    >>> top_k(torch.tensor([1.0, -3.0, 2.0]), 2)
    tensor([1, 2])

    Source: arXiv 1712.01887, algorithm 1. Differs: exact, where the paper estimates a threshold
    from a sample.
    """
    return for_device(values.device).top_k(values, k)
