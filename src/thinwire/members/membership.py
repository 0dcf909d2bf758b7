"""Membership of one process, as the main thread sees it; a thread forms generations meanwhile."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.comm.private import forget_ended
from thinwire.errors import PeerStalled, ThinwireError
from thinwire.members.generation import Generation, Outcome
from thinwire.members.kv import KeyValueView, no_answer_message
from thinwire.members.watcher import (
    BUSY_BEAT_S,
    POLL_S,
    Shared,
    Terms,
    Watcher,
)

_EXIT_S = 2.0


class Membership(Shared):
    """Membership of this process in a run, as the main thread sees it."""

    def __init__(self, kv: KeyValueView, own_id: str, terms: Terms) -> None:
        super().__init__(own_id, terms.timeout_s)
        self.kv = kv
        self.watcher = Watcher(kv, self, terms)
        self._thread = threading.Thread(
            target=self.watcher.form_generations, name="thinwire-members", daemon=True
        )

    def meet(self, founders: tuple[str, ...] | None = None) -> None:
        """Announce this member and wait for the first generation, or for one to join."""
        self.watcher.founders = founders
        self._thread.start()
        if not self._wait_until(
            lambda: self.generation or self.joiner,
            lambda: self.silence_s + self.attempts_s,
        ):
            raise ThinwireError("the first generation was not formed in time")

    def _wait_until(self, condition: Callable[[], Any], limit_s: Callable[[], float]) -> bool:
        """Wait for a change made by the thread; False if it did not come in time."""
        begun_s = time.monotonic()
        with self.changed:
            while not self.changed.wait_for(lambda: self.end_reason or condition(), POLL_S):
                if self.kv.waiting_s > self.timeout_s:
                    raise PeerStalled(no_answer_message(self.timeout_s))
                if self.unknown:
                    begun_s = time.monotonic()
                if time.monotonic() - begun_s > limit_s():
                    return False
        self.require_running()
        return True

    def current(self) -> Generation:
        """Return the last generation that was formed."""
        self.require_running()
        assert self.generation is not None, "met"
        return self.generation

    def report_broken(self, number: int, why: str) -> None:
        """Report that exchanges in a generation fail, so that a new one must be formed."""
        self.watcher.commands.put(lambda: self.watcher.regroup(why, number))

    def change_members(self, number: int, ids: Sequence[str], continuing: Sequence[str]) -> None:
        """Replace a generation by one of these members, as all its members have agreed."""
        with self.changed:
            # a joiner that is not admitted now has missed a round, and must come back as a new one
            self.past_members.update(ids)
        self.watcher.commands.put(
            lambda: self.watcher.change_generation(number, tuple(ids), tuple(continuing))
        )

    def wait_for_next(self, number: int) -> None:
        """Wait for a generation after this one."""
        if not self._wait_until(
            lambda: self.generation and self.generation.number > number,
            lambda: self.attempts_s,
        ):
            raise PeerStalled(
                f"generation {number} broke, and the next one was not formed within "
                f"{self.attempts_s:.0f} s"
            )

    def accept_closed(self, agreed: Outcome) -> None:
        """Accept an agreement that the host keeps, whatever the generation."""
        with self.changed:
            self.agreed = agreed
            self.recorded = None

    def accept_agreement(self, number: int, vote: int, answers: Sequence[bytes]) -> bool:
        """Accept an agreement; return False if its generation has been left meanwhile."""
        with self.changed:
            # `frozen` is set before this member announces its last agreement: an agreement that
            # was accepted after that would be missing from the announcement
            now = self.generation
            if self.frozen or now is None or now.number != number:
                return False
            self.agreed = Outcome(vote, answers, now.present_ids(self.present))
            self.voted = True
            now.continuing = now.ids
            return True

    def accept_recorded(self, vote: int) -> list[bytes] | None:
        """Return the answers of an agreement that only other members had received, if known."""
        with self.changed:
            return self.accepted(self.recorded, vote)

    def accepted(self, agreed: Outcome | None, vote: int) -> list[bytes] | None:
        """Accept an agreement of others, if it is this one and this member was in time for it."""
        if agreed is None or agreed.vote != vote or self.own_id not in agreed.voters:
            return None
        self.accept_closed(agreed)
        return list(agreed.answers)

    def missed(self, vote: int) -> list[bytes] | None:
        """Return the answers of an agreement that the others had when they evicted this member."""
        now = self.generation
        self.kv.limit_s = self.timeout_s  # the thread has ended
        self.kv.session = None
        decision = None if now is None else self.watcher._decision(now.number + 1)
        return self.accepted(None if decision is None else decision.agreed, vote)

    def extension_s(self, timeout_s: float) -> float:
        """Return the seconds for which busy members may be waited for; takes two at most."""
        found: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.watcher.commands.put(lambda: found.put(self.watcher.extension_s(timeout_s)))
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=self.with_trips(2 * BUSY_BEAT_S))
        return 0.0

    def require_heartbeat(self) -> None:
        """Check, on a joiner that waits, that some member is alive."""
        self.require_running()
        if self.is_silent():
            raise PeerStalled(
                f"the run has begun, and none of its members sent a heartbeat for "
                f"{self.silence_s:.0f} s: {', '.join(self.expected)}. Join again: "
                "if they have ended, the run restarts"
            )

    def is_admitted(self) -> bool:
        """Wait for admission; return False if none comes within the time-out."""
        return self._wait_until(lambda: self.admitted, lambda: self.timeout_s)

    def wait_for_decision(self) -> None:
        """Wait until the store holds a generation without this member, which leaves."""
        with self.changed:
            self.changed.wait_for(lambda: self.end_reason, self.timeout_s)

    def waiting_joiners(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the requests of the joiners that have no donor yet, and their numbers."""
        return [one for one in self._joiners() if one[0] not in self.donor_assigned_s]

    def ready_joiners(self) -> list[str]:
        """Return the joiners that have the state of the run."""
        return [*dict.fromkeys(one["id"] for n, one in self._joiners() if n in self.ready)]

    def _joiners(self) -> list[tuple[int, dict[str, Any]]]:
        with self.changed:
            return [
                (number, one)
                for number, one in sorted(self.hellos.items())
                if one["id"] not in self.past_members and self.is_alive(one["id"])
            ]

    def close(self) -> None:
        """End the thread. May be called twice."""
        with self.changed:
            if self.end_reason is None:
                self.end_reason = ThinwireError("this member has been closed")
            self.changed.notify_all()
        self.watcher.stopped.set()
        self.watcher.commands.put(None)
        if self.kv.waiting_s > self.timeout_s:  # the host does not answer
            self.kv.disconnect()
        # longer in the end: a backend thread that still connects would abort the process at exit
        for limit_s in (_EXIT_S, self.connecting_s):
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join(limit_s)
            self.kv.disconnect()  # the thread may still wait for the host
        now = self.generation
        if now is not None:
            now.release()
        forget_ended(_EXIT_S / 4)
