"""Address of the meeting place, and the secret of a run with its keys; without torch."""

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from thinwire._wording import host_port
from thinwire.errors import PayloadCorrupt

_LEAST_BYTES = 16
_MOST_BYTES = 1 << 16
_PURPOSE = b"thinwire members 1"


def read_token(path: str | os.PathLike[str]) -> bytes:
    """Return the token, 16 bytes or more, in a file that only its owner can read."""
    how = f"`thinwire host --new-token {path}` or `openssl rand -hex 32` makes one"
    return read_private(Path(path), "token file", how)


def read_private(file: Path, kind: str, how: str) -> bytes:
    """Return the secret in a file that only its owner can read, without white space around it."""
    try:
        # a pipe without a writer would block here for ever
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ValueError(f"{kind} {file} does not exist: {how}") from None
    except OSError as error:
        raise ValueError(f"{kind} {file} cannot be read: {error.strerror}") from None
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{kind} {file} is not a regular file: {how}")
        if stat.S_IMODE(mode) & 0o077:
            raise ValueError(
                f"{kind} {file} has mode {stat.S_IMODE(mode):03o}, so that others on this "
                f"machine can use it: chmod 600 {file}"
            )
        secret = os.read(handle, _MOST_BYTES + 1).strip()
    finally:
        os.close(handle)
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ValueError(
            f"{kind} {file} holds {len(secret)} bytes, {_LEAST_BYTES} to {_MOST_BYTES} "
            f"are allowed: {how}"
        )
    return secret


def new_token(path: str | os.PathLike[str]) -> None:
    """Write a token of 32 random bytes, as hexadecimal digits, to a new file for its owner only."""
    write_private(Path(path), f"{secrets.token_hex(32)}\n".encode())


def write_private(file: Path, content: bytes) -> None:
    """Write a secret to a new file for its owner only."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{file} exists already and was not changed") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be made: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
    except OSError as error:
        file.unlink()
        raise ValueError(f"{file} cannot be written: {error.strerror}") from None


def derived_key(secret: bytes, *purpose: str) -> bytes:
    """Return a 32-byte key for one purpose: HMAC-SHA256 of the purpose."""
    words = b"".join(len(word.encode()).to_bytes(4, "big") + word.encode() for word in purpose)
    return hmac.digest(secret, _PURPOSE + words, hashlib.sha256)


_MAGIC = b"tws1"
_MAC_BYTES = hashlib.sha256().digest_size
_OVERHEAD_BYTES = len(_MAGIC) + _MAC_BYTES


class Signer:
    """MACs of values under keys; without a secret, values are as they are."""

    # a sealed value is 4 bytes, the HMAC-SHA256 of key and value (32 bytes), and the value. One who
    # can write to the store can still delete values and restore older ones: a key that is written
    # more than once needs a counter in its value

    def __init__(self, secret: bytes | None) -> None:
        self._key = None if secret is None else derived_key(secret, "values")

    def sign(self, key: str, value: bytes) -> bytes:
        """Return a value with its MAC."""
        return value if self._key is None else _MAGIC + self._mac(key, value) + value

    def verify(self, key: str, found: bytes) -> bytes:
        """Return the value of what `sign` made; raise `PayloadCorrupt` for anything else."""
        if self._key is None:
            return found
        value = found[_OVERHEAD_BYTES:]
        mac = found[len(_MAGIC) : _OVERHEAD_BYTES]
        if found.startswith(_MAGIC) and hmac.compare_digest(mac, self._mac(key, value)):
            return value
        problem = "has another MAC" if found.startswith(_MAGIC) else "has no MAC"
        raise PayloadCorrupt(
            f"the value of {key!r} in the store was refused: it {problem}. It was written by a "
            "stranger, or with another token"
        )

    def _mac(self, key: str, value: bytes) -> bytes:
        assert self._key is not None
        location = key.encode()
        content = len(location).to_bytes(4, "big") + location + value
        return hmac.digest(self._key, content, hashlib.sha256)


def host_secret(token: bytes | None) -> bytes | None:
    """Return the secret of what a host writes for members of all runs."""
    return None if token is None else derived_key(token, "place")


def run_secret(token: bytes | None, run: str, session: str) -> bytes | None:
    """Return the secret of a run, for one session of its host."""
    return None if token is None else derived_key(token, "run", run, session)


_SCHEME = "tcp://"
_FORM = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def parse_address(name: str, text: str, *, scheme: bool) -> Address:
    """Parse HOST:PORT, with an IPv6 address in brackets."""
    example = f"{_SCHEME if scheme else ''}10.0.0.1:29400"
    rest = text.removeprefix(_SCHEME) if scheme else text
    found = _FORM.fullmatch(rest)
    lowest = 1 if scheme else 0  # a listener may use port 0: any free port
    if found is None or (scheme and rest == text) or not lowest <= int(found["port"]) <= 0xFFFF:
        raise ValueError(
            f"{name}={text!r} is not an address such as {example}; put IPv6 addresses in brackets: "
            f"{_SCHEME if scheme else ''}[fd00::1]:29400"
        )
    return Address(found["bracketed"] or found["plain"], int(found["port"]))
