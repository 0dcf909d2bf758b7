"""The secret that the members of a run share, and the keys that are made from it."""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

__all__ = ["derived_key", "new_token", "read_token"]

_LEAST_BYTES = 16
_MOST_BYTES = 1 << 16
_PURPOSE = b"thinwire members 1"


def read_token(path: str | os.PathLike[str]) -> bytes:
    """The token in a file, without the white space around it.

    Args:
        path: Of a file that its owner alone can read.

    Returns:
        At least 16 bytes.

    Raises:
        ValueError: The file cannot be read, can be read by others, or holds too little.
    """
    file = Path(path)
    how = f"`thinwire host --new-token {file}` or `openssl rand -hex 32` makes one"
    try:
        # a pipe without a writer would block here for ever
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ValueError(f"token file {file} does not exist: {how}") from None
    except OSError as error:
        raise ValueError(f"token file {file} cannot be read: {error.strerror}") from None
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"token file {file} is no ordinary file: {how}")
        if stat.S_IMODE(mode) & 0o077:
            raise ValueError(
                f"token file {file} has mode {stat.S_IMODE(mode):03o}, so that others on this "
                f"machine can use it: chmod 600 {file}"
            )
        token = os.read(handle, _MOST_BYTES + 1).strip()
    finally:
        os.close(handle)
    if not _LEAST_BYTES <= len(token) <= _MOST_BYTES:
        raise ValueError(
            f"token file {file} holds {'more than ' * (len(token) > _MOST_BYTES)}"
            f"{min(len(token), _MOST_BYTES)} bytes, {_LEAST_BYTES} to {_MOST_BYTES} are allowed: "
            f"{how}"
        )
    return token


def new_token(path: str | os.PathLike[str]) -> None:
    """Make a file with a token of 32 random bytes in hexadecimal digits, for its owner alone.

    Raises:
        ValueError: There is such a file already, or it cannot be made.
    """
    file = Path(path)
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{file} exists already and is left as it is") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be made: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="ascii") as opened:
            opened.write(f"{secrets.token_hex(32)}\n")
    except OSError as error:
        file.unlink()
        raise ValueError(f"{file} cannot be written: {error.strerror}") from None


def derived_key(secret: bytes, *purpose: str) -> bytes:
    """A key for one purpose: HMAC-SHA256 of the purpose, 32 bytes.

    Args:
        secret: The token, or a key derived from it.
        purpose: What it is for; other words, or the same ones divided otherwise, give another key.
    """
    words = b"".join(len(word.encode()).to_bytes(4, "big") + word.encode() for word in purpose)
    return hmac.digest(secret, _PURPOSE + words, hashlib.sha256)
