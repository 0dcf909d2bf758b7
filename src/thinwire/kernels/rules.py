"""Arguments of calls over many tensors: a fold, and the constants of a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Tensors = Sequence[Tensor]
Sparse = tuple[Tensor, Tensor]
"""Positions, int64, and values."""
Largest = tuple[Tensor, Tensor, bool | Tensor]
"""Those of the entries of largest magnitude, and True if all numbers are finite."""


class Fold(NamedTuple):
    """One tensor's gradient with residual and momentum; see `core.feedback`."""

    grad: Tensor
    residual: Tensor
    momentum_buffer: Tensor | None
    momentum: float
    nesterov: bool


@dataclass(frozen=True, slots=True)
class TrustRule:
    """Constants of a trust ratio.

    >>> TrustRule(coefficient=0.001, weight_decay=1e-4).high
    inf
    """

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
    """Constants of one LAMB update."""

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
        """1/(1 - b1^t) and 1/(1 - b2^t): correction of the moments for their start at zero."""
        return 1 / (1 - self.beta1**self.step), 1 / (1 - self.beta2**self.step)


@dataclass(frozen=True, slots=True)
class LarsRule:
    """Constants of one LARS update."""

    lr: float
    """Learning rate."""
    momentum: float
    """>= 0."""
    nesterov: bool
    """True to look one step ahead."""
    trust: TrustRule
    """Constants of the trust ratio, with the weight decay wd; without wd the ratio is 1."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """SGD with momentum; the defaults are plain averaging.

    >>> OuterRule().plain, OuterRule(lr=0.7, momentum=0.9, nesterov=True).plain
    (True, False)
    """

    lr: float = 1.0
    """Unitless, at least 0; 1 goes all the way to the mean."""
    momentum: float = 0.0
    """Momentum, in [0, 1)."""
    nesterov: bool = False
    """True to look ahead; needs momentum."""

    @property
    def plain(self) -> bool:
        """True if anchors become the mean."""
        return self.lr == 1 and not self.momentum

    def gain(self, times: int) -> float:
        """Return the distance that anchors move, in multiples of the sum of the changes.

        It holds for `times` averagings whose changes have one size. The distance is lr (1 - m (1 -
        m^T) / (T (1 - m))) / (1 - m) for a momentum m and T averagings, whether changes are equal
        or uncorrelated; with Nesterov lr + m times that.
        """
        m = self.momentum
        if not m or not times:
            return self.lr if times else 1.0
        summed = (1 - m * (1 - m**times) / (times * (1 - m))) / (1 - m)
        return self.lr * (1 + m * summed if self.nesterov else summed)
