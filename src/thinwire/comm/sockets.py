"""Find the connections of this process by its descriptors, and shut them down."""

import contextlib
import ctypes
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SYSTEM = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.pythonapi
"""C library of this process; its calls here return 0 on success. Windows makes none."""

_RESENDING_MS = (44, 1000), (18, 900_000)
"""TCP_RTO_MAX_MS, of Linux from 6.15 on, and TCP_USER_TIMEOUT; Python lacks names for them."""
Endpoint = tuple[str, int]
"""Address as text, and port."""


class Connection(NamedTuple):
    """One connection; the inode tells whether the descriptor still refers to it."""

    descriptor: int
    inode: int
    local: Endpoint
    remote: Endpoint


def connections() -> list[Connection]:
    """Return all internet connections of this process; none on systems other than Linux."""
    found = []
    for descriptor, inode, held in _streams():
        local = _address_of("getsockname", held)
        remote = _address_of("getpeername", held)
        if local is not None and remote is not None:  # a listening socket has no peer
            found.append(Connection(descriptor, inode, local, remote))
    return found


def listeners() -> dict[int, Endpoint]:
    """Return the addresses on which this process listens, by inode."""
    found = {}
    for _, inode, held in _streams():
        local = _address_of("getsockname", held)
        if local is not None and _option(held, socket.SO_ACCEPTCONN):
            found[inode] = local
    return found


def shut_down(connection: Connection) -> None:
    """Shut a connection down for both sides, unless its descriptor was closed or reused."""
    with contextlib.suppress(OSError), _held(connection.descriptor) as (inode, held):
        if inode == connection.inode:
            _SYSTEM.shutdown(held, socket.SHUT_RDWR)


def resend_every_second(connection: Connection) -> None:
    """Let TCP resend every second, if the kernel can: after a cut it would double its pauses."""
    with contextlib.suppress(OSError), _held(connection.descriptor) as (inode, held):
        # the second, since the usual 15 attempts would be over after 13 seconds
        for option, ms in _RESENDING_MS if inode == connection.inode else ():
            value = ms.to_bytes(4, sys.byteorder)
            _SYSTEM.setsockopt(held, socket.IPPROTO_TCP, option, value, 4)


def _streams() -> Iterator[tuple[int, int, int]]:
    """Yield descriptor, inode and a duplicate descriptor of each of the process's streams."""
    folder = Path("/proc/self/fd")
    for entry in list(folder.iterdir()) if folder.is_dir() else ():
        # the descriptor that listed the folder is closed by now
        with contextlib.suppress(OSError), _held(int(entry.name)) as (inode, held):
            if inode is not None and _option(held, socket.SO_TYPE) == socket.SOCK_STREAM:
                yield int(entry.name), inode, held


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[tuple[int | None, int]]:
    """Yield the inode of a socket (else None) and a descriptor that no other code closes."""
    # not a Python socket: under setdefaulttimeout it makes the connection non-blocking for all
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


def _address_of(function: str, descriptor: int) -> Endpoint | None:
    name = ctypes.create_string_buffer(128)  # a `sockaddr_storage`
    if getattr(_SYSTEM, function)(descriptor, name, ctypes.byref(ctypes.c_uint32(len(name)))) != 0:
        return None
    raw = name.raw
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family == socket.AF_INET:
        address = raw[4:8]
    elif family == socket.AF_INET6:
        address = raw[8:24]
    else:  # a local socket, such as a socket pair
        return None
    return socket.inet_ntop(family, address), int.from_bytes(raw[2:4], "big")
