"""What members tell each other at the store of a run: plain values under keys."""

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.distributed import DistError, DistNetworkError

from thinwire._aside import Late, within
from thinwire.comm.sockets import Connection, connections, end_unanswered, shut_down
from thinwire.errors import PayloadCorrupt, PeerLost, PeerStalled, ThinwireError
from thinwire.members.sealed import SealedStore

__all__ = ["Board", "no_answer"]

_log = logging.getLogger("thinwire")
_connecting = threading.Lock()
_UNANSWERED_S = 5
"""A connection on which the host's machine has confirmed nothing for so long is lost: else it waits
in the back-off of TCP, long after a line that was cut is back."""
_AGAIN_S = 0.5
"""Between two attempts at another one, each of which takes `_UNANSWERED_S` at most."""
_T = TypeVar("_T")
Value = Any
"""What JSON holds."""


class Board:
    """Values as JSON under the keys of one run, over one connection. Use one for each thread.

    A call waits for the host, and torch's store has no time-out for that: on the main thread it is
    to be limited. Where the connection is lost and the same host can be reached again, what was
    asked is asked once more over another one: so all writes are such as may be made twice, and
    late.

    Args:
        store: Of the run.
        limit_s: For how long a call waits for the host; None: for ever.

    Raises:
        PayloadCorrupt: A value was written by a stranger.
        PeerStalled: The host did not answer within `limit_s`.
        PeerLost: It closed the connection. RuntimeError of torch's where there is no limit.
    """

    def __init__(self, store: SealedStore, limit_s: float | None = None) -> None:
        self.store, self.limit_s = store, limit_s
        self._told: set[str] = set()
        self._asked: float | None = None
        self._connect: Callable[..., SealedStore] | None = None
        self._connections: list[Connection] = []
        self._lost: DistNetworkError | None = None
        self._over = threading.Event()

    @classmethod
    def over(
        cls, connect: Callable[..., SealedStore], port: int, limit_s: float | None = None
    ) -> "Board":
        """One with a connection of its own, to a host that listens on this port. Another one is
        made by `connect(at_most_s=...)`.
        """
        store, connections = _connected(connect, port)
        board = cls(store, limit_s)
        board._connect, board._connections = connect, connections
        return board

    def under(self, prefix: str) -> "Board":
        """The same with a prefix before all keys, over the same connection."""
        board, connect = Board(self.store.under(prefix), self.limit_s), self._connect
        if connect is not None:
            board._connect = lambda **limit: connect(**limit).under(prefix)
        board._connections = self._connections
        return board

    def clone(self) -> "Board":
        """The same over a connection of its own, and without a limit."""
        board = Board.over(lambda: self._limited(self.store.clone), self.store.port)
        board._connect = self._connect
        return board

    def hang_up(self) -> None:
        """Close the connection for good: a call that waits for the host ends with an error."""
        self._over.set()
        for each in self._connections:
            shut_down(each)

    @property
    def waits_s(self) -> float:
        """For how long the call that another thread is in has waited for the host; 0 in none."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def ask(self, act: Callable[[], _T]) -> _T:
        """The result of an act that waits for the host, by `store`; it may be made twice."""
        return self._limited(lambda: self._answer(act))

    def _answer(self, act: Callable[[], _T]) -> _T:
        while True:
            if self._lost is not None:
                self._renew(self._lost)
            try:
                return act()
            except DistNetworkError as error:
                self._lost = error

    def _renew(self, lost: DistNetworkError) -> None:
        """Go on over another connection, once the host can be reached.

        Raises:
            DistNetworkError: Nobody listens there any more, or another life of the host.
        """
        while self._connect is not None and not self._over.is_set():
            connect = partial(self._connect, at_most_s=_UNANSWERED_S)
            try:
                store, self._connections = _connected(connect, self.store.port)
            except PeerStalled:
                time.sleep(_AGAIN_S)
                continue
            except ThinwireError:
                break
            if store.session == self.store.session:
                self.store, self._lost = store, None
                _log.info("connected with the meeting place anew: %s", lost)
                if self._over.is_set():  # meanwhile
                    self.hang_up()
                return
            self._connect = None  # it stays another one
        raise lost

    def _limited(self, act: Callable[[], _T]) -> _T:
        if self.limit_s is None:
            self._asked = time.monotonic()
            try:
                return act()
            finally:
                self._asked = None
        try:
            return within(self.limit_s, act, name="thinwire-board")
        except Late:
            raise PeerStalled(no_answer(self.limit_s)) from None
        except DistError as error:
            raise PeerLost(
                f"the meeting place closed the connection ({error}): has `thinwire host` ended? "
                "Start it, and all members, again"
            ) from error

    def put(self, key: str, value: Value) -> None:
        """Write, over what was there."""
        self.ask(lambda: self.store.set(key, json.dumps(value)))

    def first(self, key: str, value: Value) -> Value:
        """Write unless something is there already.

        Returns:
            What is there now, the same to all who ask.
        """
        return json.loads(self.ask(lambda: self.store.compare_set(key, "", json.dumps(value))))

    def get(self, key: str) -> Value:
        """What is there; None where nothing is."""
        there = self.ask(lambda: self.store.peek(key))
        return None if there is None else json.loads(there)

    def has(self, key: str) -> bool:
        """Whether a member has written something there; what a stranger wrote does not count."""
        return self.of_member(key) is not None

    def of_member(self, key: str) -> Value:
        """What a member has written there; None where nothing is, or what a stranger wrote."""
        try:
            return self.get(key)
        except PayloadCorrupt as error:
            self.tell_once(key, error)
            return None

    def tell_once(self, key: str, error: PayloadCorrupt) -> None:
        """Log, the first time, that a stranger has written there."""
        if key not in self._told:
            self._told.add(key)
            _log.warning("%s", error)


def _connected(
    connect: Callable[[], SealedStore], port: int
) -> tuple[SealedStore, list[Connection]]:
    """What `connect` gives, and the connections to this port that it has made for it."""
    with _connecting:
        before = {each.inode for each in connections()}
        store = connect()
        new = [each for each in connections() if each.inode not in before]
    found = [each for each in new if each.there[1] == port]
    for each in found:
        end_unanswered(each, _UNANSWERED_S)
    return store, found


def no_answer(seconds: float) -> str:
    """What to say where the host has not answered for so long."""
    return (
        f"the meeting place did not answer within {seconds:g} s: is `thinwire host` stopped, or "
        "the network cut? Join again once it answers"
    )
