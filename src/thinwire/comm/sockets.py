"""The connections of this process, found by its descriptors, and an end to them."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Connection", "connections", "listeners", "shut_down"]


class Connection(NamedTuple):
    """One connection; the inode tells whether the descriptor still means it."""

    descriptor: int
    inode: int
    port: int
    other_port: int


def connections() -> list[Connection]:
    """All of this process over the internet protocols, where the system tells."""
    found = []
    for descriptor, inode, beside in _sockets():
        with contextlib.suppress(OSError):  # one that listens has no other end
            other_port = beside.getpeername()[1]
            found.append(Connection(descriptor, inode, beside.getsockname()[1], other_port))
    return found


def listeners() -> dict[int, int]:
    """Ports on which this process listens, by inode."""
    return {
        inode: beside.getsockname()[1]
        for _, inode, beside in _sockets()
        if beside.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def shut_down(descriptor: int, inode: int | None = None) -> None:
    """End a connection for both sides; nothing where it has been closed, or is another by now."""
    with contextlib.suppress(OSError):
        about = os.fstat(descriptor)
        if stat.S_ISSOCK(about.st_mode) and inode in (None, about.st_ino):
            with socket.socket(fileno=os.dup(descriptor)) as beside:
                beside.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """Descriptor and inode of every stream, and a socket beside it, to be closed on its own."""
    linux = Path("/proc/self/fd")
    for entry in list((linux if linux.is_dir() else Path("/dev/fd")).iterdir()):
        with contextlib.suppress(OSError):
            descriptor = int(entry.name)
            about = os.fstat(descriptor)
            if stat.S_ISSOCK(about.st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as beside:
                    # the other end of a pipe within this machine has a text for its name
                    if beside.family != socket.AF_UNIX and beside.type == socket.SOCK_STREAM:
                        yield descriptor, about.st_ino, beside
