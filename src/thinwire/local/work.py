"""Timed rounds: the work of a rank in a round, and the weight of its change."""

import time
from collections.abc import Sequence

from thinwire import _validate as check
from thinwire.errors import ThinwireError
from thinwire.local.config import LocalConfig

__all__ = ["RoundWork", "of_site", "require_tokens", "weights_of"]

Work = tuple[int, int | None]
"""Steps, and tokens if every step reported some."""


def require_tokens(tokens: object, config: LocalConfig | None) -> None:
    """Raise unless `tokens` is a valid weight in a timed round.

    Raises:
        TypeError, ValueError: It is not an integer >= 1, or rounds are not timed.
    """
    if config is None or not config.by_time:
        raise ValueError(
            f"tokens={tokens} weigh the ranks of a round that ends by time: give "
            "LocalSGD(round_seconds=...), or leave them out. All ranks count alike here"
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
        self.steps = self._tokens = self._told_steps = 0
        self._tells = False
        self.problem: str | None = None

    def observe(self, tokens: int) -> None:
        """Add tokens of the current step."""
        self._tokens += tokens
        self._tells = True

    @property
    def tokens_before_step(self) -> int | None:
        """Tokens observed before the first step of the round; None if there are none."""
        return self._tokens if self._tells else None

    def step(self) -> None:
        """Count a step. Set `problem` if only some steps of the round reported tokens; all ranks
        receive it when they average.
        """
        self.steps += 1
        self._told_steps += self._tells
        self._tells = False
        if self._told_steps not in (0, self.steps):
            self.problem = (
                f"{self._told_steps} of the {self.steps} steps of this round told their tokens: "
                "call sync.observe(loss, tokens=n) before every optimizer.step(), or never"
            )

    def over(self, most_steps: int) -> bool:
        """Return True if it is time to average."""
        return self.steps >= most_steps or time.monotonic() >= self._until

    def told(self) -> Work:
        """Return the work of this rank, for the other ranks."""
        return self.steps, self._tokens if self._told_steps else None


def of_site(works: Sequence[Work]) -> Work:
    """Return the work of a site: the steps of one rank, since all make the same, and the tokens
    of all.
    """
    told = [tokens for _, tokens in works if tokens is not None]
    return works[0][0], sum(told) if len(told) == len(works) else None


def weights_of(works: Sequence[Work]) -> list[float]:
    """Return the weight of each rank's (or site's) change; the mean weight is 1.

    >>> weights_of([(3, None), (1, None)])
    [1.5, 0.5]

    w_r n / sum(w) for n ranks, where w is a rank's tokens if all ranks reported some, else its
    steps. Equal work gives exactly 1.

    Raises:
        ThinwireError: Some ranks reported tokens and some did not.
    """
    tokens = [each for _, each in works]
    # a rank without a step reports no tokens, and its weight is 0 either way
    silent = [rank for rank, (steps, told) in enumerate(works) if told is None and steps]
    if silent and any(each is not None for each in tokens):
        raise ThinwireError(
            f"ranks {silent} told no tokens of this round, and the others did: call "
            "sync.observe(loss, tokens=n) on all ranks, or on none. Nothing was averaged on any"
        )
    weights = [steps if silent else told or 0 for steps, told in works]
    total = sum(weights)
    if not total:
        return [1.0] * len(works)
    return [weight * len(works) / total for weight in weights]
