"""Local steps of a training loop: followed by hooks, and counted as work in timed rounds."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thinwire import _validate as check
from thinwire.errors import ThinwireError
from thinwire.local.config import LocalConfig
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
        self._optimizers = optimizers
        self._made = set[int]()
        self._before = before
        self._observed = observed
        self._after = after
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


RoundTotals = tuple[int, int | None]
"""Steps, and tokens if every step reported some."""


def require_tokens(tokens: object, config: LocalConfig | None) -> None:
    """Raise unless rounds are timed, and `tokens` is an integer >= 1."""
    if config is None or not config.by_time:
        raise ValueError(
            f"tokens={tokens} sets the weight of a rank in timed rounds only: use "
            "LocalSGD(round_seconds=...), or leave tokens out"
        )
    check.integer("tokens", tokens, at_least=1)


class RoundWork:
    """Work of this rank: in the round, and on each fragment since it was averaged last."""

    def __init__(self, seconds: float, fragments: int) -> None:
        self._seconds = seconds
        self._fragments: list[RoundTotals] = [(0, 0)] * fragments
        self.begin()

    def begin(self, fragment: int | None = None) -> None:
        """Start a round after an averaging of `fragment`, or of the whole model."""
        self._begun_s = time.monotonic()
        self.steps = self._steps_with_tokens = 0
        self._now: int | None = None
        self.problem: str | None = None
        for index in range(len(self._fragments)) if fragment is None else (fragment,):
            self._fragments[index] = 0, 0

    def observe(self, tokens: int) -> None:
        """Add tokens of the current step."""
        self._now = (self._now or 0) + tokens

    def step(self) -> None:
        """Count a step. Set `problem` if only some steps of the round reported tokens."""
        now = self._now
        self._now = None
        self.steps += 1
        self._steps_with_tokens += now is not None
        self._fragments = [
            (steps + 1, None if tokens is None or now is None else tokens + now)
            for steps, tokens in self._fragments
        ]
        if self._steps_with_tokens not in (0, self.steps):
            self.problem = (
                f"{self._steps_with_tokens} of the {self.steps} steps of this round reported "
                "tokens: call sync.observe(loss, tokens=n) before every optimizer.step(), or never"
            )

    def over(self, most_steps: int, share: float) -> bool:
        """Return True after `most_steps` steps of the round, or after `share` of its seconds."""
        return self.steps >= most_steps or time.monotonic() >= self._begun_s + self._seconds * share

    def totals(self, fragment: int | None = None) -> RoundTotals:
        """Return the work on a fragment; without one, on that averaged longest ago."""
        steps, tokens = max(self._fragments) if fragment is None else self._fragments[fragment]
        return steps, tokens or None

    def state(self) -> dict[str, Any]:
        """Return the work on every fragment, and the tokens observed for the next step."""
        return {"fragments": [list(totals) for totals in self._fragments], "now": self._now}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the work of `state` at the begin of a round; None is no work."""
        self.begin()
        if state is not None:
            self._fragments = [(steps, tokens) for steps, tokens in state["fragments"]]
            self._now = state["now"]


def of_site(totals: Sequence[RoundTotals]) -> RoundTotals:
    """Return the work of a site: the steps of one rank, as of all, and the tokens of all."""
    reported = [tokens for _, tokens in totals if tokens is not None]
    return totals[0][0], sum(reported) if len(reported) == len(totals) else None


def weights_of(totals: Sequence[RoundTotals]) -> list[float]:
    """Return the weight of each rank's (or site's) change, w n / sum(w) for n ranks: w are its
    tokens if all ranks reported some, else its steps. Equal work gives exactly 1.

    >>> weights_of([(3, None), (1, None)])
    [1.5, 0.5]
    """
    # a rank without a step reports no tokens, and its weight is 0 either way
    silent = [rank for rank, (steps, tokens) in enumerate(totals) if tokens is None and steps]
    if silent and any(tokens is not None for _, tokens in totals):
        raise ThinwireError(
            f"ranks {silent} reported no tokens in this round, but the others did: call "
            "sync.observe(loss, tokens=n) on all ranks, or on none. Nothing was averaged"
        )
    weights = [steps if silent else tokens or 0 for steps, tokens in totals]
    total = sum(weights)
    if not total:
        return [1.0] * len(totals)
    return [weight * len(totals) / total for weight in weights]
