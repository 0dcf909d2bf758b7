"""The store of a run: plain values under keys, each with a MAC made from the token."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

from torch.distributed import DistError, DistNetworkError, DistStoreError, Store

from thinwire._watchdog import Late, within
from thinwire.comm.outgoing import known_certificate
from thinwire.comm.relay import RelayEndpoint
from thinwire.errors import PayloadCorrupt, PeerLost, PeerStalled, ThinwireError
from thinwire.members.credentials import Signer, derived_key


@final
class AuthenticatedStore(Store):
    """Part of a store: all keys share a prefix, and with a secret every value carries a MAC."""

    # torch keeps no reference to it as a store: the caller must. Each thread needs a `clone`: a
    # wait blocks all calls of a connection

    def __init__(
        self, store: Any, secret: bytes | None, prefix: str = "", session: str = ""
    ) -> None:
        super().__init__()
        self.connection = store
        """A `HostStore`."""
        self._secret = secret
        self._prefix = prefix
        self.session = session
        self._signer = Signer(secret)

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
        return AuthenticatedStore(self.connection, self._secret, longer, self.session)

    def clone(self) -> AuthenticatedStore:
        """Return the same store over a connection of its own."""
        return AuthenticatedStore(self.connection.clone(), self._secret, self._prefix, self.session)

    def age_s(self) -> float:
        """Return the seconds since the host was started."""
        return float(self.connection.ask("age")[0])

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.connection.ask("set", self._prefix + key, self._signed(key, value))

    def announce(self, key: str, value: str | bytes) -> None:
        """Write a value that ends with this connection, without waiting for the host."""
        self.connection.announce(self._prefix + key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Return a value; wait for it until the store's time-out."""
        return self.multi_get([key])[0]

    def look(
        self, keys: Sequence[str], limit_s: float = 0.0, since: int = 0
    ) -> tuple[int, list[bytes | None]]:
        """Return what is under keys, not `verified`, and a number for the next `since`.

        Waits until one of them is written after `since`, for at most `limit_s`.
        """
        full = [self._prefix + key for key in keys]
        began_s = time.monotonic()
        number, *found = self.connection.ask("look", str(limit_s), str(since), *full)
        if not limit_s:
            trip_s = time.monotonic() - began_s
            self.connection.round_trip_s += (trip_s - self.connection.round_trip_s) / 8
        return int(number), found

    def entries(self, prefix: str) -> dict[str, bytes]:
        """Return all values under keys with this prefix, not `verified`, by the rest of the key."""
        start = self._prefix + prefix
        found = self.connection.ask("list", start)
        keys = [key.decode(errors="replace").removeprefix(start) for key in found[::2]]
        return dict(zip(keys, found[1::2], strict=True))

    def of_relays(self, key: bytes) -> AuthenticatedStore:
        """Return the part of the host's store in which relays with this key are announced."""
        return AuthenticatedStore(self.connection, key or None, f"relay/{self.session}/")

    def relays(self, endpoint: RelayEndpoint) -> dict[str, RelayEndpoint]:
        """Return the relay of the host, as "", and those that are announced there, by name."""
        found = KeyValueView(self.of_relays(endpoint.key)).entries("")
        others = {}
        for name, (host, port, known) in found.items():
            tls = known_certificate(bytes.fromhex(known)) if known else endpoint.tls
            others[name] = endpoint._replace(host=host, port=port, tls=tls)
        return {"": endpoint, **others}

    def drop(self, prefix: str) -> None:
        """Remove all keys with this prefix, which a host that is started again may still have."""
        self.connection.ask("drop", self._prefix + prefix)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Write a value if `expected_value` is there (empty: none); return what is there then."""
        expected = self._signed(key, expected_value) if expected_value else b""
        desired = self._signed(key, desired_value)
        (found,) = self.connection.ask("swap", self._prefix + key, expected, desired)
        return self.verified(key, found)

    def multi_get(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        """Return several values, as `get` does."""
        found = self._awaited(keys, timeout or self.connection.limit)
        return [self.verified(key, value) for key, value in zip(keys, found, strict=True)]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. The values are not verified."""
        self._awaited(keys, timeout or self.connection.limit)

    def _awaited(self, keys: Sequence[str], limit: timedelta) -> list[bytes]:
        full = [self._prefix + key for key in keys]
        values: list[bytes] = self.connection.ask("wait", str(limit.total_seconds()), *full)
        if None in values:
            raise DistStoreError(f"wait timeout after {limit}, keys: {', '.join(full)}")
        return values

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return self._signer.sign(self._prefix + key, content)

    def verified(self, key: str, found: bytes) -> bytes:
        """Return a value; raise `PayloadCorrupt` if no member wrote it."""
        return self._signer.verify(self._prefix + key, found)


_log = logging.getLogger("thinwire")
_CONNECT_S = 5.0
"""Longest time in seconds of one attempt to reconnect."""
_RETRY_S = 0.5
"""Seconds between two attempts to reconnect."""
_T = TypeVar("_T")
Value = Any
"""A value that JSON can represent."""
Connect = Callable[..., AuthenticatedStore]


class HostRestarted(RuntimeError):
    """The host was started anew, and does not know the run of these calls."""


class KeyValueView:
    """JSON values under the keys of one run, over one connection."""

    # calls wait for the host without a time-out: on the main thread, give `limit_s`. Calls are
    # repeated over a new connection, so writes must be idempotent, and valid when they arrive late

    def __init__(
        self,
        store: AuthenticatedStore,
        limit_s: float | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.store = store
        self.limit_s = limit_s
        self.patience_s = 0.0
        """Seconds for which a call waits for a host that does not listen."""
        self.session: str | None = None
        """Session of the host that calls are meant for; None for any."""
        self._connect = connect
        self._warned: set[str] = set()
        self._call_began_s: float | None = None
        self._lost_connection: DistNetworkError | None = None
        self._closed = threading.Event()

    def under(self, prefix: str) -> KeyValueView:
        """Return the same view with a prefix before all keys, over the same connection."""
        connect = self._connect
        longer = None if connect is None else lambda **limit: connect(**limit).under(prefix)
        return KeyValueView(self.store.under(prefix), self.limit_s, longer)

    def clone(self) -> KeyValueView:
        """Return the same view over a connection of its own, without a limit."""
        # by a greeting: the host may have been started anew since this view was used
        connect = self._connect or self.store.clone
        return KeyValueView(self._with_limit(connect), None, self._connect)

    def disconnect(self) -> None:
        """Close the connection for good. A call that waits for the host ends with an error."""
        self._closed.set()
        self.store.connection.close()

    @property
    def waiting_s(self) -> float:
        """Seconds for which another thread's running call has waited for the host; else 0."""
        began_s = self._call_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def call(self, request: Callable[[], _T]) -> _T:
        """Run a request that waits for the host, and return its result. It may run twice."""

        def with_reconnect() -> _T:
            while True:
                if self._lost_connection is not None:
                    self._reconnect(self._lost_connection)
                if self.session not in (None, self.store.session):
                    raise HostRestarted("the host was started anew")
                try:
                    return request()
                except DistNetworkError as error:
                    self._lost_connection = error

        return self._with_limit(with_reconnect)

    def _reconnect(self, lost: DistNetworkError) -> None:
        until = time.monotonic() + self.patience_s
        while self._connect is not None and not self._closed.is_set():
            try:
                store = self._connect(at_most_s=_CONNECT_S)
            except PeerStalled:
                pass  # its machine does not answer
            except ThinwireError:
                if time.monotonic() > until:
                    break
            else:
                self._lost_connection = None
                _log.warning("reconnected to the host: %s", lost)
                self.store = store
                if self._closed.is_set():  # closed by another thread meanwhile
                    store.connection.close()
                return
            self._closed.wait(_RETRY_S)
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
                "Start it again"
            ) from None

    def put(self, key: str, value: Value) -> None:
        """Write a value, replacing any other."""
        self.call(lambda: self.store.set(key, json.dumps(value)))

    def announce(self, key: str, value: Value) -> None:
        """Write a value that ends with the connection, without waiting for the host."""
        self.call(lambda: self.store.announce(key, json.dumps(value)))

    def put_if_absent(self, key: str, value: Value) -> Value:
        """Write a value unless the key has one."""
        return self.swap(key, None, value)

    def swap(self, key: str, before: Value, value: Value) -> Value:
        """Write a value if `before` is there (None: nothing); return what is there then."""
        expected = "" if before is None else json.dumps(before)
        wanted = json.dumps(value)
        # the store is another one after a reconnection
        return json.loads(self.call(lambda: self.store.compare_set(key, expected, wanted)))

    def get(self, key: str) -> Value:
        """Return the value that a member wrote; None if there is none, or a stranger wrote it."""
        return self.look([key])[1][0]

    def look(
        self, keys: Sequence[str], limit_s: float = 0.0, since: int = 0
    ) -> tuple[int, list[Value]]:
        """Return the values that members wrote, each or None, in one answer of the host.

        Waits until one of them is written after `since`, the number that is returned too, for at
        most `limit_s`.
        """
        number, found = self.call(lambda: self.store.look(keys, limit_s, since))
        return number, [self._read(*item) for item in zip(keys, found, strict=True)]

    def entries(self, prefix: str) -> dict[str, Value]:
        """Return all values that members wrote under keys with this prefix, by the rest of it."""
        found = self.call(lambda: self.store.entries(prefix))
        read = {rest: self._read(prefix + rest, value) for rest, value in found.items()}
        return {rest: value for rest, value in read.items() if value is not None}

    def _read(self, key: str, found: bytes | None) -> Value:
        try:
            return None if found is None else json.loads(self.store.verified(key, found))
        except PayloadCorrupt as error:
            self.warn_once(key, error)
            return None

    def warn_once(self, key: str, error: PayloadCorrupt) -> None:
        """Log once per key that a stranger has written there."""
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s", error)


def no_answer_message(seconds: float) -> str:
    """Error text for a host that has not answered for this long."""
    return (
        f"the meeting place did not answer within {seconds:g} s: is `thinwire host` stopped, or "
        "the network down? Join again once it answers"
    )
