"""PowerSGD: a matrix of gradients travels as two thin factors, and what they miss is kept.

Per tensor, seen as a matrix of n rows and m columns (its first dimension and all others), with the
rank's own gradient G, its error E and the factor Q, shape (m, r), that the last update left:

    P = mean over the sources of (G + E) Q        one all-reduce of n r numbers
    P <- its columns, orthonormal                 `orthonormal`, on every rank for itself
    Q = mean over the sources of (G + E)^T P      one all-reduce of m r numbers
    mean = P Q^T,  E <- G + E - P Q^T

P and Q are the same bits on all ranks, and so must be what follows from them. Library routines for
matrices choose their order of additions by processor and number of threads; therefore the columns
are made orthonormal by sums of a fixed order, and the product of thin factors is taken entry by
entry. G Q and the like may differ: they are added up over the ranks anyway.

Source: Vogels et al., 2019, arXiv 1905.13727, algorithms 1 and 2. Differs: any number of tensors
travel together and any number of buckets at once; columns that are no more than rounding are
replaced instead of made longer by an epsilon; for any optimizer, which gets the mean.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.change_protocol import ERRORS, Kept, MeanChange, Rule
from thinwire.compress.dense import by_dtype, joined, parted
from thinwire.compress.protocol import (
    AllReduce,
    Arrived,
    Context,
    OtherRanks,
    Sending,
    Watch,
    zeros_for,
)
from thinwire.compress.words import plural
from thinwire.core.merge import checked_mean_
from thinwire.core.precision import state_dtype
from thinwire.kernels.needs import Need

__all__ = ["LowRank", "LowRankCompressor", "LowRankMeans", "orthonormal"]

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHUNK = 1024
"""Numbers that one thread adds up; sums of a fixed order are made of these."""
_LOST = 1e-12
"""A column whose square is this much smaller, once the others are taken out, is rounding."""


@dataclass(frozen=True)
class LowRank:
    """Each matrix of gradients travels as two factors of few columns (PowerSGD), with error
    feedback.

    Attributes:
        rank: r, columns of a factor, >= 1; a matrix whose smaller side is not above it travels
            densely.
        begin_step: Updates before compression begins, >= 0.
        min_numel: Smaller tensors, and those of fewer than two dimensions, are exchanged densely,
            >= 1.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: Vogels et al., 2019, arXiv 1905.13727.
    """

    rank: int = 2
    begin_step: int = 10
    min_numel: int = 16384

    field: ClassVar[str] = "low_rank"
    """Of a strategy."""
    may_change: ClassVar[tuple[str, ...]] = ("begin_step",)
    """Settings that another run may go on with, from a checkpoint of this one."""
    node_size: ClassVar[None] = None
    """Ranks of one machine average densely and count as one source, as with `DGC`."""

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("begin_step", 0), ("min_numel", 1)):
            value = check.integer(name, getattr(self, name), at_least=least)
            object.__setattr__(self, name, value)

    def compresses(self, param: Tensor) -> bool:
        """Whether this tensor is ever compressed; all others are always exchanged densely."""
        if param.dtype not in _TYPES or param.dim() < 2 or param.numel() < self.min_numel:
            return False
        return self.rank < min(_sides(param))

    def why_dense(self, param: Tensor) -> str | None:
        """Why this tensor is never compressed, in words; None where it is."""
        if self.compresses(param):
            return None
        if param.dim() < 2:
            return "of fewer than two dimensions"
        if param.numel() < self.min_numel:
            return f"below min_numel={self.min_numel}"
        if param.dtype not in _TYPES:
            return f"because of {param.dtype}"
        return f"because rank={self.rank} is not below its smaller side"

    def message_text(self, params: Iterable[Tensor]) -> str:
        """What one source sends of these, in words."""
        numbers = sum(self.numbers_sent(param) for param in params)
        return f"the factors have {numbers:,} numbers, in two rounds"

    def explanation(self) -> str:
        """What becomes of a gradient, in words."""
        begin = (
            f"the first {self.begin_step} {plural('update', self.begin_step)} dense, then "
            if self.begin_step
            else ""
        )
        columns = f"{self.rank} {plural('column', self.rank)}"
        return (
            f"{begin}each gradient of n rows and m columns travels as two factors of {columns}, "
            f"{self.rank} (n + m) numbers in two rounds; what they miss is kept and added to the "
            f"next gradient. Tensors of fewer than two dimensions or below {self.min_numel} "
            "numbers are dense"
        )

    def needs(self, params: Iterable[Tensor]) -> frozenset[Need]:
        """The compiled loops that it calls: none."""
        return frozenset()

    decay: ClassVar[float] = 1.0
    conserves: ClassVar[bool] = True
    kept: ClassVar[Mapping[str, Rule]] = {ERRORS: "mean_zero", "factors": "first"}
    """See `ChangeCompression`, which it is for the changes of local updates, with local steps for
    updates."""

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """See `ChangeCompression`."""
        factor = _drawn(_sides(anchor)[1], self.rank, anchor.numel())
        return {ERRORS: torch.zeros_like(anchor), "factors": factor.to(anchor)}

    def takes(self, step: int, numel: int) -> bool:
        """After `begin_step` local steps."""
        return step > self.begin_step

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """See `ChangeCompression`: two all-reduces per dtype."""

        def product(name: str, factor: Tensor, turned: bool) -> Tensor:
            matrix = folded[name].view(_sides(folded[name]))
            return (matrix.t() if turned else matrix).mm(factor)

        return _send_factors(context, {name: kept["factors"][name] for name in folded}, product)

    def sent_bytes(self, step: int, shapes: Sequence[torch.Size]) -> int:
        """See `ChangeCompression`."""
        return sum(4 * self.rank * (shape[0] + shape[1:].numel()) for shape in shapes)

    def sparsity_at(self, step: int) -> float:
        """Nothing is left out."""
        return 0.0

    def explained(self) -> str:
        """See `ChangeCompression`."""
        return self.explanation().replace("gradient", "change")

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> "LowRankCompressor":
        """See `thinwire.compress.protocol.Compression`."""
        return LowRankCompressor(self, params)

    def sparsity_in_force(self, step: int) -> float:
        """0: no entry is left out."""
        return 0.0

    def numbers_sent(self, param: Tensor) -> int:
        """Of a compressed tensor: r (n + m), in float32, float64 for float64 parameters."""
        return self.rank * sum(_sides(param))


class LowRankCompressor:
    """PowerSGD of the tensors that `LowRank.compresses`, from `begin_step` on.

    **State**: per tensor `residual` E in the shape of the parameter, of this rank or its node, and
    `factor` Q, shape (m, r), the same on all ranks; float32 (float64 for float64 parameters).
    """

    bucket_bytes = 25 * 2**20
    other_ranks: Mapping[str, OtherRanks] = {"residual": "mean_zero", "factor": "first"}

    def __init__(self, config: LowRank, params: Mapping[str, Tensor]) -> None:
        self._config = config
        self._keys = {name: key for key, name in enumerate(params)}
        mine = {name: param for name, param in params.items() if config.compresses(param)}
        self._residuals = {
            name: torch.zeros(param.shape, dtype=state_dtype(param), device=param.device)
            for name, param in mine.items()
        }
        self._factors = {
            name: _drawn(_sides(param)[1], config.rank, self._keys[name]).to(self._residuals[name])
            for name, param in mine.items()
        }

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        """See `Compressor`."""
        return step >= self._config.begin_step and name in self._residuals and not grad.is_sparse

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        """See `Compressor`.

        Communication: two all-reduces per dtype, r n and r m numbers per matrix.
        """

        def product(name: str, factor: Tensor, turned: bool) -> Tensor:
            # (G + E) Q, or (G + E)^T P, without a tensor for the sum
            error = self._residuals[name].view(_sides(grads[name]))
            matrix = grads[name].detach().reshape(error.shape).to(error.dtype)
            if turned:
                matrix, error = matrix.t(), error.t()
            return matrix.mm(factor).addmm_(error, factor)

        return _send_factors(context, {name: self._factors[name] for name in grads}, product)

    def commit_(
        self, grads: Mapping[str, Tensor], arrived: Arrived, watch: Watch | None = None
    ) -> None:
        """See `Compressor`."""
        assert isinstance(arrived, LowRankMeans)
        for name in arrived.names:
            left, right = arrived.factors[name]
            residual = self._residuals[name]
            error = residual.view(left.shape[0], -1)
            error.add_(arrived.node_means.get(name, grads[name]).reshape(error.shape))
            for p, q in zip(_columns(left), _columns(right), strict=True):
                error.addr_(p, q, alpha=-1)
            factor = self._factors[name].copy_(right)
            for column in arrived.lost[name]:  # it would stay zero for ever
                seed = (arrived.context.step + 1 << 24) + self._keys[name]
                factor[:, column] = _drawn(len(factor), self._config.rank, seed)[:, column].to(
                    factor
                )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See `Compressor`."""
        return {"residual": self._residuals, "factor": self._factors}

    def forget(self) -> None:
        """See `Compressor`."""


class LowRankMeans(MeanChange):
    """Means as products of two factors."""

    def __init__(self, context: Context, names: list[str]) -> None:
        super().__init__(context, names)
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        """P, shape (n, r), orthonormal, and Q, shape (m, r)."""
        self.lost: dict[str, list[int]] = {}
        """Columns of P that were no more than rounding, and are zero."""

    def first_bad_sum(self) -> str | None:
        """See `Arrived`."""
        for name, factors in self.factors.items():
            if not all(bool(factor.isfinite().all()) for factor in factors):
                return name
        return None

    def mean(self, name: str, param: Tensor, into: Tensor | None = None) -> Tensor:
        """P Q^T: the same bits on all ranks."""
        left, right = self.factors[name]
        mean = zeros_for(param, left.dtype, into)
        matrix = mean.view(left.shape[0], -1)
        # entry by entry: the order of additions in a product of matrices depends on the processor
        for p, q in zip(_columns(left), _columns(right), strict=True):
            matrix.addr_(p, q)
        return mean

    def settle_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        """See `MeanChange`."""
        mean = self.mean(name, folded)
        torch.sub(folded, mean, out=kept[ERRORS][name])
        factor = kept["factors"][name].copy_(self.factors[name][1])
        for column in self.lost[name]:  # it would stay zero for ever
            seed = (self.context.step << 24) + folded.numel()
            factor[:, column] = _drawn(len(factor), factor.shape[1], seed)[:, column].to(factor)
        return mean


def _send_factors(
    context: Context, factors: Mapping[str, Tensor], product: Callable[[str, Tensor, bool], Tensor]
) -> Sending:
    """The two rounds of several matrices.

    Args:
        context: Of the sending.
        factors: Q by name, shape (m, r), the same on all ranks.
        product: Of this rank's matrix with Q; of its transpose with P, where the third argument is
            true.

    Returns:
        `LowRankMeans`.
    """
    purpose = f"step {context.step}, bucket {context.bucket}"
    groups = by_dtype(factors)
    lefts = {name: product(name, factor, False) for name, factor in factors.items()}
    answers = yield [
        AllReduce(joined(lefts[name] for name in group), f"averaging left factors of {purpose}")
        for group in groups
    ]
    sums = []
    for total, group in zip(answers, groups, strict=True):
        sums.append(checked_mean_(total, context.sources, bits=context.read_sums))
        lefts |= parted(total, {name: lefts[name] for name in group})
    bases = dict(zip(factors, orthonormal([lefts[name] for name in factors]), strict=True))
    rights = {name: product(name, basis, True) for name, (basis, _) in bases.items()}
    answers = yield [
        AllReduce(joined(rights[name] for name in group), f"averaging right factors of {purpose}")
        for group in groups
    ]
    arrived = LowRankMeans(context, list(factors))
    for total, group in zip(answers, groups, strict=True):
        sums.append(checked_mean_(total, context.sources, bits=context.read_sums))
        mine = parted(total, {name: rights[name] for name in group})
        for name, right in mine.items():
            arrived.factors[name] = (bases[name][0], right)
    arrived.lost = {name: lost for name, (_, lost) in bases.items()}
    arrived.sums = sums
    return arrived


def _columns(factor: Tensor) -> tuple[Tensor, ...]:
    """The columns, contiguous, with which products are five times as fast."""
    return factor.t().contiguous().unbind(0)


def _drawn(rows: int, columns: int, seed: int) -> Tensor:
    """A factor to begin with, shape (rows, columns), the same on all ranks and processors."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) - 0.5


def orthonormal(matrices: Iterable[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """The columns of tall matrices made orthonormal from left to right, twice by the Cholesky
    factor of P^T P.

    The same bits from the same bits on every processor with the same vector instructions, whatever
    its number of threads: sums of a fixed order in float64, small matrices in plain numbers.

    Args:
        matrices: Shape (n, r) each, all on one device, r < n.

    Returns:
        Per matrix, of its shape and type, and the columns that depend on those before them: they
        are zero. Two copies to the host for all matrices together.
    """
    given = list(matrices)
    by_shape: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(given):
        by_shape.setdefault(matrix.shape, []).append(place)
    stacks = [
        torch.stack([given[place].double() for place in places]) for places in by_shape.values()
    ]
    # once leaves an error that grows with the square of how nearly dependent columns are
    stacks, first = _orthonormalized(stacks)
    stacks, second = _orthonormalized(stacks)
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for places, stack, before, after in zip(by_shape.values(), stacks, first, second, strict=True):
        for at, place in enumerate(places):
            found[place] = stack[at].to(given[place].dtype), sorted({*before[at], *after[at]})
    return [found[place] for place in range(len(given))]


def _orthonormalized(stacks: list[Tensor]) -> tuple[list[Tensor], list[list[list[int]]]]:
    """One pass over stacks of matrices, shape (b, n, r), float64; and the columns of each that are
    lost.
    """
    if not stacks:
        return [], []
    numbers = torch.cat([_grams(stack).reshape(-1) for stack in stacks]).tolist()
    found, all_lost = [], []
    for stack in stacks:
        count, _, r = stack.shape
        inverses, lost = [], []
        for _ in range(count):
            inverse, its_lost = _inverse_of_factor([numbers[r * i : r * (i + 1)] for i in range(r)])
            numbers = numbers[r * r :]
            inverses.append(inverse)
            lost.append(its_lost)
        factors = torch.tensor(inverses, dtype=stack.dtype, device=stack.device).unsqueeze(2)
        columns = []
        for j in range(r):
            column = stack[:, :, 0] * factors[:, 0, :, j]
            for i in range(1, j + 1):
                column = column + stack[:, :, i] * factors[:, i, :, j]
            columns.append(column)
        found.append(torch.stack(columns, dim=2))
        all_lost.append(lost)
    return found, all_lost


def _grams(stack: Tensor) -> Tensor:
    """P^T P of each matrix in float64, its upper half; chunks are added up each by one thread."""
    count, n, r = stack.shape
    rows = stack.new_zeros(count, -(-n // _CHUNK) * _CHUNK, r)
    rows[:, :n] = stack
    grams = stack.new_zeros(count, r, r)
    for j in range(r):
        products = (rows[:, :, : j + 1] * rows[:, :, j : j + 1]).transpose(1, 2)
        grams[:, : j + 1, j] = products.reshape(count, j + 1, -1, _CHUNK).sum(3).sum(2)
    return grams


def _inverse_of_factor(gram: list[list[float]]) -> tuple[list[list[float]], list[int]]:
    """The inverse of R, where R^T R is the matrix whose upper half is given; and columns that are
    lost.
    """
    r = len(gram)
    upper = [[0.0] * r for _ in range(r)]
    inverse = [[0.0] * r for _ in range(r)]
    lost = []
    for j in range(r):
        for i in range(j):
            rest = math.fsum([gram[i][j], *(-upper[k][i] * upper[k][j] for k in range(i))])
            upper[i][j] = rest / upper[i][i] if upper[i][i] else 0.0
        square = math.fsum([gram[j][j], *(-upper[k][j] * upper[k][j] for k in range(j))])
        if not square > _LOST * gram[j][j]:  # nor where it is not a number
            lost.append(j)
            continue
        upper[j][j] = math.sqrt(square)
        inverse[j][j] = 1.0 / upper[j][j]
        for i in range(j):
            total = math.fsum(inverse[i][k] * upper[k][j] for k in range(i, j))
            inverse[i][j] = -inverse[j][j] * total
    return inverse, lost


def _sides(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is seen as."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // max(1, rows)
