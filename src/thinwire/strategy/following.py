"""Follows the optimizers' own steps in a training loop that cannot be changed."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.core.several import all_of
from thinwire.core.sharded import shard_of
from thinwire.local.model import SCALER, refuse_scaler
from thinwire.strategy.ownership import params_of, remove_scaler_marks_, replace_step_
from thinwire.strategy.updates import Steps


class Following:
    """Handle of `Engine.follow_steps`; `remove` stops following."""

    # one update follows a step of each optimizer after one backward pass

    def __init__(self, steps: Steps, loss: Callable[[], Tensor | None] | None) -> None:
        self.active = True
        """True if steps are followed."""
        self._steps = steps
        self._loss = loss
        self._optimizers = all_of(steps.optimizer)
        self._stepped = list[int]()
        self._seen: dict[Tensor, tuple[Tensor | None, int]] = {}
        """Gradients and their versions at the optimizer's step; with -1 before it."""
        self._backward_passed = False
        """True after a backward pass since the first step."""
        self._undo = ExitStack()
        for param in params_of(steps.optimizer):
            if param.requires_grad and len(self._optimizers) > 1:
                hook = param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._undo.callback(hook.remove)
        for index, optimizer in enumerate(self._optimizers):
            self._undo.callback(replace_step_(optimizer, partial(self._step, index)))

    def remove(self) -> None:
        """Stop following steps. May be called twice."""
        self.active = False
        self._undo.close()

    def unfinished(self) -> str:
        """Return why a flush would drop steps; empty unless only some optimizers have stepped."""
        made = self._stepped
        self._stepped = []
        why = f"engine.flush() came after a step of optimizer {made} and before that of all others"
        return f"{why}: step all, or give each part an engine of its own" if made else ""

    def _on_gradient(self, _: Tensor) -> None:
        self._backward_passed = True

    def _step(self, which: int, closure: Callable[[], Any] | None) -> Any:
        steps = self._steps
        marked = [remove_scaler_marks_(single) for single in self._optimizers]
        if any(marked):
            raise RuntimeError(SCALER)
        if steps.group.size > 1 and steps.in_lockstep:
            refuse_scaler(steps.optimizer)
        with torch.enable_grad():
            value = None if closure is None else closure()
        if (problem := self._problem_of(which)) is not None:
            steps.refuse(problem)
        if len(self._stepped) == len(self._optimizers):
            self._update(value)
        return value

    def _problem_of(self, which: int) -> str | None:
        """Add a step; return why it is of another update, if so."""
        if not self._stepped:
            self._seen = {p: (p.grad, -1) for p in params_of(self._steps.optimizer)}
            self._backward_passed = False
        changed = self._backward_passed or any(
            p.grad is not None and (p.grad is not grad or version not in (-1, _version(grad)))
            for p, (grad, version) in self._seen.items()
        )
        if changed or which in self._stepped:
            why = f"its step after another backward pass than optimizer {self._stepped[0]}"
            why = "a second step before all had made one" if which in self._stepped else why
            self._stepped = []
            return (
                f"optimizer {which} ({type(self._optimizers[which]).__name__}) made {why}: "
                "follow_steps makes one update of all optimizers after one backward pass. "
                "Optimizers with losses or rhythms of their own, as of a generator and its critic, "
                "need one engine a part: strategy.prepare(critic, critic_optimizer)"
            )
        self._stepped.append(which)
        self._seen |= {p: (p.grad, _version(p.grad)) for p in params_of(self._optimizers[which])}
        return None

    def _update(self, value: Any) -> None:
        """Update from the gradients of the steps, also from those that were cleared since."""
        seen = self._seen
        self._seen = {}
        self._stepped = []
        cleared = [p for p in seen if p.grad is None]
        for param, (grad, _) in seen.items():
            param.grad = grad
        loss = value if self._loss is None else self._loss()
        self._steps.apply(loss if isinstance(loss, Tensor) else None)
        for param in cleared:
            param.grad = None


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else shard_of(grad)._version
