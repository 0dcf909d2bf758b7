"""Columns of many tall matrices made orthonormal at once, with the same bits on every rank."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["orthonormal"]

_CHUNK = 128
"""Numbers that one thread adds up; sums of a fixed order are made of these."""
_LOST = 1e-12
"""A column whose square is this much smaller, once the others are taken out, is rounding."""


def orthonormal(columns: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The columns of each matrix made orthonormal from left to right, twice by the Cholesky factor
    of P^T P.

    The same bits from the same bits on every processor with the same vector instructions, whatever
    its number of threads: sums of a fixed order in float64, everything else entry by entry.

    Args:
        columns: Shape (r, N), float32 or float64: the r columns of all matrices, one matrix beside
            the other.
        rows: Of each of b matrices, N together, more than r each.

    Returns:
        The same of the orthonormal ones; and bool, shape (r, b), true for a column that depends on
        those before it: it is zero. No host synchronization once `rows` are known.
    """
    plan = _planned(tuple(rows), columns.device)
    spread = _with_zero(columns.double()).index_select(1, plan.spread)
    chunks = spread.view(len(columns), -1, _CHUNK)
    # once leaves an error that grows with the square of how nearly dependent columns are
    chunks, first = _orthonormalized(chunks, plan)
    chunks, second = _orthonormalized(chunks, plan)
    found = chunks.view(len(columns), -1).index_select(1, plan.places)
    return found.to(columns.dtype), first | second


class _Plan(NamedTuple):
    """Where the rows of matrices are once each begins with a chunk of its own."""

    spread: Tensor
    """Row that is at each place of the chunks; N for none."""
    places: Tensor
    """Place of each row."""
    owners: Tensor
    """Matrix of each chunk."""
    chunks: Tensor
    """The chunks of each matrix, as many for all of them, shape (b, any); K for none."""


@lru_cache(maxsize=256)
def _planned(rows: tuple[int, ...], device: torch.device) -> _Plan:
    counts = [-(-n // _CHUNK) for n in rows]
    most, every = max(counts), sum(counts)
    chunks = torch.full((len(rows), most), every, device="cpu")
    places, begin = [], 0
    for matrix, (n, count) in enumerate(zip(rows, counts, strict=True)):
        places.append(torch.arange(n, device="cpu") + begin * _CHUNK)
        chunks[matrix, :count] = torch.arange(begin, begin + count, device="cpu")
        begin += count
    place = torch.cat(places)
    spread = torch.full((every * _CHUNK,), sum(rows), device="cpu")
    spread[place] = torch.arange(sum(rows), device="cpu")
    matrices = torch.arange(len(rows), device="cpu")
    owners = matrices.repeat_interleave(torch.tensor(counts, device="cpu"))
    return _Plan(*(each.to(device) for each in (spread, place, owners, chunks)))


def _with_zero(values: Tensor) -> Tensor:
    """With one more column, of zeros."""
    return torch.cat([values, values.new_zeros(len(values), 1)], 1)


def _orthonormalized(chunks: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """One pass over the chunks of all matrices, shape (r, K, _CHUNK), float64; and what is lost."""
    r = len(chunks)
    # chunks are added up each by one thread, and then those of a matrix
    sums = torch.cat([(chunks[: j + 1] * chunks[j]).sum(2) for j in range(r)])
    spread = _with_zero(sums).index_select(1, plan.chunks.view(-1))
    grams = spread.view(-1, *plan.chunks.shape).sum(2).unbind(0)
    starts = [j * (j + 1) // 2 for j in range(r + 1)]
    upper = [grams[begin:end] for begin, end in pairwise(starts)]
    inverse, lost = _inverse_of_factor(upper)
    factors = torch.stack(inverse).index_select(1, plan.owners).unsqueeze(2)
    found = torch.empty_like(chunks)
    for j, begin in enumerate(starts[:-1]):
        torch.mul(chunks[0], factors[begin], out=found[j])
        for i in range(1, j + 1):
            found[j] += chunks[i] * factors[begin + i]
    return found, lost


def _inverse_of_factor(gram: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], Tensor]:
    """The inverse of R, where R^T R is given, of b matrices at once.

    Args:
        gram: `gram[j][i]` is the entry (i, j), i <= j, shape (b,).

    Returns:
        Its entries (i, j), j by j, zeros in a column that is lost; and what is lost, shape (r, b).
    """
    upper: list[list[Tensor]] = []
    inverse: list[list[Tensor]] = []
    all_lost = []
    for j, entries in enumerate(gram):
        column: list[Tensor] = []
        square = entries[j]
        for i in range(j):
            rest = entries[i]
            for k in range(i):
                rest = rest - upper[i][k] * column[k]
            column.append(rest * inverse[i][i])
            square = square - column[i] * column[i]
        lost = ~(square > _LOST * entries[j])  # nor where it is not a number
        scale = torch.where(lost, 0.0, 1.0 / square.sqrt())
        upper.append(column)
        inverse.append([])
        for i in range(j):
            total = inverse[i][i] * column[i]
            for k in range(i + 1, j):
                total = total + inverse[k][i] * column[k]
            inverse[j].append(-scale * total)
        inverse[j].append(scale)
        all_lost.append(lost)
    return [entry for column in inverse for entry in column], torch.stack(all_lost)
