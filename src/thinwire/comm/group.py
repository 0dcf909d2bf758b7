"""The ranks that exchange, as one object that also works on a single rank."""

import contextlib
import datetime
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire._devices import uploaded
from thinwire._launched import one_of_several, require_linux
from thinwire._wording import warn_user
from thinwire.comm.elastic import UNKNOWN_S, backends_of, timeout_s_of
from thinwire.comm.failures import RESTART, explain_failure
from thinwire.comm.macs import MessageMacs, wrong_mac_text
from thinwire.comm.private import Private, forget, is_alone, keep_alive, private_group
from thinwire.comm.stats import Rate
from thinwire.comm.waiting import (
    Awaited,
    Progress,
    Timeout,
    left_s,
    one_deadline,
    progressed,
    seconds_of,
    set_activity,
    state_after_failure,
    waited,
    whole_s,
    within_text,
)
from thinwire.errors import Mismatch, PayloadCorrupt, ThinwireError
from thinwire.layout.traffic import STREAMS, children, streams_between

_SLICE_S = 1.0
"""Interval at which a wait checks the clock and lets signals in."""
_SHORT_BYTES = 64 << 10
"""Longest message of the host's memory that goes to all ranks at once."""
_HEAD = struct.Struct("<I8s8s")
"""Length of a string, its digest, and that of what ranks of all parts have in common."""
_FILES_OF_STREAM = 3
"""Descriptors of a group of gloo, beside one for each rank."""
_CHECKSUM = struct.Struct("<I")
"""CRC-32 at the end of each control message."""
_T_co = TypeVar("_T_co", covariant=True)


class Regrouped(Exception):
    """Membership changed during this exchange; retry it from the last agreed state."""


@dataclass(slots=True)
class Pending(Generic[_T_co]):
    """A launched exchange."""

    _finish: Callable[[], _T_co]
    _rest: Iterator[None] | None = None

    @classmethod
    def started(cls, work: Generator[None, None, _T_co]) -> "Pending[_T_co]":
        """Run `work` up to its first pause, when something is on its way; `wait` runs the rest."""
        result: list[_T_co] = []

        def kept() -> Iterator[None]:
            result.append((yield from work))

        rest = kept()
        next(rest, None)

        def finish() -> _T_co:
            for _ in rest:
                pass
            return result[0]

        return cls(finish, rest)

    def forward(self) -> None:
        """Wait for the first of several rounds, and launch the second; once."""
        rest = self._rest
        self._rest = None
        if rest is not None:
            next(rest, None)

    def wait(self) -> _T_co:
        """Return the result, or raise an error that names the exchange and the cause."""
        return self._finish()


class Group:
    """The ranks that exchange with each other."""

    # a private process group carries the traffic: collectives of the user cannot interleave.
    # Making it is collective. After a failure all exchanges over these ranks are refused

    on_the_wire = 0
    """`bytes_sent` of all groups of this process: a gathered message W-1 times, a reduced one
    2(W-1)/W times, without TCP and IP headers."""
    within_sites = 0
    """The part of `on_the_wire` between ranks of one site, which shard a model."""
    one_site = False
    """True if these ranks are those of one site."""
    rank, size = 0, 1
    static_membership = True
    """True if the ranks never change; False if members join and leave."""
    relayed = False
    """True if some ranks reach each other only through a relay."""
    copies = 1
    """Times that a message for all ranks leaves this one, if `relayed`."""
    node_size = 1
    """Ranks that count as one source: 1 here, see `Nodes`."""
    streams: int | None = None
    """Connections to each rank for large messages, the same on all ranks; None: by their number."""
    shards: "Group | None" = None
    """Ranks of this rank's site, on a group of all ranks of sharded models; see `sites_of`."""
    replicas: "Group | None" = None
    """Ranks that hold the same part of a model as this rank, on a group of all ranks."""
    parts: Sequence[int] = ()
    """Index of each rank's part, a shard or a stage; empty if every rank holds the whole model."""
    early = False
    """True if the next agreement may be made without members that are late."""
    near = False
    """True if large messages travel in few pieces; the same on all ranks. Same bits."""
    macs: MessageMacs | None = None
    """MACs for the messages that callers exchange; see `authenticate`."""
    _agreement_macs: MessageMacs | None = None
    _advice = RESTART
    """What to do after the loss of a rank."""
    _ask_before_s = 0.0
    """Time before a time-out at which it asks whether missing ranks are busy."""
    _shared: Private | None

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout: Timeout = None,
        streams: int | None = None,
        *,
        gloo: bool = False,
    ) -> None:
        # with `gloo`, between sites, data too travels by a gloo group of ours
        self._begin(time_limit_s(process_group, timeout))
        self.streams = streams
        if is_alone():
            if process_group is not None:
                raise ValueError(
                    "process_group was given but torch.distributed is not initialized: call "
                    "init_process_group first"
                )
            if (which := one_of_several(os.environ)) is not None:
                warn_user(
                    f"this is {which}, and there is no process group, so that each rank trains for "
                    'itself: call torch.distributed.init_process_group("gloo") first, with RANK, '
                    "WORLD_SIZE, MASTER_ADDR and MASTER_PORT set (docs/machines.md). To train "
                    "alone, set WORLD_SIZE=1"
                )
            return
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                "process_group does not contain this rank: pass the group that it belongs to"
            )
        parent = process_group or dist.group.WORLD
        assert parent is not None
        if self.size > 1:
            require_linux("training on several ranks", or_macos=True)
            ranks = dist.get_process_group_ranks(parent)
            name = "gloo" if gloo else "all"
            self._shared = private_group(parent, name, self.timeout_s, ranks, gloo=gloo)

    @classmethod
    def over_private(cls, private: Private | None, timeout_s: float) -> "Group":
        """Return a group over a process group of the library; None: of this rank only."""
        group = cls.__new__(cls)
        group._begin(timeout_s)
        if private is not None:
            assert private.group is not None, "made just now"
            group.rank, group.size = private.group.rank(), private.group.size()
            group._shared = private
        return group

    def detached(self) -> "Group":
        """Return a group for one other thread; see `Private.detached`."""
        own = self._shared and self._shared.detached(self.timeout_s)
        return Group.over_private(own, self.timeout_s)

    def _begin(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.bytes_sent = self.bytes_received = 0
        self.wait_s = 0.0
        self._rate = Rate()
        self._shared = None

    def authenticate(self, key: bytes) -> None:
        """Add a MAC made with `key` to every further agreement, and make `macs` for messages."""
        self.macs = MessageMacs(key, "messages", self.rank)
        self._agreement_macs = MessageMacs(key, "agreements", self.rank)

    def one_deadline(self) -> AbstractContextManager[None]:
        """Apply `waiting.one_deadline` with this group's time-out."""
        return one_deadline(self.timeout_s)

    def one_attempt(self) -> AbstractContextManager[None]:
        """Bind an exchange to its agreement: `Regrouped` if the membership changes meanwhile."""
        return nullcontext()

    @property
    def replica_count(self) -> int:
        """Number of whole models: the ranks, or the sites of sharded models."""
        return self.size if self.replicas is None else self.replicas.size

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave exchanges inside the block out of `bytes_sent` and `bytes_received`."""
        groups = filter(None, (self, self.shards, self.replicas))
        counted = [(group, group.bytes_sent, group.bytes_received) for group in groups]
        yield
        for group, sent, received in counted:
            group.bytes_sent = sent
            group.bytes_received = received

    @property
    def all_ranks(self) -> "Group":
        """All ranks of all sources, see `Nodes`: this group."""
        return self

    @property
    def leaders(self) -> "Group":
        """The ranks that send for their source: all."""
        return self

    @property
    def node(self) -> "Group":
        """The ranks of this rank's source: itself."""
        return Group.over_private(None, self.timeout_s)

    @property
    def global_ranks(self) -> list[int]:
        """Global ranks of this group, in the order of the group."""
        return [0] if self._shared is None else self._shared.ranks

    @property
    def _private(self) -> dist.ProcessGroup:
        shared = self._shared
        if shared is None or shared.group is None:  # never use the user's own group instead
            raise ThinwireError(
                "the library's process group has been released: nothing can be exchanged at exit"
            )
        if not shared.lives:
            raise ThinwireError(
                "the process group was destroyed, so nothing can be exchanged over it: call "
                "destroy_process_group after the last step, save and flush; after a new "
                "init_process_group make a new engine or optimizer"
            )
        if shared.abandoned is not None:
            kind, reason = shared.abandoned
            raise kind(
                f"an earlier exchange was aborted, so ranks are out of step ({reason}): restart "
                "from the last checkpoint"
            )
        return shared.group

    @property
    def rate_bit_s(self) -> float:
        """Moving mean of this rank's throughput, in bits a second; see `Rate`."""
        return self._rate.bit_s

    def abandon(self, reason: str, kind: type[ThinwireError] = ThinwireError) -> None:
        """Refuse all further traffic over these ranks: it would mix with exchanges in flight."""
        if self._shared is not None:
            self._shared.abandoned = kind, reason
            if kind in (PayloadCorrupt, Mismatch):  # other ranks wait in other exchanges
                self._shared.disconnect()

    @property
    def answer_index(self) -> int:
        """Index of this rank's answer among the last answers received."""
        return self.rank

    def leave_out(self, ranks: Sequence[int]) -> bool:
        """Continue without members, by the indices of their last answers, if that is possible."""
        return False

    @property
    def device(self) -> torch.device:
        """Device on which this group's backend needs data from the host."""
        if self._shared is not None and not self._shared.from_host:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def all_gather(self, message: Tensor, *, action: str) -> Pending[Tensor]:
        """Launch an all-gather of equally long byte strings, untouched until `wait`, uint8 (n,)."""
        carried = message.to(self._carrier(message.device))
        gathered = self._gather(carried, action, control=False)
        return Pending(lambda: uploaded(gathered.wait(), message.device))

    def _gather(self, message: Tensor, action: str, *, control: bool) -> Pending[Tensor]:
        """Gather as `all_gather` does; `control` messages use a process group of their own."""
        if self.size == 1:
            return Pending(lambda: message.unsqueeze(0))
        out = message.new_empty(self.size * message.numel())
        rows = out.view(self.size, -1)
        limit = self._piece_bytes(message.numel())
        held = [out, message]
        # gloo's gather hands every message on W - 1 times, a round trip each; this needs one
        at_once = self.size > 2 and not self.relayed and message.is_cpu
        if at_once and message.numel() <= min(limit, _SHORT_BYTES):
            held.append(copies := message.repeat(self.size))
            launches = [partial(dist.all_to_all_single, out, copies)]
        elif message.numel() <= limit:
            launches = [partial(getattr(dist, _GATHER), out, message)]
        else:
            cuts = [slice(at, at + limit) for at in range(0, message.numel(), limit)]
            launches = [
                partial(dist.all_gather, [row[cut] for row in rows], message[cut]) for cut in cuts
            ]
        received = (self.size - 1) * message.numel()
        wire = self.copies * message.numel() if self.relayed else received
        return self._launched(
            launches, lambda: rows, action, held, wire=(wire, received), control=control
        )

    def all_to_all(self, parts: Tensor, lengths: Sequence[int], *, action: str) -> Pending[Tensor]:
        """Launch an all-to-all in which every rank sends a byte string of its own to every rank."""
        # `parts`: the strings for rank 0, 1, ..., untouched; the result is (size, lengths[rank])
        swapped = self.swap(parts, [lengths] * self.size, action=action)
        return Pending(lambda: swapped.wait().view(self.size, -1))

    def swap(
        self, parts: Tensor, lengths: Sequence[Sequence[int]], *, action: str
    ) -> Pending[Tensor]:
        """Launch an all-to-all of strings whose lengths differ by sender too."""
        # `lengths` by sender, then by receiver; the result has the strings one after the other
        given = lengths[self.rank]
        taken = [row[self.rank] for row in lengths]
        own = given[self.rank]
        if self.size == 1:
            return Pending(lambda: parts)
        device = parts.device
        parts = parts.to(self._carrier(parts.device))
        longest = max(1, *map(max, lengths))
        width = ceil(self._piece_bytes(self.size * longest) / self.size)
        begins = range(0, longest, width)
        strings = torch.split(parts, list(given))
        gone = [[string[at : at + width] for string in strings] for at in begins]
        came = [[min(max(length - at, 0), width) for length in taken] for at in begins]
        pieces = [parts] if len(gone) == 1 else [torch.cat(cut) for cut in gone]
        outs = [parts.new_empty(sum(row)) for row in came]
        launches = [
            partial(dist.all_to_all_single, out, piece, to, [len(string) for string in cut])
            for out, piece, to, cut in zip(outs, pieces, came, gone, strict=True)
        ]

        def joined() -> Tensor:
            split = [torch.split(out, row) for out, row in zip(outs, came, strict=True)]
            whole = [piece for source in zip(*split, strict=True) for piece in source]
            return uploaded(outs[0] if len(outs) == 1 else torch.cat(whole), device)

        wire = parts.numel() - own, sum(taken) - own
        return self._launched(launches, joined, action, [*outs, *pieces], wire=wire)

    def _carrier(self, device: torch.device) -> torch.device:
        """Device from which this group's backend sends a tensor: gloo sends from the host."""
        if device.type == "cpu" or self.size == 1:
            return self.device
        backend = backends_of(self._private).get(device.type)
        if backend is None:
            return self.device
        return torch.device("cpu") if backend.name() == "gloo" else device

    def _carried(self, buffer: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return a buffer where the backend sends it from, and views of its pieces, in order."""
        carried = buffer.to(self._carrier(buffer.device))
        limit = self._piece_bytes(carried.nbytes)
        if carried.nbytes <= limit or not carried.is_contiguous():
            return carried, [carried]
        return carried, torch.split(carried.view(-1), limit // carried.element_size())

    @property
    def seems_near(self) -> bool:
        """True if one connection fills the line to every other rank, as far as this rank saw."""
        quick = self._shared is not None and self._shared.round_trip_s < _NEAR_S
        return quick and self.rate_bit_s >= _FAST_BIT_S

    def _piece_bytes(self, nbytes: int) -> int:
        """Return the bytes of a piece: those in flight cross 0.5 Mbit/s within the time-out."""
        # the same on all ranks, and for any number of streams: sums are made piece by piece
        wanted = int(min(self.timeout_s, 1e6)) * _BYTES_PER_S
        cautious = min(max(wanted, _SMALLEST_BYTES), _LARGEST_BYTES)
        if nbytes > _WHOLE_BYTES:
            # every stream carries as many pieces; whole numbers of any type
            streams = min(1 << (nbytes // _OF_STREAM_BYTES).bit_length() - 1, STREAMS)
            most = min(max(wanted // STREAMS, _SMALLEST_BYTES), _LARGEST_BYTES)
            pieces = ceil(nbytes / streams / most)
            cautious = 16 * ceil(nbytes / streams / pieces / 16)
        # a near line that becomes a hundred times slower must still pass a piece in time
        quick = int(self.timeout_s * _FAST_BIT_S / 8 / 100)
        return max(cautious, min(_NEAR_BYTES, quick // 16 * 16)) if self.near else cautious

    def all_reduce_(self, buffer: Tensor, *, action: str) -> Pending[Tensor]:
        """Launch a sum of `buffer` over the ranks, bit-identical on all, which may overwrite it.

        By gloo the sum of an entry is made in the order of the ranks, so that its bits depend on
        neither pieces nor connections.
        """
        if self.size == 1 or not buffer.nbytes:
            return Pending(lambda: buffer)
        on_host = self._carrier(buffer.device).type == "cpu"
        if on_host and (self.size > 2 or self.relayed):
            return Pending.started(self._summed(buffer, action))
        carried, pieces = self._carried(buffer)
        launches = [partial(dist.all_reduce, piece) for piece in pieces]
        wire = (round(2 * (self.size - 1) / self.size * buffer.nbytes),) * 2  # of a ring

        def done() -> Tensor:
            return buffer.copy_(uploaded(carried, buffer.device))

        return self._launched(launches, done, action, [carried], wire=wire)

    def _summed(self, buffer: Tensor, action: str) -> Generator[None, None, Tensor]:
        """Every rank adds one share of all ranks' buffers, and sends the sum to all."""
        flat = buffer.to(self._carrier(buffer.device)).reshape(-1).view(torch.uint8)
        unit = buffer.element_size() * ceil(buffer.numel() / self.size)
        shares = [max(0, min(unit, flat.numel() - unit * rank)) for rank in range(self.size)]
        parts = self.swap(flat, [shares] * self.size, action=action)
        yield
        here = shares[self.rank] // buffer.element_size()
        total, *others = parts.wait().view(buffer.dtype).view(self.size, here)
        for other in others:
            total += other
        own = total.view(torch.uint8)
        if self.near:  # needs no copies for the others, but more round trips
            padded = torch.nn.functional.pad(own, (0, unit - own.numel()))
            sums = self.all_gather(padded, action=action)
        else:
            lengths = [[share] * self.size for share in shares]
            sums = self.swap(own.repeat(self.size), lengths, action=action)
        yield
        whole = sums.wait().reshape(-1)[: flat.numel()]
        return uploaded(whole.view(buffer.dtype).view(buffer.shape), buffer.device)

    def broadcast_(self, buffer: Tensor, *, action: str, source: int = 0) -> Pending[Tensor]:
        """Launch a broadcast of rank `source`'s `buffer`, which gloo's ranks pass on in a tree."""
        if self.size == 1:
            return Pending(lambda: buffer)
        carried, pieces = self._carried(buffer)
        launches = [partial(dist.broadcast, piece, group_src=source) for piece in pieces]
        after = (self.rank - source) % self.size
        copies = self.copies * (not after) if self.relayed else children(after, self.size)
        wire = copies * buffer.nbytes, buffer.nbytes if after else 0
        done = partial(buffer.copy_, carried)
        return self._launched(launches, done, action, [carried], wire=wire, rated=False)

    def take_regroup_s(self) -> float:
        """Return the seconds spent on forming new generations since the last call."""
        return 0.0

    def gather_bytes(self, payload: bytes, *, action: str) -> list[bytes]:
        """Return every rank's byte string, of any lengths, in rank order."""
        gathered = self.launch_bytes(payload, action=action)
        return [row for row in gathered.wait() if row is not None]

    def launch_bytes(
        self, payload: bytes, *, action: str, common: bytes | None = None
    ) -> Pending[Sequence[bytes | None]]:
        """Launch the first round of `gather_bytes`; `wait` makes a second one if it is needed."""
        # one round of 24 bytes if all are equal. If they are within each of the `parts`, and
        # `common` is on all ranks, None stands for the strings of other parts
        parts = () if common is None or not self.static_membership else self.parts
        shared = common if parts and common is not None else payload
        digests = (hashlib.blake2b(one, digest_size=8).digest() for one in (payload, shared))
        own = _HEAD.pack(len(payload), *digests)
        heads = self.launch_now(own, action)

        def gathered() -> Sequence[bytes | None]:
            fields = [_HEAD.unpack(head) for head in heads.wait()]
            if len(set(fields)) == 1:
                return [payload] * self.size
            equal_within_parts = len(set(zip(parts, fields, strict=False))) == len(set(parts))
            if parts and equal_within_parts and len({agreed for *_, agreed in fields}) == 1:
                return [payload if part == parts[self.rank] else None for part in parts]
            # all ranks have these headers, so all make a second round
            lengths = [length for length, *_ in fields]
            rows = self.gather_now(payload.ljust(max(lengths), b"\0"), action)
            return [row[:length] for row, length in zip(rows, lengths, strict=True)]

        return Pending(gathered)

    def gather_now(self, payload: bytes, action: str) -> list[bytes]:
        """Gather strings of equal length on all ranks, in one round."""
        return self.launch_now(payload, action).wait()

    def launch_now(self, payload: bytes, action: str) -> Pending[list[bytes]]:
        """Launch a gather of strings of equal length on all ranks, each with a checksum."""
        message = torch.frombuffer(bytearray(sealed(payload)), dtype=torch.uint8)
        macs = self._agreement_macs
        number = 0 if macs is None else macs.next()
        if macs is not None:
            message = macs.with_mac(message, number)
        gathered = self._gather(message, action, control=True)

        def strings() -> list[bytes]:
            rows = gathered.wait()
            if macs is not None:
                rows, wrong = macs.verified(rows, number)
                for source in wrong:
                    text = wrong_mac_text(action, source)
                    raise PayloadCorrupt(f"{text}. {state_after_failure()}")
            return self.unsealed([row.numpy().tobytes() for row in rows], action)

        return Pending(strings)

    def unsealed(self, rows: Sequence[bytes], action: str) -> list[bytes]:
        """Return strings of all ranks without their checksums; end the group if one is wrong."""
        for source, row in enumerate(rows):
            if row != sealed(row[: -_CHECKSUM.size]):
                raise self.ended_by_damage(source, action)
        return [row[: -_CHECKSUM.size] for row in rows]

    def ended_by_damage(self, source: int, action: str) -> PayloadCorrupt:
        """End the group, since no other rank knows of the damage; return this rank's error."""
        text = (
            f"rank {self.rank} of {self.size}, {action}: the message from rank {source} was "
            f"damaged in transit. {state_after_failure()}"
        )
        if self._shared is not None and self._shared.heartbeats is not None:
            self._shared.heartbeats.ask("damaged", 0.0)
        self.abandon(text, PayloadCorrupt)
        return PayloadCorrupt(text)

    def _launched(
        self,
        launches: Sequence[Callable[..., dist.Work]],
        result: Callable[[], Tensor],
        action: str,
        held: Sequence[Tensor],
        *,
        wire: tuple[int, int],
        rated: bool = True,
        control: bool = False,
    ) -> Pending[Tensor]:
        """Launch all pieces. `held` is kept until they end; `wire`: bytes sent and received."""
        group, shared = self._private, self._shared
        assert shared is not None, "there are other ranks"
        launched_s = time.perf_counter()
        sent, received = wire
        self.bytes_sent += sent
        self.bytes_received += received
        Group.on_the_wire += sent
        Group.within_sites += sent * self.one_site
        by_gloo = control or (shared.watched and held[0].is_cpu)
        works, groups = [], [shared.control if control else group]
        if len(launches) > 1 and by_gloo:
            count = self.streams or streams_between(self.size)
            groups = self._carriers(shared, min(count, len(launches)))
        shared.launched[control] += 1
        awaited = shared.name, control, shared.launched[control]
        for launch, carrier in zip(launches, cycle(groups), strict=False):
            try:
                work = launch(group=carrier, async_op=True)
            except RuntimeError as error:
                explained = self._explained(error, action, f"{whole_s(self.timeout_s):g} s")
                raise explained from error.__context__
            keep_alive(carrier, work, held)
            works.append(work)

        def finish() -> Tensor:
            begin_s = time.perf_counter()
            self._wait_for_all(works, action, awaited, held, by_gloo=by_gloo)
            nbytes = sent if rated and not control else 0
            now_s = time.perf_counter()
            self._rate.ended(nbytes, launched_s, begin_s, now_s)
            if control:
                shared.round_trip_s = min(shared.round_trip_s, now_s - launched_s)
            return result()

        return Pending(finish)

    def _carriers(self, shared: Private, count: int) -> list[dist.ProcessGroup]:
        """Return up to `count` groups for pieces of a message, as many as all ranks can open."""
        if count > 1 and not shared.most_streams:
            # who makes connections waits for the others without an end: first ranks meet here
            free = os.sysconf("SC_OPEN_MAX") - len([*Path("/dev/fd").iterdir()])
            own = 1 + max(free, 0) // (self.size + _FILES_OF_STREAM)
            wire = Group.on_the_wire
            with self.uncounted():
                answers = self.gather_now(own.to_bytes(4), "opening connections")
            Group.on_the_wire = wire  # once in a process, whichever run it is in
            shared.most_streams = min(map(int.from_bytes, answers))
        # by default half of what is free is left to the script
        count = min(count, shared.most_streams // (1 if self.streams else 2))
        shared.add_streams(count - 1, self.timeout_s)
        return [self._private, *shared.more][: max(count, 1)]

    def _wait_for_all(
        self,
        works: Sequence[dist.Work],
        action: str,
        awaited: Awaited,
        held: Sequence[Tensor] = (),
        *,
        by_gloo: bool,
    ) -> None:
        nbytes = sum(tensor.nbytes for tensor in held) if len(works) > 1 else 0
        progress = Progress(action, nbytes) if len(works) > 1 else None
        set_activity(action, awaited)
        begin_s = time.perf_counter()
        try:
            for work in works:
                self._wait_for(work, action, in_slices=by_gloo)
                forget(work)
                if progress is not None:
                    progress.add(nbytes / len(works))
        finally:
            self.wait_s += time.perf_counter() - begin_s
            set_activity(action, None)

    def _wait_for(self, work: dist.Work, action: str, *, in_slices: bool) -> None:
        """Wait until the work has ended; longer while the missing ranks are busy."""
        # shortly before the limit ask whether missing ranks are busy: then it moves, else it stands
        limit_s = left_s(self.timeout_s)
        began_s = time.monotonic()
        ended = longer = denied = False
        while True:
            until_s = limit_s - (0.0 if denied else self._ask_before_s)
            try:
                if in_slices:
                    left = until_s - (time.monotonic() - began_s)
                    work.wait(datetime.timedelta(seconds=max(min(left, _SLICE_S), 0.001)))
                else:
                    work.wait()
                break
            except RuntimeError as error:
                self._look(time.monotonic() - began_s)
                if work.is_completed():
                    if not ended:
                        ended = True  # it may have succeeded since: wait again, to see its outcome
                        continue
                    forget(work)
                elif time.monotonic() - began_s < until_s:
                    continue
                elif not denied:
                    extension_s = self._extension_s()
                    waited_s = time.monotonic() - began_s
                    longer |= extension_s > 0
                    denied = extension_s <= 0
                    if not denied:
                        limit_s = max(limit_s, waited_s + extension_s)
                    if waited_s < limit_s:
                        continue
                within = within_text(limit_s, self.timeout_s)
                raise self._explained(error, action, within) from error.__context__
        if longer:
            progressed()
        else:
            waited(time.monotonic() - began_s)

    def _extension_s(self) -> float:
        heartbeats = self._shared and self._shared.heartbeats
        return heartbeats.extension_s(whole_s(self.timeout_s)) if heartbeats else 0.0

    def _look(self, waited_s: float) -> None:
        """Raise `Mismatch` if this rank and another one wait for each other, in different calls."""
        heartbeats = self._shared and self._shared.heartbeats
        if int(waited_s).bit_count() == 1 and heartbeats and (text := heartbeats.mismatch()):
            self.abandon(text, Mismatch)
            raise Mismatch(f"{text}. {state_after_failure()}")

    def _explained(self, error: RuntimeError, action: str, within: str) -> ThinwireError:
        if isinstance(error, ThinwireError):
            return error
        explained = self.explained(error, action, within)
        self.abandon(str(explained), type(explained))
        return explained

    def explained(self, error: RuntimeError, action: str, within: str) -> ThinwireError:
        """Return the error to raise for a failed exchange of these ranks."""
        return explain_failure(
            error,
            action=action,
            rank=self.rank,
            size=self.size,
            within=within,
            heartbeats=None if self._shared is None else self._shared.heartbeats,
            advice=self._advice,
        )


def sealed(payload: bytes) -> bytes:
    """Return a string with its checksum; see `Group.unsealed`."""
    return payload + _CHECKSUM.pack(zlib.crc32(payload))


def time_limit_s(process_group: dist.ProcessGroup | None, timeout: Timeout) -> float:
    """Return the longest wait in one call: `timeout`, or that of the process group."""
    require_process_group(process_group)
    own_s = seconds_of(timeout)
    if own_s is not None:
        return own_s
    parent = None if is_alone() else process_group or dist.group.WORLD
    return timeout_s_of(parent) if isinstance(parent, dist.ProcessGroup) else UNKNOWN_S


def require_process_group(value: object) -> None:
    """Raise `TypeError` unless `value` is a process group or None (all ranks)."""
    # the ranks of a group check one that is none of theirs
    known = isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER
    if value is None or known:
        return
    raise TypeError(
        "process_group must be a torch.distributed.ProcessGroup or None for all ranks, got "
        f"{value!r} of type {type(value).__name__}: pass what new_group returned"
    )


_NEAR_S, _FAST_BIT_S, _NEAR_BYTES = 2e-3, 2e8, 32 << 20
_LARGEST_BYTES, _SMALLEST_BYTES = 4 << 20, 64 << 10
_WHOLE_BYTES, _OF_STREAM_BYTES = 512 << 10, 128 << 10
_BYTES_PER_S = 32 << 10


_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""Name of torch's function, and that before torch 2.13."""
