"""Membership state machine of one member: a thread that watches the run's store and forms
generations while the main thread trains.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.comm.member_groups import MemberGroups
from thinwire.comm.private import forget_ended
from thinwire.comm.relay import RelayEndpoint
from thinwire.comm.waiting import activity, idle_s
from thinwire.errors import Evicted, PayloadCorrupt, PeerStalled, QuorumLost, ThinwireError
from thinwire.members.generation import Decision, Generation, next_decision, packed
from thinwire.members.kv import KeyValueView, no_answer_message

_POLL_S = 0.2
_STEP_S = 0.02
_ANNOUNCE_S = 2.0
"""Time for members to announce themselves after a break; each does so within `_POLL_S`."""
_ALIVE_S = 3.0
"""Age in seconds from which a process without a new heartbeat counts as gone."""
BUSY_BEAT_S = 1.2
"""Longest time in seconds between two heartbeats of a busy member."""
_SCAN_S = 1.0
_CONNECT_S = 10.0
_MAX_ATTEMPTS = 3
_EXIT_S = 2.0
_HELLOS = "hellos"
"""Key of the next free request number; a hint where to begin to search."""
_ALL_ATTEMPTS_S = (_MAX_ATTEMPTS + 2) * (_CONNECT_S + _ANNOUNCE_S) + _EXIT_S
_log = logging.getLogger("thinwire")


class Membership:
    """Membership state machine of one member, on a thread of its own."""

    # agreements are numbered over all generations. One is valid as soon as one member has received
    # all answers. When a generation breaks, every member announces its last agreement with its
    # answers, and accepts none of that generation any more. The first that sees all announcements
    # (or those in time) writes the next generation with the latest agreement, from which the others
    # take it

    def __init__(
        self,
        kv: KeyValueView,
        own_id: str,
        *,
        endpoint: RelayEndpoint,
        min_members: int,
        start_members: int,
        timeout_s: float,
    ) -> None:
        self.kv, self.own_id, self._endpoint = kv, own_id, endpoint
        self.timeout_s, self._min_members = timeout_s, min_members
        self._silence_s = timeout_s + min(_CONNECT_S, timeout_s)
        self._start_members = start_members
        self.generation: Generation | None = None
        self.end_reason: ThinwireError | None = None
        self.votes = 0
        self.joiner = False
        self.admitted: tuple[int, tuple[str, ...]] | None = None
        self.donor_assigned_s: dict[int, float] = {}
        """Time at which a donor was assigned, by the joiner's request number."""
        self.store_problem: str | None = None
        self._answers: tuple[bytes, ...] = ()
        self.voters: tuple[str, ...] = (own_id,)
        """Members whose answers the last agreement holds, in the order of the answers."""
        self._recorded: tuple[int, tuple[bytes, ...], tuple[str, ...]] | None = None
        self._founders: tuple[str, ...] | None = None
        self._frozen = self._voted = False
        self._next_own_hello = 0
        self._last_alive_s = time.monotonic()
        self._expected: tuple[str, ...] = ()
        self._next_hello = 0
        self._unread: list[int] = []
        self._hellos: dict[int, dict[str, Any]] = {}
        self._ready: set[int] = set()
        self._checked_s: dict[int, float] = {}
        self._past_members: set[str] = set()
        self._beat_count = 0
        self._heartbeats: dict[str, tuple[int, float, bool]] = {}
        self._changed = threading.Condition()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-members", daemon=True)

    # called on the main thread

    def meet(self, founders: tuple[str, ...] | None = None) -> None:
        """Announce this member and wait for the first generation, or for one to join."""
        self._founders = founders
        self._thread.start()
        limit_s = self._silence_s + self.timeout_s + _ALL_ATTEMPTS_S
        formed = self._wait_until(
            lambda: self.end_reason or self.generation or self.joiner, limit_s
        )
        if self.end_reason is not None:
            raise self.end_reason
        if not formed:
            raise ThinwireError(f"the first generation was not formed within {limit_s:g} s")

    def _wait_until(self, condition: Callable[[], Any], limit_s: float) -> bool:
        """Wait for a change made by the thread; False if it did not come in time."""
        until = time.monotonic() + limit_s
        with self._changed:
            while not self._changed.wait_for(condition, _POLL_S):
                if self.kv.waiting_s > self.timeout_s:
                    raise PeerStalled(no_answer_message(self.timeout_s))
                if time.monotonic() > until:
                    return False
        return True

    def current(self) -> Generation:
        """Return the last generation that was formed."""
        if self.end_reason is not None:
            raise self.end_reason
        assert self.generation is not None, "met"
        return self.generation

    def report_broken(self, number: int, why: str) -> None:
        """Report that exchanges in a generation fail, so that a new one must be formed."""

        def regroup_if_current() -> None:
            if self.generation is not None and self.generation.number == number:
                self._regroup(why)

        self._commands.put(regroup_if_current)

    def change_members(self, number: int, ids: Sequence[str], continuing: Sequence[str]) -> None:
        """Replace a generation by one of these members, as all its members have agreed."""
        with self._changed:
            # a joiner that is not admitted now has missed a round, and must come back as a new one
            self._past_members.update(ids)
        self._commands.put(lambda: self._change_generation(number, tuple(ids), tuple(continuing)))

    def wait_for_next(self, number: int) -> Generation:
        """Wait for a generation after this one."""
        limit_s = self.timeout_s + _ALL_ATTEMPTS_S
        formed = self._wait_until(
            lambda: self.end_reason or (self.generation and self.generation.number > number),
            limit_s,
        )
        if not formed:
            raise ThinwireError(
                f"generation {number} broke, and the next one was not formed within {limit_s:g} s"
            )
        return self.current()

    def accept_agreement(self, number: int, vote: int, answers: Sequence[bytes]) -> bool:
        """Accept an agreement; return False if its generation has been left meanwhile."""
        with self._changed:
            # `_frozen` is set before this member announces its last agreement: an agreement that
            # was accepted after that would be missing from the announcement
            now = self.generation
            if self._frozen or now is None or now.number != number:
                return False
            self.votes, self._answers, self._voted = vote, tuple(answers), True
            self.voters = now.quorum_base = now.ids
            return True

    def recorded(self, vote: int) -> list[bytes] | None:
        """Return the answers of an agreement that only other members had received, taken from the
        new generation; None if this one is not known.
        """
        with self._changed:
            if self._recorded is None or self._recorded[0] != vote:
                return None
            self.votes, self._answers, self.voters = self._recorded
            self._recorded = None
            return list(self._answers)

    def extension_s(self, timeout_s: float) -> float:
        """Return the seconds for which busy members may still be waited for: until `timeout_s`
        after the last of them was known to be busy. It is 0 or less if a member is missing that is
        not busy, if none is missing, or if the meeting place does not answer. Takes at most two
        seconds.
        """
        found: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._commands.put(lambda: found.put(self._extension_s(timeout_s)))
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=2 * _SCAN_S)
        return 0.0

    def say_hello(self, kv: KeyValueView, first_generation: int | None = None) -> int:
        """Ask for admission, or to found `first_generation`; return the number of the request."""
        number = max(self._next_own_hello, kv.get_verified(_HELLOS) or 0)
        while True:
            key = f"hello/{number}"
            try:
                hello = {"id": self.own_id, "n": number, "founds": first_generation}
                if kv.put_if_absent(key, hello)["id"] == self.own_id:
                    break
            except PayloadCorrupt as error:  # a stranger has written there
                kv.warn_once(key, error)
            number += 1
        self._next_own_hello = number + 1
        kv.put(_HELLOS, self._next_own_hello)
        return number

    def require_heartbeat(self) -> None:
        """Check, on a joiner that waits, that some member is alive."""
        if self.end_reason is not None:
            raise self.end_reason
        if self._is_silent():
            raise PeerStalled(
                f"the run has begun, and none of its members sent a heartbeat for "
                f"{self._silence_s:.0f} s: {', '.join(self._expected)}. Join again: if they have "
                "ended, the run restarts"
            )

    def is_admitted(self) -> bool:
        """Wait for admission; return False if none comes within the time-out."""
        self._wait_until(lambda: self.end_reason or self.admitted, self.timeout_s)
        if self.end_reason is not None:
            raise self.end_reason
        return self.admitted is not None

    def wait_for_decision(self) -> None:
        """Wait until the store holds a generation without this member, which leaves."""
        with self._changed:
            self._changed.wait_for(lambda: self.end_reason is not None, self.timeout_s)

    def waiting_joiners(self) -> list[tuple[int, str]]:
        """Return the joiners that have no donor yet, by request number and identity."""
        with self._changed:  # a member that has just left asks no more
            asked = {n: value["id"] for n, value in sorted(self._hellos.items())}
            asked = {n: member for n, member in asked.items() if member not in self._past_members}
        return [
            (n, member)
            for n, member in asked.items()
            if n not in self.donor_assigned_s and self._is_alive(member)
        ]

    def ready_joiners(self) -> list[str]:
        """Return the joiners that have the state of the run."""
        with self._changed:
            found = [self._hellos[n]["id"] for n in sorted(self._ready) if n in self._hellos]
            found = [member for member in found if member not in self._past_members]
        return [member for member in dict.fromkeys(found) if self._is_alive(member)]

    def announce_leaving(self, kv: KeyValueView) -> None:
        """Tell the others that this member leaves, with its last agreement for members that have
        not received it. They continue without it, however few they are.
        """
        now = self.generation
        announcement = self._announcement() | {"after": -1 if now is None else now.number}
        try:
            kv.put(f"left/{self.own_id}", announcement)
        except (RuntimeError, ThinwireError) as error:  # the others cannot read there either
            _log.info("could not announce at the meeting place that this member leaves: %s", error)

    def close(self) -> None:
        """End the thread. May be called twice."""
        with self._changed:
            if self.end_reason is None:
                self.end_reason = ThinwireError("this member has been closed")
            self._changed.notify_all()
        self._stopped.set()
        self._commands.put(None)
        if self.kv.waiting_s > self.timeout_s:  # the host does not answer
            self.kv.disconnect()
        # longer in the end: a backend thread that still connects would abort the process at exit
        for limit_s in (_EXIT_S, _CONNECT_S):
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join(limit_s)
            self.kv.disconnect()  # the thread may still wait for the host
        if self.generation is not None and self.generation.groups is not None:
            self.generation.groups.release()
            self.generation.groups = None
        forget_ended(_EXIT_S / 4)

    # called on the membership thread

    def _run(self) -> None:
        try:
            self._meet()
            while not self._stopped.is_set():
                try:
                    command = self._commands.get(timeout=_POLL_S)
                except queue.Empty:
                    self._watch()
                    continue
                if command is not None:
                    command()
        except ThinwireError as error:
            self._stop_with(error)
        except RuntimeError as error:
            text = "the meeting place does not answer, and no new generation can form without it"
            self._stop_with(ThinwireError(f"{text}: {error}"))
        except Exception as error:  # the main thread may wait for this one
            _log.exception("the membership thread has failed")
            text = f"the membership thread failed: {type(error).__name__}: {error}"
            self._stop_with(ThinwireError(text))

    def _stop_with(self, error: ThinwireError) -> None:
        with self._changed:
            self.end_reason = error
            self._frozen = True
            self._changed.notify_all()
        if self.generation is not None and self.generation.groups is not None:
            self.generation.groups.disconnect()

    def _meet(self) -> None:
        hint = self.kv.get("gen")
        number = self._latest_from(-1 if hint is None else int(hint))
        first_generation, begun, enough_s = -1, 0.0, math.inf
        if self._founders:
            self._follow_founders(self._founders, number)
            return
        self._last_alive_s = time.monotonic()
        while not self._stopped.is_set():
            number, decision, alive = self._poll(number)
            if self.own_id in decision.ids:
                with self._changed:
                    self.votes, self.admitted = decision.votes, (number, decision.ids)
                    self._changed.notify_all()
                self._enter(number, decision)
                return
            if alive or (self._founders is not None and number >= 0):
                with self._changed:  # the main thread fetches the state meanwhile
                    self.joiner = True
                    self._changed.notify_all()
            now, first = time.monotonic(), number + 1
            # no member is alive, or there was never one: found a generation with the others
            if not self.joiner and (
                first == first_generation or not decision.ids or self._is_silent()
            ):
                if first != first_generation:
                    first_generation, begun, enough_s = first, now, math.inf
                    self.say_hello(self.kv, first_generation)
                    if number >= 0:
                        _log.warning(
                            "no member of generation %d is alive: the run restarts", number
                        )
                found = self._present_founders(first_generation)
                enough_s = min(enough_s, now) if len(found) >= self._start_members else math.inf
                if now - enough_s >= 2 * _POLL_S:  # wait for founders that come at the same time
                    self.kv.put_if_absent(f"members/{first}", Decision(found, found, 0).to_dict())
                elif now - begun > self.timeout_s:
                    raise QuorumLost(
                        f"{len(found)} of {self._start_members} members came within "
                        f"{self.timeout_s:g} s: {', '.join(found)}. Start the others, or lower "
                        "min_members or start_members"
                    )
            time.sleep(_POLL_S / 2)

    def _follow_founders(self, founders: tuple[str, ...], latest: int) -> None:
        """Enter the generation in which the first rank of this site has met the others."""
        number = latest  # they may have lost a member since
        while number >= 0 and self._decision(number).ids != founders:
            number -= 1
        number = latest + 1 if number < 0 else number
        first = Decision(founders, founders, 0).to_dict()
        self._enter(number, Decision.from_dict(self.kv.put_if_absent(f"members/{number}", first)))

    def _present_founders(self, number: int) -> tuple[str, ...]:
        """Return the live members that asked to found this generation, in the order of asking."""
        self._read_hellos(math.inf)
        hellos = [value for _, value in sorted(self._hellos.items())]
        ids = dict.fromkeys(value["id"] for value in hellos if value.get("founds") == number)
        return tuple(
            member for member in ids if member == self.own_id or self._poll_heartbeat(member)
        )

    def _poll(self, number: int) -> tuple[int, Decision, bool]:
        """Return number and members of the latest generation, searched from `number` on, and
        whether one of its members is alive.
        """
        self._beat()
        before, number = number, self._latest_from(number)
        decision = self._decision(number)
        self._expected = decision.ids
        # all of them are read, also after one that is alive
        polled = [self._poll_heartbeat(other) for other in decision.ids if other != self.own_id]
        alive = any(polled)
        if alive or number > before:
            self._last_alive_s = time.monotonic()
        return number, decision, alive

    def _decision(self, number: int) -> Decision:
        """Return the decision of a generation that was formed; an empty one for -1."""
        if number < 0:
            return Decision((), (), 0)
        value = self.kv.get(f"members/{number}")
        assert value is not None, "it was there"
        return Decision.from_dict(value)

    def _is_silent(self) -> bool:
        # members that are connecting send no heartbeat
        return time.monotonic() - self._last_alive_s > self._silence_s

    def _latest_from(self, number: int) -> int:
        while self.kv.has(f"members/{number + 1}"):
            number += 1
        return number

    def _announcement(self, connecting_s: float | None = None) -> dict[str, Any]:
        # an agreement taken from another member counts even before the main thread asks for it
        with self._changed:
            votes, answers, _ = self._recorded or (self.votes, self._answers, ())
        return {
            "votes": votes,
            "answers": packed(answers),
            "voted": self._voted,
            "connecting_s": connecting_s,
        }

    def _announced(self, number: int, other: str) -> dict[str, Any] | None:
        """Return a member's announcement for the generation of this number, or the one it made when
        it left; None if there is none.
        """
        found: dict[str, Any] | None = self.kv.get(f"left/{other}")
        if found is not None:
            voted = found["voted"] and found["after"] == number - 1
            return found | {"left": True, "voted": voted}
        found = self.kv.get(f"alive/{number}/{other}")
        return None if found is None else found | {"left": False}

    def _beat(self) -> None:
        """Write a heartbeat. Its number grows, so that a replayed one is recognized."""
        self._beat_count += 1
        heartbeat = {"beat": self._beat_count, "idle": idle_s(), "waits": activity()[1]}
        self.kv.put(f"hb/{self.own_id}", heartbeat)

    def _extension_s(self, timeout_s: float) -> float:
        formed = self.generation
        assert formed is not None, "exchanged"
        others = [member for member in formed.ids if member != self.own_id]
        until = time.monotonic() + BUSY_BEAT_S
        try:
            before = [self.kv.get(f"hb/{member}") for member in others]
            while True:
                time.sleep(_POLL_S)
                self._beat()  # the others check this member too
                latest = [self.kv.get(f"hb/{member}") for member in others]
                pairs = list(zip(before, latest, strict=True))
                live = [was is not None and now["beat"] > was["beat"] for was, now in pairs]
                if all(live) or time.monotonic() > until:
                    break
        except RuntimeError as error:
            _log.warning("the meeting place cannot say who is busy: %s", error)
            return 0.0
        if not all(live):
            return 0.0
        idle = [math.inf if b["idle"] is None else b["idle"] for b in latest if not b["waits"]]
        return timeout_s - max(idle, default=math.inf)

    def _poll_heartbeat(self, other: str) -> bool:
        """Read the heartbeat of another process; return True if a new one came recently."""
        value, now = self.kv.get(f"hb/{other}"), time.monotonic()
        if value is not None:
            before = self._heartbeats.get(other)
            if before is None:  # the first one read may be old
                self._heartbeats[other] = value["beat"], now, False
            elif value["beat"] > before[0]:
                self._heartbeats[other] = value["beat"], now, True
        return self._is_alive(other)

    def _is_alive(self, other: str) -> bool:
        beat = self._heartbeats.get(other)
        return beat is not None and beat[2] and time.monotonic() - beat[1] < _ALIVE_S

    def _watch(self) -> None:
        now = self.generation
        assert now is not None, "entered"
        try:
            self._beat()
            if self.kv.has(f"break/{now.number}"):
                self._regroup("another member reported it")
                return
            value = self.kv.get(f"members/{now.number + 1}")
            if value is not None:  # the others have received an agreement that this member has not
                self._freeze(now)
                self._enter(now.number + 1, Decision.from_dict(value))
                return
            if now.rank == 0:
                self._check_joiners()
            self.store_problem = None
        except ThinwireError:
            raise
        except RuntimeError as error:
            if self.store_problem is None and not self._stopped.is_set():
                _log.warning(
                    "the meeting place does not answer (%s): rounds continue, but no member can "
                    "join, and the loss of a member ends the run",
                    error,
                )
            self.store_problem = str(error)

    def _check_joiners(self) -> None:
        """Update the set of joiners, for at most `_SCAN_S`: there may be many old requests, and the
        others wait for this member's heartbeat.
        """
        until = time.monotonic() + _SCAN_S
        self._read_hellos(until)
        for number, value in list(self._hellos.items()):
            if value["id"] in self._past_members:
                with self._changed:
                    del self._hellos[number]
                    self._ready.discard(number)
        for number in sorted(self._hellos, key=self._check_order):
            if time.monotonic() > until:
                return
            self._checked_s[number] = time.monotonic()
            if not self._poll_heartbeat(self._hellos[number]["id"]) or number in self._ready:
                continue
            if self.kv.has(f"ready/{number}"):
                with self._changed:
                    self._ready.add(number)
            elif self._lacks_donor(number):
                del self.donor_assigned_s[number]

    def _read_hellos(self, until: float) -> None:
        """Read the new requests, and, while time is left, older ones from the last on."""
        if self._next_hello == 0:
            self._next_hello = self.kv.get_verified(_HELLOS) or 0
            self._unread = list(range(self._next_hello))
        while time.monotonic() < until:
            key = f"hello/{self._next_hello}"
            try:
                value = self.kv.get(key)
            except PayloadCorrupt as error:  # a stranger's request: skip its number
                self.kv.warn_once(key, error)
            else:
                if value is None:
                    break
                with self._changed:
                    self._hellos[self._next_hello] = value
            self._next_hello += 1
        while self._unread and time.monotonic() < until:
            number = self._unread.pop()
            value = self.kv.get_verified(f"hello/{number}")
            if value is not None:
                with self._changed:
                    self._hellos[number] = value

    def _lacks_donor(self, number: int) -> bool:
        """Return True if a donor was assigned long ago and none has begun."""
        # members that were in different generations may have computed different donors
        asked = self.donor_assigned_s.get(number)
        late = asked is not None and time.monotonic() - asked > self.timeout_s
        return late and not self.kv.has(f"donor/{number}")

    def _check_order(self, number: int) -> tuple[bool, float]:
        """Sort key: live joiners first, then those checked longest ago."""
        return not self._is_alive(self._hellos[number]["id"]), self._checked_s.get(number, 0.0)

    def _change_generation(
        self, number: int, ids: tuple[str, ...], continuing: tuple[str, ...]
    ) -> None:
        old = self.generation
        if old is None or old.number != number:  # another one was formed meanwhile
            if self.own_id not in ids:
                self.announce_leaving(self.kv)
                raise Evicted("this member has left")
            return
        with self._changed:
            self._frozen = True
            decision = Decision(ids, continuing, self.votes, self._answers)
        value = self.kv.put_if_absent(f"members/{number + 1}", decision.to_dict())
        self._enter(number + 1, Decision.from_dict(value))

    def _freeze(self, old: Generation) -> None:
        """Accept no further agreement of a generation, and end all waits in it."""
        with self._changed:
            self._frozen = True
        if old.groups is not None:
            old.groups.disconnect()

    def _regroup(self, why: str) -> None:
        old = self.generation
        assert old is not None, "entered"
        self.kv.put(f"break/{old.number}", {"by": self.own_id, "why": why})
        self._freeze(old)
        _log.warning("generation %d is broken: %s", old.number, why)
        self._enter(old.number + 1, self._next_decision(old))

    def _next_decision(self, old: Generation, connecting_s: float | None = None) -> Decision:
        """Return the next generation, of the members that are still present; some may need
        `connecting_s` more to connect.
        """
        number, begun = old.number + 1, time.monotonic()
        self.kv.put(f"alive/{number}/{self.own_id}", self._announcement(connecting_s))
        while True:
            self._beat()
            value = self.kv.get(f"members/{number}")
            if value is not None:
                return Decision.from_dict(value)
            # taken before the announcements are read: every member had this long to announce itself
            waited_s = time.monotonic() - begun
            announced = {
                member: announcement
                for member in old.ids
                if (announcement := self._announced(number, member)) is not None
            }
            connecting = [one["connecting_s"] or 0.0 for one in announced.values()]
            grace_s = _ANNOUNCE_S + max(connecting, default=0.0)
            if len(announced) == old.size or waited_s > grace_s:
                decision, electorate = next_decision(old.ids, announced, old.quorum_base)
                present = sum(member in decision.ids for member in electorate)
                left = sum(announcement["left"] for announcement in announced.values())
                # members that left do not count as lost: then fewer than min_members may continue
                enough = present == len(electorate) or len(decision.ids) + left >= self._min_members
                if enough and (2 * present > len(electorate) or not electorate):
                    return Decision.from_dict(
                        self.kv.put_if_absent(f"members/{number}", decision.to_dict())
                    )
                if waited_s > self.timeout_s:
                    missing = ", ".join(member for member in old.ids if member not in announced)
                    raise QuorumLost(
                        f"{len(decision.ids)} members are left of {old.size}, and more than half "
                        f"of {len(electorate)} and at least min_members={self._min_members} are "
                        f"needed; no announcement within {waited_s:.1f} s: {missing}"
                    )
            time.sleep(_STEP_S)

    def _enter(self, number: int, decision: Decision) -> None:
        """Connect the members of a generation; if that fails, those of the next one."""
        attempts, cause = 0, "it did not announce itself in time, or has left"
        with self._changed:
            self._voted = False
        while True:
            if self.own_id not in decision.ids:
                raise Evicted(
                    f"generation {number} was formed without this member: {cause}. Join again to "
                    f"take part; the others are {', '.join(decision.ids)}"
                )
            with self._changed:
                if self.generation is not None and decision.votes == self.votes + 1:
                    # the last agreement took the answers of all members of this generation
                    self._recorded = decision.votes, decision.answers, self.generation.ids
            self.kv.put("gen", number)
            self._past_members.update(decision.ids)
            formed = Generation(number, decision, decision.ids.index(self.own_id))
            if formed.size == 1:
                break
            limit_s = min(_CONNECT_S, self.timeout_s)
            until = time.monotonic() + limit_s
            try:
                store = self.kv.store.under(f"gloo/{number}")
                formed.groups = MemberGroups(
                    store, formed.rank, formed.size, limit_s, self._endpoint
                )
                break
            except ThinwireError as error:
                why = f"({error.__cause__ or error}). {self._connecting_advice()}"
                cause = f"it could not connect to all of them {why}"
                attempts += formed.quorum_base == decision.ids
                if attempts == _MAX_ATTEMPTS:
                    raise ThinwireError(
                        f"{attempts} generations in a row could not connect: their members reach "
                        f"the meeting place, but not each other {why}"
                    ) from error
                self.kv.put(f"break/{number}", {"by": self.own_id, "why": str(error)})
                decision = self._next_decision(formed, max(until - time.monotonic(), 0.0))
                number += 1
        with self._changed:
            old, self.generation = self.generation, formed
            self._frozen = False
            self._changed.notify_all()
        if old is not None and old.groups is not None:
            old.groups.disconnect()
        _log.info("generation %d: %s", number, ", ".join(decision.ids))

    def _connecting_advice(self) -> str:
        doctor = "`thinwire doctor` on each machine says what is in the way"
        if self._endpoint.own_address is None:  # it uses the relay already
            return doctor
        return (
            "If routers or firewalls let nothing in, join with relay=True, at a host that was "
            f"started with `thinwire host --relay`; else {doctor}"
        )
