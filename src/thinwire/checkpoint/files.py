"""Files and folders that are on the disk when a function returns; work with them that counts only
if it succeeded on all ranks.
"""

import errno
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from thinwire.comm import Group, by_rank, while_busy
from thinwire.errors import CheckpointError

__all__ = [
    "by_rank",
    "checksum",
    "clean_up",
    "discard",
    "is_regular",
    "last_progress",
    "make_directory",
    "note_progress",
    "on_all_ranks",
    "remove",
    "sync_directory",
    "write_pieces",
]

_CHUNK_BYTES = 1 << 20
_SYNC_BYTES = 64 << 20
"""So much may wait in memory for the disk, so that a slow one shows that it moves."""
_moved = [0.0]


def note_progress() -> None:
    """Note that work with files makes progress: after every piece that was read or written."""
    _moved[0] = time.monotonic()


def last_progress() -> float:
    """The time of the last progress, on the clock of `time.monotonic`."""
    return _moved[0]


def make_directory(path: Path) -> None:
    """Make a directory and its parents, those that are missing, and force them to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_directory(folder.parent)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file and force it to the disk; pieces are made when they are asked for.

    Returns:
        Its size in bytes and its SHA-256 in hex.

    Raises:
        OSError: Of the file system; also when it exists.
    """
    hasher, size, waiting = hashlib.sha256(), 0, 0
    with path.open("xb") as file:
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                file.write(chunk)
                hasher.update(chunk)
                size, waiting = size + len(chunk), waiting + len(chunk)
                note_progress()
                if waiting >= _SYNC_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    waiting = 0
        file.flush()
        os.fsync(file.fileno())
    return size, hasher.hexdigest()


def sync_directory(path: Path) -> None:
    """Force the entries of a directory to the disk, where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """SHA-256 in hex of a file, read piece by piece."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            note_progress()
    return hasher.hexdigest()


def is_regular(path: Path) -> bool:
    """Whether it is a plain file: no link, folder or pipe, whose reading may never end."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def discard(folder: Path, aside: Path) -> None:
    """Delete a folder, renamed first, so that no reader sees half of it under its name."""
    if folder != aside:
        folder.rename(aside)
    remove(aside)


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, a file, or a link; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_T = TypeVar("_T")
_PATIENCE_S = 1.0


def on_all_ranks(group: Group, what: str, act: Callable[[], _T]) -> list[_T]:
    """Run `act` on every rank and wait for all of them, as `while_busy` does, as long as it goes
    on.

    Raises:
        CheckpointError: On every rank with the same text, when it failed on any, or read and wrote
            nothing for the time-out of the group; of the kind of its own that all ranks that failed
            agree on, if there is one.
        Mismatch: A rank is at other work than this.
        PeerLost, PeerStalled: A rank died or stopped.
    """
    return while_busy(
        group, what, act, limit_s=group.timeout_s, moved=last_progress, error=CheckpointError
    )


def clean_up(act: Callable[[], None]) -> None:
    """Clean up; what takes longer than a second, on a disk that hangs, goes on alone."""
    thread = threading.Thread(target=act, name="thinwire-cleanup", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
