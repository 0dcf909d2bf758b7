"""Transfer of the run's state from a donor to a joiner, while the other members train on."""

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

from thinwire.comm.channel import Channel
from thinwire.comm.relay import RelayEndpoint
from thinwire.errors import PayloadCorrupt, ThinwireError
from thinwire.members.kv import KeyValueView

_CHECKSUM_BYTES = 16
_ALIVE, _BEATS_PER_TIMEOUT = "alive", 4
"""Kind of the heartbeat message, and the number of heartbeats within one time-out."""
_POSITION = struct.Struct("<QQ")
_MAX_PLAIN_BYTES = 64 << 20
_log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class StateMessage:
    """One message of a transfer: plain values, and tensors by name."""

    kind: str
    plain: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    last: bool = False
    waiting: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class TransferContext(NamedTuple):
    """Connection data for the transfers of one member."""

    kv: KeyValueView
    """View of the run's store; each thread clones it."""
    endpoint: RelayEndpoint
    """The relay, and the address of this machine if others reach it there."""
    timeout_s: float
    key: bytes
    """Key of the checksums; empty if the run has no token."""

    def channel(self, number: int, *, sending: bool) -> Channel:
        """Return a channel to the other end of the transfer with this number."""
        store = self.kv.store.under(f"copy/{number}")
        return Channel(store, sending=sending, timeout_s=self.timeout_s, endpoint=self.endpoint)

    def cloned(self) -> "TransferContext":
        """Return the same context with a connection of its own, for another thread."""
        return self._replace(kv=self.kv.clone())


class _Checksums:
    """Checksums of the messages of one transfer, keyed if the run has a token."""

    # a checksum covers number of the transfer and index of the message: nothing can be replayed,
    # reordered, or sent to another joiner

    def __init__(self, key: bytes, number: int) -> None:
        self._key, self._number, self._count = key, number, 0

    def add(self, content: bytes) -> bytes:
        """Return the donor's next message with its checksum."""
        return self._next(content) + content

    def verify(self, message: bytes | bytearray) -> bytes:
        """Return the content of the next message received."""
        content = bytes(message[_CHECKSUM_BYTES:])
        if not hmac.compare_digest(message[:_CHECKSUM_BYTES], self._next(content)):
            raise PayloadCorrupt("the state from a member was damaged in transit: join again")
        return content

    def _next(self, content: bytes) -> bytes:
        checksum = hashlib.blake2b(
            _POSITION.pack(self._number, self._count), digest_size=_CHECKSUM_BYTES, key=self._key
        )
        checksum.update(content)
        self._count += 1
        return checksum.digest()


def handoff_number(generation: int, rank: int) -> int:
    """Return the transfer number of a leaving member's handoff; joiners count from 0."""
    return (1 << 40) + (generation << 20) + rank


class Donor:
    """Thread that sends one recipient a state and the update of every round after it, in order."""

    def __init__(self, context: TransferContext, number: int, joiner: str, *, own_id: str) -> None:
        self.number, self.joiner = number, joiner
        self._context, self._own_id = context, own_id
        self._checksums = _Checksums(context.key, number)
        self._messages: deque[StateMessage | None] = deque()
        self._changed = threading.Condition()
        self._state_bytes = 0
        self._thread = threading.Thread(target=self._run, name="thinwire-donor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True until the transfer has ended or failed."""
        return self._thread.is_alive()

    @property
    def behind(self) -> bool:
        """True if the waiting messages are larger than a full state, which should replace them."""
        with self._changed:
            waiting = [message for message in self._messages if message is not None]
        return bool(waiting) and sum(message.nbytes for message in waiting) > self._state_bytes

    def enqueue(self, message: StateMessage) -> None:
        """Send a message after the waiting ones. A full state replaces them."""
        with self._changed:
            if message.kind == "state":
                self._messages.clear()
                self._state_bytes = message.nbytes
            self._messages.append(message)
            self._changed.notify()

    def close(self, limit_s: float = 0.0) -> None:
        """Let the thread end once all messages are sent; wait for it at most `limit_s` seconds."""
        with self._changed:
            self._messages.append(None)
            self._changed.notify()
        self._thread.join(limit_s)

    def _next(self) -> tuple[StateMessage | None, int]:
        """Return the next message and the number of those behind it."""
        # a heartbeat if there is none for long: a round may take longer than the time-out
        with self._changed:
            if not self._messages:
                self._changed.wait(self._context.timeout_s / _BEATS_PER_TIMEOUT)
            if not self._messages:
                return StateMessage(_ALIVE, {}, {}), 0
            return self._messages.popleft(), len(self._messages)

    def _run(self) -> None:
        try:
            context = self._context.cloned()
            context.kv.put(f"donor/{self.number}", {"id": self._own_id})
            channel = context.channel(self.number, sending=True)
            try:
                while True:
                    message, waiting = self._next()
                    if message is None:
                        break
                    plain = {"kind": message.kind, "last": message.last, "waiting": waiting}
                    plain |= message.plain
                    channel.send(self._checksums.add(json.dumps(plain).encode()))
                    tensors = {name: t.contiguous() for name, t in message.tensors.items()}
                    channel.send(self._checksums.add(safetensors.torch.save(tensors)))
                    if message.last:
                        break
            finally:
                channel.close()
        except (ThinwireError, RuntimeError) as error:
            _log.warning("joiner %d was lost while it received the state: %s", self.number, error)


class Recipient:
    """Receiving end of a transfer."""

    def __init__(self, context: TransferContext, number: int) -> None:
        self._checksums = _Checksums(context.key, number)
        self._channel = context.channel(number, sending=False)

    def receive(self, max_bytes: int) -> StateMessage:
        """Return the next message, skipping heartbeats."""
        while True:
            plain = json.loads(self._checksums.verify(self._channel.receive(_MAX_PLAIN_BYTES)))
            content = self._checksums.verify(self._channel.receive(max_bytes))
            kind, last, waiting = (plain.pop(key) for key in ("kind", "last", "waiting"))
            if kind != _ALIVE:
                return StateMessage(kind, plain, safetensors.torch.load(content), last, waiting)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class IncomingHandoff:
    """Thread that receives the handoff of a leaving member: the state that only it held."""

    def __init__(
        self, context: TransferContext, number: int, factor: float, *, max_bytes: int
    ) -> None:
        self.factor = factor
        self.message: StateMessage | None = None
        self._arguments = context, number, max_bytes
        self._thread = threading.Thread(target=self._run, name="thinwire-handoff", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the handoff is in transit."""
        return self._thread.is_alive()

    def _run(self) -> None:
        context, number, max_bytes = self._arguments
        try:
            recipient = Recipient(context.cloned(), number)
            try:
                self.message = recipient.receive(max_bytes)
            finally:
                recipient.close()
        except (ThinwireError, RuntimeError) as error:
            _log.warning("the handoff of a leaving member was lost: %s", error)
