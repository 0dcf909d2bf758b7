"""One rank's sockets to every other rank, on the addresses that gloo announces."""

import concurrent.futures
import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, final

from thinwire.tools.doctor.interfaces import family_of
from thinwire.tools.doctor.local_checks import why_not

TOKEN_BYTES = 16
_NUMBER, _CLOCK = struct.Struct("!I"), struct.Struct("!d")
_LARGE_BYTES = 32 * 1024
_PINGS, _FEWEST_PINGS, _PINGING_S = 9, 3, 0.3
_SMALLER_MTU = (1420, 1380, 1280, 1000)
_HEADERS_BYTES = {socket.AF_INET: 40, socket.AF_INET6: 60}
"""Bytes of IP and TCP headers, which the segment size excludes."""
_MOST_AT_ONCE = 32
_ENDLESS = 2**32 - 1
"""Length of a message that ends with its connection."""
_INFO = struct.Struct("=100xI16xQ28xI")
"""Of Linux's `tcp_info`: segments sent again, bytes acknowledged, segments sent."""
_PIECE_BYTES, _SAMPLE_S, _OPENING, _NEARLY = 2**16, 1e-3, 0.6, 0.9
_FILLS = 0.7
"""Least share of the rate of several connections at which one is enough."""
BBR = "sysctl -w net.ipv4.tcp_congestion_control=bbr"


@dataclass(frozen=True)
class Reach:
    """Connection of one rank to another."""

    to: int
    error: str = ""
    latency_s: float | None = None
    ahead_s: float = 0.0
    """Clock of this rank over the other's, up to half of `latency_s` off."""
    large: bool | None = None
    fitting_mtu: int = 0


class Flow(NamedTuple):
    """Bytes that connections carried."""

    bytes_s: float
    sent_bytes: int
    lost: float
    """Share of the segments that were sent again."""
    congestion: str


def mbit_s(bytes_s: float) -> str:
    """Format a rate with three digits."""
    return f"{float(f'{8 * bytes_s / 1e6:.3g}'):,g}"


@dataclass(frozen=True)
class Line:
    """Bytes per second from one rank to another, over one connection and over several."""

    one_bytes_s: float
    bytes_s: float
    streams: int
    lost: float
    congestion: str

    def __str__(self) -> str:
        """Return the line in words."""
        return (
            f"{mbit_s(self.one_bytes_s)} Mbit/s over one connection, {mbit_s(self.bytes_s)} over "
            f"{self.streams}; "
            f"{100 * self.lost:.2g} % of packets lost; {self.congestion or 'unknown congestion'}"
        )

    @property
    def advice(self) -> str:
        """Advice where one connection leaves much of the line free; else empty."""
        full = self.one_bytes_s >= _FILLS * self.bytes_s or self.congestion.startswith("bbr")
        return "" if full else f"leave streams=None, or use BBR: {BBR}"


@final
class Answering:
    """A socket on one address that answers the ranks of this run, until the block ends."""

    def __init__(self, address: str, rank: int, token: bytes, patience_s: float) -> None:
        self._rank = rank
        self._token = token
        self._patience_s = patience_s
        self._socket = socket.create_server((address, 0), family=family_of(address))
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
            except Exception:  # the block has ended
                return
            threading.Thread(
                target=self._answer, args=(connection,), name="thinwire-doctor", daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        # the connecting rank reports a peer that leaves, falls silent or lacks the token
        with connection, contextlib.suppress(Exception):
            connection.settimeout(self._patience_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_read(connection, TOKEN_BYTES), self._token):
                return
            connection.sendall(self._token + _NUMBER.pack(self._rank))
            while True:
                length = _NUMBER.unpack(_read(connection, _NUMBER.size))[0]
                while length == _ENDLESS and connection.recv(_PIECE_BYTES):
                    pass
                _read(connection, min(length, _LARGE_BYTES))
                connection.sendall(_CLOCK.pack(time.time()))


@dataclass(frozen=True)
class Peer:
    """Another rank, and how long to wait for it."""

    rank: int
    address: str
    port: int
    token: bytes
    patience_s: float

    def connect(self, segment_bytes: int = 0) -> socket.socket:
        """Return a connection over which the rank has answered."""
        with contextlib.ExitStack() as failure:
            connection = socket.socket(family_of(self.address), socket.SOCK_STREAM)
            failure.enter_context(connection)
            connection.settimeout(self.patience_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if segment_bytes:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
            connection.connect((self.address, self.port))
            connection.sendall(self.token)
            answer = _read(connection, TOKEN_BYTES + _NUMBER.size)
            if not hmac.compare_digest(answer[:TOKEN_BYTES], self.token):
                raise OSError("another program answers")
            if answer[TOKEN_BYTES:] != _NUMBER.pack(self.rank):
                raise OSError(f"rank {_NUMBER.unpack(answer[TOKEN_BYTES:])[0]} answers")
            failure.pop_all()
        return connection

    def flow(self, streams: int, most_bytes: int, most_s: float) -> Flow:
        """Send over so many connections, until nearly all bytes arrived or the time is over."""
        with contextlib.ExitStack() as stack:
            with concurrent.futures.ThreadPoolExecutor(streams) as pool:
                ends = list(pool.map(lambda _: self.connect(), range(streams)))
            for end in ends:
                stack.enter_context(end)
                # what is on its way when the connection is closed would disturb what follows
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.sendall(_NUMBER.pack(_ENDLESS))
                end.setblocking(False)
            return _flow(ends, most_bytes, most_s)

    def line(self, streams: int, most_bytes: int, most_s: float) -> tuple[Line, int]:
        """Measure over one connection and over several; return the bytes sent, too."""
        one = self.flow(1, 2 * most_bytes // 3, most_s / 2)
        several = self.flow(streams, most_bytes // 3, most_s / 2)
        line = Line(one.bytes_s, several.bytes_s, streams, one.lost, one.congestion)
        return line, one.sent_bytes + several.sent_bytes


def _flow(ends: Sequence[socket.socket], most_bytes: int, most_s: float) -> Flow:
    left = memoryview(bytes(most_bytes))
    before = _carried(ends)[1]
    seen = [(0.0, 0)]
    begun_s = time.perf_counter()
    again = 0
    segments = 0
    while seen[-1][0] < most_s and seen[-1][1] < _NEARLY * most_bytes:
        for end in ends:
            with contextlib.suppress(BlockingIOError):
                left = left[end.send(left) :]
        time.sleep(_SAMPLE_S)
        again, arrived, segments = _carried(ends)
        seen.append((time.perf_counter() - begun_s, arrived - before))
    # before, windows open and burst buckets empty
    open_s, carried = max(one for one in seen if one[0] <= _OPENING * seen[-1][0])
    rate = (seen[-1][1] - carried) / (seen[-1][0] - open_s)
    # a route may have a congestion control of its own
    control = ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    lost = again / max(segments, 1)
    name = control.rstrip(b"\0").decode()
    return Flow(rate, most_bytes - len(left), lost, name)


def _carried(ends: Sequence[socket.socket]) -> tuple[int, int, int]:
    """Return segments sent again, bytes that arrived, and segments sent."""
    size = _INFO.size
    rows = (_INFO.unpack(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)) for end in ends)
    again, arrived, segments = map(sum, zip(*rows, strict=True))
    return again, arrived, segments


def reach_all(peers: Collection[Peer], large: Set[int]) -> list[Reach]:
    """Connect to other ranks, several at once; to some with a large message."""
    with concurrent.futures.ThreadPoolExecutor(min(len(peers), _MOST_AT_ONCE) or 1) as pool:
        return list(pool.map(lambda peer: reach(peer, peer.rank in large), peers))


def reach(peer: Peer, large: bool) -> Reach:
    """Connect to one other rank, with or without a large message."""
    found = None
    try:
        with peer.connect() as connection:
            found = Reach(peer.rank, "", *round_trip(connection), large or None)
            if large:
                _answered(connection, _LARGE_BYTES)
    except OSError as error:
        if found is None or not isinstance(error, TimeoutError):
            return Reach(peer.rank, why_not(error))
        return replace(found, large=False, fitting_mtu=_fitting_mtu(peer))
    return found


def round_trip(connection: socket.socket) -> tuple[float, float]:
    """Return seconds and clock of the shortest of several round trips, of fewer if they are long.

    The clock is how far this rank's is ahead of the other's, in seconds.
    """
    taken = list[tuple[float, float]]()
    while len(taken) < _FEWEST_PINGS or (
        len(taken) < _PINGS and sum(seconds for seconds, _ in taken) < _PINGING_S
    ):
        taken.append(_answered(connection, 0))
    return min(taken)


def _answered(connection: socket.socket, length: int) -> tuple[float, float]:
    """Return seconds and clock of a message of this length and its acknowledgement."""
    sent_s = time.time()
    begun_s = time.perf_counter()
    connection.sendall(_NUMBER.pack(length) + bytes(length))
    theirs_s = _CLOCK.unpack(_read(connection, _CLOCK.size))[0]
    seconds = time.perf_counter() - begun_s
    return seconds, sent_s + seconds / 2 - theirs_s


def _fitting_mtu(peer: Peer) -> int:
    headers = _HEADERS_BYTES[family_of(peer.address)]
    hasty = replace(peer, patience_s=peer.patience_s / 2)

    def fits(mtu: int) -> bool:
        try:
            with hasty.connect(mtu - headers) as connection:
                _answered(connection, _LARGE_BYTES)
        except OSError:  # the answer is no, whatever the reason
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(len(_SMALLER_MTU)) as pool:
        answers = zip(_SMALLER_MTU, pool.map(fits, _SMALLER_MTU), strict=True)
        return max((mtu for mtu, fit in answers if fit), default=0)


def _read(connection: socket.socket, length: int) -> bytes:
    parts = list[bytes]()
    while missing := length - sum(map(len, parts)):
        parts.append(connection.recv(missing))
        if not parts[-1]:
            raise OSError("closed by the listener")
    return b"".join(parts)
