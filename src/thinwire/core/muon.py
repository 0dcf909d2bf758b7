"""Muon's update of a matrix: the momentum with all singular values moved close to 1."""

from collections.abc import Sequence
from math import log, prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.arithmetic import products_are_exact
from thinwire.core.norms import into_range
from thinwire.core.tensors import TensorList

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
def muon_(
    params: TensorList,
    grads: TensorList,
    momentum_buffers: TensorList,
    lr: float,
    rule: MuonRule,
) -> None:
    """Update matrices of one shape and type, and their momentum buffers, in place: as one batch.

    Args:
        params: Shape (rows, columns), real; a kernel of more dimensions is a matrix (rows, rest).
        grads: The same shape, not sparse.
        momentum_buffers: The same shape, zeros before the first update.
        lr: >= 0.
        rule: The constants.

    Source: Jordan et al., 2024, kellerjordan.github.io/posts/muon; the rate that matches AdamW's:
    Liu et al., 2025, arXiv 2502.16982. Differs: without Nesterov, torch.optim.Muon normalises the
    buffer itself where that is bfloat16.
    """
    moved = [matrix.flatten(1) for matrix in direction(grads, momentum_buffers, rule)]
    several = len(moved) > 1
    found = newton_schulz(torch.stack(moved) if several else moved[0], rule)
    if several:
        # for one launch a GPU needs updates of the type and layout of the parameters
        found = found.to(params[0].dtype).contiguous()
    shape = params[0].shape
    updates = found.reshape(len(params), *shape).unbind()
    descend_(params, grads, momentum_buffers, updates, shape, lr, rule)


@torch.no_grad()
def direction(grads: TensorList, momentum_buffers: TensorList, rule: MuonRule) -> TensorList:
    """Return the matrices to orthogonalise, or these parts of them. Nothing changes."""
    moved = torch._foreach_lerp(momentum_buffers, grads, 1 - rule.momentum)
    return torch._foreach_lerp(grads, moved, rule.momentum) if rule.nesterov else moved


@torch.no_grad()
def descend_(
    params: TensorList,
    grads: TensorList,
    momentum_buffers: TensorList,
    updates: TensorList,
    shape: Sequence[int],
    lr: float,
    rule: MuonRule,
) -> None:
    """Update matrices and their buffers, or these parts of them; `shape` is a whole matrix's."""
    torch._foreach_lerp_(momentum_buffers, grads, 1 - rule.momentum)
    rows, columns = shape[0], prod(shape[1:])
    if rule.match_rms_adamw:
        factor = 0.2 * sqrt(max(rows, columns))
    else:
        factor = sqrt(max(1, rows / max(1, columns)))
    # a float would be rounded to bfloat16 first
    decay = torch.tensor(1 - lr * rule.weight_decay, dtype=torch.float64, device="cpu")
    torch._foreach_mul_(params, decay)
    torch._foreach_add_(params, updates, alpha=-lr * factor)


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
        matrix: Shape (m, n), or (b, m, n) for a batch; not changed.
        rule: Coefficients, iterations, eps and dtype.

    Returns:
        The same shape, in the rule's dtype; zeros if `matrix` is zero and eps is not.

    Source: as `muon_`; by X Xᵀ alone: Gram Newton-Schulz, tridao.me/blog/2026/gram-newton-schulz.

    >>> rule = MuonRule(0.0, 0.95, True, (1.5, -0.5, 0.0), 10, 1e-7, True, torch.float32)
    >>> newton_schulz(torch.diag(torch.tensor([3.0, 1.0])), rule).round(decimals=2)
    tensor([[1., 0.],
            [0., 1.]])
    """
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(rule.dtype)
    x = x.mT if tall else x
    x = x * into_range(x.norm(dim=(-2, -1), keepdim=True))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=rule.eps)
    # with more columns than that it needs fewer multiplications; in less than float32 its
    # errors would grow
    by_gram = 2 * x.size(-1) > 3 * x.size(-2) and products_are_exact(x)
    most = _iterations_of_a_gram(rule)
    # of several iterations: polynomials in X Xᵀ commute, so that x is multiplied once
    product = None
    # a batch of one has other bits than a matrix
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    a, b, c = rule.coefficients
    with torch.autocast(x.device.type, enabled=False):  # the user's autocast would change the type
        for i in range(1, rule.iterations + 1):
            if product is None:
                gram = x @ x.mT
            factor = addmm(gram, gram, gram, beta=b, alpha=c)
            if not by_gram:
                x = addmm(x, factor, x, beta=a)
                continue
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            product = factor if product is None else factor @ product
            if i % most and i < rule.iterations:
                gram = factor @ (gram @ factor)
            else:
                x = product @ x
                product = None
    return x.mT if tall else x


def _iterations_of_a_gram(rule: MuonRule) -> int:
    """Return the number of iterations after which X Xᵀ must be computed again."""
    # rounding makes zero eigenvalues negative: times a² each iteration, they would pass -1
    growth = abs(rule.coefficients[0])
    noise = torch.finfo(rule.dtype).eps
    return 1 + int(log(_LARGEST_NOISE / noise) / (2 * log(growth))) if growth > 1 else 1
