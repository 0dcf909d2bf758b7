"""Loss scaling: two configs, and the rule that adapts the scale to overflows.

A loss is multiplied by the scale before the backward pass, so that small gradients do not underflow
in a narrow type. The gradients are divided by it before any other use. A gradient that is not
finite is an overflow.

Sources: Micikevicius et al., 2018, arXiv 1710.03740, section 3.2; MindSpore,
train/loss_scale_manager.py (names). Differs: a factor of at most 1 is refused; the scale never
falls below 1 nor leaves float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.tensors import coalesced, values_of
from thinwire.errors import NonFinite

_LARGEST = float(torch.finfo(torch.float32).max)
_MOST_OVERFLOWS_IN_A_ROW = 1000


@check.by_name
@dataclass(frozen=True)
class FixedLossScale:
    """A loss scale that never changes.

    Attributes:
        loss_scale: Factor of the loss, >= 1.
        drop_overflow_update: Drop a step whose gradients overflowed; False applies it unchecked.

    >>> initial_scale(FixedLossScale(128.0)).scale
    128.0
    """

    loss_scale: float = 128.0
    drop_overflow_update: bool = True

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "loss_scale", at_least=1, at_most=_LARGEST)
        check.boolean("drop_overflow_update", self.drop_overflow_update)


@check.by_name
@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that falls at an overflow and grows after enough good updates.

    Attributes:
        init_loss_scale: Factor of the loss at the start, >= 1.
        scale_factor: Divisor at an overflow and factor of growth, > 1.
        scale_window: Good updates in a row after which the scale grows, an int >= 1.

    >>> config = DynamicLossScale(init_loss_scale=1024.0, scale_factor=2.0)
    >>> next_scale(config, initial_scale(config), overflow=True).scale
    512.0
    """

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2.0
    scale_window: int = 2000

    def __post_init__(self) -> None:
        check.set_fields(self, check.real, "init_loss_scale", at_least=1, at_most=_LARGEST)
        check.set_fields(self, check.real, "scale_factor", above=1)
        check.set_fields(self, check.integer, "scale_window", at_least=1)


LossScale = FixedLossScale | DynamicLossScale


@dataclass(frozen=True)
class ScaleState:
    """State of the rule between two steps."""

    scale: float
    """Factor of the next loss."""
    good_updates: int = 0
    """Updates since the last overflow or change of the scale."""
    overflows_in_a_row: int = 0
    """Steps dropped since the last good update."""
    dropped_steps: int = 0
    """Steps dropped in all."""


def initial_scale(config: LossScale) -> ScaleState:
    """Return the state before the first step."""
    if isinstance(config, FixedLossScale):
        return ScaleState(config.loss_scale)
    return ScaleState(config.init_loss_scale)


def next_scale(config: LossScale, state: ScaleState, *, overflow: bool) -> ScaleState:
    """Return the state after a step; `NonFinite` after more than 1000 overflows in a row.

    Overflow: scale <- max(scale/factor, 1), and the count of good updates restarts. Good update:
    count + 1. When the count reaches the window, scale <- scale * factor, unless float32 cannot
    hold that, and the count restarts. A fixed scale only counts.
    """
    if overflow:
        in_a_row = state.overflows_in_a_row + 1
        if in_a_row > _MOST_OVERFLOWS_IN_A_ROW:
            raise NonFinite(
                f"{in_a_row} steps in a row were dropped for gradients that are not finite, at a "
                f"loss scale of {state.scale:g}; the model itself produces infinities or NaN: "
                "lower the learning rate, or find the first such value"
            )
        factor = config.scale_factor if isinstance(config, DynamicLossScale) else 1.0
        return ScaleState(max(state.scale / factor, 1.0), 0, in_a_row, state.dropped_steps + 1)
    if isinstance(config, FixedLossScale):
        return replace(state, overflows_in_a_row=0)
    good = state.good_updates + 1
    if good < config.scale_window:
        return replace(state, good_updates=good, overflows_in_a_row=0)
    grown = state.scale * config.scale_factor
    scale = grown if grown <= _LARGEST else state.scale
    return replace(state, scale=scale, good_updates=0, overflows_in_a_row=0)


def any_non_finite(grads: Iterable[Tensor]) -> Tensor:
    """Return a flag: some gradient, dense or sparse, has an entry that is not finite.

    Shape (), bool, on the first gradient's device; no host synchronization.

    >>> any_non_finite([torch.ones(2), torch.tensor([torch.nan])])
    tensor(True)
    """
    flags = [~values_of(coalesced(grad)).isfinite().all() for grad in grads]
    if not flags:
        return torch.tensor(False, device="cpu")
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()
