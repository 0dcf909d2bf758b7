"""Who is alive, and where: every rank says it to the store now and then, and asks only when an
exchange has failed.
"""

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from thinwire.comm.sockets import Connection, connections, shut_down
from thinwire.comm.waiting import idle_s, whereabouts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Courier", "Sighting", "stop_all"]

_KEY = "thinwire/alive"
_SHORTEST_S, _LONGEST_S = 0.5, 5.0
_PROMPT_S = 0.2
"""With what `ask` adds: what a store that answers at all needs on a loaded machine."""
_connecting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Sighting:
    """Facts about a rank that has said something.

    Attributes:
        age_s: Since it last did, by the clocks of both, which began when the group was made.
        interval_s: In which it does.
        what: The exchange that it was in or had left; empty before its first.
        waiting: Whether it was waiting there.
        since_s: For how long, at that time.
        failed: How an exchange of this group failed there: "stalled", "lost" or empty.
        idle_s: Since it was known to be at work of its own that may take long; None: it never was.
    """

    age_s: float
    interval_s: float
    what: str
    waiting: bool
    since_s: float
    failed: str
    idle_s: float | None

    @property
    def silent(self) -> bool:
        """Whether it is too long ago for a rank that is alive, with room for a busy machine."""
        return self.age_s > max(3 * self.interval_s, 2.0)


class Courier:
    """Carries this rank's signs of life to the store of a group, on a thread of its own.

    A client of the store is busy until the store's host has answered, and that host may be stopped
    or cut off: the thread has a connection of its own, saying takes no answer, and `ask` gives up
    by closing the connection. So the main thread waits no longer than it wants to, and no thread is
    left in the middle of a call at exit, where it would abort the interpreter.
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
        """Say that an exchange has failed here, and hear about all ranks.

        Args:
            failed: "stalled", "lost", or empty where nothing has failed yet.
            patience_s: How long to wait for ranks that have not said the same; the answer comes
                within half a second of it.

        Returns:
            By rank, None for one that has never been heard of; None where the store does not
            answer.
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
        """Seconds that this rank may still wait for ranks that are busy: until `timeout_s` after
        the last of them was known to be. Takes milliseconds, and a second where the store is away.

        Returns:
            Seconds from now; 0 or less where another rank than those is missing, or none is.
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
        """End the thread, within a second; may be called more than once."""
        self._over.set()
        self._wanted.put(None)
        if (
            threading.current_thread() is self._thread
        ):  # the collector of garbage runs on any thread
            return
        self._thread.join(0.2)
        if self._thread.is_alive():
            self._hang_up()
            self._thread.join(0.8)
        with contextlib.suppress(ValueError):
            _couriers.remove(self)

    def _run(self, store: "Store") -> None:
        # whatever the store says or does not: it is asked only to make an error clearer
        with contextlib.suppress(RuntimeError, ValueError):
            with _connecting:
                self._others = _connections_to(self._host)
                # torch has it, its stub not
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
        what, waiting, since = whereabouts()
        now = time.monotonic()
        sign = {
            "at": now - self._begun,
            "what": what,
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
        return Sighting(
            age_s,
            self.interval_s,
            sign["what"],
            sign["waiting"],
            sign["for"],
            sign["failed"],
            None if sign["idle"] is None else sign["idle"] + age_s,
        )

    def _hang_up(self) -> None:
        """Close the connection under a call that waits for an answer, or for the connection
        itself.
        """
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
    """End all threads: at exit, before anything that they use goes."""
    for courier in list(_couriers):
        courier.stop()


def _host_of(store: "Store") -> int | None:
    """The port of the store's host, None where the store is no server."""
    inner: Any = getattr(store, "_underlying_non_prefix_store", store)
    port = getattr(inner, "port", None)
    return port if isinstance(port, int) else None


def _connections_to(port: int | None) -> set[Connection]:
    """Those of this process to a port, where the system tells."""
    return {each for each in connections() if each.there[1] == port}
