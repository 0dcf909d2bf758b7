"""Meeting places with a relay beside them, and members that go through it, for tests."""

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Iterator

from tests.api import relaying, run_host
from tests.members.places import TOKEN
from tests.waiting import PATIENCE_S


def two_ports(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Sockets that listen on two ports, one after the other, of those that the system gives to no
    connection: who connects to such a one again and again could meet itself."""
    while True:
        first, second = socket.socket(), socket.socket()
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            first.bind((host, random.randrange(20_000, 32_000)))
            second.bind((host, first.getsockname()[1] + 1))
            first.listen()
            second.listen()
            return first, second
        first.close()
        second.close()


@contextlib.contextmanager
def relay_place(token: bytes | None = TOKEN, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a meeting place in this process that relays."""
    first, second = two_ports()
    port, stop, ready = first.getsockname()[1], threading.Event(), threading.Event()
    options = {"say": lambda _: None, "ready": ready.set, "stop": stop}
    thread = threading.Thread(target=run_host, args=(first, token), kwargs=options)
    with relaying(second, token, tls):
        thread.start()
        try:
            assert ready.wait(PATIENCE_S)
            yield f"tcp://127.0.0.1:{port}"
        finally:
            stop.set()
            thread.join(PATIENCE_S)
