"""PowerSGD: a matrix of gradients travels as two thin factors, and what they miss is kept.

Per tensor, seen as a matrix of n rows and m columns (its first dimension and all others), with the
rank's own gradient G, its error E and the factor Q, shape (m, r), that the last update left:

    P = mean over the sources of (G + E) Q        one all-reduce of n r numbers
    P <- its columns, orthonormal                 `orthonormal`, on every rank for itself
    Q = mean over the sources of (G + E)^T P      one all-reduce of m r numbers
    mean = P Q^T,  E <- G + E - P Q^T

P and Q are held as P^T and Q^T. They are the same bits on all ranks, and so must be what follows
from them. Library routines for matrices choose their order of additions by processor and number of
threads; therefore the columns are made orthonormal by sums of a fixed order, and the product of
thin factors is taken entry by entry. G Q and the like may differ: they are added up over the ranks
anyway.

Source: Vogels et al., 2019, arXiv 1905.13727, algorithms 1 and 2. Differs: any number of tensors
travel together and any number of buckets at once; columns that are no more than rounding are
replaced instead of made longer by an epsilon; for any optimizer, which gets the mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.dense import by_dtype
from thinwire.compress.protocol import (
    ERRORS,
    AllReduce,
    Arrived,
    Context,
    Kept,
    MeanChange,
    Sending,
    place_for,
)
from thinwire.core.arithmetic import products_are_exact
from thinwire.core.checksum import checked_mean_
from thinwire.core.orthonormal import orthonormal
from thinwire.core.precision import state_dtype

__all__ = ["LowRank", "LowRankCompressor", "LowRankMeans"]

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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

    node_size: ClassVar[None] = None
    """Ranks of one machine average densely and count as one source."""

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("begin_step", 0), ("min_numel", 1)):
            value = check.integer(name, getattr(self, name), at_least=least)
            object.__setattr__(self, name, value)

    def compresses(self, param: Tensor) -> bool:
        """Whether this tensor is ever compressed; all others are always exchanged densely."""
        if param.dtype not in _TYPES or param.dim() < 2 or param.numel() < self.min_numel:
            return False
        return self.rank < min(_sides(param))

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        """See `ChangeCompression`."""
        factor = _drawn(self.rank, _sides(anchor)[1], anchor.numel())
        return {ERRORS: torch.zeros_like(anchor), "factors": factor.to(anchor)}

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """See `ChangeCompression`: two all-reduces per dtype."""
        parts = {name: [change.view(_sides(change))] for name, change in folded.items()}
        return _send_factors(context, {name: kept["factors"][name] for name in folded}, parts)

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> "LowRankCompressor":
        """See `Compression`."""
        return LowRankCompressor(self, params)


class LowRankCompressor:
    """PowerSGD of the tensors that `LowRank.compresses`, from `begin_step` on.

    **State**: per tensor `residual` E in the shape of the parameter, of this rank or its node, and
    `factor` Q^T, shape (r, m), the same on all ranks; float32 (float64 for float64 parameters).
    """

    def __init__(self, config: LowRank, params: Mapping[str, Tensor]) -> None:
        self._config = config
        self._keys = {name: key for key, name in enumerate(params)}
        mine = {name: param for name, param in params.items() if config.compresses(param)}
        self._residuals = {
            name: torch.zeros(param.shape, dtype=state_dtype(param), device=param.device)
            for name, param in mine.items()
        }
        self._errors = {name: each.view(_sides(each)) for name, each in self._residuals.items()}
        self._factors = {
            name: _drawn(config.rank, error.shape[1], self._keys[name]).to(error)
            for name, error in self._errors.items()
        }

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        """See `Compressor`."""
        return step >= self._config.begin_step and name in self._residuals and not grad.is_sparse

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        """See `Compressor`.

        Communication: two all-reduces per dtype, r n and r m numbers per matrix.
        """
        # (G + E) Q, or (G + E)^T P, without a tensor for the sum
        parts = {name: (self._matrix(name, g), self._errors[name]) for name, g in grads.items()}
        return _send_factors(context, {name: self._factors[name] for name in grads}, parts)

    def commit_(self, grads: Mapping[str, Tensor], arrived: Arrived) -> None:
        """See `Compressor`."""
        assert isinstance(arrived, LowRankMeans)
        for name in (name for name in arrived.names if name in grads):
            left, right = arrived.factors[name]
            error = self._errors[name]
            error.add_(self._matrix(name, arrived.node_means.get(name, grads[name])))
            if products_are_exact(error):
                error.addmm_(left.t(), right, alpha=-1)
            else:  # entry by entry, as what is applied: else a part of the gradient would be lost
                for column, row in zip(left, right, strict=True):
                    error.addr_(column, row, alpha=-1)
            factor = self._factors[name].copy_(right)
            if columns := arrived.lost.get(name):
                _draw_anew_(factor, columns, (arrived.context.step + 1 << 24) + self._keys[name])

    def _matrix(self, name: str, grad: Tensor) -> Tensor:
        error = self._errors[name]
        return grad.detach().reshape(error.shape).to(error.dtype)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See `Compressor`."""
        return {"residual": self._residuals, "factor": self._factors}


class LowRankMeans(MeanChange):
    """Means as products of two factors."""

    def __init__(self, context: Context, names: list[str]) -> None:
        super().__init__(context, names)
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        """P^T, shape (r, n), its rows orthonormal, and Q^T, shape (r, m)."""
        self.found_lost: list[tuple[list[str], Tensor]] = []
        """Names of several matrices, b, and which columns of their P were no more than rounding,
        and are zero: bool, shape (r, b)."""

    @cached_property
    def lost(self) -> dict[str, list[int]]:
        """These columns by name, without matrices that have none; one host read per dtype."""
        return {
            name: [column for column, gone in enumerate(each) if gone]
            for names, lost in self.found_lost
            for name, each in zip(names, lost.t().tolist(), strict=True)
            if any(each)
        }

    def first_bad_sum(self) -> str | None:
        """See `Arrived`."""
        for name, factors in self.factors.items():
            if not all(bool(factor.isfinite().all()) for factor in factors):
                return name
        return None

    def mean(self, name: str, param: Tensor, into: Tensor | None = None) -> Tensor:
        """P Q^T: the same bits on all ranks."""
        left, right = self.factors[name]
        mean = place_for(param, left.dtype, into)
        matrix = mean.view(left.shape[1], -1)
        # entry by entry: the order of additions in a product of matrices depends on the processor
        first, *others = zip(left.unsqueeze(2).unbind(0), right.unbind(0), strict=True)
        torch.mul(*first, out=matrix)
        for column, row in others:
            matrix += column * row
        return mean

    def take_mean_(self, name: str, folded: Tensor, kept: Kept) -> Tensor:
        """See `MeanChange`."""
        mean = self.mean(name, folded)
        torch.sub(folded, mean, out=kept[ERRORS][name])
        factor = kept["factors"][name].copy_(self.factors[name][1])
        if columns := self.lost.get(name):
            _draw_anew_(factor, columns, (self.context.step << 24) + folded.numel())
        return mean


def _send_factors(
    context: Context, factors: Mapping[str, Tensor], parts: Mapping[str, Sequence[Tensor]]
) -> Sending:
    """The two rounds of several matrices.

    Args:
        context: Of the sending.
        factors: Q^T by name, shape (r, m), the same on all ranks.
        parts: What this rank's matrix is the sum of, shape (n, m) each.

    Returns:
        `LowRankMeans`.
    """
    purpose = f"step {context.step}, bucket {context.bucket}"
    groups = [list(group) for group in by_dtype(factors)]
    lefts = [_products(names, [factors[name] for name in names], parts) for names in groups]
    answers = yield [
        AllReduce(left.view(-1), f"averaging left factors of {purpose}") for left in lefts
    ]
    arrived, sums, bases, rights = LowRankMeans(context, list(factors)), [], [], []
    for names, left, total in zip(groups, lefts, answers, strict=True):
        sums.append(checked_mean_(total, context.sources, bits=context.read_sums))
        rows = [parts[name][0].shape[0] for name in names]
        basis, lost = orthonormal(total.view(left.shape), rows)
        arrived.found_lost.append((names, lost))
        bases.append(torch.split(basis, rows, 1))
        rights.append(_products(names, bases[-1], parts, turned=True))
    answers = yield [
        AllReduce(right.view(-1), f"averaging right factors of {purpose}") for right in rights
    ]
    for names, ours, right, total in zip(groups, bases, rights, answers, strict=True):
        sums.append(checked_mean_(total, context.sources, bits=context.read_sums))
        columns = [parts[name][0].shape[1] for name in names]
        means = torch.split(total.view(right.shape), columns, 1)
        arrived.factors |= dict(zip(names, zip(ours, means, strict=True), strict=True))
    arrived.sums = sums
    return arrived


def _products(
    names: Sequence[str],
    factors: Sequence[Tensor],
    parts: Mapping[str, Sequence[Tensor]],
    *,
    turned: bool = False,
) -> Tensor:
    """(G Q)^T, shape (r, n), of several matrices beside each other; `turned`: P^T G, shape (r, m).

    With columns as contiguous rows, products of few columns are four times as fast.
    """
    lengths = [parts[name][0].shape[1 if turned else 0] for name in names]
    found = factors[0].new_empty(len(factors[0]), sum(lengths))
    for name, factor, product in zip(names, factors, torch.split(found, lengths, 1), strict=True):
        matrices = [part if turned else part.t() for part in parts[name]]
        torch.mm(factor, matrices[0], out=product)
        for matrix in matrices[1:]:
            product.addmm_(factor, matrix)
    return found


def _draw_anew_(factor: Tensor, columns: Sequence[int], seed: int) -> None:
    """Replaces columns of a factor that would stay zero for ever."""
    drawn = _drawn(factor.shape[0], factor.shape[1], seed)
    for column in columns:
        factor[column] = drawn[column].to(factor)


def _drawn(columns: int, rows: int, seed: int) -> Tensor:
    """A factor to begin with, shape (columns, rows), the same on all ranks and processors."""
    source = torch.Generator().manual_seed(seed)
    drawn = torch.rand(columns, rows, generator=source, dtype=torch.float32, device="cpu")
    return drawn - 0.5


def _sides(tensor: Tensor) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is seen as."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // max(1, rows)
