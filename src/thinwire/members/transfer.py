"""Transfer of the run's state from donors to a joiner, while the members train on."""

import hashlib
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from thinwire.comm.member_groups import Channel
from thinwire.comm.relay import RelayEndpoint
from thinwire.comm.waiting import Progress
from thinwire.errors import LineTooSlow, PayloadCorrupt, PeerLost, ThinwireError
from thinwire.members.kv import KeyValueView
from thinwire.members.line import CHECKSUM_BYTES, LENGTH, Line

MOST_DONORS = 4
"""Most members that send one joiner a part of the state each."""
MOST_WAITING = 256 << 20
"""Bytes of rounds, beside the last one, that wait for a late member at most."""
_ALIVE = "alive"
_BEATS_PER_TIMEOUT = 4
"""Kind of the message that says that nothing waits, and the number of them within one time-out."""
_ROUNDS = 3
_JUDGED_S = 10.0
"""Rounds and seconds after which the line is compared with what the rounds need."""
_MAX_PLAIN_BYTES = 64 << 20
_BATCH_BYTES = 4 << 20
_BLOCK_BYTES = 64 << 10
_POLL_S = 0.1
_WANTED_S = 1.0
_JOIN_S = 2.0
_log = logging.getLogger("thinwire")
_Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class StateMessage:
    """One message of a transfer: plain values, and tensors by name."""

    kind: str
    plain: Mapping[str, Any]
    tensors: _Tensors
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

    def line(self, number: int, part: int, needed: Callable[[], float] | None = None) -> Line:
        """Return a line to the other end of this part of the transfer with this number."""
        store = self.kv.store.under(f"copy/{number}/{part}")
        timeout_s = self.timeout_s
        channel = Channel(
            store, sending=needed is not None, timeout_s=timeout_s, endpoint=self.endpoint
        )
        return Line(channel, self.key, number, part, timeout_s, needed)

    def cloned(self) -> "TransferContext":
        """Return the same context with a connection of its own, for another thread."""
        return self._replace(kv=self.kv.clone())


def offer_key(recipient: str) -> str:
    """Return the key at which a donor says the number of its transfer to a late member."""
    return f"copy/{recipient}/offer"


def wanted_key(number: int) -> str:
    """Return the key by which a recipient asks a donor to connect."""
    return f"copy/{number}/wanted"


@dataclass(frozen=True)
class Part:
    """Which of the parts of the state of a round a donor sends."""

    index: int = 0
    count: int = 1
    state: str = ""
    """Counters of the round, as text, the same in all parts."""
    donors: Sequence[str] = ()

    def compared(self) -> list["Part"]:
        """Return this part and those whose digests its donor sends too: others have their bytes."""
        first = range(1, self.count) if self.index == 0 else (0,) * (self.index == 1)
        return [self, *(replace(self, index=index) for index in first)]

    def blocks(self, flat: _Tensors) -> list[Tensor]:
        """Return the bytes of this part in blocks, as views of flat tensors."""
        # an anchor and its momentum together: one without the other cannot be brought up to date
        whole = (tensor.view(torch.uint8) for tensor in flat.values() if tensor.numel())
        found = [row for t in whole for row in enumerate(torch.split(t, _BLOCK_BYTES))]
        return [b for at, b in sorted(found, key=itemgetter(0)) if at % self.count == self.index]


def flattened(tensors: _Tensors) -> dict[str, Tensor]:
    """Return each tensor in one dimension: a view if its memory allows."""
    return {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}


class Donor:
    """Thread that sends one recipient rounds up to a state, a part of it, and rounds since."""

    def __init__(
        self,
        context: TransferContext,
        number: int,
        joiner: str,
        first: Iterable[StateMessage],
        part: Part = Part(),
        tensors: Mapping[str, Tensor] = {},
        busy: Callable[[], bool] = lambda: False,
        *,
        offered_by: str = "",
    ) -> None:
        # `tensors` change later: this part of them is copied, and what is compared with others.
        # A transfer that a member offers begins once the recipient asks for it
        self._offered_by = offered_by
        self._closed = False
        self.number = number
        self.joiner = joiner
        self.part = part
        self._context = context
        self._busy = busy
        flat = flattened(tensors)
        self._copies = [
            [block.to("cpu", copy=True) for block in one.blocks(flat)] for one in part.compared()
        ]
        self._messages: deque[StateMessage | None] = deque(first)
        self._changed = threading.Condition()
        self._began_s = time.monotonic()
        self._rounds = 0
        self._round_bytes = 0
        self._needed = 0.0
        self._line: Line | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-donor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True until the transfer has ended or failed."""
        return self._thread.is_alive()

    def enqueue(self, message: StateMessage) -> None:
        """Send a message after the waiting ones; close if the recipient does not ask in time."""
        with self._changed:
            waiting = sum(one.nbytes for one in self._messages if one is not None)
            self._messages.append(message)
            self._rounds += 1
            self._round_bytes += message.nbytes
            if self._rounds > _ROUNDS:
                self._needed = self._round_bytes / (time.monotonic() - self._began_s)
            self._changed.notify()
        if self._offered_by and waiting > MOST_WAITING:
            self.close()

    def close(self, limit_s: float = 0.0) -> None:
        """End the thread once all messages are sent, or after `limit_s` seconds."""
        self._closed = True
        with self._changed:
            self._messages.append(None)
            self._changed.notify()
        self._thread.join(limit_s)
        if self._thread.is_alive() and self._line is not None:
            self._line.close()  # a thread that waits in torch at exit would abort the process
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            context = self._context.cloned()
            part = self.part
            if self._offered_by and not self._is_wanted(context.kv):
                return
            if part.index == 0:
                context.kv.put(f"donor/{self.number}", part.donors)
            line = self._line = context.line(
                self.number, part.index, lambda: self._needed if self._messages else 0.0
            )
            try:
                (self._send_messages if part.index == 0 else self._send_state)(line)
            finally:
                line.close()
        except Exception as error:  # nobody waits for this thread but the joiner
            if not self._closed:
                _log.warning("%s was lost while it received the state: %s", self.joiner, error)

    def _is_wanted(self, kv: KeyValueView) -> bool:
        """Wait until the recipient asks; return False if this end is closed before."""
        kv.put(offer_key(self.joiner), {"number": self.number, "by": self._offered_by})
        since = 0
        while not self._closed:
            since, (wanted,) = kv.look([wanted_key(self.number)], _WANTED_S, since)
            if wanted:
                return True
        return False

    def _send_state(self, line: Line) -> None:
        digests = [[_digest(copy) for copy in copies] for copies in self._copies]
        copies = self._copies[0]
        self._copies = []
        line.send(json.dumps({"state": self.part.state, "digests": digests}).encode())
        while (missing := json.loads(line.receive(_MAX_PLAIN_BYTES))) is None:
            continue  # rounds are repeated there
        copies[:] = [copies[index] for index in missing][::-1]
        nbytes = sum(copy.nbytes for copy in copies)
        line.stream((copies.pop().numpy().data for _ in missing), nbytes, self._busy)

    def _send_messages(self, line: Line) -> None:
        idle = True
        ended = False
        while not ended:
            batch = list[StateMessage]()
            at_state = False
            with self._changed:
                if not self._messages and idle:
                    self._changed.wait(self._context.timeout_s / _BEATS_PER_TIMEOUT)
                while self._messages and sum(m.nbytes for m in batch) < _BATCH_BYTES:
                    message = self._messages.popleft()
                    batch += [] if message is None else [message]
                    ended = message is None or message.last
                    at_state = message is not None and message.kind == "state"
                    if ended or at_state:
                        break
                idle = not (self._messages or ended or at_state)
            if idle:  # also said where there is none for long: a round may exceed the time-out
                batch.append(StateMessage(_ALIVE, {}, {}))
            contents: list[bytes] = []
            for one in batch:
                plain = json.dumps({"kind": one.kind, "last": one.last, **one.plain}).encode()
                tensors = {name: tensor.contiguous() for name, tensor in one.tensors.items()}
                for content in (plain, safetensors.torch.save(tensors)):
                    contents += [LENGTH.pack(len(content)), content]
            line.stream(map(memoryview, contents), sum(map(len, contents)), self._busy)
            if at_state:
                self._send_state(line)


def _digest(view: Tensor) -> str:
    return hashlib.blake2b(view.cpu().numpy().data, digest_size=CHECKSUM_BYTES).hexdigest()


class Recipient:
    """Receiving end of one donor's transfer."""

    def __init__(self, context: TransferContext, number: int, part: int = 0) -> None:
        self.line = context.line(number, part)
        self._beat_s = context.timeout_s / _BEATS_PER_TIMEOUT
        self.idle = False
        """True if all that the donor had when it last said so has been received."""
        self.wanted_bytes: int | None = None
        """Bytes up to the end of the donor's part, once those that differ are known."""
        self.digests: list[Any] = []
        """Digests that the donor sent, of its own part and of those that it compares."""
        self.found: list[str] = []
        """Digests of the donor's part as it is here."""

    def receive_state(self, blocks: Sequence[Tensor], ready: Callable[[float], bool]) -> str:
        """Write the donor's part where it differs, once all is `ready`; return its counters."""
        header = json.loads(self.line.receive(_MAX_PLAIN_BYTES))
        while not ready(self._beat_s):
            self.line.send(b"null")
        self.digests = list(header["digests"])
        digests: Sequence[str] = self.digests[0]
        if len(digests) != len(blocks):
            raise PayloadCorrupt(f"a member sends {len(digests)} blocks instead of {len(blocks)}")
        self.found = [_digest(block) for block in blocks]
        missing = [at for at, digest in enumerate(self.found) if digests[at] != digest]
        self.wanted_bytes = self.line.nbytes + sum(blocks[at].nbytes for at in missing)
        self.line.send(json.dumps(missing).encode())
        self.line.fill(blocks[at] for at in missing)
        for at in missing:
            self.found[at] = _digest(blocks[at])
        return str(header["state"])

    def receive(self, max_bytes: int) -> StateMessage:
        """Receive the next message, and skip those that say that there is none."""
        while True:
            plain = json.loads(self.line.receive(_MAX_PLAIN_BYTES))
            kind = plain.pop("kind")
            last = plain.pop("last")
            self.idle = kind == _ALIVE
            content = self.line.receive(max_bytes)
            if kind != _ALIVE:
                return StateMessage(kind, plain, safetensors.torch.load(bytes(content)), last)


class Download:
    """State of a round, from several donors at once, and the message of each round since."""

    def __init__(
        self,
        context: TransferContext,
        number: int,
        max_bytes: int,
        count: int = 1,
        tensors: Mapping[str, Tensor] = {},
        is_there: Callable[[], bool] = lambda: True,
    ) -> None:
        # `is_there`: False once the donor will not connect any more
        self._is_there = is_there
        self._tensors = tensors
        self._flat = flattened(tensors)
        self._recipients: list[Recipient | None] = [None] * count
        self._arrived: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        """Messages, states and errors, each with the index of its donor."""
        self.refused: list[int] = []
        """Indices of the donors of which one was lost, or has sent what is refused."""
        self._messages: deque[StateMessage] = deque()
        self._states: list[str] = []
        self._max_bytes = max_bytes
        self._closed = False
        self._at_state = False
        self._ready = threading.Event()
        """Set once the tensors may be compared with the state: all rounds before are repeated."""
        self._progress: Progress | None = None
        self._since: tuple[float, int] | None = None
        names = "joining_bytes", "joining_total_bytes", "joining_bit_s", "joining_left_s"
        self.stats: dict[str, float] = dict.fromkeys(names, 0.0)
        """Bytes of the state received, and of all that differed here; rate; seconds left."""
        where = [(context, number, Part(n, count)) for n in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=args, name="thinwire-recipient", daemon=True)
            for args in where
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """True while something is in transit."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def reached(self) -> bool:
        """True if a donor has been connected."""
        return any(self._recipients)

    def _run(self, context: TransferContext, number: int, part: Part) -> None:
        arrived = self._arrived
        index = part.index
        try:
            recipient = Recipient(context.cloned(), number, index)
            self._recipients[index] = recipient
            try:
                take = partial(recipient.receive_state, part.blocks(self._flat), self._ready.wait)
                last = index > 0
                if last and not self._closed:  # while it connected: another may copy the state now
                    arrived.put((index, take()))
                while not (last or self._closed):
                    message = recipient.receive(self._max_bytes)
                    arrived.put((index, message))
                    last = message.last
                    if message.kind == "state":
                        arrived.put((index, take()))
            finally:
                recipient.line.close()
        except ThinwireError as error:
            arrived.put((index, error))
        except Exception as error:  # a member sends what nobody can read
            text = f"what a member sends cannot be read: {type(error).__name__}: {error}"
            arrived.put((index, PayloadCorrupt(text)))

    def next(self, *, wait: bool) -> StateMessage | None:
        """Take the next message to apply; without `wait` None if the donor has no other one."""
        if self._at_state:  # the caller has applied its counters, and all rounds before
            self._ready.set()
        while True:
            complete = len(self._states) == len(self._recipients)
            first = self._recipients[0]
            idle = first is not None and first.idle and self._arrived.empty()
            if self._messages and (complete or not self._ready.is_set()):
                message = self._messages.popleft()
                self._at_state = message.kind == "state"
                return message
            if complete and idle and not wait:
                return None
            if not wait:
                self._report()
            try:
                index, arrived = self._arrived.get(timeout=_POLL_S)
            except queue.Empty:
                if self._is_there():
                    continue
                raise PeerLost("the member that was to send has been lost") from None
            if isinstance(arrived, Exception):
                self.refused = [index]
                raise arrived
            if isinstance(arrived, StateMessage):
                self._messages.append(arrived)
                continue
            if len({*self._states, arrived}) > 1:
                self.refused = [index]
                raise PayloadCorrupt("members sent states of different rounds: join again")
            self._report()
            self._states.append(arrived)
            if len(self._states) == len(self._recipients):
                self._finish()
                self._since = None  # from here on rounds alone are received

    def _finish(self) -> None:
        """Raise unless each part is what two members hold (one of both is wrong); keep all."""
        for index, donor in enumerate(self._recipients):
            assert donor is not None, "received"
            for at, part in enumerate(Part(index, len(self._recipients)).compared()):
                other = self._recipients[part.index]
                if other is not None and donor.digests[at : at + 1] != [other.found]:
                    self.refused = [index, part.index]
                    raise PayloadCorrupt("two members hold different bytes of the same state")
        for name, flat in self._flat.items():
            if flat.data_ptr() != self._tensors[name].data_ptr():
                self._tensors[name].copy_(flat.view_as(self._tensors[name]))

    def _report(self) -> None:
        connected = [one for one in self._recipients if one]
        now = time.monotonic()
        wanted = [one.wanted_bytes for one in connected if one.wanted_bytes is not None]
        if len(wanted) < len(self._recipients):
            return
        received = sum(one.line.nbytes for one in connected)
        needed = connected[0].line.needed
        began_s, before = self._since = self._since or (now, received)
        rate = (received - before) / max(now - began_s, 1e-6)
        if len(self._states) < len(self._recipients):
            total = sum(wanted)
            here = min(received, total)  # the first donor may send rounds already
            left_s = (total - here) / rate if rate else 0.0
            if self._progress is None:
                action = "receiving the state of the run"
                self._progress = Progress(action, total, logging.WARNING)
            if here > self.stats["joining_bytes"]:
                self._progress.add(here - self.stats["joining_bytes"])
            counts = here, total, 8 * rate, left_s
            self.stats = dict(zip(self.stats, counts, strict=True))
        if now - began_s > _JUDGED_S and needed > rate:
            raise LineTooSlow(
                f"this member cannot catch up with the run: its rounds send "
                f"{8e-6 * needed:.3g} Mbit/s, and {8e-6 * rate:.3g} Mbit/s arrived here "
                f"over the last {now - began_s:.0f} s. Average less often (k_steps) or compress "
                "more, or join over a faster line"
            )

    def close(self) -> None:
        """Close the connections, which ends the threads."""
        self._closed = True
        self._ready.set()
        for recipient, thread in zip(self._recipients, self._threads, strict=True):
            if recipient is not None:
                recipient.line.close()
                thread.join(_JOIN_S)
