"""Gradient merge: sums the gradients of several backward passes for one update."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.tensors import state_dtype, with_own_storage


class GradientSum:
    """Sum of gradients by parameter name: acc <- acc + factor g on every microstep. `take` returns
    their mean or sum. A gradient that a microstep lacks counts as zero there.

    >>> merge = GradientSum()
    >>> merge.add({"w": torch.tensor([1.0])})
    >>> merge.add({"w": torch.tensor([3.0])})
    >>> merge.take(avg=True)
    {'w': tensor([2.])}

    Source: Paddle, GradientMergeOptimizer. Differs: sums of narrow gradients are kept in float32.
    """

    def __init__(self) -> None:
        self.microsteps = 0
        """Number of backward passes in the sum."""
        self.overflowed = False
        """True if a gradient in the sum is known not to be finite. The caller that checks gradients
        sets it.
        """
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, grads: Mapping[str, Tensor | None], factor: float = 1.0) -> None:
        """Add the gradients of one more microstep times a factor; None counts as absent."""
        for name, grad in grads.items():
            if grad is not None:
                self._sums[name] = _added(self._sums.get(name), grad, factor)
        self.microsteps += 1

    @torch.no_grad()
    def preview(self, name: str, grad: Tensor | None, factor: float, avg: bool) -> Tensor | None:
        """Return the result of `take` for one parameter if `grad`, or None, were added last."""
        # nothing changes; without a gradient it may be the tensor of the sum itself
        total = self._sums.get(name)
        if grad is not None:
            total = _added(None if total is None else total.clone(), grad, factor)
        if total is None or not avg or self.microsteps == 0:
            return total
        return total / (self.microsteps + 1)

    @torch.no_grad()
    def take(self, avg: bool = True) -> dict[str, Tensor]:
        """Return the merged gradients by name: means, or without `avg` the tensors of the sum
        themselves. The sum is unchanged until `clear`.
        """
        if not avg or self.microsteps == 1:
            return dict(self._sums)
        return {name: total / self.microsteps for name, total in self._sums.items()}

    @torch.no_grad()
    def completed_(
        self, grads: Mapping[str, Tensor], factor: float = 1.0, avg: bool = True
    ) -> dict[str, Tensor]:
        """Return the result of `take` after `add` of these gradients; nothing is added."""
        # written into dense gradients that share no storage and have the type of the sum, which
        # saves a second set of gradients
        owned = with_own_storage(grads)
        count = self.microsteps + 1
        done = {}
        for name in dict.fromkeys([*self._sums, *grads]):
            total = self._sums.get(name)
            grad = grads.get(name)
            if grad is None:
                assert total is not None, "of one of them"
                done[name] = total / count if avg and count > 1 else total
                continue
            reuses = name in owned and grad.dtype == state_dtype(grad if total is None else total)
            if not reuses:
                whole = _added(None if total is None else total.clone(), grad, factor)
            elif total is None:
                whole = grad.mul_(factor)
            else:
                whole = torch.add(total.to(grad.device), grad, alpha=factor, out=grad)
            done[name] = whole.div_(count) if avg and count > 1 else whole
        return done

    def clear(self) -> None:
        """Clear the sum. The next microstep is the first one again."""
        self._sums = {}
        self.microsteps = 0
        self.overflowed = False

    def state_dict(self) -> dict[str, Any]:
        """Return `microsteps`, `overflowed`, and the live `sums` by parameter name."""
        sums = dict(self._sums)
        return {"microsteps": self.microsteps, "overflowed": self.overflowed, "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`. Tensors go to the device of the next gradient."""
        if set(state) != {"microsteps", "overflowed", "sums"}:
            raise ValueError(
                f"the state of a merge has microsteps, overflowed and sums, got {sorted(state)}"
            )
        microsteps = check.integer("microsteps", state["microsteps"], at_least=0)
        overflowed = check.boolean("overflowed", state["overflowed"])
        for name, total in state["sums"].items():
            check.instance(f"sums[{name!r}]", total, Tensor)
        self._sums = {name: total.clone() for name, total in state["sums"].items()}
        self.microsteps = microsteps
        self.overflowed = overflowed


def _added(total: Tensor | None, grad: Tensor, factor: float) -> Tensor:
    sparse = grad.layout is not torch.strided
    dtype = state_dtype(grad)
    if total is None:
        first = (grad.to_dense() if sparse else grad).to(dtype)
        if factor != 1.0:
            return first * factor
        return first.clone() if first is grad else first
    if total.device != grad.device:  # after `load_state_dict`
        total = total.to(grad.device)
    term = grad.to(dtype) if sparse and grad.dtype != total.dtype else grad
    return total.add_(term, alpha=factor)
