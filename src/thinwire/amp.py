"""Loss scale for training in a narrow type."""

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from thinwire import _validate as check
from thinwire.comm import Group, wrong_call_site
from thinwire.core.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    ScaleState,
    any_non_finite,
    initial_scale,
    next_scale,
)
from thinwire.core.tensors import with_own_storage

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScaler"]

_log = logging.getLogger("thinwire")


class LossScaler:
    """Owner of the loss scale. Only this class multiplies a loss by the scale and divides gradients
    by it.

    A step is `loss = scaler.scaled(loss)`, the backward pass, then `if scaler.unscale_(parameters):
    optimizer.step()`. `unscale_` also adapts the scale of the next loss. With several optimizers,
    call `unscale_` once for each, then `update()` once; all use the scale of the losses. A loop
    that merges several backward passes into an update calls the parts of `unscale_` instead:
    `overflowed` after each of them, `inverse_scale` on what is added, `agree` and `update` once per
    update.

    An overflow on one rank drops the step on all, so scales and optimizers stay equal. Under local
    updates it concerns its own rank only (`local=True`), and `LocalUpdates(..., scaler=scaler)`
    gives all ranks the smallest scale when they average; adapt the scale before that step, so that
    it counts.

    Example:
        >>> scaler = LossScaler(FixedLossScale(1024.0))
        >>> float(scaler.scaled(torch.tensor(0.5)))
        512.0

    **State**: scale and counters, in `state_dict`.
    **Communication**: one flag per step, 24 bytes a rank where all agree; none with a scale that
    does not check, or with `local=True`. **Failure**: a dropped step changes the scale and the
    counters only. A dead or late rank: see `thinwire.errors`.

    Args:
        config: `FixedLossScale` or `DynamicLossScale`.
        process_group: The ranks that agree; None for all of them. One process alone works too.
        local: True if every rank decides for itself; there is no process group then.

    Raises:
        TypeError: Another kind of config.
        ValueError: A process group for a local scale.
    """

    def __init__(
        self,
        config: LossScale,
        process_group: dist.ProcessGroup | None = None,
        *,
        local: bool = False,
    ) -> None:
        check.instance("config", config, (FixedLossScale, DynamicLossScale))
        if check.boolean("local", local) and process_group is not None:
            raise ValueError(
                "a local loss scale has no process group: give process_group or local=True, not "
                "both"
            )
        self.config = config
        self.local = local
        self._process_group = process_group
        self._group: Group | None = None
        self._state = initial_scale(config)
        self._begun: ScaleState | None = None
        """Scale of the losses in a step whose gradients are being unscaled."""
        self._unscaled: MutableMapping[Tensor, TensorWeakRef] = {}
        """Gradient of each parameter that was unscaled in this step; the parameter itself if it has
        none."""

    @property
    def scale(self) -> float:
        """Factor of the next loss."""
        return self._state.scale

    @property
    def inverse_scale(self) -> float:
        """Factor of the gradients of a loss that was `scaled`."""
        return 1.0 / self.scale

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent in agreements, headers included; counted on one rank too."""
        return 0 if self._group is None else self._group.bytes_sent

    @property
    def dropped_steps(self) -> int:
        """Steps dropped so far."""
        return self._state.dropped_steps

    @property
    def checks(self) -> bool:
        """True if gradients are checked for overflow."""
        return not isinstance(self.config, FixedLossScale) or self.config.drop_overflow_update

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, for the backward pass. A new step begins."""
        self.update()
        return loss * self.scale

    def unscale_(self, params: Iterable[Tensor]) -> bool:
        """Divide `p.grad` by the scale, unless the step is to be dropped. Changes `p.grad`.

        Args:
            params: Parameters whose gradients came from a scaled loss. Parameters without a
                gradient are skipped.

        Returns:
            True if the update may be made. False if a gradient overflowed on any rank: gradients
            stay scaled, and no optimizer state may change.

        Raises:
            RuntimeError: One of these gradients was unscaled since the last `scaled` or `update`;
                none has changed.
            NonFinite: More than 1000 steps in a row have been dropped.
        """
        params = list(params)
        grads = {param: param.grad for param in params if param.grad is not None}
        again = [param for param in params if param in self._unscaled]
        if any(self._unscaled[param]() is grads[param] for param in again if param in grads):
            raise RuntimeError(
                "unscale_ was called twice for the same gradients in one step, which would divide "
                "them twice: call it once for the parameters of each optimizer, then call update()"
            )
        if again or not self._unscaled:  # a new step
            self.update()
            self._unscaled = WeakTensorKeyDictionary()
        overflow = self.checks and self.agree(self.overflowed(grads.values()))
        factor = 1.0 / self._adapted(overflow)
        if not overflow:
            with torch.no_grad():
                own = with_own_storage(grads)
                for param, grad in grads.items():
                    param.grad = grad.mul_(factor) if param in own else grad * factor
        for param in params:
            self._unscaled[param] = TensorWeakRef(param if param.grad is None else param.grad)
        return not overflow

    def overflowed(self, grads: Iterable[Tensor]) -> bool:
        """Return True if a gradient of this rank, scaled or not, is not finite. False if the scale
        does not check.
        """
        return self.checks and bool(any_non_finite(grads))

    def agree(self, overflow: bool) -> bool:
        """Agree on an overflow: True if any rank has one; of a local scale this rank's own answer.

        Raises:
            Mismatch: A rank is in another call of this library.

        Communication: 24 bytes a rank where all say the same. All ranks must call it equally often.
        """
        if self.local:
            return overflow
        if self._group is None:
            self._group = Group(self._process_group)
        purpose = "agreeing on an overflow of scaled gradients"
        answers = self._group.gather_bytes(b"1" if overflow else b"0", action=purpose)
        for rank, answer in enumerate(answers):
            if answer not in (b"0", b"1"):
                raise wrong_call_site(purpose, rank, answer)
        return b"1" in answers

    def update(self, overflow: bool | None = None) -> None:
        """End a step. Gradients are not checked.

        Args:
            overflow: True if the step was dropped for an overflow; None if `unscale_` has adapted
                the scale.

        Raises:
            NonFinite: More than 1000 steps in a row have been dropped.
        """
        if overflow is not None:
            self._adapted(overflow)
        self._begun = None
        self._unscaled = {}

    def _adapted(self, overflow: bool) -> float:
        """Adapt the scale once a step, and return the scale of the losses."""
        before = self._begun or self._state
        if self._begun is None or (overflow and self.dropped_steps == before.dropped_steps):
            self._state = next_scale(self.config, before, overflow=overflow)
            if overflow:
                _log.info(
                    "an update was dropped for an overflow; the loss scale goes from %g to %g",
                    before.scale,
                    self.scale,
                )
        self._begun = before
        return before.scale

    def take_scale(self, scale: float) -> None:
        """Take over the scale of another rank. A new scale restarts the count of good updates."""
        scale = check.real("scale", scale, at_least=1)
        if scale != self._state.scale:
            self._state = replace(self._state, scale=scale, good_updates=0)

    def state_dict(self) -> dict[str, Any]:
        """Return scale and counters as plain values."""
        return asdict(self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore from `state_dict`. A fixed scale stays that of this object.

        Raises:
            ValueError: A key is missing or unknown, or a value is out of range.
            TypeError: A value of the wrong kind.
        """
        expected = set(self.state_dict())
        if set(state_dict) != expected:
            raise ValueError(
                f"the state of a loss scale has the keys {sorted(expected)}, got "
                f"{sorted(state_dict)}"
            )
        counts = {k: check.integer(k, state_dict[k], at_least=0) for k in expected if k != "scale"}
        scale = check.real("scale", state_dict["scale"], at_least=1)
        if isinstance(self.config, FixedLossScale):
            scale = self.config.loss_scale
        self.update()
        self._state = ScaleState(scale=scale, **counts)
