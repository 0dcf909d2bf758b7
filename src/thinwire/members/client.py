"""Connection of a member to the store of its host."""

import contextlib
import socket
import ssl
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError

from thinwire._watchdog import addresses_of
from thinwire.comm.outgoing import refused, through_proxy
from thinwire.errors import PeerLost, PeerStalled
from thinwire.members.credentials import Address
from thinwire.members.server import GREETING, LENGTH, MOST_BYTES, framed, unframed

_SHORTEST_S = 0.1
_UNANSWERED_S = 5
"""Seconds without the host's acknowledgement after which a connection counts as lost."""
_TCP_RXT_CONNDROPTIME = 0x80
"""The same on macOS, for which Python has no name."""


class HostStore:
    """Connection to the store of a host: a request and its answer at a time."""

    def __init__(
        self,
        host: Address,
        timeout: timedelta,
        connect_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host = host
        self._tls = tls
        self.limit = timeout
        """Longest wait for a key."""
        self._connect_s = connect_s
        self._lock = threading.Lock()
        began_s = time.monotonic()
        self._socket = _connected(host, connect_s, tls)
        self.round_trip_s = time.monotonic() - began_s
        """Mean time in seconds of recent requests."""
        # not in `close`: another thread may wait for an answer
        weakref.finalize(self, self._socket.close)
        self.own_address = str(self._socket.getsockname()[0])
        """Address of this machine from which it reaches the host."""
        self._socket.settimeout(None)
        # the kernel ends a connection to a machine that is gone; a stopped process answers
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {socket.TCP_NODELAY: 1, socket.TCP_KEEPINTVL: 1}
        if sys.platform == "darwin":
            options |= {socket.TCP_KEEPALIVE: 1, _TCP_RXT_CONNDROPTIME: _UNANSWERED_S}
        else:
            options |= {socket.TCP_KEEPIDLE: 1, socket.TCP_USER_TIMEOUT: 1000 * _UNANSWERED_S}
        for option, value in options.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._explaining():
            self._socket.sendall(GREETING)

    def clone(self) -> "HostStore":
        """Return the same store over a connection of its own."""
        return HostStore(self._host, self.limit, self._connect_s, self._tls)

    def close(self) -> None:
        """End the connection; a call that waits on another thread ends with an error."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def ask(self, *parts: str | bytes) -> list[Any]:
        """Make a request, and return the answer; see `HostedStore`."""
        with self._lock, self._explaining():
            self._socket.sendall(_message(parts))
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            if length > MOST_BYTES:
                raise ValueError("it is no host of thinwire")
            return unframed(self._read(length))

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()
            raise DistNetworkError(f"the connection was lost: {error}") from None

    def _read(self, nbytes: int) -> bytes:
        found = bytearray()
        while len(found) < nbytes:
            piece = self._socket.recv(min(nbytes - len(found), 1 << 20))
            if not piece:
                raise OSError("it was closed")
            found += piece
        return bytes(found)

    def announce(self, key: str, value: bytes) -> None:
        """Write a value that ends with this connection, without waiting for the host."""
        with self._lock, self._explaining():
            self._socket.sendall(_message(("announce", key, value)))


def _message(parts: Sequence[str | bytes]) -> bytes:
    return framed([part.encode() if isinstance(part, str) else part for part in parts])


def _connected(host: Address, limit_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    """Return a connection to a listening host."""
    until = time.monotonic() + limit_s
    try:
        if tls is None:
            return _first_connection(host, until)
        plain = through_proxy(*host, limit_s) or _first_connection(host, until)
        plain.settimeout(max(until - time.monotonic(), _SHORTEST_S))
        return _encrypted(plain, tls, host)
    except socket.gaierror as error:
        raise PeerLost(
            f"{host.host} does not resolve to an address: {error.strerror or error}"
        ) from None
    except ConnectionRefusedError as error:
        raise PeerLost(
            f"nothing listens at tcp://{host} ({error.strerror}): start `thinwire host "
            f"--bind {host}` there first"
        ) from None
    except OSError as error:  # no answer in time, or no route
        why = f" ({error.strerror})" if error.strerror else ""
        raise PeerStalled(
            f"nothing answers at tcp://{host} within {limit_s:g} s{why}: is the machine up, and "
            "does a firewall let the port through?"
        ) from None


def _encrypted(plain: socket.socket, tls: ssl.SSLContext, host: Address) -> socket.socket:
    try:
        return tls.wrap_socket(plain, server_hostname=host.host)
    except ssl.SSLCertVerificationError as error:
        raise refused(f"the host at {host}", error) from None
    except (ssl.SSLError, ConnectionResetError) as error:
        raise PeerLost(f"{host} speaks no TLS ({error}): is it `thinwire host --run`?") from None


def _first_connection(host: Address, until: float) -> socket.socket:
    addresses = addresses_of(host.host, until - time.monotonic())
    # one after the other: there may be no route to the first, such as over IPv6
    for tried, address in enumerate(addresses, 1):
        rest = len(addresses) - tried
        part_s = max(until - time.monotonic(), _SHORTEST_S) / (1 + rest)
        try:
            return socket.create_connection((address, host.port), timeout=part_s)
        except OSError:
            if rest == 0:
                raise
    raise AssertionError(f"{host.host} has been found without an address")
