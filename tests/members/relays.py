"""Meeting places with a relay beside them, and members that go through it, for tests."""

import contextlib
import json
import random
import socket
import ssl
import struct
from collections.abc import Iterator

from tests.api import (
    GREETING,
    NONCE_BYTES,
    Answer,
    Relay,
    RelayEndpoint,
    hello_mac,
    relay_key,
    serving,
)
from tests.members.places import TOKEN, hosted
from tests.waiting import PATIENCE_S


def listening() -> socket.socket:
    """A socket that listens on a port of those that the system gives to no connection: who connects
    to such a one again and again could meet itself."""
    while True:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            made.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            made.listen()
            return made
        made.close()


@contextlib.contextmanager
def relay_alone(token: bytes | None = None) -> Iterator[RelayEndpoint]:
    """A relay without a store behind it, as a member with that token reaches it."""
    listener = listening()
    with serving(listener, None, Relay(relay_key(token), None)):
        yield RelayEndpoint(*listener.getsockname(), relay_key(token))


def rank_by_hand(
    place: RelayEndpoint, room: str, rank: int, patience_s: float = 0.0
) -> socket.socket:
    """A connection that the relay has let in as this rank, without a token."""
    sock = socket.create_connection(place[:2], timeout=PATIENCE_S)
    sock.sendall(GREETING)
    nonce = sock.recv(1 + NONCE_BYTES, socket.MSG_WAITALL)[1:]
    hello = json.dumps({"room": room, "rank": rank, "patience_s": patience_s}).encode()
    sock.sendall(struct.pack("<H", len(hello)) + hello + hello_mac(b"", nonce, hello))
    assert sock.recv(1) == Answer.OK
    return sock


@contextlib.contextmanager
def relay_place(token: bytes | None = TOKEN, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a meeting place in this process that relays."""
    listener = listening()
    with hosted(listener, token, relay=Relay(relay_key(token), tls), tls=tls):
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def listens(address: str, port: int) -> bool:
    """Whether a connection to there is answered."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True
