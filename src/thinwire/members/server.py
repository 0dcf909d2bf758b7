"""The store of a host: values under keys, for clients that wait for them; without torch."""

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from thinwire.errors import ThinwireError

GREETING = b"\0tw2"
"""First bytes of a client; the first one is that of no TLS handshake and no client of a relay."""
LENGTH = struct.Struct("<I")
MOST_CONNECTIONS = 200
"""Most ranks that a relay connects, and most clients that have not been admitted."""
MOST_BYTES = 16 << 20
"""Longest message between a client and the store."""
_ABSENT = 0xFFFFFFFF
_TLS_CLIENT = b"\x16"
_HELLO_S = 5.0
_RETRY_S = 0.2
_MORE_FILES = 64
_JOIN_S = 2.0
_PASSING = re.compile(rb"relay/|run/[^/]+/(.*/)?(hb|here|alive|founder|shown|gloo|copy)/")
"""Keys that are of no use to a host that was restarted."""

Parts = Sequence[bytes | None]
_log = logging.getLogger("thinwire")


def framed(parts: Parts) -> bytes:
    """Return byte strings, or None, as one message."""
    packed = [
        LENGTH.pack(_ABSENT) if part is None else LENGTH.pack(len(part)) + part for part in parts
    ]
    body = b"".join(packed)
    return LENGTH.pack(len(body)) + body


def unframed(body: bytes) -> list[bytes | None]:
    """Return what `framed` packed into the body of a message."""
    found: list[bytes | None] = []
    at = 0
    while at < len(body):
        if len(body) - at < LENGTH.size:
            raise ValueError("a length is cut off")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if length == _ABSENT:
            found.append(None)
            continue
        if length > len(body) - at:
            raise ValueError("a part is cut off")
        found.append(body[at : at + length])
        at += length
    return found


def allow_files(more: int, use: str) -> None:
    """Let this process open so many files more than now; raise if its hard limit is too low."""
    import resource  # Windows has none, and members import this module

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = soft  # where not even the list can be read
    with contextlib.suppress(OSError):
        opened = len([*Path("/dev/fd").iterdir()])
    needed = opened + more
    if needed > hard != resource.RLIM_INFINITY:
        raise ThinwireError(
            f"{use}: this process needs {needed} open files, and may open {hard} at most. Start it "
            f"after `ulimit -n {needed}` as root, or with LimitNOFILE={needed} as a service"
        )
    if needed > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Journal:
    """File with the values of a store, which a host that is started again continues with."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._descriptor = self._locked(path)
        self.values: dict[bytes, bytes] = {}
        """What the file held."""
        content = path.read_bytes()
        at = 0
        # the last message is cut off if the machine failed while it was written
        while at + LENGTH.size <= len(content):
            end = at + LENGTH.size + LENGTH.unpack_from(content, at)[0]
            if end > len(content):
                break
            key, value = unframed(content[at + LENGTH.size : end])
            if key is None or value is None:
                raise ValueError(f"{path} is no file of a host")
            self.values[key] = value
            at = end
        self.rewrite(self.values)

    def _locked(self, path: Path) -> int:
        import fcntl  # Windows has none, and members import this module

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ValueError(f"{path} is in use by another `thinwire host`") from None
        return descriptor

    def rewrite(self, values: dict[bytes, bytes]) -> None:
        """Let the file hold these values alone."""
        new = self.path.with_name(f"{self.path.name}.new")
        new.unlink(missing_ok=True)
        before = self._descriptor
        self._descriptor = self._locked(new)
        os.write(self._descriptor, b"".join(framed(item) for item in values.items()))
        os.fsync(self._descriptor)
        new.replace(self.path)
        os.close(before)

    def clear(self) -> None:
        """Forget what the file held."""
        self.values.clear()
        self.rewrite(self.values)

    def append(self, key: bytes, value: bytes) -> None:
        """Write a value to the disk."""
        message = framed([key, value])
        if os.write(self._descriptor, message) < len(message):
            raise OSError("the disk is full")
        os.fsync(self._descriptor)

    def close(self, *, remove: bool = False) -> None:
        """Close the file."""
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class HostedStore:
    """Values under keys. A client waits for keys that others write; nobody asks in a loop."""

    def __init__(
        self, journal: Journal | None = None, say: Callable[[str], object] = print
    ) -> None:
        self.values: dict[bytes, bytes] = {} if journal is None else dict(journal.values)
        self._journal = journal
        self.say = say
        self._revision = 0
        self._revisions: dict[bytes, int] = {}
        self._announced: set[bytes] = set()
        """Keys of values that end with a connection."""
        self._waiting: defaultdict[bytes, set[asyncio.Event]] = defaultdict(set)
        self._is_full = False
        self._began_s = time.monotonic()
        self.loop: asyncio.AbstractEventLoop | None = None
        """Loop that serves it; other threads write through it."""

    @property
    def age_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began_s

    def allow_clients(self) -> None:
        """Open more files for clients; say so once if that cannot be."""
        try:
            allow_files(_MORE_FILES, "a client more")
        except ThinwireError as error:
            if not self._is_full:
                self.say(str(error))
            self._is_full = True

    def drop(self, prefix: bytes) -> None:
        """Remove all values under keys with this prefix."""
        for key in [key for key in self.values if key.startswith(prefix)]:
            del self.values[key]
            self._revisions.pop(key, None)

    def forget(self, prefix: str) -> None:
        """Remove all values under keys with this prefix, from the file too."""
        self.drop(prefix.encode())
        if self._journal is not None:
            self._journal.rewrite(self.values)

    def write_soon(self, key: str, value: bytes) -> None:
        """Write a value from another thread."""
        assert self.loop is not None, "serving"
        self.loop.call_soon_threadsafe(self.write, key.encode(), value)

    def write(self, key: bytes, value: bytes) -> None:
        """Write a value, and wake who waits for it."""
        lasts = self.values.get(key) != value and not _PASSING.match(key)
        if lasts and self._journal is not None:
            try:
                self._journal.append(key, value)  # before the answer
            except OSError as error:
                # an old file would take the run back to an earlier generation
                self._journal.close(remove=True)
                self._journal = None
                self.say(f"the run is not kept in a file any more: {error.strerror or error}")
        self.values[key] = value
        self._wake(key)

    def _wake(self, key: bytes) -> None:
        self._announced.discard(key)
        self._revision += 1
        self._revisions[key] = self._revision
        for event in self._waiting.pop(key, ()):
            event.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a client, whose first byte has been read, until it ends the connection."""
        if await reader.readexactly(len(GREETING) - 1) != GREETING[1:]:
            raise ValueError("no client")
        announced: dict[bytes, bytes] = {}
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MOST_BYTES:
                    raise ValueError("no message of a client")
                parts = [part or b"" for part in unframed(await reader.readexactly(length))]
                match parts:
                    case [b"announce", key, value]:
                        self._announce(key, value)
                        announced[key] = value
                        continue
                writer.write(framed(await self._answer(parts)))
                await writer.drain()
        finally:
            for key, value in announced.items():
                if self.values.get(key) is value:  # else written over another connection
                    del self.values[key]
                    self._wake(key)

    def _announce(self, key: bytes, value: bytes) -> None:
        if key in self.values and key not in self._announced:  # a stranger would remove it
            raise ValueError("a value that stays")
        self.write(key, value)
        self._announced.add(key)

    async def _answer(self, parts: Sequence[bytes]) -> Parts:
        match parts:
            case [b"set", key, value]:
                self.write(key, value)
            case [b"drop", prefix]:
                self.drop(prefix)
            case [b"swap", key, expected, desired]:
                return [self._swapped(key, expected, desired)]
            case [b"wait", limit_s, *keys]:
                await self._until(lambda: all(map(self.values.__contains__, keys)), keys, limit_s)
                return [*map(self.values.get, keys)]
            case [b"look", limit_s, since, *keys]:
                last = int(since)
                found = self._revisions
                await self._until(
                    lambda: any(found.get(key, 0) > last for key in keys), keys, limit_s
                )
                return [b"%d" % self._revision, *map(self.values.get, keys)]
            case [b"list", prefix]:
                items = self.values.items()
                return [part for item in items if item[0].startswith(prefix) for part in item]
            case [b"age"]:
                return [b"%f" % self.age_s]
            case _:
                raise ValueError("no request of a client")
        return []

    def _swapped(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        now = self.values.get(key)
        if now is None and expected:
            return expected
        if now is not None and now != expected:
            return now
        self.write(key, desired)
        return desired

    async def _until(self, done: Callable[[], bool], keys: Sequence[bytes], limit_s: bytes) -> None:
        event = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(limit_s)):
                while not done():
                    event.clear()
                    for key in keys:
                        self._waiting[key].add(event)
                    await event.wait()
        for key in keys:
            self._waiting[key].discard(event)
            if not self._waiting[key]:
                del self._waiting[key]


class Relaying(Protocol):
    """A relay that shares the port of the store."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set."""

    async def handle(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        admitted: Callable[[], object],
    ) -> None:
        """Serve a client, whose first byte has been read, until it ends; call `admitted` once it
        has shown that it is a member.
        """


class _Front:
    """Accepts clients, and passes them to the store or to the relay by their first byte."""

    def __init__(
        self, store: HostedStore | None, relay: Relaying | None, tls: ssl.SSLContext | None
    ) -> None:
        self._store = store
        self._relay = relay
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}
        """Clients that have not been admitted, the oldest first."""

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        readable = asyncio.Event()
        with listener, contextlib.ExitStack() as ends:
            # sock_accept drops the socket of a client if it is cancelled just then
            loop.add_reader(listener, readable.set)
            ends.callback(loop.remove_reader, listener)
            while True:
                await readable.wait()
                readable.clear()
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    if error.errno == errno.EMFILE and self._store is not None:
                        self._store.allow_clients()
                    await asyncio.sleep(_RETRY_S)
                    continue
                task = loop.create_task(self._handle_client(sock))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._strangers[sock] = task
                await asyncio.sleep(0)  # a task that is cancelled before it runs closes nothing
                if len(self._strangers) > MOST_CONNECTIONS:
                    self._strangers.pop(next(iter(self._strangers))).cancel()

    async def _handle_client(self, sock: socket.socket) -> None:
        errors = OSError, EOFError, ValueError, KeyError, TypeError  # it has gone, or is no client
        with contextlib.suppress(*errors), contextlib.ExitStack() as ends:
            ends.callback(self._strangers.pop, sock, None)
            async with asyncio.timeout(_HELLO_S):
                reader, writer = await self._connected(sock)
                ends.enter_context(contextlib.closing(writer))
                of_store = await reader.readexactly(1) == GREETING[:1]
            if of_store and self._store is not None:
                self._strangers.pop(sock, None)
                # else the connections of machines that vanished stay open for ever
                accepted = writer.get_extra_info("socket")
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                await self._store.handle(reader, writer)
            elif self._relay is not None and not of_store:
                known = partial(self._strangers.pop, sock, None)
                await self._relay.handle(reader, writer, known)

    async def _connected(
        self, sock: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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
        return reader, writer


@contextlib.contextmanager
def serving(
    listener: socket.socket,
    store: HostedStore | None,
    relay: Relaying | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[None]:
    """Serve clients on a thread of its own while the block runs."""
    runner = asyncio.Runner()
    stop = asyncio.Event()
    loop = runner.get_loop()
    loop.set_exception_handler(lambda *_: None)  # strangers that abort a handshake
    if store is not None:
        store.loop = loop

    async def handle() -> None:
        accepting = asyncio.create_task(_Front(store, relay, tls).accept(listener))
        await (stop.wait() if relay is None else relay.run(stop))
        accepting.cancel()

    def run() -> None:
        try:
            with runner:
                runner.run(handle())
        except Exception:  # members wait for it, and say that they lost it
            _log.exception("the host has failed")

    thread = threading.Thread(target=run, name="thinwire-host", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_JOIN_S)
