"""What members tell each other at the store of a run: plain values under keys."""

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
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
        connect: Makes another connection, within `at_most_s`; None where there is none.

    Raises:
        PayloadCorrupt: A value was written by a stranger.
        PeerStalled: The host did not answer within `limit_s`.
        PeerLost: It closed the connection. RuntimeError of torch's where there is no limit.
    """

    def __init__(
        self,
        store: SealedStore,
        limit_s: float | None = None,
        *,
        connect: Callable[..., SealedStore] | None = None,
    ) -> None:
        self.store, self.limit_s, self._connect = store, limit_s, connect
        self._told: set[str] = set()
        self._asked: float | None = None
        self._connections: list[Connection] = []
        self._lost: DistNetworkError | None = None
        self._over = False

    @classmethod
    def over(
        cls, connect: Callable[..., SealedStore], port: int, limit_s: float | None = None
    ) -> "Board":
        """One with a connection of its own, to a host that listens on this port."""
        with _noticed(port) as found:
            board = cls(connect(), limit_s, connect=connect)
        board._connections = found
        return board

    def under(self, prefix: str) -> "Board":
        """The same with a prefix before all keys, over the same connection."""
        connect = self._connect
        board = Board(self.store.under(prefix), self.limit_s)
        if connect is not None:
            board._connect = lambda **limit: connect(**limit).under(prefix)
        board._connections = self._connections
        return board

    def clone(self) -> "Board":
        """The same over a connection of its own, and without a limit."""
        with _noticed(self.store.port) as found:
            board = Board(self._limited(self.store.clone), connect=self._connect)
        board._connections = found
        return board

    def hang_up(self) -> None:
        """Close the connection for good: a call that waits for the host ends with an error."""
        self._over = True
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
        until = math.inf if self.limit_s is None else time.monotonic() + self.limit_s
        while True:
            if self._lost is not None:
                self._renew(until)
            try:
                return act()
            except DistNetworkError as error:
                self._lost = error

    def _renew(self, until: float) -> None:
        """Go on over another connection to the same host, once it can be reached.

        Raises:
            DistNetworkError: Nobody listens there any more, or another life of the host.
        """
        assert self._lost is not None, "else there is one"
        while self._connect is not None and not self._over and time.monotonic() < until:
            try:
                with _noticed(self.store.port) as found:
                    store = self._connect(at_most_s=_UNANSWERED_S)
            except PeerStalled:
                time.sleep(_AGAIN_S)
                continue
            except ThinwireError:
                break
            if store.session != self.store.session:  # and it stays another one
                self._connect = None
                break
            self.store, self._connections = store, found
            if not self._over:
                self._lost = None
                return
            self.hang_up()
        raise self._lost

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


@contextlib.contextmanager
def _noticed(port: int) -> Iterator[list[Connection]]:
    """The connections that are made meanwhile to a host that listens on this port."""
    found: list[Connection] = []
    with _connecting:
        before = {each.inode for each in connections()}
        yield found
        new = [each for each in connections() if each.inode not in before]
    found += [each for each in new if each.there[1] == port]
    for each in found:
        end_unanswered(each, _UNANSWERED_S)


def no_answer(seconds: float) -> str:
    """What to say where the host has not answered for so long."""
    return (
        f"the meeting place did not answer within {seconds:g} s: is `thinwire host` stopped, or "
        "the network cut? Join again once it answers"
    )
