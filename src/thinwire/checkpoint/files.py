"""Files and folders that are on the disk when a function returns."""

import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "checksum",
    "discard",
    "is_regular",
    "last_progress",
    "make_directory",
    "note_progress",
    "remove",
    "sync_directory",
    "write_file",
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


def write_file(path: Path, content: bytes) -> tuple[int, str]:
    """Write a new file and force it to the disk.

    Returns:
        Its size in bytes and its SHA-256 in hex.

    Raises:
        OSError: Of the file system; also when it exists.
    """
    return write_pieces(path, [content])


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """`write_file` of content that comes in pieces, each made when it is asked for."""
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
    """Whether it is a plain file, which a link, a folder or a pipe is not (reading a pipe may never
    end).
    """
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def discard(folder: Path, aside: Path) -> None:
    """Delete a folder so that no reader ever sees half of it under its name: it is renamed
    first.
    """
    if folder != aside:
        folder.rename(aside)
    remove(aside)


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, a file, or a link; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
