"""The relay of `thinwire host --relay`, which shares the port of torch's store behind it."""

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from thinwire.comm.relay import (
    ALL,
    FRAME_BYTES,
    GREETING,
    HEAD,
    NONCE_BYTES,
    Answer,
    Kind,
    hello_mac,
    signal,
)
from thinwire.members.credentials import derived_key

MOST_CONNECTIONS = 200
"""Most ranks that are connected, and most clients that have not been admitted."""
_HELLO_S = 5.0
_SIGN_S = 2.0
_RETRY_S = 0.2
_CHUNK_BYTES = 64 << 10
_STORE_CLIENT = b"\0"
_TLS_CLIENT = b"\x16"
"""First byte of a client of torch's store (`QueryType::VALIDATE`), and of a TLS handshake."""
_SLOW_S = 120.0
"""Seconds after which a rank that reads nothing is dropped."""
_LONGEST_HELLO_BYTES = 1024
_SENT_BY_MEMBERS = {Kind.DATA, Kind.CONTROL, Kind.DATA_DONE, Kind.CONTROL_DONE, Kind.GOODBYE}
_MOST_PATIENCE_S = 5.0
_Room = dict[int, asyncio.StreamWriter]
_log = logging.getLogger("thinwire")


def relay_key(token: bytes | None) -> bytes:
    """Return the key with which members authenticate to the relay; empty without a token."""
    return b"" if token is None else derived_key(token, "relay")


def certificate(cert: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS context of a relay."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        files = f"--cert {cert}, --key {key}" if key else f"--cert {cert} without --key"
        raise ValueError(
            f"{files}: not a certificate and its private key: {error.strerror or error}"
        ) from None
    return context


class _Goodbye(Exception):
    """A rank leaves."""


class _Relay:
    """Connections of all ranks, by room; those of the store's clients are passed on."""

    def __init__(
        self, key: bytes, tls: ssl.SSLContext | None, store_port: int, stop: asyncio.Event
    ) -> None:
        self._key = key
        self._tls = tls
        self._store_port = store_port
        self._stop = stop
        self._rooms: defaultdict[str, _Room] = defaultdict(dict)
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}
        """Clients that have not been admitted, the oldest first."""

    async def run(self, listener: socket.socket) -> None:
        """Accept connections until `stop` is set, and then abort those of all ranks."""
        accepting = asyncio.create_task(self._accept(listener))
        while not self._stop.is_set():
            for writer in self._members():
                writer.write(signal(ALL, 0, Kind.ALIVE))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _SIGN_S)
        accepting.cancel()
        for writer in self._members():
            writer.transport.abort()

    def _members(self) -> list[asyncio.StreamWriter]:
        return [writer for room in self._rooms.values() for writer in room.values()]

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        with listener:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # too many open files
                    await asyncio.sleep(_RETRY_S)
                    continue
                task = loop.create_task(self._handle_client(sock))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._strangers[sock] = task
                if len(self._strangers) > MOST_CONNECTIONS:
                    self._strangers.pop(next(iter(self._strangers))).cancel()

    async def _handle_client(self, sock: socket.socket) -> None:
        errors = OSError, EOFError, ValueError, KeyError, TypeError  # it has gone, or is no member
        with contextlib.suppress(*errors), contextlib.ExitStack() as ends:
            ends.callback(self._strangers.pop, sock, None)
            async with asyncio.timeout(_HELLO_S):
                of_store, reader, writer = await self._connected(sock)
                ends.enter_context(contextlib.closing(writer))
                if not of_store:
                    name, rank, direct, patience_s = await self._admitted(reader, writer)
            self._strangers.pop(sock, None)
            if of_store:
                # else the connections of machines that vanished stay open for ever
                accepted = writer.get_extra_info("socket")
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                answers, store = await asyncio.open_connection("127.0.0.1", self._store_port)
                await asyncio.gather(_copy(reader, store), _copy(answers, writer))
                return
            room = self._rooms[name]
            if previous := room.pop(rank, None):  # its connection broke, and it is back
                previous.transport.abort()
            for other, there in room.items():
                there.write(signal(other, rank, Kind.CONNECTED))
                writer.write(signal(rank, other, Kind.CONNECTED))
            room[rank] = writer
            leave = partial(self._leave, name, rank, writer)
            # a broken connection is no departure yet
            ends.callback(asyncio.get_running_loop().call_later, patience_s, leave)
            with contextlib.suppress(_Goodbye):
                while True:
                    await self._hand_on(room, rank, reader, direct)
            leave()

    async def _connected(
        self, sock: socket.socket
    ) -> tuple[bool, asyncio.StreamReader, asyncio.StreamWriter]:
        with contextlib.ExitStack() as failed:
            failed.callback(sock.close)
            loop = asyncio.get_running_loop()
            readable = asyncio.Event()
            loop.add_reader(sock, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(sock)
            first = sock.recv(1, socket.MSG_PEEK)
            tls = self._tls if first == _TLS_CLIENT else None
            if not first or (first == _TLS_CLIENT and tls is None):
                raise ValueError("no client")
            # asyncio sets it only if the listener was made with IPPROTO_TCP
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failed.pop_all()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return first == _STORE_CLIENT, reader, writer

    async def _admitted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, int, set[int], float]:
        """Return room, rank, ranks reached directly and patience of a client that is a member."""
        if await reader.readexactly(len(GREETING)) != GREETING:
            raise ValueError("no member")
        if self._tls is not None and writer.get_extra_info("ssl_object") is None:
            writer.write(Answer.TLS)
            raise ValueError("no TLS")
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(Answer.OK + nonce)
        length = int.from_bytes(await reader.readexactly(2), "little")
        if length > _LONGEST_HELLO_BYTES:
            raise ValueError("no hello")
        hello = await reader.readexactly(length)
        mac = await reader.readexactly(len(hello_mac(b"", b"", b"")))
        if not hmac.compare_digest(mac, hello_mac(self._key, nonce, hello)):
            writer.write(Answer.TOKEN)
            raise ValueError("another token")
        hello_fields = json.loads(hello)
        name = str(hello_fields["room"])
        rank = int(hello_fields["rank"])
        direct = {int(other) for other in hello_fields.get("direct", ())}
        patience_s = min(max(0.0, float(hello_fields.get("patience_s", 0))), _MOST_PATIENCE_S)
        if not 0 <= rank < MOST_CONNECTIONS:
            raise ValueError("no rank")
        is_back = rank in self._rooms.get(name, {})
        if len(self._members()) >= MOST_CONNECTIONS and not is_back:
            writer.write(Answer.FULL)
            raise ValueError("full")
        writer.write(Answer.OK)
        return name, rank, direct, patience_s

    def _leave(self, name: str, rank: int, writer: asyncio.StreamWriter) -> None:
        room = self._rooms.get(name, {})
        if room.get(rank) is not writer or self._stop.is_set():
            return
        del room[rank]
        for other, there in room.items():
            there.write(signal(other, rank, Kind.DISCONNECTED))
        if not room:
            del self._rooms[name]

    async def _hand_on(
        self, room: _Room, rank: int, reader: asyncio.StreamReader, direct: set[int]
    ) -> None:
        head = await reader.readexactly(HEAD.size)
        length, to, _, kind, *position = HEAD.unpack(head)
        if length > FRAME_BYTES or kind not in _SENT_BY_MEMBERS:
            raise ValueError("no frame of a member")
        frame = HEAD.pack(length, to, rank, kind, *position) + await reader.readexactly(length)
        if kind == Kind.GOODBYE:
            raise _Goodbye
        recipients = [
            writer
            for other, writer in room.items()
            if other not in (rank, *direct) and to in (ALL, other) and not writer.is_closing()
        ]
        for recipient in recipients:
            recipient.write(frame)
        for recipient in recipients:
            try:
                async with asyncio.timeout(_SLOW_S):
                    await recipient.drain()
            except TimeoutError:
                recipient.transport.abort()
            except OSError:
                pass  # it has disconnected, and its own task cleans up


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.closing(target):
        while chunk := await source.read(_CHUNK_BYTES):
            target.write(chunk)
            await target.drain()


@contextlib.contextmanager
def relaying(
    listener: socket.socket, token: bytes | None, tls: ssl.SSLContext | None, store_port: int
) -> Iterator[None]:
    """Run a relay on a thread of its own while the block runs."""
    runner = asyncio.Runner()
    stop = asyncio.Event()
    loop = runner.get_loop()
    loop.set_exception_handler(lambda *_: None)  # strangers that abort a handshake

    def run() -> None:
        try:
            with runner:
                runner.run(_Relay(relay_key(token), tls, store_port, stop).run(listener))
        except Exception:  # members wait for it, and say that they lost it
            _log.exception("the relay has failed")

    thread = threading.Thread(target=run, name="thinwire-relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_SIGN_S)
