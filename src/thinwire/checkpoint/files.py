"""Durable files and folders: on the disk when a function returns. Also runs file work that counts
only if it succeeded on all ranks.
"""

import contextlib
import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from thinwire._watchdog import within
from thinwire.comm import Group, while_busy
from thinwire.errors import CheckpointError

LATE = (
    "a network file system must show a new file to all machines at once (for NFS mount it with "
    "lookupcache=none)"
)
"""Advice on shared directories, for errors."""
_CHUNK_BYTES = 1 << 20
_SYNC_BYTES = 64 << 20
"""Most bytes that may wait in memory for the disk, so that a slow disk still shows progress."""
_moved = [0.0]


def note_progress() -> None:
    """Note progress of file work, after every piece that was read or written."""
    _moved[0] = time.monotonic()


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and force them to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_directory(folder.parent)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Write a new file and force it to the disk; return its size in bytes."""
    size = waiting = 0
    with path.open("xb") as file:
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                file.write(chunk)
                size += len(chunk)
                waiting += len(chunk)
                note_progress()
                if waiting >= _SYNC_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    waiting = 0
        file.flush()
        os.fsync(file.fileno())
    return size


def sync_directory(path: Path) -> None:
    """Force the entries of a directory to the disk, if the file system supports it."""
    if sys.platform == "win32":  # where a directory cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def is_regular(path: Path) -> bool:
    """Return True for a plain file; reading a pipe instead might never end."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def discard(folder: Path, aside: Path) -> None:
    """Rename a folder, then delete it, so that no reader sees half of it under its name."""
    if folder != aside:
        folder.rename(aside)
    remove(aside)


def remove(path: Path) -> None:
    """Delete a folder with its contents, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_T = TypeVar("_T")
_PATIENCE_S = 1.0


def on_all_ranks(group: Group, action: str, act: Callable[[], _T]) -> list[_T]:
    """Run `act` on every rank as `while_busy` does; `CheckpointError` if it fails or makes no
    progress for the time-out of the group.
    """
    return while_busy(
        group, action, act, limit_s=group.timeout_s, moved=lambda: _moved[0], error=CheckpointError
    )


def clean_up(act: Callable[[], None]) -> None:
    """Run a clean-up on a thread; leave it running after a second, as on a disk that hangs."""
    with contextlib.suppress(Exception):
        within(_PATIENCE_S, act, name="thinwire-cleanup")
