"""Ranks that run out of batches before others do: which ranks still have one."""

from collections.abc import Callable

from thinwire.comm import Group, elsewhere
from thinwire.exchange.agreement import Answers, Said, Turn

__all__ = ["Batches", "Joining"]


class Batches:
    """Whether ranks have a batch, inside `engine.join()`, where every update is exchanged.

    A check of the agreements: the first one of an update tells it, so it costs no round of its own.
    """

    def __init__(self) -> None:
        self.inside = False
        """Whether this rank is inside `join`."""
        self.mine = True
        """Whether this rank has a batch."""
        self.merged = 0
        """Microsteps of this rank's unfinished update; after the last one of all ranks the most
        that any of them has."""
        self.all_have = True
        """Whether all ranks had a batch in the last update."""

    def begin(self) -> None:
        """The block is entered."""
        self.inside = self.mine = self.all_have = True
        self.merged = 0

    def end(self) -> None:
        """The block is left."""
        self.inside, self.mine, self.all_have = False, True, True

    def say(self, turn: Turn) -> Said:
        """See `Check`."""
        if not (self.inside and turn.first):
            return {}
        return {"batches": True} if self.mine else {"batches": False, "merged": self.merged}

    def judge(self, turn: Turn, answers: Answers) -> None:
        """See `Check`.

        Raises:
            Mismatch: A rank is in a step outside `join`.
        """
        if not turn.first:
            return
        batches = dict(answers.of("batches"))
        if not batches:
            return
        for rank in range(len(answers)):
            if rank not in batches:
                raise elsewhere("asking which ranks still have batches", rank)
        self.all_have = all(batches.values())
        if not any(batches.values()):
            self.merged = max(merged for _, merged in answers.of("merged"))


class Joining:
    """The votes inside `engine.join()` under local updates: which ranks still have batches.

    Communication: 24 bytes a rank and vote where all say the same, before the first microstep after
    an averaging.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.due = True
        """Whether the next microstep begins with a vote."""

    def vote(self, *, active: bool) -> bool:
        """Whether any rank still has a batch; all ranks must call it.

        Raises:
            Mismatch: A rank is in another call of this library, such as a step outside `join`.
        """
        what = "asking which ranks still have batches"
        answers = self._group.gather_bytes(b"+" if active else b"-", what=what)
        for rank, answer in enumerate(answers):
            if answer not in (b"+", b"-"):
                raise elsewhere(what, rank, answer)
        self.due = False
        return b"+" in answers

    def idle(self, microstep: Callable[[], None]) -> None:
        """Take part by `microstep`, as often as the others, until no rank has a batch left."""
        while not self.due or self.vote(active=False):
            microstep()
