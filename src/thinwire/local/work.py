"""Rounds that end by time: what a rank has done in one, and how much its change counts."""

import time
from collections.abc import Sequence

from thinwire import _validate as check
from thinwire.errors import ThinwireError
from thinwire.local.config import LocalConfig

__all__ = ["RoundWork", "of_site", "require_tokens", "weights_of"]

Work = tuple[int, int | None]
"""Steps, and tokens where all of them told some."""


def require_tokens(tokens: object, config: LocalConfig | None) -> None:
    """Refuse what is no number of tokens, or where nothing is weighed by them.

    Raises:
        TypeError, ValueError: It is so.
    """
    if config is None or not config.by_time:
        raise ValueError(
            f"tokens={tokens} weigh the ranks of a round that ends by time: give "
            "LocalSGD(round_seconds=...), or leave them out. All ranks count alike here"
        )
    check.integer("tokens", tokens, at_least=1)


class RoundWork:
    """What this rank has done since the last averaging."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._until = time.monotonic() + self._seconds
        self.steps = self._tokens = self._told_steps = 0
        self._tells = False
        self.problem: str | None = None

    def observe(self, tokens: int) -> None:
        """The tokens of the step that is being made."""
        self._tokens += tokens
        self._tells = True

    @property
    def tokens_before_step(self) -> int | None:
        """Those observed since the round began, in which no step was made yet; None where none
        were.
        """
        return self._tokens if self._tells else None

    def step(self) -> None:
        """A step was made; `problem` where it told tokens and one before it did not, or the other
        way round, which all ranks hear of when they average.
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
        """Whether it is time to average."""
        return self.steps >= most_steps or time.monotonic() >= self._until

    def told(self) -> Work:
        """For the other ranks."""
        return self.steps, self._tokens if self._told_steps else None


def of_site(works: Sequence[Work]) -> Work:
    """The work of a site, whose ranks make the same steps: these, and the tokens of all of them."""
    told = [tokens for _, tokens in works if tokens is not None]
    return works[0][0], sum(told) if len(told) == len(works) else None


def weights_of(works: Sequence[Work]) -> list[float]:
    """By rank, or site, how much its change counts, so that they are 1 on average.

    w_r n / sum(w) for n ranks, where w is a rank's tokens if all ranks told some, else its steps;
    equal ones are exactly 1.

    Raises:
        ThinwireError: Some ranks told tokens and some did not; nobody did anything.
    """
    tokens = [each for _, each in works]
    # a rank without a step has nothing to tell tokens of, and counts 0 either way
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
