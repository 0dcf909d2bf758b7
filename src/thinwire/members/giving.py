"""The state of the run for a newcomer, from one member, while the others go on."""

import hashlib
import hmac
import json
import logging
import struct
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from thinwire.comm.line import Line
from thinwire.comm.relay import RelayPlace
from thinwire.errors import PayloadCorrupt, ThinwireError
from thinwire.members.board import Board

__all__ = ["Given", "Giver", "Heir", "Taker", "Way", "legacy_number"]

_MARK = 16
_ALIVE, _SIGNS = "alive", 4
"""A sign of life, of which there are so many within a time-out."""
_PLACE = struct.Struct("<QQ")
_MOST_PLAIN_BYTES = 64 << 20
_log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Given:
    """One message: plain values and tensors by name.

    Attributes:
        kind: "state", or "round" for what changes a state.
        last: Whether the newcomer is a member once it has this.
        waiting: How many more there were already when this one was sent.
    """

    kind: str
    plain: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    last: bool = False
    waiting: int = 0

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Way(NamedTuple):
    """How a member copies state from or to others."""

    board: Board
    """Of the run; cloned by threads."""
    way: str | RelayPlace
    """The address of this machine, or the relay."""
    timeout_s: float
    key: bytes
    """Of the checksums; empty where the run has none."""

    def line(self, number: int, *, giver: bool) -> Line:
        """To the other end of the copy of this number."""
        store = self.board.store.under(f"copy/{number}")
        return Line(store, giver=giver, timeout_s=self.timeout_s, way=self.way)

    def cloned(self) -> "Way":
        """The same for a thread of its own."""
        return self._replace(board=self.board.clone())


class _Marks:
    """Checksums of the messages that one newcomer gets, with the run's key where it has one.

    Each holds for its place alone: not for another newcomer, nor earlier or later.
    """

    def __init__(self, key: bytes, number: int) -> None:
        self._key, self._number, self._count = key, number, 0

    def on(self, content: bytes) -> bytes:
        """The next message of the giver."""
        return self._next(content) + content

    def off(self, message: bytes | bytearray) -> bytes:
        """The content of the next message that the newcomer has got."""
        content = bytes(message[_MARK:])
        if not hmac.compare_digest(message[:_MARK], self._next(content)):
            raise PayloadCorrupt("the state that a member gave was damaged on its way: join again")
        return content

    def _next(self, content: bytes) -> bytes:
        made = hashlib.blake2b(
            _PLACE.pack(self._number, self._count), digest_size=_MARK, key=self._key
        )
        made.update(content)
        self._count += 1
        return made.digest()


def legacy_number(generation: int, rank: int) -> int:
    """The number under which a member hands over what it has kept; newcomers count from 0."""
    return (1 << 40) + (generation << 20) + rank


class Giver:
    """A thread that gives one newcomer the state, and every round from there on, in order.

    Attributes:
        number: Of the newcomer's request.
        newcomer: Its identity.
    """

    def __init__(self, way: Way, number: int, newcomer: str, *, me: str) -> None:
        self.number, self.newcomer = number, newcomer
        self._way, self._me, self._marks = way, me, _Marks(way.key, number)
        self._messages: deque[Given | None] = deque()
        self._news = threading.Condition()
        self._state_bytes = 0
        self._thread = threading.Thread(target=self._run, name="thinwire-giver", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether the newcomer still listens, as far as is known."""
        return self._thread.is_alive()

    @property
    def lags(self) -> bool:
        """Whether what waits is more than a state would be, which makes it needless."""
        with self._news:
            waiting = [message for message in self._messages if message is not None]
        return bool(waiting) and sum(message.nbytes for message in waiting) > self._state_bytes

    def give(self, message: Given) -> None:
        """Send after what came before, or instead of it where it is a state."""
        with self._news:
            if message.kind == "state":
                self._messages.clear()
                self._state_bytes = message.nbytes
            self._messages.append(message)
            self._news.notify()

    def close(self, patience_s: float = 0.0) -> None:
        """End the thread after what is waiting has been sent, or after `patience_s` seconds."""
        with self._news:
            self._messages.append(None)
            self._news.notify()
        self._thread.join(patience_s)

    def _next(self) -> tuple[Given | None, int]:
        """What is to be sent, and how many are left; a sign of life where there is nothing for
        long, as a round may take longer than the time-out.
        """
        with self._news:
            if not self._messages:
                self._news.wait(self._way.timeout_s / _SIGNS)
            if not self._messages:
                return Given(_ALIVE, {}, {}), 0
            return self._messages.popleft(), len(self._messages)

    def _run(self) -> None:
        try:
            way = self._way.cloned()
            way.board.put(f"giver/{self.number}", {"id": self._me})
            line = way.line(self.number, giver=True)
            try:
                while True:
                    message, waiting = self._next()
                    if message is None:
                        break
                    plain = {"kind": message.kind, "last": message.last, "waiting": waiting}
                    plain |= message.plain
                    line.send(self._marks.on(json.dumps(plain).encode()))
                    tensors = {name: t.contiguous() for name, t in message.tensors.items()}
                    line.send(self._marks.on(safetensors.torch.save(tensors)))
                    if message.last:
                        break
            finally:
                line.close()
        except (ThinwireError, RuntimeError) as error:
            _log.warning("newcomer %d has gone while it got the state: %s", self.number, error)


class Taker:
    """The newcomer's end of it.

    Raises:
        PeerLost, PeerStalled: The giver has gone.
    """

    def __init__(self, way: Way, number: int) -> None:
        self._marks, self._line = _Marks(way.key, number), way.line(number, giver=False)

    def take(self, at_most: int) -> Given:
        """The next message that is no mere sign of life; `at_most` bounds the bytes of its tensors.

        Raises:
            PeerLost, PeerStalled: The giver has gone.
            PayloadCorrupt: The message is damaged.
        """
        while True:
            plain = json.loads(self._marks.off(self._line.receive(_MOST_PLAIN_BYTES)))
            content = self._marks.off(self._line.receive(at_most))
            kind, last, waiting = (plain.pop(key) for key in ("kind", "last", "waiting"))
            if kind != _ALIVE:
                return Given(kind, plain, safetensors.torch.load(content), last, waiting)

    def close(self) -> None:
        """Hang up."""
        self._line.close()


class Heir:
    """A thread that takes what one member that leaves has kept.

    Args:
        factor: What it counts for here.
    """

    def __init__(self, way: Way, number: int, factor: float, *, at_most: int) -> None:
        self.factor = factor
        self.taken: Given | None = None
        self._take = way, number, at_most
        self._thread = threading.Thread(target=self._run, name="thinwire-heir", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether it is still on its way."""
        return self._thread.is_alive()

    def _run(self) -> None:
        way, number, at_most = self._take
        try:
            taker = Taker(way.cloned(), number)
            try:
                self.taken = taker.take(at_most)
            finally:
                taker.close()
        except (ThinwireError, RuntimeError) as error:
            _log.warning("what a member that left had kept is lost: %s", error)
