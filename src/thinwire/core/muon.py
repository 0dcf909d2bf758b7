"""Muon's update of a matrix: the momentum with all singular values moved close to 1."""

from collections.abc import Sequence
from math import log, prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.arithmetic import products_are_exact
from thinwire.core.norms import into_range

_LARGEST_NOISE = 0.01
"""Allowed rounding error of an eigenvalue of X Xᵀ, relative to 1."""


class MuonRule(NamedTuple):
    """The constants of an update."""

    weight_decay: float
    """Decoupled, >= 0."""
    momentum: float
    """>= 0: factor of the old buffer; the gradient has the factor 1 - momentum."""
    nesterov: bool
    coefficients: tuple[float, float, float]
    """a, b and c of X <- (a + b X Xᵀ + c (X Xᵀ)²) X."""
    iterations: int
    eps: float
    """Lower limit of the Frobenius norm that is divided by."""
    match_rms_adamw: bool
    """True: the rate is multiplied by 0.2 sqrt(max(rows, columns)). False: by sqrt(rows / columns)
    if there are more rows than columns.
    """
    dtype: torch.dtype
    """Type of the iteration."""


@torch.no_grad()
def muon_(param: Tensor, grad: Tensor, momentum_buffer: Tensor, lr: float, rule: MuonRule) -> None:
    """Update a matrix and its momentum buffer in place.

    Args:
        param: Shape (rows, columns), real; a kernel of more dimensions is a matrix (rows, rest).
        grad: The same shape, not sparse.
        momentum_buffer: The same shape, zeros before the first update.
        lr: >= 0.
        rule: The constants.

    Source: Jordan et al., 2024, kellerjordan.github.io/posts/muon; the rate that matches AdamW's:
    Liu et al., 2025, arXiv 2502.16982. Differs: without Nesterov, torch.optim.Muon normalises the
    buffer itself where that is bfloat16.
    """
    update = newton_schulz(direction(grad, momentum_buffer, rule).flatten(1), rule)
    descend_(param, grad, momentum_buffer, update.reshape(param.shape), param.shape, lr, rule)


@torch.no_grad()
def direction(grad: Tensor, momentum_buffer: Tensor, rule: MuonRule) -> Tensor:
    """Return the matrix to orthogonalise, or this part of it. Nothing changes."""
    moved = momentum_buffer.lerp(grad, 1 - rule.momentum)
    return grad.lerp(moved, rule.momentum) if rule.nesterov else moved


@torch.no_grad()
def descend_(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    update: Tensor,
    shape: Sequence[int],
    lr: float,
    rule: MuonRule,
) -> None:
    """Update a matrix and its buffer, or this part of them; `shape` is the whole matrix's."""
    momentum_buffer.lerp_(grad, 1 - rule.momentum)
    rows, columns = shape[0], prod(shape[1:])
    if rule.match_rms_adamw:
        factor = 0.2 * sqrt(max(rows, columns))
    else:
        factor = sqrt(max(1, rows / max(1, columns)))
    param.mul_(1 - lr * rule.weight_decay)
    param.add_(update, alpha=-lr * factor)


def products(shape: Sequence[int]) -> int:
    """Return the multiplications of one product in orthogonalising a matrix of this shape.

    >>> products((4, 8))
    128
    """
    rows, columns = shape[0], prod(shape[1:])
    return rows * columns * min(rows, columns)


def newton_schulz(matrix: Tensor, rule: MuonRule) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` and singular values close to 1.

    Args:
        matrix: Shape (m, n); not changed.
        rule: Coefficients, iterations, eps and dtype.

    Returns:
        Shape (m, n) and the rule's dtype; zeros if `matrix` is zero and eps is not.

    Source: as `muon_`; by X Xᵀ alone: Gram Newton-Schulz, tridao.me/blog/2026/gram-newton-schulz.

    >>> rule = MuonRule(0.0, 0.95, True, (1.5, -0.5, 0.0), 10, 1e-7, True, torch.float32)
    >>> newton_schulz(torch.diag(torch.tensor([3.0, 1.0])), rule).round(decimals=2)
    tensor([[1., 0.],
            [0., 1.]])
    """
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(rule.dtype)
    x = x.T if tall else x
    x = x * into_range(x.norm())
    x = x / x.norm().clamp(min=rule.eps)
    # with more columns than that it needs fewer multiplications; in less than float32 its
    # errors would grow
    by_gram = 2 * x.size(1) > 3 * x.size(0) and products_are_exact(x)
    left = rule.iterations
    with torch.autocast(x.device.type, enabled=False):  # the user's autocast would change the type
        while left:
            done = min(left, _iterations_of_a_gram(rule)) if by_gram else 1
            x = _iterated_by_gram(x, done, rule) if by_gram else _iterated(x, rule)
            left -= done
    return x.T if tall else x


def _iterated(x: Tensor, rule: MuonRule) -> Tensor:
    a, b, c = rule.coefficients
    gram = x @ x.T
    return torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


def _iterated_by_gram(x: Tensor, iterations: int, rule: MuonRule) -> Tensor:
    """Compute several iterations as polynomials in X Xᵀ, which commute: x is multiplied once."""
    a, b, c = rule.coefficients
    gram = x @ x.T
    product = None
    for i in range(iterations):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        if i + 1 < iterations:
            gram = factor @ (gram @ factor)
    return x if product is None else product @ x


def _iterations_of_a_gram(rule: MuonRule) -> int:
    """Return the number of iterations after which X Xᵀ must be computed again."""
    # rounding makes zero eigenvalues negative: times a² each iteration, they would pass -1
    growth = abs(rule.coefficients[0])
    noise = torch.finfo(rule.dtype).eps
    return 1 + int(log(_LARGEST_NOISE / noise) / (2 * log(growth))) if growth > 1 else 1
