"""Turn a backend's failure into one of our errors and name the rank at fault, by heartbeats."""

import contextlib
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store

from thinwire.comm.sockets import Connection, connections, shut_down
from thinwire.comm.waiting import (
    Awaited,
    activity,
    idle_s,
    launches,
    note_call,
    state_after_failure,
)
from thinwire.errors import Mismatch, PayloadCorrupt, PeerLost, PeerStalled, ThinwireError

_KEY_PREFIX = "thinwire/alive"
_MISMATCH = "mismatch: "
_SHORTEST_S = 0.5
_LONGEST_S = 5.0
_QUICK_S = 0.2
"""Time limit for a quick answer, beside the slack in `ask`."""
_connecting = threading.Lock()
_Question = tuple[str, float, "Future[list[Heartbeat | None]]"]
"""Failure to report, time until which to wait for that of others, and the heartbeats."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Last heartbeat of a rank."""

    age_s: float
    interval_s: float
    action: str
    awaited: Awaited | None
    since_s: float
    call: str
    """Call of the script, once it has waited for a second."""
    launched: dict[str, list[int]]
    """Exchanges that it has launched, by group: of data, and of control messages."""
    failed: str
    idle_s: float | None

    def lacks(self, other: "Heartbeat") -> bool:
        """Return True if the other rank waits for an exchange that this one has not launched."""
        group, control, number = other.awaited or ("", False, 0)
        counts = self.launched.get(group)
        return bool(other.call) and counts is not None and counts[control] < number

    @property
    def silent(self) -> bool:
        """True if the heartbeat is too old for a living rank, even on a busy machine."""
        return self.age_s > max(3 * self.interval_s, 2.0)

    @property
    def takes_part(self) -> bool:
        """True if its exchange has failed too, or it waits in one."""
        return bool(self.failed) or (self.awaited is not None and not self.silent)


class HeartbeatThread:
    """Heartbeat thread: reports this rank to the store of a group."""

    # a store client blocks until the store's host answers, which may be stopped: the thread has a
    # connection of its own, and `ask` gives up by closing it. A thread inside a call at exit would
    # abort the interpreter

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._rank = rank
        self._size = size
        self._began_s = time.monotonic()
        self.interval_s = min(max(timeout_s / 10, _SHORTEST_S), _LONGEST_S)
        self._failed = ""
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._host: int | None = getattr(
            getattr(store, "_underlying_non_prefix_store", store), "port", None
        )
        self._other_connections: set[Connection] = set()
        self._own_connections: set[Connection] | None = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="thinwire-alive", daemon=True
        )
        _heartbeat_threads.add(self)
        self._thread.start()

    def ask(self, failed: str, wait_s: float) -> Sequence[Heartbeat | None] | None:
        """Report a failure here, or "", and return all heartbeats; stop if none come in time."""
        if not self._thread.is_alive():
            return None
        answer: Future[list[Heartbeat | None]] = Future()
        self._questions.put((failed, time.monotonic() + wait_s, answer))
        try:
            return answer.result(wait_s + 0.4)
        except TimeoutError:
            if wait_s > 0:
                self.stop()
            return None

    def mismatch(self) -> str | None:
        """Return, and report, that this rank and another one wait for each other; else None."""
        # neither has launched what the other one waits for, nor can it; slow ranks get there
        note_call()
        found = dict(enumerate(self.ask("", 0.0) or ()))
        own = found.pop(self._rank, None)
        for rank, other in found.items():
            if own is not None and other is not None and own.lacks(other) and other.lacks(own):
                both = sorted({self._rank: own, rank: other}.items())
                calls = (f"rank {r} is in {one.call} ({one.action})" for r, one in both)
                text = f"{', and '.join(calls)}: all ranks must make the same calls, equally often"
                self.ask(_MISMATCH + text, 0.0)
                return text
        return None

    def extension_s(self, timeout_s: float) -> float:
        """Return the seconds for which missing ranks, all of them busy, may be waited for."""
        latest = self.ask("", _QUICK_S)
        if latest is None or latest[self._rank] is None:
            return 0.0
        missing = [
            s
            for rank, s in enumerate(latest)
            if rank != self._rank and (s is None or not s.takes_part)
        ]
        idle = [math.inf if s is None or s.idle_s is None else s.age_s + s.idle_s for s in missing]
        return timeout_s - max(idle, default=math.inf)

    def stop(self) -> None:
        """Stop the thread within a second; may be called more than once."""
        self._stopped.set()
        self._questions.put(None)
        if threading.current_thread() is self._thread:  # garbage collection may call it here
            return
        self._thread.join(0.2)
        if self._thread.is_alive():
            self._disconnect()
            self._thread.join(0.8)
        _heartbeat_threads.discard(self)

    def _run(self, store: Store) -> None:
        # errors of the store are ignored: heartbeats only make a message clearer. The clone's
        # connection is the new one to the store's port, so only one thread at a time may connect
        with contextlib.suppress(Exception):
            with _connecting:
                if self._stopped.is_set():
                    return
                self._other_connections = _connections_to(self._host)
                self._own_connections = None
                # missing in torch's stubs
                own: Store = store.clone()  # type: ignore[attr-defined]
                self._own_connections = _connections_to(self._host) - self._other_connections
            del store
            own.set_timeout(timedelta(seconds=_LONGEST_S))
            while not self._stopped.is_set():
                own.set(f"{_KEY_PREFIX}/{self._rank}", self._own_heartbeat())
                with contextlib.suppress(queue.Empty):
                    question = self._questions.get(timeout=self.interval_s)
                    if question is not None:
                        self._failed, until_s, answer = question
                        own.set(f"{_KEY_PREFIX}/{self._rank}", self._own_heartbeat())
                        answer.set_result(self._read_until(own, until_s))

    def _own_heartbeat(self) -> str:
        # counts are read last: then a message that they lack was not there when the wait was
        action, awaited, since, call = activity()
        now = time.monotonic()
        fields = now - self._began_s, action, awaited, now - since, call, dict(launches)
        return json.dumps((*fields, self._failed, idle_s()))

    def _read_until(self, store: Store, until_s: float) -> list[Heartbeat | None]:
        """Return all heartbeats; after a failure wait until all ranks have reported one."""
        keys = [f"{_KEY_PREFIX}/{rank}" for rank in range(self._size)]
        while True:
            latest: list[Heartbeat | None]
            if store.check(keys):
                latest = [self._parse_heartbeat(answer) for answer in store.multi_get(keys)]
            else:
                latest = [
                    self._parse_heartbeat(store.get(key)) if store.check([key]) else None
                    for key in keys
                ]
            complete = not self._failed or all(h is not None and h.failed for h in latest)
            if complete or time.monotonic() >= until_s:
                return latest
            time.sleep(0.02)

    def _parse_heartbeat(self, answer: bytes) -> Heartbeat:
        at, *fields = json.loads(answer)
        age_s = max(time.monotonic() - self._began_s - at, 0.0)
        return Heartbeat(age_s, self.interval_s, *fields)

    def _disconnect(self) -> None:
        """Close the connection, which ends a call that waits for it or for an answer."""
        own = self._own_connections
        if own is None:  # the thread is connecting
            own = _connections_to(self._host) - self._other_connections
        if len(own) == 1:  # else other code has connected to the store meanwhile
            shut_down(*own)


_heartbeat_threads: set[HeartbeatThread] = set()


def stop_all() -> None:
    """Stop all heartbeat threads; at exit, before anything that they use is freed."""
    for heartbeats in list(_heartbeat_threads):
        heartbeats.stop()


def _connections_to(port: int | None) -> set[Connection]:
    return {connection for connection in connections() if connection.remote[1] == port}


_REPORT_WAIT_S = 0.5
"""Wait for the reports of living ranks."""
_AT_WORK = (
    "If a rank works that long on purpose, wrap its work in thinwire.busy, or raise timeout=."
)
_STALLED = re.compile(r"timed? ?out|timeout|watchdog", re.IGNORECASE)
_LOST = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|remote "
    r"(worker|process)|socket|aborted",
    re.IGNORECASE,
)


RESTART = "; restart from the last checkpoint"


def explain_failure(
    error: RuntimeError,
    *,
    action: str,
    rank: int,
    size: int,
    within: str,
    heartbeats: HeartbeatThread | None = None,
    advice: str = RESTART,
) -> ThinwireError:
    """Return the error to raise on this rank for a failed collective; keep `error` as its cause."""
    text = str(error).partition("\n")[0]  # torch's own trace follows
    stalled = _STALLED.search(text)
    lost = _LOST.search(text)
    where = f"rank {rank} of {size}, {action}"
    if "Too many open files" in text:
        return ThinwireError(
            f"{where}: this process may open {os.sysconf('SC_OPEN_MAX')} files, and has reached "
            "that limit: raise it with `ulimit -n` where the ranks are started, or pass streams=1"
        )
    if not (stalled or lost):
        return ThinwireError(f"{where} failed: {text}")
    kind = "stalled" if stalled else "lost"
    latest = None if heartbeats is None else heartbeats.ask(kind, _REPORT_WAIT_S)
    others = None if latest is None else {r: h for r, h in enumerate(latest) if r != rank}
    failed = {h.failed: r for r, h in (others or {}).items() if h is not None}
    if found := next((text for text in failed if text.startswith(_MISMATCH)), None):
        return Mismatch(f"{found.removeprefix(_MISMATCH)}. {state_after_failure()}")
    if "damaged" in failed:
        cause = f"rank {failed['damaged']} received a damaged message and ended the exchanges"
        return PayloadCorrupt(f"{where}: {cause}. {state_after_failure()}. {text}")
    # a rank that stalled closes its connections, which the others see as a lost rank
    if stalled or "stalled" in failed:
        cause = _stalled_text(others, within, known=heartbeats is not None)
        return PeerStalled(f"{where}: {cause} ({text})")
    return PeerLost(f"{where}: {_lost_text(others)}{advice}. ({text})")


_Others = dict[int, Heartbeat | None] | None
"""Last heartbeats of the other ranks; None where the store does not answer."""


def _stalled_text(others: _Others, within: str, *, known: bool) -> str:
    end = f"{state_after_failure()}."
    if others is None:
        why = (
            "The store of the process group does not answer either: its host, or the network of "
            "this rank, is stopped or cut off. "
        )
        return f"another rank did not take part within {within}. {why if known else ''}{end}"
    absent = {r: h for r, h in others.items() if h is None or not h.takes_part}
    shown = (absent or others).items()
    described = "; ".join(f"rank {r} {_activity_text(h)}" for r, h in shown)
    if absent:
        at_work = any(h is not None and h.awaited is None and not h.silent for h in absent.values())
        advice = f"{_AT_WORK} " if at_work else ""
        names = ", ".join(map(str, absent))
        return f"rank {names} did not take part within {within}: {described}. {advice}{end}"
    return (
        f"the exchange did not complete within {within}, though all ranks are alive: {described}. "
        f"The network between them is down. {end}"
    )


def _lost_text(others: _Others) -> str:
    state = state_after_failure()
    left = f"closed its connection: it died, or left after an error of its own. {state}"
    if others is None:
        return f"another rank {left}"
    suspects = [r for r, h in others.items() if h is None or not h.failed]
    if not suspects:
        return f"the network closed a connection, though all ranks are alive. {state}"
    names = ", ".join(map(str, suspects))
    return f"{f'rank {names}' if len(suspects) == 1 else f'one of the ranks {names}'} {left}"


def _activity_text(heartbeat: Heartbeat | None) -> str:
    if heartbeat is None:
        return "has never sent a heartbeat"
    if not heartbeat.action:
        where = "before its first exchange"
    elif heartbeat.awaited is not None:
        where = f"waiting {heartbeat.since_s:.0f} s for others in {heartbeat.action!r}"
    else:
        where = f"busy with other work for {heartbeat.since_s:.0f} s after {heartbeat.action!r}"
    if heartbeat.silent:
        return (
            f"has sent no heartbeat for {heartbeat.age_s:.0f} s: it is stopped, cut off or dead "
            f"(it was {where})"
        )
    return f"was alive {heartbeat.age_s:.1f} s ago, {where}"
