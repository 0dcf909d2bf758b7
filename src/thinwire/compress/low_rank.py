"""PowerSGD: a matrix of gradients travels as two thin factors; the approximation error is kept.

Each tensor is seen as a matrix of n rows and m columns: its first dimension, and all others. G is
the rank's own gradient, E its error, and Q, shape (m, r), the factor of the last update:

    P = mean over the sources of (G + E) Q        one all-reduce of n r numbers
    P <- its columns, orthonormal                 `orthonormal`, on every rank for itself
    Q = mean over the sources of (G + E)^T P      one all-reduce of m r numbers
    mean = P Q^T,  E <- G + E - P Q^T

P and Q are held as P^T and Q^T. They are bit-identical on all ranks, and so must be the results
computed from them. Library routines for matrices choose their order of additions by processor and
number of threads. Therefore the columns are made orthonormal by sums of a fixed order, and the
product of thin factors is computed entry by entry. G Q and (G + E)^T P may differ: they are summed
over the ranks anyway.

Source: Vogels et al., 2019, arXiv 1905.13727, algorithms 1 and 2. Differs: any number of tensors
travel together and any number of buckets at once; columns that are no more than rounding are
replaced instead of made longer by an epsilon; for any optimizer, which gets the mean.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._devices import uploaded, with_float64
from thinwire.compress.dense import by_dtype
from thinwire.compress.protocol import (
    RESIDUAL,
    AllReduce,
    Arrived,
    Compression,
    Computed,
    Context,
    Kept,
    OtherRanks,
    Sending,
    Shapes,
    buffer_for,
)
from thinwire.core.checksum import checked_mean_
from thinwire.layout.message import factor_numels
from thinwire.layout.traffic import TWO_ROUND_BUCKETS, Messages

_UNSUITED = ("Adam", "AdamW", "Muon")
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@check.by_name
@dataclass(frozen=True)
class LowRank(Compression):
    """Send each matrix of gradients as two factors of few columns (PowerSGD).

    The approximation error is kept and added to the next gradient (error feedback).

    Attributes:
        rank: Columns r of a factor, >= 1. A matrix whose smaller side is at most r is sent
            densely.
        begin_step: Updates before compression begins, >= 0.
        min_numel: Smaller tensors, and those of fewer than two dimensions, are exchanged densely,
            >= 1.

    Raises:
        TypeError, ValueError: A wrong value.

    >>> LowRank(rank=4).compresses(torch.empty(1024, 1024))
    True

    Source: Vogels et al., 2019, arXiv 1905.13727.
    """

    rank: int = 2
    begin_step: int = 10
    min_numel: int = 16384

    kinds: ClassVar[Mapping[str, OtherRanks]] = {RESIDUAL: "mean_zero", "factor": "first"}
    free: ClassVar[Sequence[str]] = ("begin_step",)
    buckets: ClassVar[tuple[int, int]] = TWO_ROUND_BUCKETS
    elementwise: ClassVar[bool] = False
    reports_finite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "rank", "min_numel", at_least=1)
        check.set_fields(self, check.integer, "begin_step", at_least=0)

    def compresses(self, param: Tensor) -> bool:
        """Return True if this tensor is ever compressed; others always travel densely."""
        if param.dtype not in _TYPES or param.dim() < 2 or param.numel() < self.min_numel:
            return False
        return self.rank < min(_sides(param))

    def why_dense(self, param: Tensor) -> str | None:
        """See `Compression`.

        >>> LowRank().why_dense(torch.zeros(512, 512)) is None
        True
        """
        if param.dim() < 2:
            return "of fewer than two dimensions"
        other = self.compresses(param) or param.numel() < self.min_numel
        if other or param.dtype not in _TYPES:
            return super().why_dense(param)
        return f"because rank={self.rank} is not below its smaller side"

    @property
    def last_dense_step(self) -> int:
        """Return `begin_step`."""
        return self.begin_step

    def messages(self, step: int, shapes: Shapes, sources: int) -> Messages:
        """Return the bytes of both factors, which have no headers."""
        factors = [factor_numels(shape, self.rank) for shape in shapes]
        return Messages((), 0, tuple(4 * sum(numels) for numels in zip(*factors, strict=True)))

    def message_text(self, step: int, shapes: Shapes) -> str:
        """Describe the factors."""
        numbers = sum(sum(factor_numels(shape, self.rank)) for shape in shapes)
        return f"the factors have {numbers:,} numbers, in two rounds"

    def remark(self, optimizers: Collection[str]) -> str | None:
        """Return what was measured with Adam and Muon, and the remedy."""
        found = next((name for name in optimizers if name in _UNSUITED), None)
        return found and (
            f"low_rank with {found}: on 2 ranks, AdamW lost 23 % to dense, Muon 21 %; see "
            "docs/choosing.md. PowerSGD is made for SGD with momentum. localsgd=LocalSGD(16, "
            "compression=Quantized(4)) lost 4 % with AdamW, Quantized(1) 1.5 % with Muon"
        )

    def begin(self, residual: Tensor) -> dict[str, Tensor]:
        """Return the factor Q^T, shape (r, m), the same on all ranks."""
        return {"factor": _drawn(self.rank, _sides(residual)[1], residual.numel()).to(residual)}

    def send(self, context: Context, folded: Computed, kept: Kept) -> Sending:
        """Send matrices by two all-reduces per dtype, of r n and r m numbers; see `Compression`."""
        factors = {name: kept["factor"][name] for name in folded}
        sides = {name: _sides(kept[RESIDUAL][name]) for name in folded}
        # (G + E) Q, or (G + E)^T P, without materializing the sum
        return _send_factors(
            context, factors, sides, lambda n: [term.view(sides[n]) for term in folded.terms(n)]
        )


class LowRankMeans(Arrived):
    """Means as products of two factors."""

    def __init__(self, context: Context, names: list[str]) -> None:
        super().__init__(context, names)
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        """P^T, shape (r, n), its rows orthonormal, and Q^T, shape (r, m)."""
        self.lost: dict[str, list[int]] = {}
        """Columns of P that were only rounding, for matrices that have some."""

    def read(self, numbers: Sequence[int]) -> None:
        rank = len(numbers) // len(self.factors)
        for at, name in enumerate(self.factors):
            flags = numbers[at * rank : (at + 1) * rank]
            self.lost[name] = [column for column, gone in enumerate(flags) if gone]

    def first_bad_sum(self) -> str | None:
        for name, factors in self.factors.items():
            if not all(bool(factor.isfinite().all()) for factor in factors):
                return name
        return None

    def take_(self, name: str, folded: Computed, kept: Kept, into: Tensor | None = None) -> Tensor:
        """Return P Q^T: the same bits on all ranks."""
        residual = kept[RESIDUAL][name]
        left, right = (factor.to(residual.device) for factor in self.factors[name])
        # before the mean, which may overwrite the gradient
        whole = folded[name].to(residual.device)
        mean = buffer_for(residual, into)
        matrix = mean.view(left.shape[1], -1)
        # entry by entry: the order of additions in a product of matrices depends on the processor
        first, *others = zip(left.unsqueeze(2).unbind(0), right.unbind(0), strict=True)
        torch.mul(*first, out=matrix)
        for column, row in others:
            matrix += column * row
        torch.sub(whole, mean, out=residual)
        factor = kept["factor"][name].copy_(right)
        if columns := self.lost[name]:
            _redraw_(factor, columns, (self.context.step << 24) + residual.numel())
        return mean


def _send_factors(
    context: Context,
    factors: Mapping[str, Tensor],
    sides: Mapping[str, tuple[int, int]],
    parts: Callable[[str], Sequence[Tensor]],
) -> Sending:
    """Run the two rounds of several matrices, each the sum of its `parts`."""
    purpose = f"step {context.step}, bucket {context.bucket}"
    groups = [list(group) for group in by_dtype(factors)]
    rows, columns = ([[sides[n][side] for n in names] for names in groups] for side in (0, 1))
    lefts = [
        _products([factors[n] for n in names], its, ([m.t() for m in parts(n)] for n in names))
        for names, its in zip(groups, rows, strict=True)
    ]
    answers = yield [
        AllReduce(left.view(-1), f"averaging left factors of {purpose}") for left in lefts
    ]
    arrived = LowRankMeans(context, list(factors))
    sums = []
    columns_lost = []
    bases = []
    rights = []
    for names, its, wide, left, total in zip(groups, rows, columns, lefts, answers, strict=True):
        sums.append(checked_mean_(total, context.sources, bits=context.read_sums))
        found, lost = orthonormal(with_float64(total.view(left.shape)), its)
        basis = uploaded(found, total.device)
        columns_lost.append(lost.t().reshape(-1))
        bases.append(torch.split(basis, its, 1))
        rights.append(_products(bases[-1], wide, map(parts, names)))
    answers = yield [
        AllReduce(right.view(-1), f"averaging right factors of {purpose}") for right in rights
    ]
    for names, its, ours, right, total in zip(groups, columns, bases, rights, answers, strict=True):
        sums.append(checked_mean_(total, context.sources, bits=context.read_sums))
        means = torch.split(total.view(right.shape), its, 1)
        arrived.factors |= dict(zip(names, zip(ours, means, strict=True), strict=True))
    arrived.unread = torch.cat(columns_lost).long()
    arrived.sums = sums
    return arrived


def _products(
    factors: Sequence[Tensor], lengths: Sequence[int], matrices: Iterable[Sequence[Tensor]]
) -> Tensor:
    """Return the products of factors and sums of matrices side by side, shape (r, N)."""
    # with columns as contiguous rows, products of few columns are four times as fast
    found = factors[0].new_empty(len(factors[0]), sum(lengths))
    products = torch.split(found, list(lengths), 1)
    for factor, product, (first, *others) in zip(factors, products, matrices, strict=True):
        torch.mm(factor, first, out=product)
        for matrix in others:
            product.addmm_(factor, matrix)
    return found


def _redraw_(factor: Tensor, columns: Sequence[int], seed: int) -> None:
    """Replace columns of a factor that would otherwise stay zero."""
    drawn = _drawn(factor.shape[0], factor.shape[1], seed)
    for column in columns:
        factor[column] = drawn[column].to(factor)


def _drawn(columns: int, rows: int, seed: int) -> Tensor:
    """Return an initial factor, shape (columns, rows), the same on all ranks and processors."""
    source = torch.Generator().manual_seed(seed)
    drawn = torch.rand(columns, rows, generator=source, dtype=torch.float32, device="cpu")
    return drawn - 0.5


def _sides(tensor: Tensor) -> tuple[int, int]:
    rows = tensor.shape[0]
    return rows, tensor.numel() // max(1, rows)


_CHUNK = 128
"""Numbers that one thread adds up. Sums of a fixed order consist of these chunks."""
_LOST = 1e-12
"""Ratio of a column's square after and before others are taken out, below which it is rounding."""


def orthonormal(columns: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Make the columns of each matrix orthonormal from left to right.

    It applies the Cholesky factor of P^T P twice. Equal bits give equal bits on every processor
    with the same vector instructions, for any number of threads: sums have a fixed order in
    float64, all else is computed entry by entry.

    Args:
        columns: Shape (r, N), float32 or float64: the r columns of all matrices, side by side.
        rows: Of each of b matrices, N together, more than r each.

    Returns:
        The orthonormal columns, same shape; and bool, shape (r, b), True for a column that depends
        on those before it: it is zero. No host synchronization once `rows` are known.

    >>> columns, lost = orthonormal(torch.tensor([[2.0, 0.0, 0.0], [1.0, 3.0, 0.0]]), [3])
    >>> columns.tolist(), lost.tolist()
    ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[False], [False]])
    """
    plan = _planned(tuple(rows), columns.device)
    spread = _with_zero(columns.double()).index_select(1, plan.spread)
    chunks = spread.view(len(columns), -1, _CHUNK)
    # once leaves an error that grows with the square of how nearly dependent columns are
    chunks, first = _orthonormalized(chunks, plan)
    chunks, second = _orthonormalized(chunks, plan)
    found = chunks.view(len(columns), -1).index_select(1, plan.positions)
    return found.to(columns.dtype), first | second


class _RowChunks(NamedTuple):
    """Positions of the matrices' rows, padded: each matrix begins with its own chunk."""

    spread: Tensor
    """Row at each position of the chunks; N for padding."""
    positions: Tensor
    """Position of each row."""
    owners: Tensor
    """Matrix of each chunk."""
    chunks: Tensor
    """Chunks of each matrix, padded to the same number, shape (b, any); K for padding."""


@lru_cache(maxsize=256)
def _planned(rows: tuple[int, ...], device: torch.device) -> _RowChunks:
    counts = [-(-n // _CHUNK) for n in rows]
    most = max(counts)
    every = sum(counts)
    chunks = torch.full((len(rows), most), every, device="cpu")
    positions = []
    begin = 0
    for matrix, (n, count) in enumerate(zip(rows, counts, strict=True)):
        positions.append(torch.arange(n, device="cpu") + begin * _CHUNK)
        chunks[matrix, :count] = torch.arange(begin, begin + count, device="cpu")
        begin += count
    every_position = torch.cat(positions)
    spread = torch.full((every * _CHUNK,), sum(rows), device="cpu")
    spread[every_position] = torch.arange(sum(rows), device="cpu")
    matrices = torch.arange(len(rows), device="cpu")
    owners = matrices.repeat_interleave(torch.tensor(counts, device="cpu"))
    return _RowChunks(*(tensor.to(device) for tensor in (spread, every_position, owners, chunks)))


def _with_zero(values: Tensor) -> Tensor:
    """Append a column of zeros."""
    return torch.cat([values, values.new_zeros(len(values), 1)], 1)


def _orthonormalized(chunks: Tensor, plan: _RowChunks) -> tuple[Tensor, Tensor]:
    """Make one pass over the chunks of all matrices, shape (r, K, _CHUNK), float64."""
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
    """Return the inverse of R of b matrices, from R^T R: `gram[j][i]` is the entry (i, j).

    Column by column, with zeros in a column that is only rounding; and flags of those.
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
        lost = ~(square > _LOST * entries[j])  # True for NaN as well
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
