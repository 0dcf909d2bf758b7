"""One rank's sockets to every other rank, on the addresses that gloo announces."""

import concurrent.futures
import contextlib
import hmac
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Self, final

from thinwire.tools.doctor.local_checks import why_not

TOKEN_BYTES = 16
_RANK, _LENGTH = struct.Struct("!I"), struct.Struct("!I")
_LARGE_BYTES = 32 * 1024
_PINGS = 5
_SMALLER_MTU = (1420, 1380, 1280, 1000)
_HEADERS_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}
"""Bytes of IP and TCP headers, which the segment size excludes."""
_MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Reach:
    """Connection of one rank to another."""

    to: int
    error: str = ""
    latency_s: float | None = None
    large: bool | None = None
    fitting_mtu: int = 0


@final
class Answering:
    """A socket on one address that answers the ranks of this run, until the block ends."""

    def __init__(self, address: str, rank: int, token: bytes, patience_s: float) -> None:
        self._rank, self._token, self._patience_s = rank, token, patience_s
        self._socket = socket.create_server((address, 0), family=_family(address))
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="thinwire-doctor", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # wakes `accept`, and is refused where none waits
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # the block has ended
                return
            threading.Thread(
                target=self._answer, args=(connection,), name="thinwire-doctor", daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        # the connecting rank reports a peer that leaves, falls silent or lacks the token
        with connection, contextlib.suppress(OSError, EOFError):
            connection.settimeout(self._patience_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_read(connection, TOKEN_BYTES), self._token):
                return
            connection.sendall(self._token + _RANK.pack(self._rank))
            while True:
                length = _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
                _read(connection, min(length, _LARGE_BYTES))
                connection.sendall(_LENGTH.pack(length))


def reach_all(
    addresses: Mapping[int, tuple[str, int]], large: Set[int], token: bytes, patience_s: float
) -> list[Reach]:
    """Connect to all other ranks, several at once."""
    if not addresses:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(len(addresses), _MOST_AT_ONCE)) as pool:
        return list(
            pool.map(
                lambda rank: reach(rank, *addresses[rank], rank in large, token, patience_s),
                sorted(addresses),
            )
        )


def reach(
    rank: int, address: str, port: int, large: bool, token: bytes, patience_s: float
) -> Reach:
    """Connect to one other rank, with or without a large message; see `reach_all`."""
    try:
        with _greeted(rank, address, port, token, patience_s) as connection:
            latency_s = min(_seconds(connection, 0) for _ in range(_PINGS))
            if not large:
                return Reach(rank, latency_s=latency_s)
            try:
                _seconds(connection, _LARGE_BYTES)
            except TimeoutError:
                fitting = _fitting_mtu(rank, address, port, token, patience_s)
                return Reach(rank, latency_s=latency_s, large=False, fitting_mtu=fitting)
            return Reach(rank, latency_s=latency_s, large=True)
    except EOFError:
        return Reach(rank, "closed by the listener")
    except _SomeoneElse as other:
        return Reach(rank, str(other))
    except OSError as error:
        return Reach(rank, why_not(error))


class _SomeoneElse(Exception):
    """The peer is not the intended rank."""


def _greeted(
    rank: int, address: str, port: int, token: bytes, patience_s: float, segment_bytes: int = 0
) -> socket.socket:
    connection = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        connection.settimeout(patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if segment_bytes:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        connection.connect((address, port))
        connection.sendall(token)
        answer = _read(connection, TOKEN_BYTES + _RANK.size)
        if not hmac.compare_digest(answer[:TOKEN_BYTES], token):
            raise _SomeoneElse("another program answers")
        answered = _RANK.unpack(answer[TOKEN_BYTES:])[0]
        if answered != rank:
            raise _SomeoneElse(f"rank {answered} answers")
    except BaseException:
        connection.close()
        raise
    return connection


def _seconds(connection: socket.socket, length: int) -> float:
    """Return the seconds of a message of this length and its acknowledgement."""
    begun = time.perf_counter()
    connection.sendall(_LENGTH.pack(length) + bytes(length))
    _read(connection, _LENGTH.size)
    return time.perf_counter() - begun


def _fitting_mtu(rank: int, address: str, port: int, token: bytes, patience_s: float) -> int:
    headers = _HEADERS_BYTES[_family(address)]

    def fits(mtu: int) -> bool:
        try:
            with _greeted(rank, address, port, token, patience_s / 2, mtu - headers) as connection:
                _seconds(connection, _LARGE_BYTES)
        except (OSError, EOFError, _SomeoneElse):  # the answer is no, whatever the reason
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(len(_SMALLER_MTU)) as pool:
        answers = zip(_SMALLER_MTU, pool.map(fits, _SMALLER_MTU), strict=True)
        return max((mtu for mtu, fit in answers if fit), default=0)


def _read(connection: socket.socket, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = connection.recv(missing)
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _family(address: str) -> socket.AddressFamily:
    six = ipaddress.ip_address(address).version == 6
    return socket.AF_INET6 if six else socket.AF_INET
