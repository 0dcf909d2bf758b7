"""Ranks with unequal numbers of batches: who has none left takes part in what the others
exchange.
"""

from collections.abc import Callable

from thinwire.comm import Group, elsewhere

__all__ = ["Joining"]


class Joining:
    """The votes inside `engine.join()`: which ranks still have batches.

    Communication: 24 bytes a rank and vote where all say the same. One comes before every
    microstep; under local updates before the first one after an averaging.
    """

    def __init__(self, group: Group, *, every: bool) -> None:
        self._group, self._every = group, every
        self.all_active = True
        """Whether all ranks had a batch at the last vote."""
        self.due = True
        """Whether the next microstep begins with a vote; after one, it does only where `every` was
        said."""

    def vote(self, *, active: bool) -> bool:
        """Whether any rank still has a batch; all ranks must call it.

        Raises:
            Mismatch: A rank is in another call of this library, such as a step outside `join`.
        """
        what = "asking which ranks still have batches"
        answers = self._group.gather_bytes(b"+" if active else b"-", what=what)
        for rank, answer in enumerate(answers):
            if answer not in (b"+", b"-"):
                raise elsewhere(what, rank)
        self.all_active = b"-" not in answers
        self.due = self._every
        return b"+" in answers

    def idle(self, microstep: Callable[[], None]) -> None:
        """Take part by `microstep`, as often as the others, until no rank has a batch left."""
        while not self.due or self.vote(active=False):
            microstep()
