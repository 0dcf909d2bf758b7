"""A channel between two members, and a stream of bytes over it, in pieces that fit their line."""

import contextlib
import datetime
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
from torch._C._distributed_c10d import Store
from torch.distributed import Work

from thinwire.comm.failures import explain_failure
from thinwire.comm.member_groups import MemberGroups
from thinwire.comm.private import forget, keep_alive
from thinwire.comm.relay import RelayEndpoint
from thinwire.errors import PayloadCorrupt, PeerLost, PeerStalled, ThinwireError

_HEAD = struct.Struct("<QQ")
"""Bytes of the content, and of the second message after this one."""
_AHEAD = 2
_LEAST_ROOM, _MOST_ROOM = 512, 8 << 20


class Channel:
    """Byte strings between two processes, in order, both ways."""

    # a message leaves only when the other end awaits its length: two are awaited at any time, and
    # each announces the length of the second one after it

    def __init__(
        self, store: Store, *, sending: bool, timeout_s: float, endpoint: RelayEndpoint
    ) -> None:
        self._groups = MemberGroups(store, 0 if sending else 1, 2, timeout_s, endpoint)
        self._timeout_s = timeout_s
        self._other = 1 if sending else 0
        self._sizes = deque([_LEAST_ROOM] * _AHEAD)
        self._sent, self._awaited = deque[Work](), deque[tuple[Work, bytearray] | RuntimeError]()
        for _ in range(_AHEAD):
            self._await(_LEAST_ROOM)

    @property
    def rooms(self) -> list[int]:
        """Bytes that each of the next two messages can hold."""
        return [size - _HEAD.size for size in self._sizes]

    def send(self, content: Any, then_bytes: int = 0) -> None:
        """Send a message, and give the second one after it room for `then_bytes`."""
        message = bytearray(self._sizes.popleft())
        self._sizes.append(min(max(then_bytes + _HEAD.size, _LEAST_ROOM), _MOST_ROOM))
        _HEAD.pack_into(message, 0, len(content), self._sizes[-1])
        message[_HEAD.size : _HEAD.size + len(content)] = content
        try:
            self._sent.append(self._launched(message, sending=True)[0])
            while len(self._sent) >= _AHEAD:
                self._wait(self._sent.popleft())
        except RuntimeError as error:
            raise self._explained(error) from error.__context__

    def receive(self) -> memoryview:
        """Return the content of the next message."""
        awaited = self._awaited.popleft()
        try:
            if isinstance(awaited, RuntimeError):
                raise awaited
            self._wait(awaited[0])
        except RuntimeError as error:
            raise self._explained(error) from error.__context__
        message = memoryview(awaited[1])
        nbytes, size = _HEAD.unpack_from(message)
        if nbytes > len(message) - _HEAD.size or not _LEAST_ROOM <= size <= _MOST_ROOM:
            self.close()
            raise PayloadCorrupt("a message of a member that sends its state is damaged")
        self._await(size)
        return message[_HEAD.size : _HEAD.size + nbytes]

    def _await(self, nbytes: int) -> None:
        try:
            self._awaited.append(self._launched(bytearray(nbytes), sending=False))
        except RuntimeError as error:  # raised when it is waited for: there may be no other message
            self._awaited.append(error)

    def _launched(self, message: bytearray, *, sending: bool) -> tuple[Work, bytearray]:
        group, tensor = self._groups.group, torch.frombuffer(message, dtype=torch.uint8)
        if group is None:
            raise PeerLost("copying the state of a member: the connection was closed")
        work = (group.send if sending else group.recv)([tensor], self._other, 0)
        keep_alive(group, work, [tensor])
        return work, message

    def _wait(self, work: Work) -> None:
        work.wait(datetime.timedelta(seconds=self._timeout_s))
        forget(work)

    def _explained(self, error: RuntimeError) -> ThinwireError:
        self.close()
        exchange, within = "copying the state of a member", f"{self._timeout_s:g} s"
        explained = explain_failure(
            error, action=exchange, rank=1 - self._other, size=2, within=within, advice=""
        )
        known = isinstance(explained, PeerLost | PeerStalled)
        return explained if known else PeerLost(str(explained))

    def close(self) -> None:
        """Close the connections, and end what nobody will wait for."""
        self._groups.release()
        # gloo marks a send or receive as completed in a wait alone; `keep_alive` would keep them,
        # and with them the group. Copies, since the thread of the channel may still use both
        left = [entry[0] for entry in list(self._awaited) if isinstance(entry, tuple)]
        for work in left + list(self._sent):
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(milliseconds=1))
            forget(work)


CHECKSUM_BYTES = 16
LENGTH = struct.Struct("<Q")
"""Number of bytes before each byte string."""
_POSITION, _NEED = struct.Struct("<QQQ"), struct.Struct("<d")
_OVERHEAD_BYTES = CHECKSUM_BYTES + _NEED.size
_LEAST_BYTES, _MOST_BYTES = 4 << 10, 4 << 20
"""Bytes of the shortest piece that is measured, and of the longest."""
_PIECE_S = 0.1
"""Time that a piece takes on the line; an exchange waits for two of them at most."""
_IN_FLIGHT = 2
_PAUSE, _POLL_S = 20, 0.01
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
        self._channel, self._key, self._timeout_s = channel, key, timeout_s
        sending, self._needed = needed is not None, needed or float
        self._number, self._ends = number, (2 * part + sending, 2 * part + (not sending))
        self._counts = [0, 0]
        self._unacknowledged: deque[tuple[float, int]] = deque()
        self._acknowledged_s = -math.inf
        self._latency_s, self._second_bytes = math.inf, 0.0
        self._piece_bytes, self._rest = _LEAST_BYTES, memoryview(b"")
        self.nbytes, self.needed = 0, 0.0
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
            now, (sent_s, nbytes) = time.monotonic(), self._unacknowledged.popleft()
            taken_s = max(now - max(sent_s, self._acknowledged_s), 1e-6)
            self._acknowledged_s, self.nbytes = now, self.nbytes + nbytes
            self._latency_s = min(self._latency_s, now - sent_s)
            if nbytes < self._piece_bytes // 2:  # it says nothing about the line
                continue
            before = self._second_bytes or taken_s / nbytes
            self._second_bytes = 0.75 * before + 0.25 * taken_s / nbytes
            # two pieces fill a line of any latency
            seconds = min(max(_PIECE_S, 2 * self._latency_s), self._timeout_s / 4)
            least, most = max(self._piece_bytes // 2, _LEAST_BYTES), 2 * self._piece_bytes
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
                taken, self._rest = self._rest[: len(target) - at], self._rest[len(target) - at :]
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
