"""Loss scale for training in a narrow type."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    ScaleState,
    any_non_finite,
    initial_scale,
    next_scale,
)

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScaler"]


class LossScaler:
    """Owner of the loss scale: the one place where a loss is multiplied by it and gradients are divided by it.

    A step is `loss = scaler.scaled(loss)`, the backward pass, then `if scaler.unscale_(parameters): optimizer.step()`,
    which adapts the scale too.

    **State**: scale and counters, in `state_dict`.
    **Communication**: none of its own; `agree` may exchange one flag per step.
    **Failure**: a dropped step changes the scale and the counters only.

    Args:
        config: `FixedLossScale` or `DynamicLossScale`.
        agree: Makes one flag of this rank's, the same on all ranks: True if any rank's is. None: this rank alone.

    Raises:
        TypeError: Another kind of config, or `agree` cannot be called.
    """

    def __init__(self, config: LossScale, agree: Callable[[bool], bool] | None = None) -> None:
        check.instance("config", config, (FixedLossScale, DynamicLossScale))
        if agree is not None and not callable(agree):
            raise TypeError(f"agree must be a callable (flag) -> flag, got {agree!r}")
        self.config = config
        self._agree = agree
        self._state = initial_scale(config)

    @property
    def scale(self) -> float:
        """Factor of the next loss."""
        return self._state.scale

    @property
    def dropped_steps(self) -> int:
        """Steps dropped so far."""
        return self._state.dropped_steps

    @property
    def checks(self) -> bool:
        """Whether gradients are looked at for overflow at all."""
        return not isinstance(self.config, FixedLossScale) or self.config.drop_overflow_update

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for the backward pass."""
        return loss * self.scale

    def unscale_(self, params: Iterable[Tensor]) -> bool:
        """Changes `p.grad`: divides it by the scale, unless the step is to be dropped.

        Args:
            params: Parameters whose gradients came from a scaled loss; without a gradient they are passed over.

        Returns:
            Whether the update may be made. False: a gradient overflowed, here or on another rank; gradients stay
            scaled and no state of an optimizer may change.

        Raises:
            NonFinite: More than 1000 steps in a row have been dropped.
        """
        held = [param for param in params if param.grad is not None]
        overflow = self.checks and self._overflowed([param.grad for param in held if param.grad is not None])
        factor = 1.0 / self.scale
        self._state = next_scale(self.config, self._state, overflow=overflow)
        if not overflow:
            with torch.no_grad():
                for param in held:
                    assert param.grad is not None, "looked at above"
                    param.grad.mul_(factor)
        return not overflow

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters, plain values."""
        return asdict(self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: A key is missing or unknown, or a value is out of range.
            TypeError: A value of the wrong kind.
        """
        expected = set(self.state_dict())
        if set(state_dict) != expected:
            raise ValueError(f"the state of a loss scale has the keys {sorted(expected)}, got {sorted(state_dict)}")
        counts = {k: check.integer(k, state_dict[k], at_least=0) for k in expected if k != "scale"}
        self._state = ScaleState(scale=check.real("scale", state_dict["scale"], at_least=1), **counts)

    def _overflowed(self, grads: list[Tensor]) -> bool:
        mine = bool(any_non_finite(grads))
        return mine if self._agree is None else self._agree(mine)
