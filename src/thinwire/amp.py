"""Loss scale for training in a narrow type."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _validate as check
from thinwire.comm import Group
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

    An overflow on one rank drops the step on all, so scales and optimizers never part.

    **State**: scale and counters, in `state_dict`.
    **Communication**: one flag per step, 24 bytes a rank where all agree; none with a scale that does not check.
    **Failure**: a dropped step changes the scale and the counters only. A dead or late rank: see `thinwire.errors`.

    Args:
        config: `FixedLossScale` or `DynamicLossScale`.
        process_group: The ranks that agree; None for all of them. One process alone works too.

    Raises:
        TypeError: Another kind of config.
    """

    def __init__(self, config: LossScale, process_group: dist.ProcessGroup | None = None) -> None:
        check.instance("config", config, (FixedLossScale, DynamicLossScale))
        self.config = config
        self._process_group = process_group
        self._group: Group | None = None
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
        if self._group is None:
            self._group = Group(self._process_group)
        mine = b"1" if any_non_finite(grads) else b"0"
        return b"1" in self._group.gather_bytes(mine, what="agreeing on an overflow of scaled gradients")
