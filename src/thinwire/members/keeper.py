"""The thread of a member that watches the run's store and forms generations, while training goes on
in the main thread.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.comm.line import ways_between
from thinwire.comm.private import forget_ended
from thinwire.comm.relay import RelayPlace
from thinwire.comm.waiting import idle_s, waits
from thinwire.errors import Evicted, PayloadCorrupt, PeerStalled, QuorumLost, ThinwireError
from thinwire.members.board import Board, no_answer
from thinwire.members.generation import Decision, Generation, agreed, packed

__all__ = ["AWAY_S", "Keeper"]

_POLL_S = 0.2
_STEP_S = 0.02
_GRACE_S = 2.0
"""For a member to announce itself once a generation is broken; it does so within `_POLL_S`."""
_FRESH_S = 3.0
"""A process whose sign of life is older is away."""
AWAY_S = 1.2
"""A member that has said that it is busy gives a sign of life within this time."""
_LOOK_S = 1.0
_BUILD_S = 10.0
_MOST_BUILDS = 3
_EXIT_S = 2.0
_HELLOS = "hellos"
"""A number from which on none may be there: where to begin to look, no more."""
_BUILDS_S = (_MOST_BUILDS + 2) * (_BUILD_S + _GRACE_S) + _EXIT_S
_log = logging.getLogger("thinwire")


class Keeper:
    """What this member knows about the others, and its voice at the store.

    An agreement has a number, counted over all generations, and has come about as soon as one
    member has heard all. When a generation breaks, every member announces the number of its last
    one and what was said there; the first to see all announcements, or those that came in time,
    writes who goes on. Who had not heard the last agreement takes it from there. From its
    announcement on a member accepts no agreement of the old generation.

    Attributes:
        me: The identity of this member.
        votes: Agreements that have come about, as far as this member goes along.
        generation: The last one that was formed; None before the first.
        end: Why this member cannot go on; None while it can.
        newcomer: Whether the run had begun without this process.
        admitted: The number and the members of the generation that lets a newcomer in, which need
            not be connected yet; None before that.
    """

    def __init__(
        self,
        board: Board,
        me: str,
        *,
        way: str | RelayPlace,
        min_members: int,
        start_members: int,
        timeout_s: float,
    ) -> None:
        self.board, self.me, self._way = board, me, way
        self.timeout_s, self._min_members = timeout_s, min_members
        self._patience_s = timeout_s + min(_BUILD_S, timeout_s)
        self._start_members = start_members
        self.generation: Generation | None = None
        self.end: ThinwireError | None = None
        self.votes = 0
        self.newcomer = False
        self.admitted: tuple[int, tuple[str, ...]] | None = None
        self.served: dict[int, float] = {}
        """When somebody was to give a state to a newcomer, by its number."""
        self.store_problem: str | None = None
        self._answers: tuple[bytes, ...] = ()
        self.voters: tuple[str, ...] = (me,)
        """Whose answers the last agreement has, in their order."""
        self._recorded: tuple[int, tuple[bytes, ...], tuple[str, ...]] | None = None
        self._founders: tuple[str, ...] | None = None
        self._frozen = self._voted = False
        self._hello = 0
        self._heard = time.monotonic()
        self._awaited: tuple[str, ...] = ()
        self._next_hello = 0
        self._unread: list[int] = []
        self._hellos: dict[int, dict[str, Any]] = {}
        self._ready: set[int] = set()
        self._looked: dict[int, float] = {}
        self._were_in: set[str] = set()
        self._beats = 0
        self._seen: dict[str, tuple[int, float, bool]] = {}
        self._news = threading.Condition()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-members", daemon=True)

    # for the main thread

    def meet(self, founders: tuple[str, ...] | None = None) -> None:
        """Say hello, and wait until there is a first generation, or one that this member has to
        join. A run of whose last generation nobody is left begins anew, with the next one.

        Args:
            founders: Whom the first rank of this site has met, for its other ranks, which do not
                ask to be let in; empty where the run had begun without them.

        Raises:
            QuorumLost: Fewer than `min_members` came within the time-out.
            PeerStalled: The meeting place does not answer.
        """
        self._founders = founders
        self._thread.start()
        limit_s = self._patience_s + self.timeout_s + _BUILDS_S
        there = self._came(lambda: self.end or self.generation or self.newcomer, limit_s)
        if self.end is not None:
            raise self.end
        if not there:
            raise ThinwireError(f"no first generation came about within {limit_s:g} s")

    def _came(self, what: Callable[[], Any], limit_s: float) -> bool:
        """Wait for the thread to bring something about; False where it did not in time."""
        until = time.monotonic() + limit_s
        with self._news:
            while not self._news.wait_for(what, _POLL_S):
                if self.board.waits_s > self.timeout_s:
                    raise PeerStalled(no_answer(self.timeout_s))
                if time.monotonic() > until:
                    return False
        return True

    def current(self) -> Generation:
        """The last generation that was formed.

        Raises:
            Evicted, QuorumLost, ThinwireError: This member cannot go on.
        """
        if self.end is not None:
            raise self.end
        assert self.generation is not None, "met"
        return self.generation

    def broken(self, number: int, why: str) -> None:
        """Say that nothing can be exchanged in a generation any more."""

        def leave_behind() -> None:
            if self.generation is not None and self.generation.number == number:
                self._regroup(why)

        self._orders.put(leave_behind)

    def change(self, number: int, ids: Sequence[str], settled: Sequence[str]) -> None:
        """Go over from a generation to one of these members, as all its members have agreed."""
        with self._news:
            # whoever is not let in now has missed a round, and has to come as another
            self._were_in.update(ids)
        self._orders.put(lambda: self._go_over(number, tuple(ids), tuple(settled)))

    def settle(self, number: int) -> Generation:
        """Wait for a generation after this one.

        Raises:
            Evicted, QuorumLost, ThinwireError: This member cannot go on.
            PeerStalled: The meeting place does not answer.
        """
        limit_s = self.timeout_s + _BUILDS_S
        there = self._came(
            lambda: self.end or (self.generation and self.generation.number > number), limit_s
        )
        if not there:
            raise ThinwireError(
                f"no other generation after {number} came about within {limit_s:g} s"
            )
        return self.current()

    def passed(self, number: int, vote: int, answers: Sequence[bytes]) -> bool:
        """Go along with an agreement; False where its generation has been left meanwhile."""
        with self._news:
            now = self.generation
            if self._frozen or now is None or now.number != number:
                return False
            self.votes, self._answers, self._voted = vote, tuple(answers), True
            self.voters = now.base = now.ids
            return True

    def recorded(self, vote: int) -> list[bytes] | None:
        """What was said in an agreement that another member has heard; None for any other."""
        with self._news:
            if self._recorded is None or self._recorded[0] != vote:
                return None
            self.votes, self._answers, self.voters = self._recorded
            self._recorded = None
            return list(self._answers)

    def more_s(self, timeout_s: float) -> float:
        """For how long, in seconds, members that have said to be busy may still be waited for:
        until `timeout_s` after the last of them was known to be. Takes two seconds at most.

        Returns:
            0 or less where another one than those is missing, or none is; or where the meeting
            place does not answer.
        """
        found: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._orders.put(lambda: found.put(self._more_s(timeout_s)))
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=2 * _LOOK_S)
        return 0.0

    def say_hello(self, board: Board, founds: int | None = None) -> int:
        """Ask to be let in, or to begin with the generation `founds`; the request's number."""
        number = max(self._hello, board.of_member(_HELLOS) or 0)
        while True:
            key = f"hello/{number}"
            try:
                said = {"id": self.me, "n": number, "founds": founds}
                if board.first(key, said)["id"] == self.me:
                    break
            except PayloadCorrupt as error:  # a stranger has written there
                board.tell_once(key, error)
            number += 1
        self._hello = number + 1
        board.put(_HELLOS, self._hello)
        return number

    def require_life(self) -> None:
        """For a newcomer that waits.

        Raises:
            PeerStalled: No member has given a sign of life within the time-out, and the time that
                connecting may take.
        """
        if self.end is not None:
            raise self.end
        if self._is_silent():
            raise PeerStalled(
                "the run has begun, and none of its members was heard of for "
                f"{self._patience_s:.0f} s: {', '.join(self._awaited)}. Join again: if they have "
                "ended, the run begins anew"
            )

    def is_let_in(self) -> bool:
        """Whether a generation is to have this newcomer, within the time-out."""
        self._came(lambda: self.end or self.admitted, self.timeout_s)
        if self.end is not None:
            raise self.end
        return self.admitted is not None

    def wait_for_decision(self) -> None:
        """Wait until it is written that the others go on without this member, who leaves."""
        with self._news:
            self._news.wait_for(lambda: self.end is not None, self.timeout_s)

    def waiting(self) -> list[tuple[int, str]]:
        """Newcomers that nobody has given a state yet, by number and identity."""
        with self._news:  # one that has just left asks no more
            asked = {n: value["id"] for n, value in sorted(self._hellos.items())}
            asked = {n: each for n, each in asked.items() if each not in self._were_in}
        return [
            (n, each) for n, each in asked.items() if n not in self.served and self._is_fresh(each)
        ]

    def ready(self) -> list[str]:
        """Newcomers that have the state of the run."""
        with self._news:
            found = [self._hellos[n]["id"] for n in sorted(self._ready) if n in self._hellos]
            found = [each for each in found if each not in self._were_in]
        return [each for each in dict.fromkeys(found) if self._is_fresh(each)]

    def say_left(self, board: Board) -> None:
        """Tell the others that this member ends by itself, so that they go on without it however
        many they are, and who has not heard the last agreement takes it from there.
        """
        now = self.generation
        said = self._announcement() | {"after": -1 if now is None else now.number}
        try:
            board.put(f"left/{self.me}", said)
        except (RuntimeError, ThinwireError) as error:  # nobody can ask there either
            _log.info("left without a word at the meeting place: %s", error)

    def close(self) -> None:
        """End the thread; may be called twice."""
        with self._news:
            if self.end is None:
                self.end = ThinwireError("this member has been closed, and takes part no more")
            self._news.notify_all()
        self._over.set()
        self._orders.put(None)
        if self.board.waits_s > self.timeout_s:  # the host does not answer
            self.board.hang_up()
        beside = threading.current_thread() is not self._thread
        if self._thread.is_alive() and beside:
            self._thread.join(_EXIT_S)
        self.board.hang_up()  # it may still wait for the host
        if self._thread.is_alive() and beside:
            # the process would be aborted at its end by a thread of the backend that still connects
            self._thread.join(_BUILD_S)
        if self.generation is not None and self.generation.groups is not None:
            self.generation.groups.release()
            self.generation.groups = None
        forget_ended(_EXIT_S / 4)

    # on the thread

    def _run(self) -> None:
        try:
            self._meet()
            while not self._over.is_set():
                try:
                    order = self._orders.get(timeout=_POLL_S)
                except queue.Empty:
                    self._watch()
                    continue
                if order is not None:
                    order()
        except ThinwireError as error:
            self._ended(error)
        except RuntimeError as error:
            text = "the meeting place does not answer, and without it no new generation can be"
            self._ended(ThinwireError(f"{text} formed: {error}"))
        except Exception as error:  # who waits for this thread must not wait for ever
            _log.exception("the thread that keeps this member in its run has failed")
            text = f"keeping this member in its run: {type(error).__name__}: {error}"
            self._ended(ThinwireError(text))

    def _ended(self, error: ThinwireError) -> None:
        with self._news:
            self.end = error
            self._frozen = True
            self._news.notify_all()
        if self.generation is not None and self.generation.groups is not None:
            self.generation.groups.hang_up()

    def _meet(self) -> None:
        number, founds, begun, enough_s = self._latest(), -1, 0.0, math.inf
        if self._founders:
            self._begin_with(self._founders, number)
            return
        self._heard = time.monotonic()
        while not self._over.is_set():
            number, decision, lives = self._look(number)
            if self.me in decision.ids:
                with self._news:
                    self.votes, self.admitted = decision.votes, (number, decision.ids)
                    self._news.notify_all()
                self._enter(number, decision)
                return
            if lives or (self._founders is not None and number >= 0):
                with self._news:  # the main thread fetches the state meanwhile
                    self.newcomer = True
                    self._news.notify_all()
            now, first = time.monotonic(), number + 1
            # nobody is left, or was there ever
            if not self.newcomer and (first == founds or not decision.ids or self._is_silent()):
                if first != founds:
                    founds, begun, enough_s = first, now, math.inf
                    self.say_hello(self.board, founds)
                    if number >= 0:
                        _log.warning("none of generation %d is left: the run begins anew", number)
                found = self._who_came(founds)
                enough_s = min(enough_s, now) if len(found) >= self._start_members else math.inf
                if now - enough_s >= 2 * _POLL_S:  # for those who come together with the others
                    self.board.first(f"members/{first}", Decision(found, found, 0).to_dict())
                elif now - begun > self.timeout_s:
                    raise QuorumLost(
                        f"{len(found)} of {self._start_members} members came within "
                        f"{self.timeout_s:g} s: {', '.join(found)}. Start the others, or ask for "
                        "fewer"
                    )
            time.sleep(_POLL_S / 2)

    def _begin_with(self, founders: tuple[str, ...], latest: int) -> None:
        """Be in the run as the first rank of this site is, from where it has met the others."""
        number = latest  # they may have lost one since
        while number >= 0 and self._decision(number).ids != founders:
            number -= 1
        number = latest + 1 if number < 0 else number
        first = Decision(founders, founders, 0).to_dict()
        self._enter(number, Decision.from_dict(self.board.first(f"members/{number}", first)))

    def _who_came(self, number: int) -> tuple[str, ...]:
        """Those alive who have said hello to begin with this generation, in the order of that."""
        self._read_hellos(math.inf)
        hellos = [value for _, value in sorted(self._hellos.items())]
        ids = dict.fromkeys(value["id"] for value in hellos if value.get("founds") == number)
        return tuple(each for each in ids if each == self.me or self._lives(each))

    def _look(self, number: int) -> tuple[int, Decision, bool]:
        """The last generation by now, from this one on, and whether one of its members lives."""
        self._beat()
        before, number = number, self._latest_from(number)
        decision = self._decision(number)
        self._awaited = decision.ids
        lives = self._some_live(decision.ids)
        if lives or number > before:
            self._heard = time.monotonic()
        return number, decision, lives

    def _decision(self, number: int) -> Decision:
        """Of a generation that was formed; -1 for none."""
        if number < 0:
            return Decision((), (), 0)
        value = self.board.get(f"members/{number}")
        assert value is not None, "it was there"
        return Decision.from_dict(value)

    def _is_silent(self) -> bool:
        # members that connect give no sign of life
        return time.monotonic() - self._heard > self._patience_s

    def _latest(self) -> int:
        hint = self.board.get("gen")
        return self._latest_from(-1 if hint is None else int(hint))

    def _latest_from(self, number: int) -> int:
        while self.board.has(f"members/{number + 1}"):
            number += 1
        return number

    def _announcement(self, connecting_s: float | None = None) -> dict[str, Any]:
        with self._news:  # what was taken from another counts before the main thread asks for it
            votes, answers, _ = self._recorded or (self.votes, self._answers, ())
        return {
            "votes": votes,
            "answers": packed(answers),
            "voted": self._voted,
            "connecting_s": connecting_s,
        }

    def _announced(self, number: int, other: str) -> dict[str, Any] | None:
        """What a member has said for the generation of this number, or when it left."""
        said: dict[str, Any] | None = self.board.get(f"left/{other}")
        if said is not None:
            return said | {"left": True, "voted": said["voted"] and said["after"] == number - 1}
        said = self.board.get(f"alive/{number}/{other}")
        return None if said is None else said | {"left": False}

    def _beat(self) -> None:
        """A sign of life; its number grows, so that an old one is none."""
        self._beats += 1
        sign = {"beat": self._beats, "idle": idle_s(), "waits": waits()}
        self.board.put(f"hb/{self.me}", sign)

    def _more_s(self, timeout_s: float) -> float:
        formed = self.generation
        assert formed is not None, "exchanged"
        others = [each for each in formed.ids if each != self.me]
        until = time.monotonic() + AWAY_S
        try:
            before = [self.board.get(f"hb/{each}") for each in others]
            while True:
                time.sleep(_POLL_S)
                self._beat()  # the others look too
                signs = [self.board.get(f"hb/{each}") for each in others]
                pairs = list(zip(before, signs, strict=True))
                live = [was is not None and now["beat"] > was["beat"] for was, now in pairs]
                if all(live) or time.monotonic() > until:
                    break
        except RuntimeError as error:
            _log.warning("the meeting place cannot say who is busy: %s", error)
            return 0.0
        if not all(live):
            return 0.0
        idle = [math.inf if s["idle"] is None else s["idle"] for s in signs if not s["waits"]]
        return timeout_s - max(idle, default=math.inf)

    def _lives(self, other: str) -> bool:
        """Look for a sign of life of another process, and say whether one came lately."""
        value, now = self.board.get(f"hb/{other}"), time.monotonic()
        if value is not None:
            before = self._seen.get(other)
            if before is None:  # one that was there when we first looked may be old
                self._seen[other] = value["beat"], now, False
            elif value["beat"] > before[0]:
                self._seen[other] = value["beat"], now, True
        return self._is_fresh(other)

    def _some_live(self, others: Sequence[str]) -> bool:
        found = [self._lives(other) for other in others if other != self.me]
        return any(found)

    def _is_fresh(self, other: str) -> bool:
        beat = self._seen.get(other)
        return beat is not None and beat[2] and time.monotonic() - beat[1] < _FRESH_S

    def _watch(self) -> None:
        now = self.generation
        assert now is not None, "entered"
        try:
            self._beat()
            if self.board.has(f"break/{now.number}"):
                self._regroup("others found it broken")
                return
            value = self.board.get(f"members/{now.number + 1}")
            if value is not None:  # others have heard an agreement that has not come here
                self._leave_for(Decision.from_dict(value))
                return
            if now.rank == 0:
                self._look_for_newcomers()
            self.store_problem = None
        except ThinwireError:
            raise
        except RuntimeError as error:
            if self.store_problem is None and not self._over.is_set():
                _log.warning(
                    "the meeting place does not answer (%s): rounds go on, nobody can join, and a "
                    "member that is lost ends the run",
                    error,
                )
            self.store_problem = str(error)

    def _look_for_newcomers(self) -> None:
        """For a while: many may have asked, most of whom have gone, and others wait for a beat."""
        until = time.monotonic() + _LOOK_S
        self._read_hellos(until)
        for number, value in list(self._hellos.items()):
            if value["id"] in self._were_in:
                with self._news:
                    del self._hellos[number]
                    self._ready.discard(number)
        for number in sorted(self._hellos, key=self._turn):
            if time.monotonic() > until:
                return
            self._looked[number] = time.monotonic()
            if not self._lives(self._hellos[number]["id"]) or number in self._ready:
                continue
            if self.board.has(f"ready/{number}"):
                with self._news:
                    self._ready.add(number)
            elif self._is_forgotten(number):
                del self.served[number]

    def _read_hellos(self, until: float) -> None:
        """The requests that are new, as far as time allows; of old ones the last first."""
        if self._next_hello == 0:
            self._next_hello = self.board.of_member(_HELLOS) or 0
            self._unread = list(range(self._next_hello))
        while time.monotonic() < until:
            key = f"hello/{self._next_hello}"
            try:
                value = self.board.get(key)
            except PayloadCorrupt as error:  # a stranger has written there, and no member needs it
                self.board.tell_once(key, error)
            else:
                if value is None:
                    break
                with self._news:
                    self._hellos[self._next_hello] = value
            self._next_hello += 1
        while self._unread and time.monotonic() < until:
            number = self._unread.pop()
            value = self.board.of_member(f"hello/{number}")
            if value is not None:
                with self._news:
                    self._hellos[number] = value

    def _is_forgotten(self, number: int) -> bool:
        """Whether nobody has begun to give a newcomer the state, though somebody was to: members
        who were in different generations do not see the same one in this turn.
        """
        asked = self.served.get(number)
        late = asked is not None and time.monotonic() - asked > self.timeout_s
        return late and not self.board.has(f"giver/{number}")

    def _turn(self, number: int) -> tuple[bool, float]:
        """Those who live go first, then whoever was not looked at for longest."""
        return not self._is_fresh(self._hellos[number]["id"]), self._looked.get(number, 0.0)

    def _go_over(self, number: int, ids: tuple[str, ...], settled: tuple[str, ...]) -> None:
        old = self.generation
        if old is None or old.number != number:  # another one was formed meanwhile
            if self.me not in ids:
                self.say_left(self.board)
                raise Evicted("this member has left")
            return
        with self._news:
            self._frozen = True
            decision = Decision(ids, settled, self.votes, self._answers)
        value = self.board.first(f"members/{number + 1}", decision.to_dict())
        self._enter(number + 1, Decision.from_dict(value))

    def _leave_for(self, decision: Decision) -> None:
        old = self.generation
        assert old is not None, "entered"
        self._give_up(old)
        self._enter(old.number + 1, decision)

    def _give_up(self, old: Generation) -> None:
        """Accept no agreement of a generation any more; who waits in it need not wait longer."""
        with self._news:
            self._frozen = True
        if old.groups is not None:
            old.groups.hang_up()

    def _regroup(self, why: str) -> None:
        old = self.generation
        assert old is not None, "entered"
        self.board.put(f"break/{old.number}", {"by": self.me, "why": why})
        self._give_up(old)
        _log.warning("generation %d is broken: %s", old.number, why)
        self._enter(old.number + 1, self._decided(old))

    def _decided(self, old: Generation, connecting_s: float | None = None) -> Decision:
        """The next generation, of those still there; some may connect for `connecting_s` yet."""
        number, begun = old.number + 1, time.monotonic()
        self.board.put(f"alive/{number}/{self.me}", self._announcement(connecting_s))
        while True:
            self._beat()
            value = self.board.get(f"members/{number}")
            if value is not None:
                return Decision.from_dict(value)
            waited_s = time.monotonic() - begun  # of which all of them had a chance to be seen
            announced = {
                each: said
                for each in old.ids
                if (said := self._announced(number, each)) is not None
            }
            connecting = [said["connecting_s"] or 0.0 for said in announced.values()]
            grace_s = _GRACE_S + max(connecting, default=0.0)
            if len(announced) == old.size or waited_s > grace_s:
                decision, needed = agreed(old.ids, announced, old.base)
                there = sum(each in decision.ids for each in needed)
                gone = sum(said["left"] for said in announced.values())
                # where nobody is lost, as many as have not left are enough
                enough = there == len(needed) or len(decision.ids) + gone >= self._min_members
                if enough and (2 * there > len(needed) or not needed):
                    return Decision.from_dict(
                        self.board.first(f"members/{number}", decision.to_dict())
                    )
                if waited_s > self.timeout_s:
                    away = ", ".join(each for each in old.ids if each not in announced)
                    raise QuorumLost(
                        f"{len(decision.ids)} members are left of {old.size}, and more than half "
                        f"of {len(needed)} and at least min_members={self._min_members} are "
                        f"needed; not heard of for {waited_s:.1f} s: {away}"
                    )
            time.sleep(_STEP_S)

    def _enter(self, number: int, decision: Decision) -> None:
        """Form the groups of a generation; where that fails the next one, as `agreed` decides."""
        builds, trouble = 0, "it was not heard of in time, or has left"
        with self._news:
            self._voted = False
        while True:
            if self.me not in decision.ids:
                raise Evicted(
                    f"generation {number} was formed without this member: {trouble}. Join again to "
                    f"take part; the others are {', '.join(decision.ids)}"
                )
            with self._news:
                if self.generation is not None and decision.votes == self.votes + 1:
                    # it took all of the generation that this member was in
                    self._recorded = decision.votes, decision.answers, self.generation.ids
            self.board.put("gen", number)
            self._were_in.update(decision.ids)
            formed = Generation(number, decision, decision.ids.index(self.me))
            if formed.size == 1:
                break
            limit_s = min(_BUILD_S, self.timeout_s)
            until = time.monotonic() + limit_s
            try:
                formed.groups = ways_between(
                    self.board.store.under(f"gloo/{number}"),
                    formed.rank,
                    formed.size,
                    limit_s,
                    self._way,
                )
                break
            except ThinwireError as error:
                trouble = f"it could not be connected with all of them ({error})"
                builds += formed.base == decision.ids
                if builds == _MOST_BUILDS:
                    raise ThinwireError(
                        f"{builds} generations in a row could not connect, though their members "
                        f"reach the meeting place: {error}. Run `thinwire doctor` on them"
                    ) from error
                self.board.put(f"break/{number}", {"by": self.me, "why": str(error)})
                decision = self._decided(formed, max(until - time.monotonic(), 0.0))
                number += 1
        with self._news:
            old, self.generation = self.generation, formed
            self._frozen = False
            self._news.notify_all()
        if old is not None and old.groups is not None:
            old.groups.hang_up()
        _log.info("generation %d: %s", number, ", ".join(decision.ids))
