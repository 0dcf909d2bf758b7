"""The connections of this process, found by its descriptors, and an end to them."""

import contextlib
import ctypes
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Connection", "Place", "connections", "end_unanswered", "listeners", "shut_down"]

_SYSTEM = ctypes.CDLL(None)
"""The C library of this process; of its calls here 0 is success."""
_LONGEST_NAME_BYTES = 128
"""Of a `sockaddr_storage`."""

Place = tuple[str, int]
"""An address as text, and a port."""


class Connection(NamedTuple):
    """One connection; the inode tells whether the descriptor still means it."""

    descriptor: int
    inode: int
    here: Place
    there: Place


def connections() -> list[Connection]:
    """All of this process over the internet protocols; none where the system is not Linux."""
    found = []
    for descriptor, inode, held in _streams():
        here, there = _place("getsockname", held), _place("getpeername", held)
        if here is not None and there is not None:  # one that listens has no other end
            found.append(Connection(descriptor, inode, here, there))
    return found


def listeners() -> dict[int, Place]:
    """Where this process listens, by inode."""
    found = {}
    for _, inode, held in _streams():
        here = _place("getsockname", held)
        if here is not None and _option(held, socket.SO_ACCEPTCONN):
            found[inode] = here
    return found


def shut_down(each: Connection) -> None:
    """End a connection for both sides; nothing where it has been closed, or is another by now."""
    with contextlib.suppress(OSError), _held(each.descriptor) as (inode, held):
        if inode == each.inode:
            _SYSTEM.shutdown(held, socket.SHUT_RDWR)


def end_unanswered(each: Connection, seconds: int) -> None:
    """Let the kernel end a connection once nothing that was sent has been confirmed for so long; it
    asks once a second where nothing is sent. A process that is stopped confirms all the same.
    """
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds),
    )
    with contextlib.suppress(OSError), _held(each.descriptor) as (inode, held):
        for level, option, value in options if inode == each.inode else ():
            number = ctypes.c_int(value)
            _SYSTEM.setsockopt(held, level, option, ctypes.byref(number), ctypes.sizeof(number))


def _streams() -> Iterator[tuple[int, int, int]]:
    """Descriptor and inode of every stream of this process, and another descriptor of it."""
    folder = Path("/proc/self/fd")
    for entry in list(folder.iterdir()) if folder.is_dir() else ():
        # the one through which the folder was read is closed by now
        with contextlib.suppress(OSError), _held(int(entry.name)) as (inode, held):
            if inode is not None and _option(held, socket.SO_TYPE) == socket.SOCK_STREAM:
                yield int(entry.name), inode, held


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[tuple[int | None, int]]:
    """Inode of a socket, None of anything else, and a descriptor that nobody else closes."""
    # no object of Python's socket: under socket.setdefaulttimeout it would make the connection
    # itself non-blocking, for torch and whoever else uses it
    held = os.dup(descriptor)
    try:
        about = os.fstat(held)
        yield about.st_ino if stat.S_ISSOCK(about.st_mode) else None, held
    finally:
        os.close(held)


def _option(descriptor: int, option: int) -> int:
    value = ctypes.c_int()
    length = ctypes.c_uint32(ctypes.sizeof(value))
    _SYSTEM.getsockopt(
        descriptor, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(length)
    )
    return value.value


def _place(function: str, descriptor: int) -> Place | None:
    name = ctypes.create_string_buffer(_LONGEST_NAME_BYTES)
    if getattr(_SYSTEM, function)(descriptor, name, ctypes.byref(ctypes.c_uint32(len(name)))) != 0:
        return None
    raw = name.raw
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        address = raw[4:8]
    elif family == socket.AF_INET6:
        address = raw[8:24]
    else:  # the other end of a pipe within this machine
        return None
    return socket.inet_ntop(family, address), int.from_bytes(raw[2:4], "big")
