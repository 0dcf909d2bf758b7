"""Find the connections of this process by its descriptors, and shut them down."""

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SYSTEM = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.pythonapi
"""C library of this process; its calls here return 0 on success. Windows makes none."""

_RESENDING_MS = (44, 1000), (18, 900_000)
"""TCP_RTO_MAX_MS, of Linux from 6.15 on, and TCP_USER_TIMEOUT; Python lacks names for them, and
macOS refuses both.
"""
Endpoint = tuple[str, int]
"""Address as text, and port."""


class Connection(NamedTuple):
    """One connection; the addresses tell whether the descriptor still refers to it."""

    # macOS has no inodes of sockets
    descriptor: int
    local: Endpoint
    remote: Endpoint


def connections() -> list[Connection]:
    """Return all internet connections of this process."""
    found = []
    for descriptor, held in _streams():
        local, remote = _ends(held)
        if local is not None and remote is not None:  # a listening socket has no peer
            found.append(Connection(descriptor, local, remote))
    return found


def listeners() -> list[Endpoint]:
    """Return the addresses on which this process listens."""
    found = []
    for _, held in _streams():
        local, remote = _ends(held)
        # macOS does not say which sockets listen
        if local is not None and remote is None and _option(held, socket.SO_ACCEPTCONN) != 0:
            found.append(local)
    return found


def shut_down(connection: Connection) -> None:
    """Shut a connection down for both sides, unless its descriptor was closed or reused."""
    with contextlib.suppress(OSError), _held(connection.descriptor) as held:
        if _ends(held) == connection[1:]:
            _SYSTEM.shutdown(held, socket.SHUT_RDWR)


def resend_every_second(connection: Connection) -> None:
    """Let TCP resend every second, if the kernel can: after a cut it would double its pauses."""
    with contextlib.suppress(OSError), _held(connection.descriptor) as held:
        # the second, since the usual 15 attempts would be over after 13 seconds
        for option, ms in _RESENDING_MS if _ends(held) == connection[1:] else ():
            value = ms.to_bytes(4, sys.byteorder)
            _SYSTEM.setsockopt(held, socket.IPPROTO_TCP, option, value, 4)


def _streams() -> Iterator[tuple[int, int]]:
    """Yield the descriptor, and a duplicate of it, of each of the process's streams."""
    for entry in list(Path("/dev/fd").iterdir()):
        # the descriptor that listed the folder is closed by now
        with contextlib.suppress(OSError), _held(int(entry.name)) as held:
            if _option(held, socket.SO_TYPE) == socket.SOCK_STREAM:
                yield int(entry.name), held


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[int]:
    """Yield a duplicate that no other code closes."""
    # not a Python socket: under setdefaulttimeout it makes the connection non-blocking for all
    held = os.dup(descriptor)
    try:
        yield held
    finally:
        os.close(held)


def _option(descriptor: int, option: int) -> int:
    value = ctypes.c_int()
    length = ctypes.c_uint32(ctypes.sizeof(value))
    known = _SYSTEM.getsockopt(
        descriptor, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(length)
    )
    return value.value if known == 0 else -1


def _ends(descriptor: int) -> tuple[Endpoint | None, Endpoint | None]:
    return _address_of("getsockname", descriptor), _address_of("getpeername", descriptor)


def _address_of(function: str, descriptor: int) -> Endpoint | None:
    name = ctypes.create_string_buffer(128)  # a `sockaddr_storage`
    if getattr(_SYSTEM, function)(descriptor, name, ctypes.byref(ctypes.c_uint32(len(name)))) != 0:
        return None
    raw = name.raw
    family = raw[1] or raw[0]  # macOS puts a length before a family of one byte
    if family == socket.AF_INET:
        address = raw[4:8]
    elif family == socket.AF_INET6:
        address = raw[8:24]
    else:  # a local socket, such as a socket pair
        return None
    return socket.inet_ntop(family, address), int.from_bytes(raw[2:4], "big")
