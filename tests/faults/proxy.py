"""A forwarder in front of a listener, which does to a connection what a bad network does."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["Proxy", "proxy"]

_CHUNK_BYTES = 1 << 16
Change = Callable[[bytes], bytes]


class Proxy:
    """Forwards every connection on its port to a target; `there`, `back`: what is done to bytes."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.there: Change = _same
        self.back: Change = _same
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

    def mend(self) -> None:
        """Forward again, and what was held up first."""
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
        self.mend()
        self.reset()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, _ = self._server.accept()
                beyond = socket.create_connection(self._target)
                self._sockets += [here, beyond]
                for one, other, way in ((here, beyond, "there"), (beyond, here, "back")):
                    threading.Thread(
                        target=self._forward, args=(one, other, way), daemon=True
                    ).start()

    def _forward(self, one: socket.socket, other: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):  # either end has gone
            while chunk := one.recv(_CHUNK_BYTES):
                self._open.wait()
                other.sendall(getattr(self, way)(chunk))
            other.shutdown(socket.SHUT_WR)


def slowed(bytes_per_s: float) -> Change:
    """What lets this many bytes through in a second."""

    def wait(chunk: bytes) -> bytes:
        time.sleep(len(chunk) / bytes_per_s)
        return chunk

    return wait


@contextlib.contextmanager
def proxy(host: str, port: int) -> Iterator[Proxy]:
    """A forwarder to this listener, for the block."""
    made = Proxy((host, port))
    try:
        yield made
    finally:
        made.close()


def _same(chunk: bytes) -> bytes:
    return chunk
