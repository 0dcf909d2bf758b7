"""A store whose values carry a proof that a holder of the token wrote them, under this very key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, final

from torch._C._distributed_c10d import Store

from thinwire.errors import PayloadCorrupt
from thinwire.members.token import derived_key

__all__ = ["SealedStore"]

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
    another value, others want a number in the value, as heart-beats have one. `add` counts on the
    server, in plain: a stranger can change what it gives, so nothing that matters may hang on it.

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
    def is_sealed(self) -> bool:
        """Whether values are sealed."""
        return self._key is not None

    @property
    def port(self) -> int:
        """Of the host; -1 where the store is none of another process."""
        port: int = getattr(self._store, "port", -1)
        return port

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

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """`set` of several."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Refused where values are sealed: a part of a value has no proof of its own."""
        if self._key is not None:
            raise NotImplementedError(f"{key!r}: a sealed value cannot be appended to; set it")
        self._store.append(self._prefix + key, value)

    def add(self, key: str, value: int) -> int:
        """Count on the server; not sealed."""
        count: int = self._store.add(self._prefix + key, value)
        return count

    def check(self, keys: list[str]) -> bool:
        """Whether all of the keys are there; says nothing of their values."""
        there: bool = self._store.check([self._prefix + key for key in keys])
        return there

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; says nothing of their values."""
        there = [self._prefix + key for key in keys]
        if timeout is None:
            self._store.wait(there)
        else:
            self._store.wait(there, timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a value; whether there was one."""
        was: bool = self._store.delete_key(self._prefix + key)
        return was

    def num_keys(self) -> int:
        """Number of keys under the prefix."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """The keys under the prefix, without it."""
        length = len(self._prefix)
        return [key[length:] for key in self._store.list_keys() if key.startswith(self._prefix)]

    def set_timeout(self, timeout: timedelta) -> None:
        """Of all later calls over this connection."""
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """False, so that torch keeps away from `append`."""
        return False

    # by these names torch looks for them in a class of Python
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

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
