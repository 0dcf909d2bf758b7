"""The membership thread: it watches the run's store and forms generations."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from thinwire.comm.member_groups import MemberGroups
from thinwire.comm.relay import RelayEndpoint
from thinwire.comm.waiting import activity, idle_s
from thinwire.errors import Evicted, PayloadCorrupt, PeerLost, QuorumLost, ThinwireError
from thinwire.members.generation import Decision, Generation, Outcome, next_decision
from thinwire.members.kv import HostRestarted, KeyValueView
from thinwire.members.meeting import require_same
from thinwire.members.server import allow_files

POLL_S = 0.2
"""Seconds between two looks at the host."""
_ANNOUNCE_S = 2.0
"""Time for members to announce themselves after a break; each does so within `POLL_S`."""
_QUIET_S = 1.0
"""Time since the last announcement after which the missing ones are left out."""
_BACK_S = 8.0
"""Time for a member that lost its connection to the host to have another one."""
_ALIVE_S = 3.0
"""Age in seconds from which a process without a new heartbeat counts as gone."""
BUSY_BEAT_S = 1.2
"""Longest time in seconds between two heartbeats of a busy member."""
_COME_BACK_S = 1.0
"""Time for members to find a host that was started again, before another founds their run."""
_CONNECT_S = 10.0
_ADDRESS_BYTES = 154, 8
"""Bytes of the addresses of a member for the others, and more for each of them."""
_HOST_BYTES_PER_S = 2.5e6
"""Slowest rate of a host that passes them on, 20 Mbit/s."""
_MAX_ATTEMPTS = 3
CLOSED_KEY = "closed"
"""Key of the last agreement that was made at the host."""
_MORE_FILES = 32
END_KEY = "end"
"""Key that asks all members to leave."""
_RECOVERING = "recovering"
"""Key that tells founders of members that were in the run before its host lost it."""
_HELLOS = "hellos"
"""Key of the next free request number; a hint where to begin to search."""
_HELLOS_AT_ONCE = 16
"""Requests of joiners that are read at once."""
_log = logging.getLogger("thinwire")


class Terms(NamedTuple):
    """Arguments of `join` for the run."""

    endpoint: RelayEndpoint
    min_members: int
    start_members: int
    timeout_s: float
    streams: int | None = None
    keep_batch: bool = False
    name: str | None = None
    grace_seconds: float | None = None


class Shared:
    """What the main thread and the membership thread share; what both write, under `changed`."""

    # agreements are numbered over all generations. One is valid as soon as one member has received
    # all answers. When a generation breaks, every member announces its last agreement with its
    # answers, and accepts none of that generation any more. The first that sees all announcements
    # (or those in time) writes the next generation with the latest agreement, from which the others
    # take it

    def __init__(self, own_id: str, timeout_s: float) -> None:
        self.changed = threading.Condition()
        self.own_id = own_id
        self.timeout_s = timeout_s
        self.round_trip_s = 0.0
        """Longest mean round trip to the host, of the members."""
        self.generation: Generation | None = None
        self.end_reason: ThinwireError | None = None
        self.store_problem: str | None = None
        self.reached: list[str] = []
        """Members that the last attempt to connect has found; empty where none looked."""
        self.joiner = self.unknown = False
        """`unknown`: the host was started anew, and waits for more members before it goes on."""
        self.former: tuple[str, dict[str, Any]] | None = None
        """What this member presented before it entered again; then it founds no generation."""
        self.admitted: tuple[int, tuple[str, ...]] | None = None
        self.agreed = Outcome(0, (), (own_id,))
        """Last agreement that the main thread has accepted."""
        self.present: Sequence[str] | None = None
        """Members that make the present round, if others are late; used by the main thread."""
        self.recorded: Outcome | None = None
        """Agreement that only other members had received, until the main thread takes it."""
        self.frozen = self.voted = self.ending = False
        self.expected: tuple[str, ...] = ()
        """Members of the latest generation, for a joiner that waits."""
        self.last_alive_s = time.monotonic()
        self.heartbeats: dict[str, tuple[int, float, bool]] = {}
        self.hellos: dict[int, dict[str, Any]] = {}
        self.ready: set[int] = set()
        self.past_members: set[str] = set()
        self.donor_assigned_s: dict[int, float] = {}
        """Time at which a donor was assigned, by the joiner's request number."""
        self.next_own_hello = 0
        self.facts: Mapping[str, Mapping[str, Any]] = {}
        """Facts of this member's set-up by occasion, for a host that was started anew."""
        self.shown: dict[str, Any] = {}
        """New numbers of this member for the host's page."""

    def with_trips(self, seconds: float) -> float:
        """Return a time that grows with the round trips of the members to the host."""
        return seconds + 4 * self.round_trip_s

    @property
    def connecting_s(self) -> float:
        """Longest time in seconds for the latest generation, and a joiner, to connect."""
        # two groups, each of one connection after the other, after their addresses went by the host
        size = len(self.expected) + 1
        first, more = _ADDRESS_BYTES
        through_host_s = 2 * size**2 * (first + more * size) / _HOST_BYTES_PER_S
        return min(_CONNECT_S, self.timeout_s) + 4 * size * self.round_trip_s + through_host_s

    @property
    def attempts_s(self) -> float:
        """Longest time in seconds for the next generation, or the end of this member."""
        attempt_s = self.connecting_s + self.with_trips(_ANNOUNCE_S)
        return self.timeout_s + (_MAX_ATTEMPTS + 2) * attempt_s

    @property
    def silence_s(self) -> float:
        """Time in seconds without a heartbeat of any member after which a run has ended."""
        return self.timeout_s + self.connecting_s

    def require_running(self) -> None:
        """Raise the reason for which this member has ended, if it has."""
        if self.end_reason is not None:
            raise self.end_reason

    def is_alive(self, other: str) -> bool:
        """Return True if a new heartbeat of another process came recently."""
        beat = self.heartbeats.get(other)
        recently = self.with_trips(_ALIVE_S)
        return beat is not None and beat[2] and time.monotonic() - beat[1] < recently

    def is_silent(self) -> bool:
        """Return True if no member has sent a heartbeat for long; connecting ones send none."""
        return time.monotonic() - self.last_alive_s > self.silence_s

    def presented(self) -> tuple[str, dict[str, Any]] | None:
        """Return key and facts of the generation, for a host that has lost the run."""
        now = self.generation
        if now is None:
            return self.former
        facts = {"number": now.number, "ids": now.ids, "vote": self.agreed.vote}
        return f"recover/{self.own_id}", facts | {"timeout_s": self.timeout_s}

    def announcement(self, connecting_s: float | None = None) -> dict[str, Any]:
        """Return the last agreement, for members that have not received it."""
        # an agreement taken from another member counts even before the main thread asks for it
        with self.changed:
            agreed = (self.recorded or self.agreed).to_dict() | {"voted": self.voted}
        return agreed | {"connecting_s": connecting_s, "reached": self.reached}

    def announce_leaving(self, kv: KeyValueView) -> None:
        """Tell the others that this member leaves: they continue, however few they are."""
        now = self.generation
        announcement = self.announcement() | {"after": -1 if now is None else now.number}
        try:
            kv.put(f"left/{self.own_id}", announcement)
        except (RuntimeError, ThinwireError) as error:  # the others cannot read there either
            _log.info("could not announce at the meeting place that this member leaves: %s", error)

    def say_hello(self, kv: KeyValueView, **asks: Any) -> int:
        """Ask for admission; return the number of the request."""
        number = max(self.next_own_hello, kv.get(_HELLOS) or 0)
        while True:
            key = f"hello/{number}"
            try:
                hello = {"id": self.own_id, "n": number, **asks}
                if kv.put_if_absent(key, hello)["id"] == self.own_id:
                    break
            except PayloadCorrupt as error:  # a stranger has written there
                kv.warn_once(key, error)
            number += 1
        self.next_own_hello = number + 1
        kv.put(_HELLOS, self.next_own_hello)
        return number


class Watcher:
    """The membership thread: it watches the run's store and forms generations."""

    def __init__(self, kv: KeyValueView, shared: Shared, terms: Terms) -> None:
        self.kv = kv
        self.shared = shared
        self.own_id = shared.own_id
        self._endpoint, self._min_members, self._start_members, self.timeout_s, *_ = terms
        self.founders: tuple[str, ...] | None = None
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """What the main thread asks this one to do; None wakes it."""
        self.stopped = threading.Event()
        kv.session = kv.store.session
        self._next_hello = self._beat_count = self._news = 0
        self._latest = Decision((), ())

    def form_generations(self) -> None:
        """Meet the others, then watch and do what the main thread asks, until this member ends."""
        try:
            try:
                self._meet()
            except HostRestarted:  # the members present a generation to the new host
                if self.shared.generation is None:
                    raise
            while not self.stopped.is_set():
                try:
                    command = self.commands.get(timeout=POLL_S)
                except queue.Empty:
                    self._watch()
                    continue
                if command is not None:
                    self._at_known_host(command)
        except ThinwireError as error:
            self._stop_with(error)
        except HostRestarted:
            self._stop_with(PeerLost("the host was started anew: join again"))
        except RuntimeError as error:
            text = "the meeting place does not answer, and no new generation can form without it"
            self._stop_with(PeerLost(f"{text}: {error}"))
        except Exception as error:  # the main thread may wait for this one
            _log.exception("the membership thread has failed")
            text = f"the membership thread failed: {type(error).__name__}: {error}"
            self._stop_with(ThinwireError(text))

    def _at_known_host(self, command: Callable[[], None]) -> None:
        """Do this, and do it again where the host was started anew meanwhile."""
        # a generation is decided among the members of one host alone
        while not self.stopped.is_set():
            try:
                command()
                return
            except HostRestarted:
                while not self._is_known() and not self.stopped.wait(POLL_S):
                    pass

    def _stop_with(self, error: ThinwireError) -> None:
        with self.shared.changed:
            self.shared.end_reason = error
            self.shared.changed.notify_all()
        self._freeze()

    def _freeze(self) -> None:
        """Accept no further agreement of this generation, and end all waits in it."""
        shared = self.shared
        with shared.changed:
            shared.frozen = True
        if shared.generation is not None:
            shared.generation.disconnect()

    def _meet(self) -> None:
        shared = self.shared
        number = first_generation = -1
        begun = 0.0
        seen = False
        enough_s = math.inf
        if self.founders:
            self._follow(self.founders)
            return
        shared.last_alive_s = time.monotonic()
        while not self.stopped.is_set():
            shared.unknown = False
            number, decision, alive = self._poll(number)
            if self.own_id in decision.ids:
                with shared.changed:
                    shared.agreed = shared.agreed._replace(vote=decision.agreed.vote)
                    shared.admitted = (number, decision.ids)
                    shared.changed.notify_all()
                self._enter(number, decision)
                return
            if alive or (self.founders is not None and number >= 0):
                with shared.changed:  # the main thread fetches the state meanwhile
                    shared.joiner = True
                    shared.changed.notify_all()
            seen |= alive
            # of sites some ranks may know a former run alone
            if seen and not alive and self._is_over(number):
                raise QuorumLost(
                    f"the run has ended: {', '.join(decision.ids)} left. Join again to begin anew"
                )
            now = time.monotonic()
            first = number + 1
            # no member is alive, or there was never one: found a generation with the others
            if not shared.joiner and (
                first == first_generation or shared.is_silent() or self._is_over(number)
            ):
                if first != first_generation:
                    shared.unknown = self._is_recovering()
                    if shared.unknown or (shared.former and number < 0 and not shared.is_silent()):
                        time.sleep(POLL_S)
                        continue
                    if shared.former:
                        raise QuorumLost("no member of the run is alive")
                    first_generation = first
                    begun = now
                    enough_s = math.inf
                    if number >= 0:
                        _log.warning("no member of generation %d is alive: restarting", number)
                found = self._present_founders(first_generation)
                enough_s = min(enough_s, now) if len(found) >= self._start_members else math.inf
                if now - enough_s >= 2 * POLL_S:  # wait for founders that come at the same time
                    self.kv.put(CLOSED_KEY, {"vote": 0})  # of a run that had this name before
                    self._decided(first, Decision(found, found))
                elif enough_s == math.inf and now - begun > self.timeout_s:
                    raise QuorumLost(
                        f"{len(found)} of {self._start_members} members came within "
                        f"{self.timeout_s:g} s: {', '.join(found)}. Start the others, or lower "
                        "min_members or start_members"
                    )

    def _follow(self, founders: tuple[str, ...]) -> None:
        """Enter the generation in which the first rank of this site met the others."""
        met = number = self._poll(-1)[0]  # they may have lost a member since
        while (written := self._decision(met)) is not None and written.ids != founders:
            met -= 1
        met = number + 1 if written is None else met
        self._enter(met, self._decided(met, Decision(founders, founders)))

    def _is_over(self, number: int) -> bool:
        """Return True if all members have left, and no generation is after this one."""
        left = None not in self.kv.look([f"left/{one}" for one in self._latest.ids])[1]
        return left and self._decision(number + 1) is None

    def _is_recovering(self) -> bool:
        """Return True if members of a run that the host does not know may be coming back."""
        if self.kv.call(self.kv.store.age_s) < _COME_BACK_S:
            return True
        recovering, known = self.kv.look([_RECOVERING, "gen"])[1]
        if known is not None:
            return False
        if self.shared.former is not None:
            key, facts = self.shared.former
            self.kv.put(key, facts | {"away": True})
        return recovering is not None

    def _present_founders(self, number: int) -> tuple[str, ...]:
        ids = [*self.kv.entries(f"founder/{number}/")]  # in the order in which they came
        if self.own_id not in ids:
            self.kv.announce(f"founder/{number}/{self.own_id}", True)
        alive = zip(ids, self._poll_heartbeats(ids), strict=True)
        return tuple(one for one, is_alive in alive if is_alive or one == self.own_id)

    def _poll(self, number: int) -> tuple[int, Decision, bool]:
        """Wait for the latest generation, from `number` on; return if a member of it is alive."""
        self._beat()
        before = number
        decision = self._latest
        keys = ["gen", f"members/{number + 1}"]
        self._news, (hint, following) = self.kv.look(keys, POLL_S / 2, self._news)
        if following is None and hint is not None and hint > number:
            # a host that was started anew knows no earlier ones
            number = hint
            decision = self._decision(number) or Decision((), ())
            following = self.kv.get(f"members/{number + 1}")
        while following is not None:
            number += 1
            decision = Decision.from_dict(following)
            following = self.kv.get(f"members/{number + 1}")
        self._latest = decision
        self._expect(decision.ids)
        alive = any(self._poll_heartbeats([one for one in decision.ids if one != self.own_id]))
        if alive or number > before:
            self.shared.last_alive_s = time.monotonic()
        return number, decision, alive

    def _decision(self, number: int) -> Decision | None:
        value = self.kv.get(f"members/{number}")
        return None if value is None else Decision.from_dict(value)

    def _decided(self, number: int, decision: Decision) -> Decision:
        return Decision.from_dict(self.kv.put_if_absent(f"members/{number}", decision.to_dict()))

    def _announced(
        self, number: int, missing: Sequence[str], since: int
    ) -> tuple[int, Decision | None, dict[str, dict[str, Any]], bool]:
        """Wait for news after `since`; return its number, the decision about this generation, the
        announcements of missing members for it, or when they left, and True if no other one of
        them is connected to the host.
        """
        kinds = "left", f"alive/{number}", "hb"
        keys = [f"{kind}/{one}" for one in missing for kind in kinds]
        since, (written, *values) = self.kv.look([f"members/{number}", *keys], POLL_S, since)
        found: dict[str, dict[str, Any]] = {}
        gone = True
        for at, other in enumerate(missing):
            left, alive, beat = values[len(kinds) * at : len(kinds) * (at + 1)]
            self._take_heartbeat(other, beat)
            if left is not None:
                voted = left["voted"] and left["after"] == number - 1
                found[other] = left | {"left": True, "voted": voted}
            elif alive is not None:
                found[other] = alive | {"left": False}
            elif beat is not None:
                gone = False
        return since, None if written is None else Decision.from_dict(written), found, gone

    def _beat(self) -> None:
        """Write a heartbeat. Its number grows, so that a replayed one is recognized."""
        self._beat_count += 1
        heartbeat = {"beat": self._beat_count, "idle": idle_s(), "waits": activity()[1] is not None}
        trip_s = {"trip_s": round(self.kv.store.connection.round_trip_s, 4)}
        self.kv.announce(f"hb/{self.own_id}", heartbeat | trip_s)

    def extension_s(self, timeout_s: float) -> float:
        """Return `timeout_s` less the time since the last of the missing members was busy."""
        # 0 or less if one is missing that is not busy, or if the meeting place does not answer
        formed = self.shared.generation
        assert formed is not None, "exchanged"
        others = [member for member in formed.ids if member != self.own_id]
        until = time.monotonic() + self.shared.with_trips(BUSY_BEAT_S)
        try:
            keys = [f"hb/{member}" for member in others]
            before = self.kv.look(keys)[1]
            while True:
                time.sleep(POLL_S)
                self._beat()  # the others check this member too
                latest = self.kv.look(keys)[1]
                pairs = list(zip(before, latest, strict=True))
                live = [was and now and now["beat"] > was["beat"] for was, now in pairs]
                if all(live) or time.monotonic() > until:
                    break
        except RuntimeError as error:
            _log.warning("the meeting place cannot say who is busy: %s", error)
            return 0.0
        if not all(live):
            return 0.0
        idle = [math.inf if b["idle"] is None else b["idle"] for b in latest if not b["waits"]]
        return timeout_s - max(idle, default=math.inf)

    def _poll_heartbeats(self, others: Sequence[str]) -> list[bool]:
        """Read heartbeats of other processes; return which of them have sent new ones recently."""
        values = self.kv.look([f"hb/{other}" for other in others])[1]
        for other, value in zip(others, values, strict=True):
            self._take_heartbeat(other, value)
        return [*map(self.shared.is_alive, others)]

    def _take_heartbeat(self, other: str, value: Any) -> None:
        shared = self.shared
        before = shared.heartbeats.get(other)
        # the first one read may be old
        if value is not None and (before is None or value["beat"] > before[0]):
            shared.heartbeats[other] = value["beat"], time.monotonic(), before is not None
            shared.round_trip_s = max(shared.round_trip_s, value["trip_s"])

    def _watch(self) -> None:
        shared = self.shared
        now = shared.generation
        assert now is not None, "entered"
        self.kv.patience_s = 0.0  # a later call finds it again
        try:
            if not self._is_known():
                return
            self._beat()
            other = now.ids[self._beat_count % now.size]
            keys = [f"break/{now.number}", f"members/{now.number + 1}", f"hb/{other}", END_KEY]
            broken, following, beat, end = self.kv.look(keys)[1]
            if broken is not None:
                self.regroup("another member reported it")
                return
            # the others may have an agreement that this member has not
            if following is not None:
                self._freeze()
                self._enter(now.number + 1, Decision.from_dict(following))
                return
            if now.rank == 0:
                self._check_joiners()
                if end is not None:  # the main thread reports it to the others
                    shared.ending = True
                    self.kv.put(END_KEY, None)  # not for a later run of this name
            self._take_heartbeat(other, beat)
            shown = shared.shown
            shared.shown = {}
            if shown:
                self.kv.put(f"shown/{self.own_id}", shown)
            shared.store_problem = None
        except ThinwireError:
            raise
        except HostRestarted:
            pass  # to be asked at once
        except RuntimeError as error:
            if shared.store_problem is None and not self.stopped.is_set():
                _log.warning(
                    "the host does not answer (%s): rounds continue. Until it is back nobody can "
                    "join, and a lost member is waited for",
                    error,
                )
            shared.store_problem = str(error)

    def _is_known(self) -> bool:
        """Return True unless the host has lost the run, and not enough members are back there."""
        session, known = self.kv.store.session, self.kv.session
        if session == known:
            return True
        self.kv.session = None
        try:
            if self._is_decided():
                known = session
        finally:
            self.kv.session = known
        if (known != session) > self.shared.unknown:
            _log.warning("the host was started anew, and waits for more members: it says for whom")
        self.shared.unknown = known != session
        return known == session

    def _is_decided(self) -> bool:
        """Present this member's generation to a host that was started anew."""
        shared = self.shared
        now, presented = shared.generation, shared.presented()
        assert now is not None and presented is not None, "entered"
        self.kv.put(_RECOVERING, True)
        self.kv.put(*presented)
        latest, decided = self.kv.look(["gen", f"members/{now.number}"])[1]
        if latest is None:
            return False
        if decided is None or tuple(decided["ids"]) != now.ids:
            raise Evicted(
                "the host was started anew, and the run goes on from another generation than that "
                f"of this member ({now.number}). Join again to take part"
            )
        for occasion, of_run in shared.facts.items():
            require_same(self.kv, occasion, of_run)
        with shared.changed:
            shared.hellos.clear()
            shared.ready.clear()
        self._next_hello = 0
        _log.warning("the host was started anew, and knows the run again")
        return True

    def _check_joiners(self) -> None:
        """Update the set of joiners."""
        shared = self.shared
        self._read_hellos()
        ids = {n: one["id"] for n, one in shared.hellos.items()}
        waiting = [(n, one) for n, one in ids.items() if one not in shared.past_members]
        if not waiting:
            return
        self._poll_heartbeats([one for _, one in waiting])
        keys = [(f"ready/{n}", f"donor/{n}") for n, _ in waiting]
        found = self.kv.look([*chain(*keys)])[1]
        late_s = time.monotonic() - self.timeout_s
        with shared.changed:
            for (number, _), ready, donor in zip(waiting, found[::2], found[1::2], strict=True):
                if ready is not None:
                    shared.ready.add(number)
                # members that were in different generations may have computed different donors
                if donor is None and shared.donor_assigned_s.get(number, late_s) < late_s:
                    del shared.donor_assigned_s[number]

    def _read_hellos(self) -> None:
        """Read the new requests, in one answer of the host, or two after many others."""
        end = 0
        while True:
            numbers = range(self._next_hello, max(end, self._next_hello + _HELLOS_AT_ONCE))
            keys = [f"hello/{number}" for number in numbers]
            hint, *values = self.kv.look([_HELLOS, *keys])[1]
            # without those of strangers
            new = {n: one for n, one in zip(numbers, values, strict=True) if one is not None}
            with self.shared.changed:
                self.shared.hellos |= new
            self._next_hello = max([self._next_hello, *(n + 1 for n in new)])
            end = hint or 0
            if end <= numbers.stop:
                return

    def change_generation(
        self, number: int, ids: tuple[str, ...], continuing: tuple[str, ...]
    ) -> None:
        """Write the generation after this one, as its members have agreed, and enter it."""
        shared = self.shared
        self.kv.patience_s = self.timeout_s
        old = shared.generation
        if old is None or old.number != number:  # another one was formed meanwhile
            if self.own_id not in ids:
                shared.announce_leaving(self.kv)
                raise Evicted("this member has left")
            return
        with shared.changed:
            shared.frozen = True
            decision = Decision(ids, continuing, shared.agreed)
        self._enter(number + 1, self._decided(number + 1, decision))

    def regroup(self, why: str, number: int | None = None) -> None:
        """Break the generation, if it is still that of `number`, and form the next one."""
        old = self.shared.generation
        if old is None or number not in (None, old.number):
            return
        self.kv.patience_s = self.timeout_s
        self.kv.put_if_absent(f"break/{old.number}", {"by": self.own_id, "why": why})
        self._freeze()
        self._enter(old.number + 1, self._next_decision(old))
        ids = self.shared.expected
        lost = ", ".join(member for member in old.ids if member not in ids) or "no member"
        # the rest is for who must restart
        _log.warning("lost %s (%s). %s go on", lost, why.partition(". ")[0], ", ".join(ids))

    def _next_decision(self, old: Generation, connecting_s: float | None = None) -> Decision:
        """Return the next generation, of those present; they may need `connecting_s` more."""
        # the store keeps what is written first: a side that does not reach it forms none
        number = old.number + 1
        begun = grown_s = there_s = time.monotonic()
        store = self.kv.store
        news = 0
        missing = [*old.ids]
        announced: dict[str, dict[str, Any]] = {}
        announcement = self.shared.announcement(connecting_s)
        announce_s = self.shared.with_trips(_ANNOUNCE_S)
        while True:
            self._beat()
            self.kv.announce(f"alive/{number}/{self.own_id}", announcement)
            # taken before the announcements are read: every member had this long to announce itself
            waited_s = time.monotonic() - begun
            news, written, found, gone = self._announced(number, missing, news)
            if written is not None:
                return written
            if found:
                announced |= found
                missing = [member for member in old.ids if member not in announced]
                grown_s = time.monotonic()
            if not gone or self.kv.store is not store:  # a host that comes back has lost them all
                there_s = time.monotonic()
                store = self.kv.store
            silent_s = min(map(self._silent_s, missing), default=math.inf)
            connecting = [one["connecting_s"] or 0.0 for one in announced.values()]
            decision, lost = next_decision(old.ids, announced, old.continuing)
            left = sum(announcement["left"] for announcement in announced.values())
            # members that left do not count as lost: then fewer than min_members may continue
            enough = not lost or len(decision.ids) + left >= self._min_members
            most = not lost or 2 * len(decision.ids) > old.size - left
            quick = enough and most
            late = waited_s > self.timeout_s or silent_s > (announce_s if quick else self.timeout_s)
            late = late and waited_s > announce_s + max(connecting, default=0.0)
            # those that were all late announce themselves one after the other
            quiet = time.monotonic() - grown_s > self.shared.with_trips(_QUIET_S)
            # no live member that reaches the host is without a connection for so long
            longer = time.monotonic() - there_s > self.shared.with_trips(_BACK_S)
            if not missing or (quiet and (late or (gone and enough and (most or longer)))):
                if enough:
                    return self._decided(number, decision)
                raise QuorumLost(
                    f"{len(decision.ids)} members are left of {old.size}, and at least "
                    f"min_members={self._min_members} are needed; lost within {waited_s:.1f} s: "
                    f"{', '.join(lost)}"
                )

    def is_gone(self, other: str) -> bool:
        """Return True if another member has sent no heartbeat for the time-out."""
        return other in self.shared.heartbeats and self._silent_s(other) > self.timeout_s

    def _silent_s(self, other: str) -> float:
        return time.monotonic() - self.shared.heartbeats.get(other, (0, -math.inf))[1]

    def _enter(self, number: int, decision: Decision) -> None:
        """Connect the members of a generation; if that fails, those of the next one."""
        shared = self.shared
        attempts = 0
        cause = "it did not announce itself in time, or has left"
        with shared.changed:
            shared.voted = False
        while True:
            if self.own_id not in decision.ids:
                raise Evicted(
                    f"generation {number} was formed without this member: {cause}. Join again to "
                    f"take part; the others are {', '.join(decision.ids)}"
                )
            with shared.changed:
                if shared.generation and decision.agreed.vote == shared.agreed.vote + 1:
                    shared.recorded = decision.agreed
                shared.past_members.update(decision.ids)
            ids = decision.ids
            self._expect(ids)
            formed = Generation(number, ids, ids.index(self.own_id), decision.continuing)
            if formed.size == 1:
                break
            until = time.monotonic() + self._connecting_s(ids)
            reached = list[int]()
            try:
                where = self.kv.store.under(f"gloo/{number}"), formed.rank, formed.size
                probe = reached if attempts == _MAX_ATTEMPTS - 1 else None
                formed.groups = MemberGroups(*where, shared.connecting_s, self._endpoint, probe)
                break
            except ThinwireError as error:
                failed = str(error)
                why = f"({error.__cause__ or error}). {self.connecting_advice()}"
            cause = f"it could not connect to all of them {why}"
            attempts += formed.continuing == decision.ids
            self.kv.put_if_absent(f"break/{number}", {"by": self.own_id, "why": failed})
            shared.reached = [decision.ids[rank] for rank in reached]
            decision = self._next_decision(formed, max(until - time.monotonic(), 0.0))
            shared.reached = []
            if attempts == _MAX_ATTEMPTS:
                founds = not shared.joiner and shared.generation is None
                least = self._start_members if founds else 1
                if decision.ids == formed.ids or len(decision.ids) < least:
                    raise ThinwireError(
                        f"{attempts} generations in a row could not connect: their members "
                        f"reach the meeting place, but not each other {why}"
                    )
                attempts = 0
            number += 1
        with shared.changed:
            old = shared.generation
            shared.generation = formed
            shared.frozen = False
            shared.changed.notify_all()
        if old is not None:
            old.disconnect()
        self.kv.put("gen", number)
        _log.info("generation %d: %s", number, ", ".join(decision.ids))

    def _connecting_s(self, ids: Sequence[str]) -> float:
        """Return the longest time for members to connect, alike on all of them."""
        self.shared.round_trip_s = self.kv.store.connection.round_trip_s
        self._poll_heartbeats(ids)
        return self.shared.connecting_s

    def _expect(self, ids: tuple[str, ...]) -> None:
        """Prepare for a generation of these members, and a joiner."""
        self.shared.expected = ids
        size = max(len(ids) + 1, self._start_members)
        # two connections to each other member, and those of the generation before
        allow_files(4 * size + _MORE_FILES, f"a run of {size} members")

    def connecting_advice(self) -> str:
        """Return what a member can do that cannot connect to the others."""
        doctor = "`thinwire doctor` on each machine says what is in the way"
        if self._endpoint.own_address is None:  # it uses the relay already
            return doctor
        return (
            "If routers or firewalls let nothing in, join with relay=True, at a host that was "
            f"started with `thinwire host --relay`; else {doctor}"
        )
