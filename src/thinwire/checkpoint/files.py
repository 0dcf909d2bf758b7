"""Files and folders that are on the disk when a function returns."""

import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path

__all__ = ["checksum", "discard", "is_regular", "make_directory", "remove", "sync_directory", "write_file"]

_CHUNK_BYTES = 1 << 20


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
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content), hashlib.sha256(content).hexdigest()


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
    return hasher.hexdigest()


def is_regular(path: Path) -> bool:
    """Whether it is a plain file, which a link, a folder or a pipe is not (reading a pipe may never end)."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def discard(folder: Path, aside: Path) -> None:
    """Delete a folder so that no reader ever sees half of it under its name: it is renamed first."""
    if folder != aside:
        folder.rename(aside)
    remove(aside)


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, a file, or a link; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
