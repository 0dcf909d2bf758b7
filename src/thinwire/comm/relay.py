"""Outgoing connection of a rank to a relay, over which it sends a message for all ranks once."""

import asyncio
import contextlib
import hashlib
import json
import logging
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from thinwire._wording import host_port
from thinwire.comm.outgoing import refused, through_proxy
from thinwire.errors import Mismatch, PeerLost, ThinwireError

HEAD = struct.Struct("<IhhBIII")
"""Length, receiver, sender, kind, number of the message, offset of this part, full length."""
FRAME_BYTES = 16 << 10
"""Size of a part: small enough that the relay forwards over a slow link while it still reads."""
ALL = -1
GREETING = b"twrelay1"
NONCE_BYTES = 16
_CONNECT_S = 5.0
_RETRY_S = 0.2
_FLUSH_S = 1.0
_SILENCE_S = 10.0
"""Seconds of silence after which the relay counts as lost; it sends a heartbeat every 2 s."""
_BUFFER_BYTES = 64 << 20
_MAX_MESSAGE_BYTES = 1 << 30
_log = logging.getLogger("thinwire")


Contents = bytes | Mapping[int, bytes]
"""A message for all other ranks, or one for each of some."""
Numbers = Mapping[int, int]
"""Numbers of messages by sender."""
_Source = tuple[int, int]
"""A channel and a sender."""


class Kind(IntEnum):
    """Kind of a frame."""

    DATA = 0
    CONTROL = 1
    DATA_DONE = 2
    """The sender has received all DATA messages before this number."""
    CONTROL_DONE = 3
    CONNECTED = 4
    """From the relay: this rank is connected."""
    DISCONNECTED = 5
    """From the relay: this rank's connection has ended."""
    ALIVE = 6
    """From the relay: heartbeat."""
    GOODBYE = 7
    """The sender will not connect again."""


def signal(to: int, source: int, kind: int, number: int = 0) -> bytes:
    """Return a frame without content."""
    return HEAD.pack(0, to, source, kind, number, 0, 0)


class Answer:
    """Answer of the relay to a greeting, and to a client that asks for admission, one byte."""

    OK = b"+"
    TOKEN = b"t"
    FULL = b"f"
    TLS = b"s"


class RelayEndpoint(NamedTuple):
    """Address of a relay, and of this machine if others reach it there."""

    host: str
    port: int
    key: bytes
    tls: ssl.SSLContext | None = None
    own_address: str | None = None
    patience_s: float = 0.0
    """Time in seconds in which this rank, once its connection breaks, may be back."""

    def __str__(self) -> str:
        return f"{'tls' if self.tls else 'tcp'}://{host_port(self.host, self.port)}"


def hello_mac(key: bytes, nonce: bytes, hello: bytes) -> bytes:
    """Return the MAC that proves that a client has the key: keyed BLAKE2b, 16 bytes."""
    return hashlib.blake2b(nonce + hello, key=key, digest_size=16).digest()


async def _connect(
    endpoint: RelayEndpoint, room: str, rank: int, direct: Set[int] = frozenset()
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the relay, as one rank in a room; messages for all are not for `direct`."""
    async with asyncio.timeout(_CONNECT_S):
        where: dict[str, Any] = {"host": endpoint.host, "port": endpoint.port}
        if endpoint.tls is not None:
            find = partial(through_proxy, endpoint.host, endpoint.port, _CONNECT_S)
            if tunnel := await asyncio.to_thread(find):
                where = {"sock": tunnel}
            where |= {"ssl": endpoint.tls, "server_hostname": endpoint.host}
        try:
            reader, writer = await asyncio.open_connection(**where)
        except ssl.SSLCertVerificationError as error:
            raise refused(f"the relay at {endpoint}", error) from None
        try:
            writer.write(GREETING)
            if await reader.readexactly(1) == Answer.TLS:
                raise Mismatch(
                    f"the relay at {endpoint} has a certificate, and this member did not ask for "
                    "it: pass it, or the CA that signed it, as ca="
                )
            nonce = await reader.readexactly(NONCE_BYTES)
            fields = {
                "room": room,
                "rank": rank,
                "direct": sorted(direct),
                "patience_s": endpoint.patience_s,
            }
            hello = json.dumps(fields, separators=(",", ":")).encode()
            mac = hello_mac(endpoint.key, nonce, hello)
            writer.write(len(hello).to_bytes(2, "little") + hello + mac)
            answer = await reader.readexactly(1)
            if answer == Answer.TOKEN:
                raise Mismatch(
                    f"the relay at {endpoint} has another token: use the same token file on all "
                    "machines"
                )
            if answer != Answer.OK:
                raise PeerLost(f"the relay at {endpoint} has reached its limit of connections")
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


def require_relay(endpoint: RelayEndpoint, limit_s: float) -> None:
    """Check that the host, which has answered, relays and admits this process."""

    async def try_once() -> None:
        async with asyncio.timeout(limit_s):
            _, writer = await _connect(endpoint, "", 0)
            writer.transport.abort()

    try:
        asyncio.run(try_once())
    except (OSError, EOFError) as error:  # torch's store leaves a greeting unanswered
        remedy = "with --relay" if endpoint.tls is None else "with --relay and --cert, or omit ca="
        raise PeerLost(
            f"the host at {endpoint} relays nothing{' over TLS' if endpoint.tls else ''}: start "
            f"`thinwire host` {remedy}"
        ) from error.__context__


def relay_times(endpoints: Mapping[str, RelayEndpoint], limit_s: float) -> dict[str, float]:
    """Return the seconds in which relays admit this process, without those that do not.

    Returns nothing for one relay alone.
    """
    times = {}

    def look(name: str) -> None:
        began_s = time.monotonic()
        try:
            require_relay(endpoints[name], limit_s)
        except ThinwireError as error:
            # the host need not relay itself
            _log.log(logging.WARNING if name else logging.INFO, "%s", error)
        else:
            times[name] = time.monotonic() - began_s

    if len(endpoints) > 1:
        with ThreadPoolExecutor(len(endpoints)) as pool:
            list(pool.map(look, endpoints))
    return times


@dataclass(slots=True)
class SentMessage:
    """Message that this rank has sent: one for all other ranks, or one for each of some."""

    channel: Kind
    number: int
    contents: Contents
    unacknowledged: set[int]

    def frames(self, to: int) -> Iterator[bytes]:
        """Yield the frames for a receiver, or for all."""
        full_length = self.contents if isinstance(self.contents, bytes) else self.contents[to]
        for offset in range(0, max(len(full_length), 1), FRAME_BYTES):
            part = full_length[offset : offset + FRAME_BYTES]
            head = (len(part), to, 0, self.channel, self.number, offset, len(full_length))
            yield HEAD.pack(*head) + part


class RelayClient:
    """Connection of one rank in a room, on a thread of its own; it reconnects after a failure."""

    # a message is kept until its receivers have acknowledged it, and sent again to those that
    # reconnect; messages are accepted in the order of their numbers only

    def __init__(
        self,
        endpoint: RelayEndpoint,
        room: str,
        rank: int,
        size: int,
        direct: Set[int] = frozenset(),
    ) -> None:
        self.endpoint = endpoint
        self._room = room
        self.rank = rank
        self._direct = direct
        self.others = frozenset(range(size)) - {rank} - direct
        self.changed = threading.Condition()
        self.refusal: ThinwireError | None = None
        self.departed: set[int] = set()
        self.closed = False
        self._outage: tuple[float, str] | None = time.monotonic(), "not connected yet"
        self._arrived: defaultdict[_Source, dict[int, bytearray]] = defaultdict(dict)
        """Received messages by number, for each channel and sender."""
        self._next_in: defaultdict[_Source, int] = defaultdict(int)
        self._claimed: defaultdict[_Source, int] = defaultdict(int)
        self._next_out: defaultdict[int, int] = defaultdict(int)
        self._buffered_bytes = 0
        # on the thread
        self._parts: defaultdict[_Source, bytearray] = defaultdict(bytearray)
        self._present: set[int] = set()
        self._sent: deque[SentMessage] = deque()
        self._queue: deque[tuple[SentMessage, int]] = deque()
        self._work_available, self._consumed, self._closing = (asyncio.Event() for _ in range(3))
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="thinwire-relayed", daemon=True)
        self._thread.start()

    # called on other threads

    def wait_for_all(self, limit_s: float) -> bool:
        """Wait for all ranks; return False after the limit, or if the relay refused this one."""
        with self.changed:
            self.changed.wait_for(lambda: self.refusal or self._present >= self.others, limit_s)
            return self._present >= self.others

    def send(self, channel: Kind, contents: Contents) -> SentMessage:
        """Send to all other ranks, or to those of them that are named in a mapping."""
        messages = [contents] if isinstance(contents, bytes) else contents.values()
        longest = max(map(len, messages), default=0)
        if longest > _MAX_MESSAGE_BYTES:
            raise ThinwireError(
                f"a message of {longest} bytes is too long for a relay, which takes "
                f"{_MAX_MESSAGE_BYTES}: compress it, or use fragments"
            )
        to = {*(self.others if isinstance(contents, bytes) else self.others & contents.keys())}
        message = SentMessage(channel, self._next_out[channel], contents, to)
        self._next_out[channel] += 1
        self._schedule(lambda: self._post(message))
        return message

    def claim(self, channel: Kind, source: int) -> int:
        """Reserve the next message of a rank for the caller, and return its number."""
        key = channel, source
        with self.changed:
            number = self._claimed[key]
            self._claimed[key] += 1
            self._buffered_bytes -= len(self._arrived[key].get(number, b""))
        self._schedule(self._consumed.set)
        return number

    def arrived(self, channel: Kind, wanted: Numbers) -> bool:
        """Return True if all these messages, numbers by sender, have arrived. Hold `changed`."""
        return all(number in self._arrived[channel, rank] for rank, number in wanted.items())

    def failure(self, channel: Kind, wanted: Numbers, sent: Set[int]) -> RuntimeError | None:
        """Return why these messages, or ranks in `sent`, cannot come. Hold `changed`."""
        missing = {r for r, number in wanted.items() if number not in self._arrived[channel, r]}
        missing |= sent
        lost = sorted(missing & self.departed)
        if missing and self.refusal is not None:
            return self.refusal
        if lost:
            names = ", ".join(map(str, lost))
            return RuntimeError(f"connection closed by peer: rank {names} has left the relay")
        if missing and self.closed:
            return RuntimeError("connection closed by this member")
        return None

    def pop(self, channel: Kind, wanted: Numbers) -> dict[int, bytearray]:
        """Remove these messages and return them by sender."""
        with self.changed:
            return {r: self._arrived[channel, r].pop(number) for r, number in wanted.items()}

    def outage(self) -> str:
        """Return a text about a lost relay; empty while it is connected."""
        if self._outage is None:
            return ""
        since, why = self._outage
        lost_s = time.monotonic() - since
        return f": the relay at {self.endpoint} has been unreachable for {lost_s:.1f} s ({why})"

    def close(self, wait_s: float = 0.0) -> None:
        """End all waits."""
        # the thread ends once the others have received all messages, or after a second
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._schedule(self._closing.set)
        self._thread.join(wait_s)

    def _schedule(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(function)

    # called on the thread of the connection

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._keep_connected())
        except Exception as error:  # other threads may wait for this one
            _log.exception("the thread of the connection to the relay has failed")
            self._refuse(ThinwireError(f"the relay: {type(error).__name__}: {error}"))

    def _refuse(self, error: ThinwireError) -> None:
        with self.changed:
            self.refusal = error
            self.changed.notify_all()

    async def _keep_connected(self) -> None:
        while not self._closing.is_set():
            try:
                reader, writer = await _connect(self.endpoint, self._room, self.rank, self._direct)
                await self._run_connection(reader, writer)
            except Mismatch as error:
                self._refuse(error)
                return
            except (OSError, EOFError, TimeoutError, PeerLost) as error:
                if self._outage is None:
                    why = str(error) or type(error).__name__
                    self._outage = time.monotonic(), why
                    _log.warning("lost the relay at %s, reconnecting: %s", self.endpoint, why)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _RETRY_S)

    async def _run_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with self.changed:
            if self._outage is not None and self._next_out:
                _log.warning("connected to the relay at %s again", self.endpoint)
            self._outage = None
            self._present.clear()
            self.departed.clear()
        self._queue.clear()
        coroutines = self._read(reader, writer), self._write(writer), self._wait_for_close()
        tasks = [asyncio.ensure_future(item) for item in coroutines]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._closing.is_set():
                writer.write(signal(ALL, 0, Kind.GOODBYE))
            writer.close()
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await writer.wait_closed()
            except (TimeoutError, OSError):  # no answer, or the connection was lost
                writer.transport.abort()
            await asyncio.sleep(0)  # for its socket to be closed
        for task in done:
            task.result()

    async def _wait_for_close(self) -> None:
        await self._closing.wait()
        until = time.monotonic() + _FLUSH_S
        while time.monotonic() < until and any(
            m.unacknowledged - self.departed for m in self._sent
        ):
            await asyncio.sleep(0.005)

    def _post(self, message: SentMessage) -> None:
        self._sent.append(message)
        self._enqueue(message)

    def _enqueue(self, message: SentMessage) -> None:
        full_length = isinstance(message.contents, bytes) and message.unacknowledged == self.others
        to = [ALL] if full_length else sorted(message.unacknowledged)
        self._queue.extend((message, item) for item in to)
        self._work_available.set()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            # a message for all is sent once, when all ranks are connected
            while not self._queue or not self._present | self.departed >= self.others:
                self._work_available.clear()
                await self._work_available.wait()
            message, to = self._queue.popleft()
            if to != ALL and to not in message.unacknowledged:
                continue
            for frame in message.frames(to):
                writer.write(frame)
                await writer.drain()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            while self._buffered_bytes > _BUFFER_BYTES:  # the others are far ahead of this rank
                self._consumed.clear()
                await self._consumed.wait()
            async with asyncio.timeout(_SILENCE_S):
                head = HEAD.unpack(await reader.readexactly(HEAD.size))
                length, _, source, kind, number, offset, full_length = head
                if length > FRAME_BYTES or full_length > _MAX_MESSAGE_BYTES:
                    raise ConnectionError("the relay sent an invalid frame")
                part = await reader.readexactly(length)
            if kind == Kind.ALIVE or source not in self.others:
                continue
            if kind in (Kind.DATA, Kind.CONTROL):
                self._add_part(Kind(kind), source, number, offset, full_length, part)
                if offset + length == full_length:
                    done = self._next_in[kind, source]
                    writer.write(signal(source, 0, kind + Kind.DATA_DONE, done))
            elif kind in (Kind.DATA_DONE, Kind.CONTROL_DONE):
                with self.changed:
                    for message in self._sent:
                        if message.channel == kind - Kind.DATA_DONE and message.number < number:
                            message.unacknowledged.discard(source)
                    self.changed.notify_all()
                while self._sent and not self._sent[0].unacknowledged:
                    self._sent.popleft()
            elif kind in (Kind.CONNECTED, Kind.DISCONNECTED):
                self._update_presence(source, here=kind == Kind.CONNECTED)

    def _add_part(
        self, channel: Kind, source: int, number: int, offset: int, full_length: int, part: bytes
    ) -> None:
        key = channel, source
        parts = self._parts[key]
        if number != self._next_in[key] or offset != len(parts):
            return  # received before, or sent again from its beginning
        parts += part
        if len(parts) < full_length:
            return
        self._parts[key] = bytearray()
        with self.changed:
            self._arrived[key][number] = parts
            self._next_in[key] += 1
            self._buffered_bytes += len(parts) if number >= self._claimed[key] else 0
            self.changed.notify_all()

    def _update_presence(self, source: int, *, here: bool) -> None:
        was_complete = self._present | self.departed >= self.others
        with self.changed:
            (self._present.add if here else self.departed.add)(source)
            (self.departed.discard if here else self._present.discard)(source)
            self.changed.notify_all()
        if here and was_complete:
            self._queue.extend((m, source) for m in self._sent if source in m.unacknowledged)
        elif self._present | self.departed >= self.others:
            self._queue.clear()
            for message in self._sent:
                self._enqueue(message)
        self._work_available.set()
