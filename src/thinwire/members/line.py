"""A stream of bytes to another rank, in checksummed pieces that fit the line between them."""

import hashlib
import hmac
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.member_groups import Channel
from thinwire.errors import PayloadCorrupt

CHECKSUM_BYTES = 16
LENGTH = struct.Struct("<Q")
"""Number of bytes before each byte string."""
_POSITION = struct.Struct("<QQQ")
_NEED = struct.Struct("<d")
_OVERHEAD_BYTES = CHECKSUM_BYTES + _NEED.size
_LEAST_BYTES = 4 << 10
_MOST_BYTES = 4 << 20
"""Bytes of the shortest piece that is measured, and of the longest."""
_PIECE_S = 0.1
"""Time that a piece takes on the line; an exchange waits for two of them at most."""
_IN_FLIGHT = 2
_PAUSE = 20
_POLL_S = 0.01
"""Longest pause beside an exchange, in times of a piece: 5 % of the line are left to the stream."""


class Line:
    """Checksummed pieces over a channel; the other end acknowledges each of them."""

    # a checksum covers number and part of the transfer, direction, and index of the piece: nothing
    # can be replayed, reordered, or sent to another joiner

    def __init__(
        self,
        channel: Channel,
        key: bytes,
        number: int,
        part: int,
        timeout_s: float,
        needed: Callable[[], float] | None = None,
    ) -> None:
        # `needed`, of the end that streams: bytes a second that it needs, sent with each piece
        self._channel = channel
        self._key = key
        self._timeout_s = timeout_s
        sending = needed is not None
        self._needed = needed or float
        self._number = number
        self._ends = (2 * part + sending, 2 * part + (not sending))
        self._counts = [0, 0]
        self._unacknowledged: deque[tuple[float, int]] = deque()
        self._acknowledged_s = -math.inf
        self._latency_s = math.inf
        self._second_bytes = 0.0
        self._piece_bytes = _LEAST_BYTES
        self._rest = memoryview(b"")
        self.nbytes = 0
        self.needed = 0.0
        """Bytes that the other end has, or that were received; bytes a second of the rounds."""

    def _send(self, content: Any = b"", then_bytes: int = 0) -> None:
        message = bytearray(self._checksum(content, 0))
        message += content
        self._channel.send(message, then_bytes + _OVERHEAD_BYTES)

    def _receive(self) -> memoryview:
        message = self._channel.receive()
        content = message[CHECKSUM_BYTES:]
        if not hmac.compare_digest(message[:CHECKSUM_BYTES], self._checksum(content, 1)):
            raise PayloadCorrupt("the state from a member was damaged in transit: join again")
        return content

    def _checksum(self, content: Any, end: int) -> bytes:
        position = _POSITION.pack(self._number, self._ends[end], self._counts[end])
        checksum = hashlib.blake2b(position, digest_size=CHECKSUM_BYTES, key=self._key)
        checksum.update(content)
        self._counts[end] += 1
        return checksum.digest()

    def send(self, content: bytes) -> None:
        """Send a byte string."""
        whole = LENGTH.pack(len(content)) + content
        self.stream([whole], len(whole))

    def stream(
        self, contents: Iterable[Any], left: int, busy: Callable[[], bool] = lambda: False
    ) -> None:
        """Send byte strings, `left` bytes in all, in pieces that fit the line, until they have
        arrived; pause while the line is `busy` with something else.
        """
        piece = bytearray()
        for content in contents:
            at = 0
            while at < len(content):
                room, next_room = (size - _OVERHEAD_BYTES for size in self._channel.rooms)
                more = content[at : at + room - len(piece)]
                piece += more
                at += len(more)
                if len(piece) == min(room, left):
                    left -= len(piece)
                    then_bytes = min(self._piece_bytes, max(left - next_room, 0))
                    self._send_piece(piece, then_bytes, busy)
                    piece = bytearray()
        self._drain(0)

    def _send_piece(self, piece: bytearray, then_bytes: int, busy: Callable[[], bool]) -> None:
        seconds = min(_PAUSE * len(piece) * self._second_bytes, self._timeout_s / 4)
        until = time.monotonic() + seconds
        while time.monotonic() < until and busy():
            time.sleep(_POLL_S)
        self._unacknowledged.append((time.monotonic(), len(piece)))
        self._send(_NEED.pack(self._needed()) + piece, then_bytes)
        self._drain(_IN_FLIGHT - 1)

    def _drain(self, left: int) -> None:
        """Wait until the other end has acknowledged all pieces but so many."""
        while len(self._unacknowledged) > left:
            self._receive()
            now = time.monotonic()
            sent_s, nbytes = self._unacknowledged.popleft()
            taken_s = max(now - max(sent_s, self._acknowledged_s), 1e-6)
            self._acknowledged_s = now
            self.nbytes += nbytes
            self._latency_s = min(self._latency_s, now - sent_s)
            if nbytes < self._piece_bytes // 2:  # it says nothing about the line
                continue
            before = self._second_bytes or taken_s / nbytes
            self._second_bytes = 0.75 * before + 0.25 * taken_s / nbytes
            # two pieces fill a line of any latency
            seconds = min(max(_PIECE_S, 2 * self._latency_s), self._timeout_s / 4)
            least = max(self._piece_bytes // 2, _LEAST_BYTES)
            most = 2 * self._piece_bytes
            self._piece_bytes = max(
                min(int(seconds / self._second_bytes), most, _MOST_BYTES), least
            )

    def fill(self, targets: Iterable[Tensor]) -> None:
        """Write what is streamed into bytes of tensors, in their order."""
        for target in targets:
            at = 0
            while at < len(target):
                if not self._rest:
                    piece = self._receive()
                    (self.needed,) = _NEED.unpack(piece[: _NEED.size])
                    self._rest = piece[_NEED.size :]
                    self.nbytes += len(self._rest)
                    self._send()
                taken = self._rest[: len(target) - at]
                self._rest = self._rest[len(target) - at :]
                target[at : at + len(taken)].copy_(torch.frombuffer(taken, dtype=torch.uint8))
                at += len(taken)

    def receive(self, max_bytes: int) -> bytearray:
        """Return the next byte string of the other end's `send`."""
        (nbytes,) = LENGTH.unpack(self._taken(LENGTH.size))
        if nbytes > max_bytes:
            raise PayloadCorrupt(f"a message of {nbytes} bytes, more than the {max_bytes} allowed")
        return self._taken(nbytes)

    def _taken(self, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        if nbytes:
            self.fill([torch.frombuffer(content, dtype=torch.uint8)])
        return content

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
