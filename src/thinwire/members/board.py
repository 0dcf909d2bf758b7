"""What members tell each other at the store of a run: plain values under keys, with a proof that a
holder of the token wrote them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, final

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistNetworkError

from thinwire._aside import Late, within
from thinwire.comm.sockets import Connection, connections, end_unanswered, shut_down
from thinwire.errors import PayloadCorrupt, PeerLost, PeerStalled, ThinwireError
from thinwire.members.credentials import derived_key

__all__ = ["Board", "SealedStore", "no_answer"]

_MARK: Final = b"tws1"
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_SEAL_BYTES: Final = len(_MARK) + _PROOF_BYTES
_NOTHING: Final = b"\0nothing"
"""What a store gives back that was to replace it by itself, where there is no value."""


@final
class SealedStore(Store):
    """A part of a store, all keys under one prefix; with a secret, every value is sealed.

    A sealed value is 4 bytes, HMAC-SHA256 of key and value (32 bytes), and the value. What does not
    verify is refused, never handed on: what a stranger wrote, what was written with another token,
    for another run, or under another key. Who can write to the store can still delete values, and
    put an older value of the same key back: keys that are written once cannot be rolled back to
    another value, others want a number in the value, as heart-beats have one.

    It may be handed to torch, as the store of a `ProcessGroupGloo` or of a `PrefixStore`; then keep
    a reference as long as torch has one, since torch itself keeps none to an object of Python. From
    several threads use a `clone` each: a wait holds up all others on the same connection.

    Args:
        store: Where the values are.
        secret: From which the key is made; None leaves values as they are.
        prefix: Before every key, the slash included.
        session: What tells one life of the host from another.
    """

    def __init__(
        self, store: Store, secret: bytes | None, prefix: str = "", session: str = ""
    ) -> None:
        super().__init__()
        # torch's stubs know values of text only, where bytes are taken too
        self._store: Any = store
        self._secret, self._prefix, self.session = secret, prefix, session
        self._key = None if secret is None else derived_key(secret, "values")

    @property
    def port(self) -> int:
        """Of the host; -1 where the store is none of another process."""
        return int(getattr(self._store, "port", -1))

    @property
    def room(self) -> str:
        """A name of this part that no other one has, in another life of the host neither."""
        return f"{self.session}/{self._prefix}"

    def key_for(self, *purpose: str) -> bytes | None:
        """A key of 32 bytes that those who share this store's secret and prefix have alike; None
        without a secret.
        """
        if self._secret is None:
            return None
        return derived_key(self._secret, "use", self._prefix, *purpose)

    def under(self, prefix: str) -> SealedStore:
        """The same store with a longer prefix, over the same connection."""
        return SealedStore(self._store, self._secret, f"{self._prefix}{prefix}/", self.session)

    def clone(self) -> SealedStore:
        """The same over a connection of its own."""
        return SealedStore(self._store.clone(), self._secret, self._prefix, self.session)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(self._prefix + key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """A value, waiting for it until the store's time-out.

        Raises:
            PayloadCorrupt: It does not verify.
        """
        return self._opened(key, self._store.get(self._prefix + key))

    def peek(self, key: str) -> bytes | None:
        """A value, in one way there and back where `check` and `get` take three; None for none.

        Raises:
            PayloadCorrupt: It does not verify.
        """
        # the question is read by strangers: sealed, it could be put back as a value
        there = self._store.compare_set(self._prefix + key, _NOTHING, _NOTHING)
        return None if there == _NOTHING else self._opened(key, there)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Write a value where the present one is as expected, empty for none; what is there then.

        Raises:
            PayloadCorrupt: What is there does not verify.
        """
        expected = self._sealed(key, expected_value) if expected_value else b""
        desired = self._sealed(key, desired_value)
        there = self._store.compare_set(self._prefix + key, expected, desired)
        return self._opened(key, there)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """`get` of several."""
        there = self._store.multi_get([self._prefix + key for key in keys])
        return [self._opened(key, value) for key, value in zip(keys, there, strict=True)]

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys are there; says nothing of their values."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; says nothing of their values."""
        there = [self._prefix + key for key in keys]
        if timeout is None:
            self._store.wait(there)
        else:
            self._store.wait(there, timeout)

    def has_extended_api(self) -> bool:
        """False: what torch would call then is not here."""
        return False

    def _proof(self, key: str, value: bytes) -> bytes:
        assert self._key is not None
        where = (self._prefix + key).encode()
        return hmac.digest(self._key, len(where).to_bytes(4, "big") + where + value, hashlib.sha256)

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return content if self._key is None else _MARK + self._proof(key, content) + content

    def _opened(self, key: str, there: bytes) -> bytes:
        if self._key is None:
            return there
        value = there[_SEAL_BYTES:]
        proof = there[len(_MARK) : _SEAL_BYTES]
        if there.startswith(_MARK) and hmac.compare_digest(proof, self._proof(key, value)):
            return value
        what = "is sealed otherwise" if there.startswith(_MARK) else "is not sealed"
        raise PayloadCorrupt(
            f"the value of {self._prefix + key!r} in the store was refused: it {what}. A stranger "
            "wrote it, or somebody with another token"
        )


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
    ) -> Board:
        """One with a connection of its own, to this port; `connect(at_most_s=...)` makes others."""
        store, connections = _connected(connect, port)
        board = cls(store, limit_s)
        board._connect, board._connections = connect, connections
        return board

    def under(self, prefix: str) -> Board:
        """The same with a prefix before all keys, over the same connection."""
        board, connect = Board(self.store.under(prefix), self.limit_s), self._connect
        if connect is not None:
            board._connect = lambda **limit: connect(**limit).under(prefix)
        board._connections = self._connections
        return board

    def clone(self) -> Board:
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
