"""A rank's connection to a relay, outgoing, by which it sends what is meant for all others once."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from thinwire.errors import Mismatch, PeerLost, PeerStalled, ThinwireError

__all__ = [
    "ALL",
    "FRAME_BYTES",
    "GREETING",
    "HEAD",
    "NONCE_BYTES",
    "Answer",
    "Kind",
    "RelayClient",
    "RelayEndpoint",
    "hello_proof",
    "require_relay",
]

HEAD: Final = struct.Struct("<IhhBIII")
"""Length, receiver, sender, kind, number of the message, where this part of it begins, its whole
length."""
FRAME_BYTES: Final = 16 << 10
"""Of a part: a slow line carries it soon, so that the relay hands on while it still reads."""
ALL: Final = -1
GREETING: Final = b"twrelay1"
NONCE_BYTES: Final = 16
_CONNECT_S, _AGAIN_S, _FLUSH_S = 5.0, 0.2, 1.0
_SILENT_S = 10.0
"""A relay that says nothing for so long is away; it gives a sign of life every 2 s."""
_AHEAD_BYTES, _LONGEST_BYTES = 64 << 20, 1 << 30
_log = logging.getLogger("thinwire")


class Kind(IntEnum):
    """Of a frame."""

    DATA = 0
    CONTROL = 1
    DATA_DONE = 2
    """The sender has all messages of DATA before this number."""
    CONTROL_DONE = 3
    HERE = 4
    """Of the relay: this rank is connected."""
    GONE = 5
    """Of the relay: its connection has ended."""
    ALIVE = 6
    """Of the relay: nothing else."""


class Answer:
    """What the relay answers to who asks to be let in, one byte."""

    COME, TOKEN, FULL = b"+", b"t", b"f"


class RelayEndpoint(NamedTuple):
    """Where a relay is.

    Attributes:
        host: Name or address.
        port: Of the relay, not of the meeting place.
        key: By which it knows members; empty where there is no token.
        tls: By which its certificate is verified; None for a connection in plain.
    """

    host: str
    port: int
    key: bytes
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def hello_proof(key: bytes, nonce: bytes, hello: bytes) -> bytes:
    """The proof that whoever says hello knows the key: keyed BLAKE2b, 16 bytes."""
    return hashlib.blake2b(nonce + hello, key=key, digest_size=16).digest()


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _entered(place: RelayEndpoint, room: str, rank: int) -> _Ends:
    """A connection to the relay, as one rank in a room.

    Raises:
        Mismatch, PeerLost: The relay refuses it, or is none.
        OSError, EOFError, TimeoutError: It is away.
    """
    async with asyncio.timeout(_CONNECT_S):
        try:
            reader, writer = await asyncio.open_connection(place.host, place.port, ssl=place.tls)
        except ssl.SSLCertVerificationError as error:
            raise Mismatch(
                f"the certificate of the relay at {place} is refused: {error.verify_message}. ca= "
                "names the authority that has signed it, or itself; it must be made for this "
                "address"
            ) from None
        try:
            writer.write(GREETING)
            nonce = await reader.readexactly(NONCE_BYTES)
            hello = json.dumps({"room": room, "rank": rank}).encode()
            proof = hello_proof(place.key, nonce, hello)
            writer.write(len(hello).to_bytes(2, "little") + hello + proof)
            answer = await reader.readexactly(1)
            if answer == Answer.TOKEN:
                raise Mismatch(f"the relay at {place} has another token")
            if answer != Answer.COME:
                raise PeerLost(f"the relay at {place} has as many connections as it may have")
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


def require_relay(place: RelayEndpoint, limit_s: float) -> None:
    """Check that a relay answers there, and lets this process in.

    Raises:
        Mismatch: It has another token, or a certificate that does not verify.
        PeerLost, PeerStalled: Nobody relays there.
    """

    async def look() -> None:
        async with asyncio.timeout(limit_s):
            _, writer = await _entered(place, "", 0)
            writer.transport.abort()

    try:
        asyncio.run(look())
    except TimeoutError:
        raise PeerStalled(
            f"no relay answers at {place}: does a firewall let the port through? It is the one "
            "after that of the meeting place"
        ) from None
    except (OSError, EOFError) as error:
        raise PeerLost(
            f"nobody relays at {place} ({error}): start `thinwire host` with --relay; where it has "
            "--cert, join with ca=, and else without"
        ) from error


@dataclass(slots=True)
class _Message:
    """What this rank has sent: to all others the same, or to each of some its own."""

    channel: Kind
    number: int
    contents: bytes | Mapping[int, bytes]
    waiting: set[int]
    """Who has not said to have it."""

    def frames(self, to: int) -> Iterator[bytes]:
        whole = self.contents if isinstance(self.contents, bytes) else self.contents[to]
        for at in range(0, max(len(whole), 1), FRAME_BYTES):
            part = whole[at : at + FRAME_BYTES]
            head = (len(part), to, 0, self.channel, self.number, at, len(whole))
            yield HEAD.pack(*head) + part


class RelayClient:
    """One rank's connection in a room, on a thread of its own; made anew wherever it breaks.

    What was sent is kept until its receivers say that they have it, and sent again to those who
    come back. Of what comes only what is next from its sender is taken: nothing twice, and nothing
    out of order.
    """

    def __init__(self, place: RelayEndpoint, room: str, rank: int, size: int) -> None:
        self.place, self._room, self.rank = place, room, rank
        self.others = frozenset(range(size)) - {rank}
        self.news = threading.Condition()
        self.refusal: ThinwireError | None = None
        self.gone: set[int] = set()
        self.closed = False
        self._away: tuple[float, str] | None = time.monotonic(), "not connected yet"
        self._arrived: defaultdict[tuple[int, int], dict[int, bytearray]] = defaultdict(dict)
        """By channel and sender, and then by number, what nobody has taken yet."""
        self._next_in: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._claimed: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._next_out: defaultdict[int, int] = defaultdict(int)
        self._ahead_bytes = 0
        # on the thread
        self._parts: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
        self._present: set[int] = set()
        self._sent: deque[_Message] = deque()
        self._queue: deque[tuple[_Message, int]] = deque()
        self._work, self._taken, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="thinwire-relayed", daemon=True)
        self._thread.start()

    # for other threads

    def wait_for_everybody(self, limit_s: float) -> bool:
        """Whether all are there within the limit, and none was refused."""
        with self.news:
            self.news.wait_for(lambda: self.refusal or self._present >= self.others, limit_s)
            return self._present >= self.others

    def send(self, channel: Kind, contents: bytes | Mapping[int, bytes]) -> None:
        """Send to all others, or to those who are named."""
        to = set(self.others if isinstance(contents, bytes) else contents)
        message = _Message(channel, self._next_out[channel], contents, to)
        self._next_out[channel] += 1
        self._soon(lambda: self._post(message))

    def claim(self, channel: Kind, source: int) -> int:
        """The number of the next message of a rank that nobody waits for yet."""
        key = channel, source
        with self.news:
            number = self._claimed[key]
            self._claimed[key] += 1
            self._ahead_bytes -= len(self._arrived[key].get(number, b""))
        self._soon(self._taken.set)
        return number

    def arrived(self, channel: Kind, wanted: Mapping[int, int]) -> bool:
        """Whether all of these are there, by sender and number; call it with `news`."""
        return all(number in self._arrived[channel, rank] for rank, number in wanted.items())

    def failure(self, channel: Kind, wanted: Mapping[int, int]) -> RuntimeError | None:
        """Why they will not arrive; None where they may. Call it with `news`."""
        missing = [r for r, number in wanted.items() if number not in self._arrived[channel, r]]
        lost = [rank for rank in missing if rank in self.gone]
        if missing and self.refusal is not None:
            return self.refusal
        if lost:
            names = ", ".join(map(str, lost))
            return RuntimeError(f"connection closed by peer: rank {names} has left the relay")
        if missing and self.closed:
            return RuntimeError("connection closed: this member has hung up")
        return None

    def take(self, channel: Kind, wanted: Mapping[int, int]) -> dict[int, bytearray]:
        """Them, by sender; once."""
        with self.news:
            return {r: self._arrived[channel, r].pop(number) for r, number in wanted.items()}

    def away(self) -> str:
        """What to say of a relay that is away; nothing where it is there."""
        if self._away is None:
            return ""
        since, why = self._away
        return f": the relay at {self.place} is away for {time.monotonic() - since:.1f} s ({why})"

    def close(self, patience_s: float = 0.0) -> None:
        """End every wait here. The thread goes once the others have what was sent, within a second;
        `patience_s` says for how long to wait for it.
        """
        with self.news:
            self.closed = True
            self.news.notify_all()
        self._soon(self._over.set)
        self._thread.join(patience_s)

    def _soon(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(act)

    # on the thread

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._stay())
        except Exception as error:  # who waits for this thread must not wait for ever
            _log.exception("the thread of the connection to the relay has failed")
            self._refuse(ThinwireError(f"the relay: {type(error).__name__}: {error}"))

    def _refuse(self, error: ThinwireError) -> None:
        with self.news:
            self.refusal = error
            self.news.notify_all()

    async def _stay(self) -> None:
        while not self._over.is_set():
            try:
                reader, writer = await _entered(self.place, self._room, self.rank)
                await self._carry(reader, writer)
            except Mismatch as error:
                self._refuse(error)
                return
            except (OSError, EOFError, TimeoutError, PeerLost) as error:
                if self._away is None:
                    self._away = time.monotonic(), str(error) or type(error).__name__
                    _log.info("lost the relay at %s, connecting anew: %s", self.place, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _AGAIN_S)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self.news:
            self._away = None
            self._present.clear()
            self.gone.clear()
        self._queue.clear()
        work = self._read(reader, writer), self._write(writer), self._end()
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await writer.wait_closed()
            writer.transport.abort()
            await asyncio.sleep(0)  # for its socket to be closed
        for task in done:
            task.result()

    async def _end(self) -> None:
        await self._over.wait()
        until = time.monotonic() + _FLUSH_S
        while time.monotonic() < until and any(m.waiting - self.gone for m in self._sent):
            await asyncio.sleep(0.005)

    def _post(self, message: _Message) -> None:
        self._sent.append(message)
        self._enqueue(message)

    def _enqueue(self, message: _Message) -> None:
        whole = isinstance(message.contents, bytes) and message.waiting == self.others
        to = [ALL] if whole else sorted(message.waiting)
        self._queue.extend((message, each) for each in to)
        self._work.set()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            # what is for all goes once, when all are there
            while not self._queue or not self._present | self.gone >= self.others:
                self._work.clear()
                await self._work.wait()
            message, to = self._queue.popleft()
            if to != ALL and to not in message.waiting:
                continue
            for frame in message.frames(to):
                writer.write(frame)
                await writer.drain()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            while self._ahead_bytes > _AHEAD_BYTES:  # the others are far ahead of this rank
                self._taken.clear()
                await self._taken.wait()
            async with asyncio.timeout(_SILENT_S):
                head = HEAD.unpack(await reader.readexactly(HEAD.size))
                length, _, source, kind, number, at, whole = head
                if length > FRAME_BYTES or whole > _LONGEST_BYTES:
                    raise ConnectionError("the relay sends what no member has sent")
                part = await reader.readexactly(length)
            if kind == Kind.ALIVE or source not in self.others:
                continue
            if kind in (Kind.DATA, Kind.CONTROL):
                self._came(Kind(kind), source, number, at, whole, part)
                if at + length == whole:
                    done = self._next_in[kind, source]
                    writer.write(HEAD.pack(0, source, 0, kind + Kind.DATA_DONE, done, 0, 0))
            elif kind in (Kind.DATA_DONE, Kind.CONTROL_DONE):
                self._confirmed(source, kind - Kind.DATA_DONE, number)
            elif kind in (Kind.HERE, Kind.GONE):
                self._moved(source, here=kind == Kind.HERE)

    def _came(
        self, channel: Kind, source: int, number: int, at: int, whole: int, part: bytes
    ) -> None:
        key = channel, source
        parts = self._parts[key]
        if number != self._next_in[key] or at != len(parts):
            return  # it was here before, or comes again from its beginning
        parts += part
        if len(parts) < whole:
            return
        self._parts[key] = bytearray()
        with self.news:
            self._arrived[key][number] = parts
            self._next_in[key] += 1
            self._ahead_bytes += len(parts) if number >= self._claimed[key] else 0
            self.news.notify_all()

    def _confirmed(self, source: int, channel: int, number: int) -> None:
        for message in self._sent:
            if message.channel == channel and message.number < number:
                message.waiting.discard(source)
        while self._sent and not self._sent[0].waiting:
            self._sent.popleft()

    def _moved(self, source: int, *, here: bool) -> None:
        were_all = self._present | self.gone >= self.others
        with self.news:
            (self._present.add if here else self.gone.add)(source)
            (self.gone.discard if here else self._present.discard)(source)
            self.news.notify_all()
        if here and were_all:
            self._queue.extend((m, source) for m in self._sent if source in m.waiting)
        elif self._present | self.gone >= self.others:
            self._queue.clear()
            for message in self._sent:
                self._enqueue(message)
        self._work.set()
