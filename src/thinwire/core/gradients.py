"""Transforms of gradients before an update: clipping, decay, centralization.

Sources: Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063 (norms); Paddle, fluid/clip.py and
regularizer.py (names). Differs: no flag per parameter; a gradient that is not finite stays so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.norms import global_norm, norms
from thinwire.core.tensors import entries_of, values_of, with_values


@dataclass(frozen=True)
class _Limit:
    c: float

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "c", above=0)


@check.by_name
class ClipByGlobalNorm(_Limit):
    """Scale all gradients of an optimizer by c / max(G, c).

    G is the norm of all gradients together.

    Attributes:
        c: Largest norm allowed, in the gradients' unit, > 0.

    >>> clipped(ClipByGlobalNorm(1.0), [torch.tensor([3.0]), torch.tensor([4.0])])
    [tensor([0.6000]), tensor([0.8000])]
    """


@check.by_name
class ClipByNorm(_Limit):
    """Scale each gradient whose norm exceeds c to the norm c.

    Attributes:
        c: Largest norm allowed, in the gradient's unit, > 0.

    >>> clipped(ClipByNorm(1.0), [torch.tensor([3.0, 4.0]), torch.tensor([0.5])])
    [tensor([0.6000, 0.8000]), tensor([0.5000])]
    """


@check.by_name
@dataclass(frozen=True)
class ClipByValue:
    """Limit each entry to [min, max].

    Attributes:
        max: Largest value allowed, in the gradient's unit.
        min: Smallest value allowed, at most `max`; -max if it is not given.

    >>> clipped(ClipByValue(1.0), [torch.tensor([-3.0, 0.5])])
    [tensor([-1.0000,  0.5000])]
    """

    max: float
    min: float | None = None

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "max")
        low = -self.max if self.min is None else check.real("min", self.min)
        if low > self.max:
            hint = (
                " (min defaults to -max; give both for a range that is not around 0)"
                if self.min is None
                else ""
            )
            raise ValueError(f"min must be at most max, got min={low} and max={self.max}{hint}")
        object.__setattr__(self, "min", low)


Clip = ClipByGlobalNorm | ClipByNorm | ClipByValue


def clipped(clip: Clip, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return new gradients within the bounds of `clip`; the inputs do not change.

    `grads` are all gradients of one update, dense or coalesced sparse; sharded ones count with
    their whole norm. No host synchronization. A gradient with an entry that is not finite keeps
    such an entry.
    """
    if not grads:
        return []
    if isinstance(clip, ClipByValue):
        return [with_values(grad, _limited(values_of(grad), clip)) for grad in grads]
    together = isinstance(clip, ClipByGlobalNorm)
    sizes = [global_norm(grads)] * len(grads) if together else norms(grads)
    # c / max(norm, c) is exactly 1 below the limit, where the product changes no bit
    factors = [clip.c / size.clamp(min=clip.c) for size in sizes]
    return [
        with_values(grad, scaled(values_of(grad), factor))
        for grad, factor in zip(grads, factors, strict=True)
    ]


def scaled(values: Tensor, factor: Tensor) -> Tensor:
    """Return a new tensor: values times a factor of shape (), rounded once."""
    # in half precision the factor itself could round to zero
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) * factor.to(values.device, wide)).to(values.dtype)


def _limited(values: Tensor, clip: ClipByValue) -> Tensor:
    # clamp would turn an infinity into a large step that looks harmless
    return torch.where(values.isfinite(), values.clamp(clip.min, clip.max), values)


@dataclass(frozen=True)
class _Coefficient:
    c: float

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "c", at_least=0)


@check.by_name
class L1Decay(_Coefficient):
    """Adds c * sign(p) to the gradient, with sign(0) = 0.

    Attributes:
        c: Coefficient, >= 0, in the gradient's unit.

    >>> decayed(torch.zeros(2), torch.tensor([2.0, -3.0]), regularizer=L1Decay(0.5))
    tensor([ 0.5000, -0.5000])
    """


@check.by_name
class L2Decay(_Coefficient):
    """Adds c * p to the gradient.

    Attributes:
        c: Coefficient, >= 0, in the gradient's unit per unit of the parameter.

    >>> decayed(torch.zeros(2), torch.tensor([2.0, -3.0]), regularizer=L2Decay(0.5))
    tensor([ 1.0000, -1.5000])
    """


Regularizer = L1Decay | L2Decay


def decayed(
    grad: Tensor,
    param: Tensor,
    *,
    weight_decay: float = 0.0,
    regularizer: Regularizer | None = None,
) -> Tensor:
    """Return the gradient with decay and regularizer: g + wd * p, then + c * p or + c * sign(p).

    Args:
        grad: Any shape, dense or coalesced sparse; read only.
        param: Same shape, read only; converted to the gradient's dtype. With a sparse gradient only
            the stored entries take part.
        weight_decay: wd, >= 0; 0 is off.
        regularizer: Added on top of wd; None is off.

    Returns:
        A new tensor like `grad`, or `grad` itself if there is nothing to add.

    >>> decayed(torch.ones(2), torch.tensor([2.0, -2.0]), weight_decay=0.5)
    tensor([2., 0.])
    """
    strength = regularizer.c if regularizer is not None else 0.0
    if weight_decay == 0 and strength == 0:
        return grad
    present = entries_of(param, grad).to(grad.dtype)
    values = values_of(grad)
    if weight_decay != 0:
        values = values.add(present, alpha=weight_decay)
    if strength != 0:
        values = values.add(
            present.sgn() if isinstance(regularizer, L1Decay) else present, alpha=strength
        )
    return with_values(grad, values)


def centralized(grad: Tensor) -> Tensor:
    """Return the gradient minus its mean over all axes but the first.

    Args:
        grad: Dense, or coalesced and row-sparse. Of a row-sparse gradient the rows present are
            centred. Read only.

    Returns:
        A new tensor like `grad`; `grad` itself if it has fewer than two dimensions.

    Raises:
        RuntimeError: A sparse gradient with more than one sparse dimension.

    >>> centralized(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]])

    Source: Yong et al., 2020, arXiv 2004.01461, equation 1. Differs: MindSpore's acts only where
    shape[1] is a multiple of 16; there is no such rule here.
    """
    if grad.ndim < 2:
        return grad
    if grad.layout is torch.sparse_coo and grad.sparse_dim() != 1:
        raise RuntimeError(
            "grad_centralization needs a dense gradient or one with sparse_dim 1, got sparse_dim "
            f"{grad.sparse_dim()}; set grad_centralization to False for this group"
        )
    values = values_of(grad)
    return with_values(grad, values - values.mean(dim=tuple(range(1, values.ndim)), keepdim=True))
