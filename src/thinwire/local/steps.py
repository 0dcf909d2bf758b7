"""Follow the local steps of a training loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.local.model import calls_of_step


class FollowedSteps:
    """Hook `step` of optimizers; a local step ends when each has made one, or one a second."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        before: Callable[[], None],
        observed: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._optimizers, self._made = optimizers, set[int]()
        self._before, self._observed, self._after = before, observed, after
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before_one),
                optimizer.register_step_post_hook(self._after_one),
            )
        ]

    def remove(self) -> None:
        """Remove the hooks; may be called twice."""
        self._made.clear()
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """End a local step that only some optimizers have made."""
        if self._made:
            self._made.clear()
            self._after()

    def _before_one(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Handle the start of one step, with all arguments of `step`, the optimizer first."""
        optimizer, *given = args
        if (self._made and id(optimizer) not in self._made) or calls_of_step(optimizer) > 1:
            return None
        if not self._made:
            self._before()
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self._observed()
            return None

        def then_observed() -> Any:
            loss = closure()
            self._observed()
            return loss

        if given:
            return (optimizer, then_observed, *given[1:]), kwargs
        return (optimizer,), {**kwargs, "closure": then_observed}

    def _after_one(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if calls_of_step(optimizer) > 1:
            return
        again = id(optimizer) in self._made
        self._made.add(id(optimizer))
        if again or len(self._made) == len(self._optimizers):
            self._made = {id(optimizer)} if again else set()
            self._after()
