"""Transfer of the run's state from donors to a joiner, while the members train on."""

import hashlib
import hmac
import json
import logging
import math
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from thinwire.comm.channel import Channel
from thinwire.comm.relay import RelayEndpoint
from thinwire.comm.waiting import Progress
from thinwire.errors import LineTooSlow, PayloadCorrupt, ThinwireError
from thinwire.members.kv import KeyValueView

MOST_DONORS = 4
"""Most members that send one joiner a part of the state each."""
_CHECKSUM_BYTES = 16
_ALIVE, _BEATS_PER_TIMEOUT = "alive", 4
"""Kind of the message that says that nothing waits, and the number of them within one time-out."""
_POSITION, _LENGTH, _NEED = struct.Struct("<QQQ"), struct.Struct("<Q"), struct.Struct("<d")
_OVERHEAD_BYTES = _CHECKSUM_BYTES + _NEED.size
_LEAST_BYTES, _MOST_BYTES = 4 << 10, 4 << 20
"""Bytes of the first piece, and of the longest."""
_PIECE_S = 0.1
"""Time that a piece takes on the line; an exchange waits for two of them at most."""
_IN_FLIGHT = 2
_PAUSE = 20
"""Longest pause beside an exchange, in times of a piece: 5 % of the line are left to the joiner."""
_ROUNDS, _JUDGED_S = 3, 10.0
"""Rounds and seconds after which the line is compared with what the rounds need."""
_MAX_PLAIN_BYTES = 64 << 20
_POLL_S = 0.1
_log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class StateMessage:
    """One message of a transfer: plain values, and tensors by name."""

    kind: str
    plain: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    last: bool = False

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

    def channel(self, number: int, part: int, *, sending: bool) -> Channel:
        """Return a channel to the other end of this part of the transfer with this number."""
        store = self.kv.store.under(f"copy/{number}/{part}")
        return Channel(store, sending=sending, timeout_s=self.timeout_s, endpoint=self.endpoint)

    def cloned(self) -> "TransferContext":
        """Return the same context with a connection of its own, for another thread."""
        return self._replace(kv=self.kv.clone())


@dataclass(frozen=True)
class Part:
    """Position of a donor's part of the state of a round."""

    index: int
    count: int
    state: str
    """Counters of the round, as text, the same in all parts."""

    def views(self, flat: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the bytes of this part, as views of flat tensors."""
        nbytes = sum(tensor.nbytes for tensor in flat.values())
        limits = [nbytes * at // self.count for at in (self.index, self.index + 1)]
        found, before = [], 0
        for tensor in flat.values():
            size = tensor.element_size()
            start, end = (
                min(max(-(-(limit - before) // size), 0), len(tensor)) for limit in limits
            )
            if start < end:
                found.append(tensor[start:end].view(torch.uint8))
            before += tensor.nbytes
        return found


def flattened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor in one dimension: a view if its memory allows."""
    return {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}


class _Line:
    """Checksummed pieces over a channel; the other end acknowledges each of them."""

    # a checksum covers number and part of the transfer, direction, and index of the piece: nothing
    # can be replayed, reordered, or sent to another joiner

    def __init__(
        self,
        context: TransferContext,
        number: int,
        part: int,
        needed: Callable[[], float] | None = None,
    ) -> None:
        sending, self._needed = needed is not None, needed or float
        self._key, self._timeout_s = context.key, context.timeout_s
        self._number, self._ends = number, (2 * part + sending, 2 * part + (not sending))
        self._counts = [0, 0]
        self._unacknowledged: deque[tuple[float, int]] = deque()
        self._acknowledged_s = -math.inf
        self._latency_s, self._second_bytes = math.inf, 0.0
        self._piece_bytes, self._rest = _LEAST_BYTES, memoryview(b"")
        self.nbytes, self.needed = 0, 0.0
        """Bytes that the other end has, or that were received; bytes a second of the rounds."""
        self._channel = context.channel(number, part, sending=sending)

    def _send(self, content: Any = b"", then_bytes: int = 0) -> None:
        message = bytearray(self._checksum(content, 0))
        message += content
        self._channel.send(message, then_bytes + _OVERHEAD_BYTES)

    def _receive(self) -> memoryview:
        message = self._channel.receive()
        content = message[_CHECKSUM_BYTES:]
        if not hmac.compare_digest(message[:_CHECKSUM_BYTES], self._checksum(content, 1)):
            raise PayloadCorrupt("the state from a member was damaged in transit: join again")
        return content

    def _checksum(self, content: Any, end: int) -> bytes:
        position = _POSITION.pack(self._number, self._ends[end], self._counts[end])
        checksum = hashlib.blake2b(position, digest_size=_CHECKSUM_BYTES, key=self._key)
        checksum.update(content)
        self._counts[end] += 1
        return checksum.digest()

    def send(self, content: bytes) -> None:
        """Send a byte string."""
        whole = _LENGTH.pack(len(content)) + content
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
            time.sleep(_POLL_S / 10)
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
                    self._send()
                    (self.needed,) = _NEED.unpack(piece[: _NEED.size])
                    self._rest = piece[_NEED.size :]
                    self.nbytes += len(self._rest)
                taken, self._rest = self._rest[: len(target) - at], self._rest[len(target) - at :]
                target[at : at + len(taken)].copy_(torch.frombuffer(taken, dtype=torch.uint8))
                at += len(taken)

    def receive(self, max_bytes: int) -> bytearray:
        """Return the next byte string of the other end's `send`."""
        (nbytes,) = _LENGTH.unpack(self._taken(_LENGTH.size))
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


def handoff_number(generation: int, rank: int) -> int:
    """Return the transfer number of a leaving member's handoff; joiners count from 0."""
    return (1 << 40) + (generation << 20) + rank


class Donor:
    """Thread that sends a part of a state, and then messages in order, to one recipient."""

    def __init__(
        self,
        context: TransferContext,
        number: int,
        joiner: str,
        *,
        own_id: str,
        part: Part | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        # `tensors` change later: this part of them is copied
        self.number, self.joiner, self.part = number, joiner, part or Part(0, 1, "")
        self._context, self._own_id, self._busy = context, own_id, busy
        views = None if tensors is None else self.part.views(flattened(tensors))
        self._copies = None if views is None else [view.to("cpu", copy=True) for view in views]
        self._messages: deque[StateMessage | None] = deque()
        self._changed = threading.Condition()
        self._began_s, self._rounds, self._round_bytes, self._needed = time.monotonic(), 0, 0, 0.0
        self._thread = threading.Thread(target=self._run, name="thinwire-donor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True until the transfer has ended or failed."""
        return self._thread.is_alive()

    def enqueue(self, message: StateMessage) -> None:
        """Send a message after the waiting ones."""
        with self._changed:
            self._messages.append(message)
            self._rounds, self._round_bytes = self._rounds + 1, self._round_bytes + message.nbytes
            if self._rounds > _ROUNDS:
                self._needed = self._round_bytes / (time.monotonic() - self._began_s)
            self._changed.notify()

    def close(self, limit_s: float = 0.0) -> None:
        """Let the thread end once all messages are sent; wait for it at most `limit_s` seconds."""
        with self._changed:
            self._messages.append(None)
            self._changed.notify()
        self._thread.join(limit_s)

    def _next(self, *, idle: bool) -> list[StateMessage | None]:
        # a message that nothing waits, also where there is none for long: a round may take longer
        # than the time-out
        with self._changed:
            if not self._messages and idle:
                self._changed.wait(self._context.timeout_s / _BEATS_PER_TIMEOUT)
            found: list[StateMessage | None] = []
            while self._messages and sum(one.nbytes for one in found if one) < _MOST_BYTES:
                found.append(self._messages.popleft())
            return found or [StateMessage(_ALIVE, {}, {})]

    def _run(self) -> None:
        try:
            context, part = self._context.cloned(), self.part
            if part.index == 0:
                found = {"id": self._own_id, "parts": part.count}
                context.kv.put(f"donor/{self.number}", found)
            line = _Line(context, self.number, part.index, lambda: self._needed)
            try:
                if self._copies is not None:
                    self._send_state(line, self._copies)
                if part.index == 0:
                    self._send_messages(line)
            finally:
                line.close()
        except (ThinwireError, RuntimeError) as error:
            _log.warning("joiner %d was lost while it received the state: %s", self.number, error)

    def _send_state(self, line: _Line, copies: list[Tensor]) -> None:
        digests = [_digest(copy) for copy in copies]
        line.send(json.dumps({"state": self.part.state, "digests": digests}).encode())
        missing = json.loads(line.receive(_MAX_PLAIN_BYTES))
        copies[:] = [copies[index] for index in missing][::-1]

        def contents() -> Iterable[Any]:
            while copies:
                yield copies.pop().numpy().data

        line.stream(contents(), sum(copy.nbytes for copy in copies), self._busy)

    def _send_messages(self, line: _Line) -> None:
        idle, ended = True, False
        while not ended:
            found = self._next(idle=idle)
            messages = [message for message in found if message is not None]
            ended = None in found or any(message.last for message in messages)
            idle = [one.kind for one in messages] == [_ALIVE]
            contents: list[bytes] = []
            for one in messages:
                plain = json.dumps({"kind": one.kind, "last": one.last, **one.plain}).encode()
                tensors = {name: tensor.contiguous() for name, tensor in one.tensors.items()}
                for content in (plain, safetensors.torch.save(tensors)):
                    contents += [_LENGTH.pack(len(content)), content]
            line.stream(map(memoryview, contents), sum(map(len, contents)), self._busy)


def _digest(view: Tensor) -> str:
    return hashlib.blake2b(view.cpu().numpy().data, digest_size=_CHECKSUM_BYTES).hexdigest()


class Recipient:
    """Receiving end of one donor's transfer."""

    def __init__(self, context: TransferContext, number: int, part: int = 0) -> None:
        self.line = _Line(context, number, part)
        self.idle = False
        """True if all that the donor had when it last said so has been received."""
        self.wanted_bytes: int | None = None
        """Bytes of the donor's part that differ here, once they are known."""

    def receive_state(self, part: Part, flat: Mapping[str, Tensor]) -> str:
        """Write the donor's part into flat tensors, where it differs; return its counters."""
        views = part.views(flat)
        header = json.loads(self.line.receive(_MAX_PLAIN_BYTES))
        digests: Sequence[str] = header["digests"]
        if len(digests) != len(views):
            raise PayloadCorrupt(f"a member sends {len(digests)} tensors instead of {len(views)}")
        missing = [at for at, view in enumerate(views) if digests[at] != _digest(view)]
        self.wanted_bytes = sum(views[at].nbytes for at in missing)
        self.line.send(json.dumps(missing).encode())
        self.line.fill(views[at] for at in missing)
        return str(header["state"])

    def receive(self, max_bytes: int) -> StateMessage:
        """Return the next message, skipping those that say that there is none."""
        while True:
            plain = json.loads(self.line.receive(_MAX_PLAIN_BYTES))
            kind, last = plain.pop("kind"), plain.pop("last")
            self.idle = kind == _ALIVE
            content = self.line.receive(max_bytes)
            if kind != _ALIVE:
                return StateMessage(kind, plain, safetensors.torch.load(bytes(content)), last)

    def close(self) -> None:
        """Close the channel."""
        self.line.close()


class Download:
    """State of a round, from several donors at once, and the message of each round since."""

    def __init__(
        self,
        context: TransferContext,
        number: int,
        count: int,
        tensors: Mapping[str, Tensor],
        max_bytes: int,
    ) -> None:
        self._tensors, self._flat = tensors, flattened(tensors)
        self._recipients: list[Recipient | None] = [None] * count
        self._arrived: queue.SimpleQueue[StateMessage | str | Exception] = queue.SimpleQueue()
        self._messages: deque[StateMessage] = deque()
        self._states: list[str] = []
        self._max_bytes, self._closed = max_bytes, False
        self._progress: Progress | None = None
        self._since: tuple[float, int] | None = None
        names = "joining_bytes", "joining_total_bytes", "joining_bit_s", "joining_left_s"
        self.stats: dict[str, float] = dict.fromkeys(names, 0.0)
        """Bytes of the state received, and of all that differed here; rate; seconds left."""
        for index in range(count):
            arguments = context, number, Part(index, count, "")
            threading.Thread(
                target=self._run, args=arguments, name="thinwire-recipient", daemon=True
            ).start()

    @property
    def received_bytes(self) -> int:
        """Bytes received so far."""
        return sum(recipient.line.nbytes for recipient in self._recipients if recipient)

    def _run(self, context: TransferContext, number: int, part: Part) -> None:
        try:
            recipient = Recipient(context.cloned(), number, part.index)
            self._recipients[part.index] = recipient
            try:
                self._arrived.put(recipient.receive_state(part, self._flat))
                last = part.index > 0
                while not last and not self._closed:
                    message = recipient.receive(self._max_bytes)
                    self._arrived.put(message)
                    last = message.last
            finally:
                recipient.close()
        except (ThinwireError, RuntimeError) as error:
            self._arrived.put(error)

    def next(self, *, wait: bool) -> StateMessage | None:
        """Return the next message to apply; without `wait` None if the donor has no other one."""
        while True:
            complete = len(self._states) == len(self._recipients)
            first = self._recipients[0]
            idle = first is not None and first.idle and self._arrived.empty()
            if complete and self._messages:
                return self._messages.popleft()
            if complete and idle and not wait:
                return None
            if not wait:
                self._report()
            try:
                arrived = self._arrived.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(arrived, Exception):
                raise arrived
            if isinstance(arrived, StateMessage):
                self._messages.append(arrived)
                continue
            if len({*self._states, arrived}) > 1:
                raise PayloadCorrupt("members sent states of different rounds: join again")
            self._report()
            self._states.append(arrived)
            if len(self._states) == len(self._recipients):
                self._since = None  # from here on rounds alone are received
                for name, flat in self._flat.items():
                    if flat.data_ptr() != self._tensors[name].data_ptr():
                        self._tensors[name].copy_(flat.view_as(self._tensors[name]))

    def _report(self) -> None:
        """Count and log the progress; raise if the rounds send more than the line carries."""
        first, now, received = self._recipients[0], time.monotonic(), self.received_bytes
        wanted = [one.wanted_bytes for one in self._recipients if one]
        if first is None or None in wanted or len(wanted) < len(self._recipients):
            return
        began_s, before = self._since = self._since or (now, received)
        rate = (received - before) / max(now - began_s, 1e-6)
        if len(self._states) < len(self._recipients):
            total = sum(nbytes for nbytes in wanted if nbytes is not None)
            left_s = max(total - received, 0) / rate if rate else 0.0
            self._progress = self._progress or Progress("receiving the state of the run", total)
            if received > self.stats["joining_bytes"]:
                self._progress.add(received - self.stats["joining_bytes"])
            counts = received, total, 8 * rate, left_s
            self.stats = dict(zip(self.stats, counts, strict=True))
        if now - began_s > _JUDGED_S and first.line.needed > rate:
            raise LineTooSlow(
                f"this member cannot catch up with the run: its rounds send "
                f"{8e-6 * first.line.needed:.3g} Mbit/s, and {8e-6 * rate:.3g} Mbit/s arrived here "
                f"over the last {now - began_s:.0f} s. Average less often (k_steps) or compress "
                "more, or join over a faster line"
            )

    def close(self) -> None:
        """Close the connections, which ends the threads."""
        self._closed = True
        for recipient in self._recipients:
            if recipient is not None:
                recipient.close()


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
