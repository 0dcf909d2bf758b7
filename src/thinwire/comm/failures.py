"""Turn a backend's failure into one of our errors and name the rank at fault.

Every rank sends heartbeats with its current exchange to the store. They are read only after an
exchange has failed.
"""

import contextlib
import json
import math
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from thinwire.comm.sockets import Connection, connections, shut_down
from thinwire.comm.waiting import idle_s, whereabouts
from thinwire.errors import PeerLost, PeerStalled, ThinwireError

__all__ = [
    "Courier",
    "Sighting",
    "explain_failure",
    "state_after_failure",
    "state_told",
    "stop_all",
]

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_KEY = "thinwire/alive"
_SHORTEST_S, _LONGEST_S = 0.5, 5.0
_PROMPT_S = 0.2
"""Time limit for a quick answer, beside the slack in `ask`: enough for a responsive store on a
loaded machine.
"""
_connecting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Sighting:
    """Last heartbeat of a rank.

    Attributes:
        age_s: Age of the heartbeat, by the clocks of both ranks since the group was made.
        interval_s: Heartbeat interval.
        action: Its current or last exchange; empty before the first.
        waiting: True if it was waiting there.
        since_s: Time spent waiting or away, at that moment.
        failed: Failure of an exchange of this group there: "stalled", "lost" or empty.
        idle_s: Time since its last `busy` work was known to last; None: there was none.
    """

    age_s: float
    interval_s: float
    action: str
    waiting: bool
    since_s: float
    failed: str
    idle_s: float | None

    @property
    def silent(self) -> bool:
        """True if the heartbeat is too old for a living rank, even on a busy machine."""
        return self.age_s > max(3 * self.interval_s, 2.0)

    @property
    def is_there(self) -> bool:
        """True if its exchange has failed too, or it waits in one."""
        return bool(self.failed) or (self.waiting and not self.silent)


class Courier:
    """Heartbeat thread: reports this rank to the store of a group.

    A store client blocks until the store's host answers, and that host may be stopped or cut off.
    So the thread has a connection of its own, heartbeats need no answer, and `ask` gives up by
    closing the connection. The main thread never waits longer than it allows. No thread is left
    inside a call at exit, where it would abort the interpreter.
    """

    def __init__(self, store: "Store", rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._size = rank, size
        self._begun = time.monotonic()
        self.interval_s = min(max(timeout_s / 10, _SHORTEST_S), _LONGEST_S)
        self._failed = ""
        self._wanted: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._host = _host_of(store)
        self._others: set[Connection] = set()
        self._mine: set[Connection] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="thinwire-alive", daemon=True
        )
        _couriers.append(self)
        self._thread.start()

    def ask(self, failed: str, patience_s: float) -> Sequence[Sighting | None] | None:
        """Report a failure here ("stalled", "lost" or "") and return the heartbeats of all ranks.

        Takes at most half a second more than `patience_s`, the time to wait for ranks that have not
        reported a failure too.

        Returns:
            One entry per rank, None without a heartbeat; None if the store does not answer.
        """
        if not self._thread.is_alive():
            return None
        question = _Question(failed, time.monotonic() + patience_s)
        self._wanted.put(question)
        question.answered.wait(patience_s + 0.4)
        if not question.answered.is_set():
            self.stop()
        return question.answer

    def more_s(self, timeout_s: float) -> float:
        """Return how long this rank may still wait for busy ranks: until `timeout_s` after the last
        of them was known to be busy.

        Takes milliseconds, or a second if the store does not answer.

        Returns:
            Seconds from now; 0 or less if a rank is missing that is not busy, or none is missing.
        """
        seen = self.ask("", _PROMPT_S)
        if seen is None or seen[self._rank] is None:
            return 0.0
        missing = [
            sighting
            for rank, sighting in enumerate(seen)
            if rank != self._rank and (sighting is None or not sighting.waiting or sighting.silent)
        ]
        idle = [math.inf if s is None or s.idle_s is None else s.idle_s for s in missing]
        return timeout_s - max(idle, default=math.inf)

    def stop(self) -> None:
        """Stop the thread within a second; may be called more than once."""
        self._over.set()
        self._wanted.put(None)
        if threading.current_thread() is self._thread:  # garbage collection may call it here
            return
        self._thread.join(0.2)
        if self._thread.is_alive():
            self._hang_up()
            self._thread.join(0.8)
        with contextlib.suppress(ValueError):
            _couriers.remove(self)

    def _run(self, store: "Store") -> None:
        # Errors of the store are ignored: heartbeats only make an error message clearer.
        # The clone has a connection of its own. It is found as the new one to the store's port, so
        # only one thread at a time may connect.
        with contextlib.suppress(RuntimeError, ValueError):
            with _connecting:
                self._others = _connections_to(self._host)
                # missing in torch's stubs
                own: Store = store.clone()  # type: ignore[attr-defined]
                self._mine = _connections_to(self._host) - self._others
            del store
            own.set_timeout(timedelta(seconds=_LONGEST_S))
            while not self._over.is_set():
                own.set(f"{_KEY}/{self._rank}", self._sign())
                with contextlib.suppress(queue.Empty):
                    question = self._wanted.get(timeout=self.interval_s)
                    if question is not None:
                        self._failed = question.failed
                        own.set(f"{_KEY}/{self._rank}", self._sign())
                        self._answer(own, question)

    def _sign(self) -> str:
        action, waiting, since = whereabouts()
        now = time.monotonic()
        sign = {
            "at": now - self._begun,
            "what": action,
            "waiting": waiting,
            "for": now - since,
            "failed": self._failed,
            "idle": idle_s(),
        }
        return json.dumps(sign)

    def _answer(self, store: "Store", question: "_Question") -> None:
        while True:
            seen = self._seen(store)
            told = not question.failed or all(s is not None and s.failed for s in seen)
            if told or time.monotonic() >= question.until:
                question.answer = seen
                question.answered.set()
                return
            time.sleep(0.02)

    def _seen(self, store: "Store") -> list[Sighting | None]:
        keys = [f"{_KEY}/{rank}" for rank in range(self._size)]
        if store.check(keys):
            return [self._sighting(answer) for answer in store.multi_get(keys)]
        return [self._sighting(store.get(key)) if store.check([key]) else None for key in keys]

    def _sighting(self, answer: bytes) -> Sighting:
        sign: dict[str, Any] = json.loads(answer)
        age_s = max(time.monotonic() - self._begun - sign["at"], 0.0)
        idle_s = None if sign["idle"] is None else sign["idle"] + age_s
        said = sign["what"], sign["waiting"], sign["for"], sign["failed"]
        return Sighting(age_s, self.interval_s, *said, idle_s)

    def _hang_up(self) -> None:
        """Close the connection, to end a call that waits for it or for an answer."""
        mine = self._mine if self._mine is not None else _connections_to(self._host) - self._others
        for each in mine:
            shut_down(each)


class _Question:
    def __init__(self, failed: str, until: float) -> None:
        self.failed, self.until = failed, until
        self.answered = threading.Event()
        self.answer: list[Sighting | None] | None = None


_couriers: list[Courier] = []


def stop_all() -> None:
    """Stop all heartbeat threads; at exit, before anything that they use is freed."""
    for courier in list(_couriers):
        courier.stop()


def _host_of(store: "Store") -> int | None:
    """Return the port of the store's host, or None if the store has no server."""
    inner: Any = getattr(store, "_underlying_non_prefix_store", store)
    port = getattr(inner, "port", None)
    return port if isinstance(port, int) else None


def _connections_to(port: int | None) -> set[Connection]:
    return {each for each in connections() if each.there[1] == port}


_PATIENCE_S = 0.5
"""Wait for the reports of living ranks: their exchange fails within milliseconds of this one's."""
_AT_WORK = (
    "Where a rank works that long on purpose, let it say so, with thinwire.busy, or give more "
    "timeout=."
)
_STALLED = re.compile(r"timed? ?out|timeout|watchdog", re.IGNORECASE)
_LOST = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|remote "
    r"(worker|process)|socket|aborted",
    re.IGNORECASE,
)


class _Told(threading.local):
    state = "Nothing of this exchange was applied"


_told = _Told()


@contextmanager
def state_told(state: str) -> Iterator[None]:
    """Let errors of exchanges inside the block describe this rank's state, if it has changed before
    them.

    Example::

        with state_told("Some matrices may have moved on some ranks"):
            pending.wait()

    Args:
        state: A sentence without its full stop.
    """
    before, _told.state = _told.state, state
    try:
        yield
    finally:
        _told.state = before


def state_after_failure() -> str:
    """Return the state after an exchange that fails now, as a sentence without its full stop."""
    return _told.state


def explain_failure(
    error: RuntimeError,
    *,
    action: str,
    rank: int,
    size: int,
    within: str,
    courier: Courier | None = None,
) -> ThinwireError:
    """Return the error to raise on this rank for a failed collective; keep `error` as its cause.
    Takes at most 1 s.

    Args:
        error: The exception of the backend.
        action: The exchange in plain words, such as "gathering messages".
        rank: This rank, of `size`.
        size: Number of ranks in the group.
        within: Longest wait of this rank, with the unit.
        courier: Heartbeat thread through which living ranks report.

    Returns:
        `PeerStalled` for a time-out, here or on the rank that hung up; `PeerLost` for a closed
        connection; else `ThinwireError`.
    """
    text = str(error)
    stalled, lost = _STALLED.search(text), _LOST.search(text)
    where = f"rank {rank} of {size}, {action}"
    if not (stalled or lost):
        return ThinwireError(f"{where} failed: {text}")
    seen = None if courier is None else courier.ask("stalled" if stalled else "lost", _PATIENCE_S)
    others = None if seen is None else {r: s for r, s in enumerate(seen) if r != rank}
    if stalled or (
        others and any(s is not None and s.failed == "stalled" for s in others.values())
    ):
        return PeerStalled(
            f"{where}: {_who_stalled(others, within, action, known=courier is not None)} ({text})"
        )
    return PeerLost(f"{where}: {_who_left(others)}; restart from the last checkpoint. ({text})")


def _who_stalled(
    others: dict[int, Sighting | None] | None, within: str, action: str, *, known: bool
) -> str:
    end = f"{state_after_failure()}."
    if others is None:
        why = (
            "The store of the process group does not answer either: its host, or the network of "
            "this rank, is stopped or cut off. "
        )
        return f"another rank did not take part within {within}. {why if known else ''}{end}"
    away = {r: s for r, s in others.items() if s is None or not s.is_there}
    if away:
        told = "; ".join(f"rank {rank} {_place_of(sighting)}" for rank, sighting in away.items())
        at_work = any(s is not None and not (s.silent or s.waiting) for s in away.values())
        advice = f"{_AT_WORK} " if at_work else ""
        names = ", ".join(map(str, away))
        return f"rank {names} did not take part within {within}: {told}. {advice}{end}"
    elsewhere = {r: s for r, s in others.items() if s is not None and s.action != action}
    told = "; ".join(
        f"rank {rank} {_place_of(sighting)}" for rank, sighting in (elsewhere or others).items()
    )
    return (
        f"no exchange came about within {within}, though all ranks are alive: {told}. The network "
        f"between them is cut, or they do not make the same calls. {end}"
    )


def _who_left(others: dict[int, Sighting | None] | None) -> str:
    state = state_after_failure()
    left = f"closed its connection, it died or left after an error of its own. {state}"
    if others is None:
        return f"another rank {left}"
    silent = [rank for rank, sighting in others.items() if sighting is None or not sighting.failed]
    if not silent:
        return f"a connection was closed, though all ranks are alive: the network cut it. {state}"
    names = ", ".join(map(str, silent))
    return f"{f'rank {names}' if len(silent) == 1 else f'one of the ranks {names}'} {left}"


def _place_of(sighting: Sighting | None) -> str:
    if sighting is None:
        return "has never been heard of"
    if not sighting.action:
        where = "before its first exchange"
    elif sighting.waiting:
        where = f"waiting {sighting.since_s:.0f} s for others in {sighting.action!r}"
    else:
        where = f"at work of its own for {sighting.since_s:.0f} s after {sighting.action!r}"
    if sighting.silent:
        return (
            f"has not been heard of for {sighting.age_s:.0f} s, it is stopped, cut off or gone (it "
            f"was {where})"
        )
    return f"was alive {sighting.age_s:.1f} s ago, {where}"
