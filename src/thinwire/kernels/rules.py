"""What calls over many tensors take: of each tensor, and the constants of a step."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["Fold", "LambRule", "LarsRule", "OuterRule", "TrustRule"]


class Fold(NamedTuple):
    """One tensor's gradient, and what it is folded into; see `thinwire.core.feedback` for shapes
    and types.
    """

    grad: Tensor
    residual: Tensor
    momentum_buffer: Tensor | None
    momentum: float
    nesterov: bool


@dataclass(frozen=True, slots=True)
class TrustRule:
    """The constants of a trust ratio."""

    coefficient: float = 1.0
    """Unitless, larger takes longer steps."""
    weight_decay: float = 0.0
    """Adds its share of the parameter's norm to the denominator."""
    eps: float = 0.0
    """Added to the denominator, in the update's unit."""
    low: float = 0.0
    """Smallest ratio."""
    high: float = math.inf
    """Largest ratio."""


@dataclass(frozen=True, slots=True)
class LambRule:
    """The constants of one update."""

    lr: float
    """Learning rate."""
    beta1: float
    """Decay of the first moment, in [0, 1)."""
    beta2: float
    """Decay of the second moment, in [0, 1)."""
    eps: float
    """Added to the root of the second moment, > 0."""
    weight_decay: float
    """wd, >= 0."""
    step: int
    """t, from 1."""
    trust: TrustRule
    """Limits of the trust ratio."""

    @property
    def corrections(self) -> tuple[float, float]:
        """1/(1 - b1^t) and 1/(1 - b2^t): what takes the start at zero out of the moments."""
        return 1 / (1 - self.beta1**self.step), 1 / (1 - self.beta2**self.step)


@dataclass(frozen=True, slots=True)
class LarsRule:
    """The constants of one update."""

    lr: float
    """Learning rate."""
    momentum: float
    """>= 0."""
    nesterov: bool
    """Look one step ahead."""
    trust: TrustRule
    """Constants of the trust ratio, with the weight decay wd; without wd the ratio is 1."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """SGD with momentum; the defaults are plain averaging."""

    lr: float = 1.0
    """Unitless, at least 0; 1 goes all the way to the mean."""
    momentum: float = 0.0
    """In [0, 1)."""
    nesterov: bool = False
    """Whether to look ahead; needs momentum."""

    @property
    def plain(self) -> bool:
        """Whether anchors become the mean."""
        return self.lr == 1 and not self.momentum

    def gain(self, times: int) -> float:
        """How far the anchors have moved, in multiples of the sum of the changes, after so many
        averagings whose changes have one size.

        lr (1 - m (1 - m^T) / (T (1 - m))) / (1 - m) for a momentum m and T averagings, whether
        changes repeat each other or have nothing in common; with Nesterov lr + m times that.
        """
        m = self.momentum
        if not m or not times:
            return self.lr if times else 1.0
        summed = (1 - m * (1 - m**times) / (times * (1 - m))) / (1 - m)
        return self.lr * (1 + m * summed if self.nesterov else summed)
