"""The relay of `thinwire host --relay`, at the port of the store or announced there."""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial

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
from thinwire.members.credentials import Address, derived_key
from thinwire.members.meeting import connect
from thinwire.members.server import MOST_CONNECTIONS, serving

_HELLO_S = 5.0
_SIGN_S = 2.0
_STORE_S = 5.0
"""Longest time in seconds of one attempt to connect to the store."""
_SLOW_S = 120.0
"""Seconds after which a rank that reads nothing is dropped."""
_QUEUE_BYTES = 32 << 20
"""Bytes that may wait for a rank before those that send to it wait too."""
_LONGEST_HELLO_BYTES = 1024
_SENT_BY_MEMBERS = {Kind.DATA, Kind.CONTROL, Kind.DATA_DONE, Kind.CONTROL_DONE, Kind.GOODBYE}
_MOST_PATIENCE_S = 5.0
_Room = dict[int, asyncio.StreamWriter]


def relay_key(token: bytes | None) -> bytes:
    """Return the key with which members authenticate to the relay; empty without a token."""
    return b"" if token is None else derived_key(token, "relay")


class _Goodbye(Exception):
    """A rank leaves."""


class Relay:
    """Connections of all ranks, by room."""

    def __init__(self, key: bytes, tls: ssl.SSLContext | None, fingerprint: bytes = b"") -> None:
        self.tls = tls
        self.fingerprint = fingerprint
        """SHA-256 of the certificate of `tls`."""
        self._key = key
        self._stop = asyncio.Event()
        self._rooms: defaultdict[str, _Room] = defaultdict(dict)

    async def run(self, stop: asyncio.Event) -> None:
        """Show members that the relay lives until `stop` is set, then abort their connections."""
        self._stop = stop
        while not stop.is_set():
            for writer in self._members():
                writer.write(signal(ALL, 0, Kind.ALIVE))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _SIGN_S)
        for writer in self._members():
            writer.transport.abort()

    def _members(self) -> list[asyncio.StreamWriter]:
        return [writer for room in self._rooms.values() for writer in room.values()]

    async def handle(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        admitted: Callable[[], object],
    ) -> None:
        """Hand on the messages of a rank until it leaves."""
        async with asyncio.timeout(_HELLO_S):
            name, rank, direct, patience_s = await self._admitted(reader, writer)
        admitted()
        writer.transport.set_write_buffer_limits(_QUEUE_BYTES)
        with contextlib.ExitStack() as ends:
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

    async def _admitted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, int, set[int], float]:
        """Return room, rank, ranks reached directly and patience of a client that is a member."""
        if await reader.readexactly(len(GREETING) - 1) != GREETING[1:]:
            raise ValueError("no member")
        if self.tls is not None and writer.get_extra_info("ssl_object") is None:
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


def run_relay(
    listener: socket.socket,
    relay: Relay,
    store: str,
    address: Address,
    token: bytes | None,
    *,
    say: Callable[[str], object],
    ready: Callable[[str], object],
    stop: threading.Event,
) -> None:
    """Relay for the members of a store, until `stop` is set.

    It announces its address there, and the fingerprint of its certificate, if it has one.
    """
    reach = partial(connect, store, "relay", token, timedelta(seconds=_STORE_S))
    reached = reach()
    problem = ""
    with serving(listener, None, relay, relay.tls):
        ready("")
        while True:
            try:
                if problem:  # the store was restarted, or the line to it was cut
                    reached = reach()
                relays = reached.of_relays(relay_key(token))
                relays.announce(str(address), json.dumps([*address, relay.fingerprint.hex()]))
                now = ""
            except RuntimeError as error:
                now = f": {error}"
            if now != problem:
                say(f"{'not announced' if now else 'announced again'} at {store}{now}")
            problem = now
            if stop.wait(_SIGN_S):
                return
