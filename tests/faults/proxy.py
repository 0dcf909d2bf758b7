"""A forwarder in front of a listener, which does to a connection what a bad network does."""

import contextlib
import socket
import threading
from collections.abc import Iterator

__all__ = ["Proxy", "proxy"]

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards every connection on its port to a target."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """As members write it."""
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Forward nothing more, and close nothing: what a line does that is cut."""
        self._open.clear()

    def resume(self) -> None:
        """Forward what came meanwhile, and all that comes."""
        self._open.set()

    def reset(self) -> None:
        """Close all connections at both ends."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):  # closed before
            self._server.shutdown(socket.SHUT_RDWR)  # else the thread that accepts keeps it open
        self._server.close()
        self._open.set()
        self.reset()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, _ = self._server.accept()
                beyond = socket.create_connection(self._target)
                self._sockets += [here, beyond]
                for pair in ((here, beyond), (beyond, here)):
                    threading.Thread(target=_forward, args=(self._open, *pair), daemon=True).start()


def _forward(is_open: threading.Event, one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):  # either end has gone
        while chunk := one.recv(_CHUNK_BYTES):
            is_open.wait()
            other.sendall(chunk)
        other.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def proxy(host: str, port: int) -> Iterator[Proxy]:
    """A forwarder to this listener, for the block."""
    made = Proxy((host, port))
    try:
        yield made
    finally:
        made.close()
