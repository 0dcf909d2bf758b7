"""Byte strings between two members, directly or through a relay."""

import datetime
import struct
from collections import deque
from typing import Any

import torch
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
_LEAST_BYTES, _MOST_BYTES = 512, 8 << 20


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
        self._sizes = deque([_LEAST_BYTES] * _AHEAD)
        self._sent, self._awaited = deque[Work](), deque[tuple[Work, bytearray] | RuntimeError]()
        for _ in range(_AHEAD):
            self._await(_LEAST_BYTES)

    @property
    def rooms(self) -> list[int]:
        """Bytes that each of the next two messages can hold."""
        return [size - _HEAD.size for size in self._sizes]

    def send(self, content: Any, then_bytes: int = 0) -> None:
        """Send a message, and give the second one after it room for `then_bytes`."""
        message = bytearray(self._sizes.popleft())
        self._sizes.append(min(max(then_bytes + _HEAD.size, _LEAST_BYTES), _MOST_BYTES))
        _HEAD.pack_into(message, 0, len(content), self._sizes[-1])
        message[_HEAD.size : _HEAD.size + len(content)] = content
        try:
            self._sent.append(self._launched(message, sending=True)[0])
            while len(self._sent) >= _AHEAD:
                self._wait(self._sent.popleft())
        except RuntimeError as error:
            raise self._explained(error) from error

    def receive(self) -> memoryview:
        """Return the content of the next message."""
        awaited = self._awaited.popleft()
        try:
            if isinstance(awaited, RuntimeError):
                raise awaited
            self._wait(awaited[0])
        except RuntimeError as error:
            raise self._explained(error) from error
        message = memoryview(awaited[1])
        nbytes, size = _HEAD.unpack_from(message)
        if nbytes > len(message) - _HEAD.size or not _LEAST_BYTES <= size <= _MOST_BYTES:
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
        """Close the connections."""
        self._groups.release()
