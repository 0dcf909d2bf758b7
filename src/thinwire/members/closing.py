"""Agreements at the host, which close without members that are late."""

import datetime
import math
import time
from typing import Any

from torch.distributed import Work

from thinwire.errors import PeerLost, PeerStalled, ThinwireError
from thinwire.members.generation import Outcome, packed, unpacked
from thinwire.members.kv import KeyValueView
from thinwire.members.membership import Membership
from thinwire.members.watcher import CLOSED_KEY, POLL_S

_STAGGER_S = 0.3
"""Seconds after which the next member in order closes an agreement that another one should have."""


class Late(ThinwireError):
    """The others made a round without this member, whose part is in its next one."""

    def __init__(self) -> None:
        super().__init__("the others made a round without this member, which was late for it")


class ClosingVote(Work):
    """One agreement, for which members write their answers at the host.

    It closes once all members have answered, or, given `least`, `grace_s` seconds after more than
    half and at least so many have. Who took part is written once, with the answers, so that it is
    equal for all.
    """

    def __init__(
        self,
        kv: KeyValueView,
        membership: Membership,
        vote: int,
        answer: bytes,
        grace_s: float,
        least: int | None,
    ) -> None:
        super().__init__()
        self.vote = vote
        self.answers: list[bytes] | None = None
        self.error: ThinwireError | None = None
        """Reason for which this member does not take part."""
        self._kv = kv
        self._membership = membership
        self._own_id = membership.own_id
        self._answer = {"vote": vote, "answer": packed([answer])}
        self._grace_s = grace_s
        self._least = least
        self._since = 0
        self._due_s = math.inf
        self._missing: list[str] = []
        self._ended = False

    def launch(self) -> bool:
        """Write the answer of this member; False if the host does not answer."""
        self._ended = False
        if self._membership.store_problem is not None:
            return False
        try:
            self._kv.put(f"here/{self._own_id}", self._answer)
        except (PeerLost, PeerStalled):
            return False
        return True

    def is_completed(self) -> bool:
        """Return True once it is closed, or the host has ended."""
        return self._ended

    def wait(self, timeout: datetime.timedelta = datetime.timedelta.max) -> bool:
        """Wait until it is closed, or the host has ended: then `answers` stay None."""
        until = time.monotonic() + timeout.total_seconds()
        while not self._ended:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"Timed out: {', '.join(self._missing)} did not answer")
            try:
                ids = self._membership.current().ids
            except ThinwireError as error:
                self.error = error
                self._ended = True
                break
            try:
                self._ended = self._look(ids, min(left_s, POLL_S))
            except (PeerLost, PeerStalled):
                self._ended = True
        return True

    def _look(self, ids: tuple[str, ...], limit_s: float) -> bool:
        """Look for news for at most `limit_s`; return True once it is closed."""
        keys = [CLOSED_KEY, *(f"here/{one}" for one in ids)]
        self._since, (closed, *answers) = self._kv.look(keys, limit_s, self._since)
        if self._take(closed):
            return True
        given = {
            one: value["answer"][0]
            for one, value in zip(ids, answers, strict=True)
            if value is not None and value["vote"] == self.vote
        }
        if self._own_id not in given:  # the host was started anew
            self._kv.put(f"here/{self._own_id}", self._answer)
            return False
        self._missing = [one for one in ids if one not in given]
        now = time.monotonic()
        if self._least is not None and len(given) >= max(self._least, len(ids) // 2 + 1):
            self._due_s = min(self._due_s, now + self._grace_s)
        if not self._missing:
            self._due_s = min(self._due_s, now)
        if now < self._due_s + _STAGGER_S * [*given].index(self._own_id):
            return False
        outcome = Outcome(self.vote, unpacked([*given.values()]), [*given])
        return self._take(self._kv.swap(CLOSED_KEY, closed, outcome.to_dict()))

    def _take(self, closed: Any) -> bool:
        """Take what was closed, if it is this agreement or a later one."""
        if closed is None or closed["vote"] < self.vote:
            return False
        # for a later one all that took part in this one were needed
        self.answers = self._membership.accepted(Outcome.from_dict(closed), self.vote)
        if self.answers is None:
            self.error = Late()
        return True
