"""Timed rounds: the work of a rank in a round, and the weight of its change."""

import time
from collections.abc import Sequence

from thinwire import _validate as check
from thinwire.errors import ThinwireError
from thinwire.local.config import LocalConfig

__all__ = ["RoundWork", "of_site", "require_tokens", "weights_of"]

RoundTotals = tuple[int, int | None]
"""Steps, and tokens if every step reported some."""


def require_tokens(tokens: object, config: LocalConfig | None) -> None:
    """Raise unless `tokens` is a valid weight in a timed round.

    Raises:
        TypeError, ValueError: It is not an integer >= 1, or rounds are not timed.
    """
    if config is None or not config.by_time:
        raise ValueError(
            f"tokens={tokens} sets the weight of a rank in timed rounds only: use "
            "LocalSGD(round_seconds=...), or leave tokens out"
        )
    check.integer("tokens", tokens, at_least=1)


class RoundWork:
    """Work of this rank since the last averaging."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._until = time.monotonic() + self._seconds
        self.steps = self._tokens = self._steps_with_tokens = 0
        self._has_tokens = False
        self.problem: str | None = None

    def observe(self, tokens: int) -> None:
        """Add tokens of the current step."""
        self._tokens += tokens
        self._has_tokens = True

    @property
    def tokens_before_step(self) -> int | None:
        """Tokens observed before the first step of the round; None if there are none."""
        return self._tokens if self._has_tokens else None

    def step(self) -> None:
        """Count a step. Set `problem` if only some steps of the round reported tokens; all ranks
        receive it when they average.
        """
        self.steps += 1
        self._steps_with_tokens += self._has_tokens
        self._has_tokens = False
        if self._steps_with_tokens not in (0, self.steps):
            self.problem = (
                f"{self._steps_with_tokens} of the {self.steps} steps of this round reported "
                "tokens: call sync.observe(loss, tokens=n) before every optimizer.step(), or never"
            )

    def over(self, most_steps: int) -> bool:
        """Return True if it is time to average."""
        return self.steps >= most_steps or time.monotonic() >= self._until

    def totals(self) -> RoundTotals:
        """Return the work of this rank, for the other ranks."""
        return self.steps, self._tokens if self._steps_with_tokens else None


def of_site(totals: Sequence[RoundTotals]) -> RoundTotals:
    """Return the work of a site: the steps of one rank, since all make the same, and the tokens
    of all.
    """
    reported = [tokens for _, tokens in totals if tokens is not None]
    return totals[0][0], sum(reported) if len(reported) == len(totals) else None


def weights_of(totals: Sequence[RoundTotals]) -> list[float]:
    """Return the weight of each rank's (or site's) change; the mean weight is 1.

    >>> weights_of([(3, None), (1, None)])
    [1.5, 0.5]

    w_r n / sum(w) for n ranks, where w is a rank's tokens if all ranks reported some, else its
    steps. Equal work gives exactly 1.

    Raises:
        ThinwireError: Some ranks reported tokens and some did not.
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
