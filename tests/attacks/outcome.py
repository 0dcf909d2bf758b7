"""What became of one attack, and the rules by which it counts as held."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.ranks import Lost, Pool
from thinwire.errors import ThinwireError

__all__ = ["GRACE_S", "Attack", "Outcome", "Seen", "judged", "said_nothing_moved"]

GRACE_S = 2.0
"""How much later than its deadline a call may end."""

FAMILY = "ThinwireError"


@dataclass
class Outcome:
    """One attack, made once."""

    verdict: str
    """"held", "silent", "false" statement, "late", "crash" (the process died, or a bare error), or
    "skipped"."""
    detail: str = ""
    updates: int | None = None
    """Within how many updates it was found."""
    seconds: float | None = None
    """How long the longest call took that ended by it."""


@dataclass
class Seen:
    """What one rank reports of its run under attack, in plain values."""

    error: str = ""
    """Class of the error that ended it, empty without one."""
    family: bool = False
    """Whether the error is one of the library's."""
    text: str = ""
    before: str = ""
    """Digest of parameters and state before the call that ended with the error."""
    after: str = ""
    """The same afterwards, or at the end of a run without an error."""
    common: str = ""
    """Digest of what must be equal on all ranks, at the end."""
    updates: int = 0
    """Made since the attack."""
    seconds: float = 0.0
    """Of the call that ended with the error."""
    more: dict[str, Any] = field(default_factory=dict)

    def raised(self, error: BaseException) -> None:
        """Note the error that ended the run."""
        self.error, self.text = type(error).__name__, str(error)
        self.family = isinstance(error, ThinwireError)


@dataclass(frozen=True)
class Attack:
    """A kind of attack: letter, name, how often it is cheap to make, and how it is made."""

    letter: str
    name: str
    make: Callable[[Pool, int], Outcome]
    """From the pool and a seed."""
    times: int = 50
    quick: bool = False
    """Whether it is one of the few that run as tests."""


def said_nothing_moved(text: str) -> bool:
    """Whether an error claims that parameters and state are as before."""
    return (
        re.search(
            r"[Nn]othing (of this exchange )?(was|has been) applied|[Nn]othing (has )?changed", text
        )
        is not None
    )


def judged(
    answers: Sequence[Any], *, expected: Sequence[str] = (), within: int | None = None
) -> Outcome:
    """Held: every rank ended with an error of the library, or none did and all hold the same."""
    details = "; ".join(_line(rank, answer) for rank, answer in enumerate(answers))
    if any(answer is None for answer in answers):
        return Outcome("late", "a rank did not come back: " + details)
    if any(not isinstance(answer, Seen) for answer in answers):
        return Outcome("crash", details)
    seen: list[Seen] = list(answers)
    for rank, answer in enumerate(seen):
        if answer.error and said_nothing_moved(answer.text) and answer.before != answer.after:
            return Outcome(
                "false",
                f"rank {rank} said that nothing was applied, and its state moved: " + details,
            )
    raised = [answer for answer in seen if answer.error]
    updates = max((answer.updates for answer in raised), default=None)
    if len(raised) == len(seen):
        bare = [answer for answer in seen if not answer.family and answer.error not in expected]
        if bare:
            return Outcome("crash", "a bare error: " + details)
        if within is not None and updates is not None and updates > within:
            return Outcome(
                "late",
                f"found after {updates} updates, {within} were promised: " + details,
                updates,
            )
        return Outcome("held", details, updates)
    if raised:
        return Outcome("silent", "only some ranks heard of it: " + details)
    if len({answer.common for answer in seen}) == 1:
        return Outcome("held", "all ranks hold the same")
    return Outcome("silent", "ranks differ and nobody was told: " + details)


def _line(rank: int, answer: Any) -> str:
    if isinstance(answer, Seen):
        return f"rank {rank}: " + (
            f"{answer.error}: {answer.text[:220]}" if answer.error else "no error"
        )
    if isinstance(answer, Lost):
        return f"rank {rank}: died with {answer.exit_code}"
    if answer is None:
        return f"rank {rank}: no answer"
    return f"rank {rank}: {answer.type_name}: {answer.text[:300]}"
