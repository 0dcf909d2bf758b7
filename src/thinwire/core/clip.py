"""Clipping of gradients: three configs and one pure function.

Sources: Pascanu, Mikolov and Bengio, 2013, arXiv 1211.5063 (norms); Paddle, fluid/clip.py (names).
Differs: no flag per parameter; a gradient that is not finite stays so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.norms import global_norm, norms
from thinwire.core.rows import values_of, with_values

__all__ = ["Clip", "ClipByGlobalNorm", "ClipByNorm", "ClipByValue", "clipped", "scaled"]


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """Scale all gradients of an optimizer by c / max(G, c), where G is the norm of all of them
    together.

    Attributes:
        c: Largest norm allowed, in the gradients' unit, > 0.
    """

    c: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "c", check.real("c", self.c, above=0))


@dataclass(frozen=True)
class ClipByNorm:
    """Scale each gradient whose norm exceeds c to the norm c.

    Attributes:
        c: Largest norm allowed, in the gradient's unit, > 0.
    """

    c: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "c", check.real("c", self.c, above=0))


@dataclass(frozen=True)
class ClipByValue:
    """Limit each entry to [min, max].

    Attributes:
        max: Largest value allowed, in the gradient's unit.
        min: Smallest value allowed, at most `max`; -max where it is not given.
    """

    max: float
    min: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max", check.real("max", self.max))
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
    """New gradients within the bounds of `clip`; those that are given stay as they are.

    Args:
        clip: Which of the three.
        grads: All gradients of one update, dense or coalesced sparse; sharded ones count with their
            whole norm.

    Returns:
        Tensors of the same shapes, dtypes, layouts and devices; no host synchronization. A tensor
        with an entry that is not finite keeps such an entry.
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
    """A new tensor, values times a factor of shape (), rounded once."""
    # in half precision the factor itself could round to zero
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) * factor.to(values.device, wide)).to(values.dtype)


def _limited(values: Tensor, clip: ClipByValue) -> Tensor:
    # clamp would turn an infinity into a large step that looks harmless
    return torch.where(values.isfinite(), values.clamp(clip.min, clip.max), values)
