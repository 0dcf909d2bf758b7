"""The store of a run: plain values under keys, each with a MAC made from the token."""

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
from typing import Any, TypeVar, final

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistNetworkError

from thinwire._watchdog import Late, within
from thinwire.comm.sockets import Connection, connections, end_unanswered, has_ended, shut_down
from thinwire.errors import PayloadCorrupt, PeerLost, PeerStalled, ThinwireError
from thinwire.members.credentials import derived_key

_MAGIC = b"tws1"
_MAC_BYTES = hashlib.sha256().digest_size
_OVERHEAD_BYTES = len(_MAGIC) + _MAC_BYTES
_ABSENT = b"\0nothing"
"""Argument of the compare-and-set that reads a key: a key without a value returns it."""


@final
class AuthenticatedStore(Store):
    """Part of a store: all keys share a prefix, and with a secret every value carries a MAC."""

    # a value is 4 bytes, the HMAC-SHA256 of key and value (32 bytes), and the value. One who can
    # write to the store can still delete values and restore older ones: a key that is written more
    # than once needs a counter in its value. torch keeps no reference to it as a store: the caller
    # must. Each thread needs a `clone`: a wait blocks all calls of a connection

    def __init__(
        self, store: Store, secret: bytes | None, prefix: str = "", session: str = ""
    ) -> None:
        super().__init__()
        # torch's stubs know values of text only, where bytes are taken too
        self._store: Any = store
        self._secret = secret
        self._prefix = prefix
        self.session = session
        self._key = None if secret is None else derived_key(secret, "values")

    @property
    def port(self) -> int:
        """Port of the host; -1 if the store is in this process."""
        return int(getattr(self._store, "port", -1))

    @property
    def room(self) -> str:
        """Name of this part, unique also across restarts of the host."""
        return f"{self.session}/{self._prefix}"

    def key_for(self, *purpose: str) -> bytes | None:
        """Return a 32-byte key of this part for the purpose; None without a secret."""
        if self._secret is None:
            return None
        return derived_key(self._secret, "use", self._prefix, *purpose)

    def under(self, prefix: str) -> AuthenticatedStore:
        """Return the same store with a longer prefix, over the same connection."""
        longer = f"{self._prefix}{prefix}/"
        return AuthenticatedStore(self._store, self._secret, longer, self.session)

    def clone(self) -> AuthenticatedStore:
        """Return the same store over a connection of its own."""
        return AuthenticatedStore(self._store.clone(), self._secret, self._prefix, self.session)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(self._prefix + key, self._with_mac(key, value))

    def get(self, key: str) -> bytes:
        """Return a value; wait for it until the store's time-out."""
        return self._verified(key, self._store.get(self._prefix + key))

    def try_get(self, key: str) -> bytes | None:
        """Return a value, or None; one round trip, where `check` and `get` take three."""
        # a stranger can read this argument: with a MAC it could be replayed as a value
        found = self._store.compare_set(self._prefix + key, _ABSENT, _ABSENT)
        return None if found == _ABSENT else self._verified(key, found)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Write a value if `expected_value` is there (empty: none); return what is there then."""
        expected = self._with_mac(key, expected_value) if expected_value else b""
        desired = self._with_mac(key, desired_value)
        return self._verified(key, self._store.compare_set(self._prefix + key, expected, desired))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values, as `get` does."""
        found = self._store.multi_get([self._prefix + key for key in keys])
        return [self._verified(key, value) for key, value in zip(keys, found, strict=True)]

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist. The values are not verified."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. The values are not verified."""
        limit = [] if timeout is None else [timeout]
        self._store.wait([self._prefix + key for key in keys], *limit)

    def _mac(self, key: str, value: bytes) -> bytes:
        assert self._key is not None
        location = (self._prefix + key).encode()
        content = len(location).to_bytes(4, "big") + location + value
        return hmac.digest(self._key, content, hashlib.sha256)

    def _with_mac(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return content if self._key is None else _MAGIC + self._mac(key, content) + content

    def _verified(self, key: str, found: bytes) -> bytes:
        if self._key is None:
            return found
        value = found[_OVERHEAD_BYTES:]
        mac = found[len(_MAGIC) : _OVERHEAD_BYTES]
        if found.startswith(_MAGIC) and hmac.compare_digest(mac, self._mac(key, value)):
            return value
        problem = "has another MAC" if found.startswith(_MAGIC) else "has no MAC"
        raise PayloadCorrupt(
            f"the value of {self._prefix + key!r} in the store was refused: it {problem}. It was "
            "written by a stranger, or with another token"
        )


_log = logging.getLogger("thinwire")
_connecting = threading.Lock()
_UNANSWERED_S = 5
"""Seconds without the host's acknowledgement after which a connection counts as lost."""
_RETRY_S = 0.5
"""Seconds between two attempts to reconnect, each of which takes at most `_UNANSWERED_S`."""
_T = TypeVar("_T")
Value = Any
"""A value that JSON can represent."""


class KeyValueView:
    """JSON values under the keys of one run, over one connection."""

    # calls wait for the host without a time-out: on the main thread, give `limit_s`. Calls are
    # repeated over a new connection, so writes must be idempotent, and valid when they arrive late

    def __init__(self, store: AuthenticatedStore, limit_s: float | None = None) -> None:
        self.store = store
        self.limit_s = limit_s
        self._warned: set[str] = set()
        self._call_began_s: float | None = None
        self._connect: Callable[..., AuthenticatedStore] | None = None
        self._connections: list[Connection] = []
        self._lost_connection: DistNetworkError | None = None
        self._closed = threading.Event()

    @classmethod
    def open(
        cls, connect: Callable[..., AuthenticatedStore], port: int, limit_s: float | None = None
    ) -> KeyValueView:
        """Return a view with a connection of its own, to this port."""
        store, connections = _connected(connect, port)
        kv = cls(store, limit_s)
        kv._connect = connect
        kv._connections = connections
        return kv

    def under(self, prefix: str) -> KeyValueView:
        """Return the same view with a prefix before all keys, over the same connection."""
        kv = KeyValueView(self.store.under(prefix), self.limit_s)
        connect = self._connect
        if connect is not None:
            kv._connect = lambda **limit: connect(**limit).under(prefix)
        kv._connections = self._connections
        return kv

    def clone(self) -> KeyValueView:
        """Return the same view over a connection of its own, without a limit."""
        kv = KeyValueView.open(lambda: self._with_limit(self.store.clone), self.store.port)
        kv._connect = self._connect
        return kv

    def disconnect(self) -> None:
        """Close the connection for good. A call that waits for the host ends with an error."""
        self._closed.set()
        for connection in self._connections:
            shut_down(connection)

    @property
    def waiting_s(self) -> float:
        """Seconds for which another thread's running call has waited for the host; else 0."""
        began_s = self._call_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def call(self, request: Callable[[], _T]) -> _T:
        """Run a request that waits for the host, and return its result. It may run twice."""

        def with_reconnect() -> _T:
            while True:
                # a call that meets a closed connection prints some fifteen lines of torch's own
                if self._lost_connection is None and any(map(has_ended, self._connections)):
                    self._lost_connection = DistNetworkError("the connection was closed")
                if self._lost_connection is not None:
                    self._reconnect(self._lost_connection)
                try:
                    return request()
                except DistNetworkError as error:
                    self._lost_connection = error

        return self._with_limit(with_reconnect)

    def _reconnect(self, lost: DistNetworkError) -> None:
        while self._connect is not None and not self._closed.is_set():
            connect = partial(self._connect, at_most_s=_UNANSWERED_S)
            try:
                store, self._connections = _connected(connect, self.store.port)
            except PeerStalled:
                time.sleep(_RETRY_S)
                continue
            except ThinwireError:
                break
            if store.session == self.store.session:
                self.store = store
                self._lost_connection = None
                _log.warning("reconnected to the meeting place: %s", str(lost).partition("\n")[0])
                if self._closed.is_set():  # closed by another thread meanwhile
                    self.disconnect()
                return
            self._connect = None  # the host has restarted: this run is over
        raise lost

    def _with_limit(self, request: Callable[[], _T]) -> _T:
        if self.limit_s is None:
            self._call_began_s = time.monotonic()
            try:
                return request()
            finally:
                self._call_began_s = None
        try:
            return within(self.limit_s, request, name="thinwire-board")
        except Late:
            raise PeerStalled(no_answer_message(self.limit_s)) from None
        except DistError as error:
            raise PeerLost(
                f"the meeting place closed the connection ({error}): has `thinwire host` ended? "
                "Start it, and all members, again"
            ) from None

    def put(self, key: str, value: Value) -> None:
        """Write a value, replacing any other."""
        self.call(lambda: self.store.set(key, json.dumps(value)))

    def put_if_absent(self, key: str, value: Value) -> Value:
        """Write a value unless the key has one."""
        return json.loads(self.call(lambda: self.store.compare_set(key, "", json.dumps(value))))

    def get(self, key: str) -> Value:
        """Return the value; None if there is none."""
        found = self.call(lambda: self.store.try_get(key))
        return None if found is None else json.loads(found)

    def has(self, key: str) -> bool:
        """Return True if a member has written this key; a stranger's value does not count."""
        return self.get_verified(key) is not None

    def get_verified(self, key: str) -> Value:
        """Return the value that a member wrote; None if there is none, or a stranger wrote it."""
        try:
            return self.get(key)
        except PayloadCorrupt as error:
            self.warn_once(key, error)
            return None

    def warn_once(self, key: str, error: PayloadCorrupt) -> None:
        """Log once per key that a stranger has written there."""
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s", error)


def _connected(
    connect: Callable[[], AuthenticatedStore], port: int
) -> tuple[AuthenticatedStore, list[Connection]]:
    with _connecting:
        before = {connection.inode for connection in connections()}
        store = connect()
        new = [connection for connection in connections() if connection.inode not in before]
    found = [connection for connection in new if connection.remote[1] == port]
    for connection in found:
        end_unanswered(connection, _UNANSWERED_S)
    return store, found


def no_answer_message(seconds: float) -> str:
    """Error text for a host that has not answered for this long."""
    return (
        f"the meeting place did not answer within {seconds:g} s: is `thinwire host` stopped, or "
        "the network down? Join again once it answers"
    )
