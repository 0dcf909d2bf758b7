"""The ranks that exchange, as one object that also works alone."""

import contextlib
import datetime
import hashlib
import logging
import os
import struct
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.failures import explain_failure, state_after_failure
from thinwire.comm.private import Private, forget, hold, is_alone, private_group, timeout_s_of
from thinwire.comm.proofs import Proofs, unproven
from thinwire.comm.waiting import (
    here,
    left_s,
    one_deadline,
    progressed,
    seconds_of,
    waited,
    whole_s,
)
from thinwire.errors import PayloadCorrupt, ThinwireError

__all__ = [
    "Group",
    "Pending",
    "Rate",
    "Regrouped",
    "collective_calls",
    "piece_bytes",
    "pieces_of",
    "require_process_group",
    "rows_of",
    "time_limit_s",
    "used_by_a_thread",
]

_SLICE_S = 1.0
"""After which a wait looks at the clock, and lets a signal in."""
_NEWS_S = 10.0
_ALONE_S = 1800.0
_LONGEST_BYTES = 64 << 20
_log = logging.getLogger("thinwire")
_HEAD = struct.Struct("<Q8s8s")
"""Length of a message, its digest, and the digest of what ranks of all parts must say alike."""
_T = TypeVar("_T")


class Regrouped(Exception):
    """The ranks are others than when this exchange began: make it again, from what was agreed on
    last.

    Never leaves the library.
    """


@dataclass(slots=True)
class Pending(Generic[_T]):
    """Something launched on the wire; `wait` blocks until it is there, and may be called once."""

    _finish: Callable[[], _T]

    def wait(self) -> _T:
        """The result, or a `thinwire.errors` error that says which exchange failed and why."""
        return self._finish()


class Group:
    """The ranks that exchange with each other; one process without a process group is a group of
    one.

    A private process group carries the library's traffic, one for each group of the user, so that
    collectives of the user cannot interleave with it.

    Args:
        process_group: The ranks; None for all of them.
        timeout: For how long a rank waits for others, in seconds or as a timedelta; None: as long
            as `process_group` itself would. The same on all ranks. What is larger than a few MiB
            goes in pieces, each of which has this time for itself.

    Raises:
        TypeError, ValueError: `process_group` or `timeout` is none, or this rank does not belong to
            the group.
        PeerLost, PeerStalled: A rank died or did not come while the private group was made.

    Warns:
        UserWarning: A launcher has started several ranks, and there is no process group.

    Communication: making the first one over given ranks is collective over them. `bytes_sent`
    counts every byte given to an exchange, on one rank too; `bytes_received` what came from others,
    the result of a sum as a whole; `wait_s` the seconds for which this rank was blocked until an
    exchange was over.
    Failure: a dead rank is `PeerLost` on the others, a stopped one `PeerStalled` within a second
    after the time-out. After that nothing goes over these ranks any more.
    """

    on_the_wire: ClassVar[float] = 0.0
    """Bytes that all groups of this process have put on the wire, agreements included, without what
    TCP and IP add. By the algorithms of gloo and NCCL for large messages: a gathered one goes W-1
    times, where `bytes_sent` counts it once, a rank's part of an all-reduce 2(W-1)/W times."""
    rank, size = 0, 1
    stays = True
    """Whether its ranks stay the same; members come and go."""
    node_size = 1
    """Ranks that count as one: every rank is a source of its own here; see `Nodes`."""
    shards: "Group | None" = None
    """Of all ranks of sites that hold sharded models: those of this rank's site; see `Sites`."""
    replicas: "Group | None" = None
    """Of all ranks, where they hold different parts of a model: those that hold the same one as
    this rank."""
    parts: Sequence[int] = ()
    """Likewise: by rank the number of its part, a shard or a stage; empty where all hold the whole
    model."""
    proofs: Proofs | None = None
    """Of messages that the caller of `all_gather` and `all_to_all` exchanges; see `prove`."""
    _agreement_proofs: Proofs | None = None
    _asks_ahead_s = 0.0
    """How long before a time-out it asks whether ranks that are missing are busy."""
    _shared: Private | None

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | datetime.timedelta | None = None,
    ) -> None:
        self._begin(time_limit_s(process_group, timeout))
        if is_alone():
            if process_group is not None:
                raise ValueError(
                    "process_group was given but torch.distributed is not initialized: call "
                    "init_process_group first"
                )
            _warn_unless_alone()
            return
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                "process_group does not contain this rank: pass the group that this rank belongs to"
            )
        parent = process_group if process_group is not None else dist.group.WORLD
        assert parent is not None
        if self.size > 1:
            self._shared = private_group(parent, self.timeout_s)

    @classmethod
    def alone(cls, timeout_s: float) -> "Group":
        """A group of this rank and nobody else, whatever process groups there are."""
        group = cls.__new__(cls)
        group._begin(timeout_s)
        return group

    @classmethod
    def over_private(cls, private: Private, timeout_s: float) -> "Group":
        """A group over a process group that is the library's own already."""
        assert private.group is not None, "made just now"
        group = cls.__new__(cls)
        group._begin(timeout_s)
        group.rank, group.size = dist.get_rank(private.group), dist.get_world_size(private.group)
        group._shared = private
        return group

    def _begin(self, timeout_s: float) -> None:
        """One rank that has exchanged nothing yet."""
        self.timeout_s = timeout_s
        self.bytes_sent = self.bytes_received = 0
        self.wait_s = 0.0
        self._rate = Rate()
        self._shared = None

    def prove(self, key: bytes) -> None:
        """From here on let every agreement carry a proof made with `key`, and offer `proofs` to
        those who exchange messages.

        Args:
            key: For these ranks and this group alone; see `Proofs`.

        Communication: none; all ranks call it at the same place. 16 bytes more in each agreement.
        """
        self.proofs = Proofs(key, "messages", self.rank)
        self._agreement_proofs = Proofs(key, "agreements", self.rank)

    def one_deadline(self) -> AbstractContextManager[None]:
        """See `waiting.one_deadline`, with this group's time-out."""
        return one_deadline(self.timeout_s)

    def one_attempt(self) -> AbstractContextManager[None]:
        """Around an exchange and the agreement about it, which belong together: where ranks come
        and go, both are made again.

        Raises:
            Regrouped: The ranks are others than when the block began, or than when something that
                is waited for in it was launched. Never by a group that stays the same.
        """
        return nullcontext()

    @property
    def replica_count(self) -> int:
        """How many hold a whole model: the ranks, or the sites of sharded models."""
        return self.size if self.replicas is None else self.replicas.size

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, what is sent is not counted in `bytes_sent`."""
        groups = [group for group in (self, self.shards, self.replicas) if group is not None]
        sent = [group.bytes_sent for group in groups]
        yield
        for group, before in zip(groups, sent, strict=True):
            group.bytes_sent = before

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of this group as the whole job counts them, in the order of the group."""
        return dist.get_process_group_ranks(self._private) if self.size > 1 else [0]

    @property
    def _private(self) -> dist.ProcessGroup:
        shared = self._shared
        if shared is None or shared.group is None:  # never go on over the user's own group
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
            raise ThinwireError(
                "an exchange was left half-way, so ranks are at different places "
                f"({shared.abandoned}): start again from the last checkpoint"
            )
        return shared.group

    @property
    def rate_bit_s(self) -> float:
        """Moving mean of what this rank's line has carried, in bits a second; see `Rate`."""
        return self._rate.bit_s

    def abandon(self, reason: str) -> None:
        """Refuse all further traffic over these ranks: it would meet what is on its way."""
        if self._shared is not None:
            self._shared.abandoned = reason

    @property
    def place(self) -> int:
        """Of this rank's own answer among those that it has heard last."""
        return self.rank

    @property
    def device(self) -> torch.device:
        """Where small control tensors must lie for this group's backend."""
        if self.size > 1 and dist.get_backend(self._private) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def all_gather(self, message: Tensor, *, what: str) -> Pending[Tensor]:
        """Launch an all-gather of equally long byte strings, uint8 of one dimension, which must
        stay untouched until `wait`; row r of the result is from rank r. `what` is the exchange in
        plain words.
        """
        return self._gather(message, what, control=False)

    def _gather(self, message: Tensor, what: str, *, control: bool) -> Pending[Tensor]:
        """As `all_gather`; `control` messages go beside the data and meet their kind only."""
        self.bytes_sent += message.numel()
        self.bytes_received += (self.size - 1) * message.numel()
        if self.size == 1:
            return Pending(lambda: message.unsqueeze(0))
        out = message.new_empty(self.size * message.numel())
        rows, limit = out.view(self.size, -1), piece_bytes(self.timeout_s)
        if message.numel() <= limit:
            # the newer name comes with 2.13
            launch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            launches = [partial(launch, out, message)]
        else:
            launches = [
                partial(dist.all_gather, to, piece) for to, piece in rows_of(rows, message, limit)
            ]
        held, wire = [out, message], (self.size - 1) * message.numel()
        return self._launched(
            launches, lambda: rows, what, held, wire_bytes=wire, rated=not control, control=control
        )

    def all_to_all(self, parts: Tensor, lengths: Sequence[int], *, what: str) -> Pending[Tensor]:
        """Launch an exchange in which every rank gives every rank a byte string of its own.

        Args:
            parts: uint8, one dimension: the strings for rank 0, 1, ..., end to end; untouched until
                `wait`.
            lengths: Of the strings by receiver, in bytes, the same on every rank.
            what: The exchange in plain words, for errors.

        Returns:
            Pending uint8 tensor of shape (size, lengths[rank]), row r from rank r.
        """
        swapped = self.swap(parts, [lengths] * self.size, what=what)
        return Pending(lambda: swapped.wait().view(self.size, -1))

    def swap(
        self, parts: Tensor, lengths: Sequence[Sequence[int]], *, what: str
    ) -> Pending[Tensor]:
        """As `all_to_all`, of strings whose lengths differ by sender too.

        Args:
            parts: As there; on any device, which gloo is given a copy of.
            lengths: By sender and then by receiver, in bytes, the same on every rank.
            what: The exchange in plain words, for errors.

        Returns:
            Pending uint8 tensor of one dimension: the strings from rank 0, 1, ..., one after the
            other.
        """
        given, taken = lengths[self.rank], [row[self.rank] for row in lengths]
        mine = given[self.rank]
        self.bytes_sent += parts.numel() - mine
        self.bytes_received += sum(taken) - mine
        if self.size == 1:
            return Pending(lambda: parts)
        device = parts.device
        parts = parts.to(self._carrier(device))
        width = max(piece_bytes(self.timeout_s) // self.size, 1)
        begins = range(0, max(1, *map(max, lengths)), width)
        rounds = list(zip(_cut(given, begins, width), _cut(taken, begins, width), strict=True))
        pieces = [parts]
        if len(rounds) > 1:
            strings = torch.split(parts, list(given))
            pieces = [torch.cat([each[at : at + width] for each in strings]) for at in begins]
        outs = [parts.new_empty(sum(came)) for _, came in rounds]
        launches = [
            partial(dist.all_to_all_single, out, piece, came, gone)
            for out, piece, (gone, came) in zip(outs, pieces, rounds, strict=True)
        ]

        def joined() -> Tensor:
            if len(outs) == 1:
                return outs[0].to(device)
            split = [torch.split(out, came) for out, (_, came) in zip(outs, rounds, strict=True)]
            strings = [piece for each in zip(*split, strict=True) for piece in each]
            return torch.cat(strings).to(device)

        return self._launched(
            launches, joined, what, [*outs, *pieces], wire_bytes=parts.numel() - mine
        )

    def _carrier(self, device: torch.device) -> torch.device:
        """Where strings from a device must lie for this group's backend."""
        if device == self.device:
            return device
        try:
            backend = self._private._get_backend(device)
        except RuntimeError:  # such as NCCL, which takes nothing from a CPU
            return self.device
        return torch.device("cpu") if backend.name() == "gloo" else device

    def all_reduce_(self, buffer: Tensor, *, what: str) -> Pending[Tensor]:
        """Launch an all-reduce that overwrites `buffer` with its sum over the ranks, bit-identical
        on all of them.
        """
        self.bytes_sent += buffer.nbytes
        if self.size == 1:
            return Pending(lambda: buffer)
        self.bytes_received += buffer.nbytes
        pieces = pieces_of(buffer, piece_bytes(self.timeout_s))
        launches = [partial(dist.all_reduce, piece) for piece in pieces]
        share = 2 * (self.size - 1) / self.size * buffer.nbytes
        return self._launched(launches, lambda: buffer, what, [buffer], wire_bytes=share)

    def broadcast_(self, buffer: Tensor, *, what: str, source: int = 0) -> Pending[Tensor]:
        """Launch a broadcast of rank `source`'s `buffer`, whose bytes are counted there."""
        if self.size == 1:
            return Pending(lambda: buffer)
        self.bytes_sent += buffer.nbytes if self.rank == source else 0
        self.bytes_received += 0 if self.rank == source else buffer.nbytes
        pieces = pieces_of(buffer, piece_bytes(self.timeout_s))
        launches = [partial(dist.broadcast, piece, group_src=source) for piece in pieces]
        share = (self.size - 1) / self.size * buffer.nbytes  # the mean over the ranks
        return self._launched(
            launches, lambda: buffer, what, [buffer], wire_bytes=share, rated=False
        )

    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Every rank's byte string, of any lengths, in rank order.

        One round of 24 bytes where all ranks say the same, which is what they do in a healthy step;
        a second one, padded to the longest, where they differ.

        Raises:
            PayloadCorrupt: A rank claims more than 64 MiB and 16 times what the shortest one sends,
                on every rank; or what came from a rank is not what it sent, on the rank that sees
                it.
        """
        return [answer or b"" for answer in self._gathered(payload, payload, (), what)]

    def gather_parts(self, payload: bytes, common: bytes, *, what: str) -> list[bytes | None]:
        """As `gather_bytes`, of ranks that hold different parts of a model, see `parts`.

        Where the ranks of each part say the same, and all the same `common`, such as the step,
        there is no second round: None stands for what ranks of other parts have said.
        """
        if not self.stays or not self.parts:
            return list(self.gather_bytes(payload, what=what))
        return self._gathered(payload, common, self.parts, what)

    def _gathered(
        self, payload: bytes, common: bytes, parts: Sequence[int], what: str
    ) -> list[bytes | None]:
        mine = _head(payload, common)
        heads = self.gather_now(mine, what)
        if all(head == mine for head in heads):
            return [payload] * self.size
        told = [_HEAD.unpack(head) for head in heads]
        each_alike = len(set(zip(parts, told, strict=False))) == len(set(parts))
        if parts and each_alike and len({agreed for *_, agreed in told}) == 1:
            return [payload if part == parts[self.rank] else None for part in parts]
        lengths = [length for length, *_ in told]
        bound = _LONGEST_BYTES + 16 * min(lengths)
        for rank, length in enumerate(lengths):
            if length > bound:
                raise PayloadCorrupt(
                    f"{what}: rank {rank} claims to send {length} bytes, and at most {bound} can "
                    f"be right beside {min(lengths)} bytes of another rank: its message is "
                    f"damaged. {state_after_failure()}"
                )
        rows = self.gather_now(payload.ljust(max(lengths), b"\0"), what)
        answers = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        for rank, (answer, (_, digest, _)) in enumerate(zip(answers, told, strict=True)):
            if _digest(answer) != digest:
                damage = f"what came from rank {rank} was damaged on its way"
                raise PayloadCorrupt(f"{what}: {damage}. {state_after_failure()}")
        return list(answers)

    def gather_now(self, payload: bytes, what: str) -> list[bytes]:
        """As `gather_bytes`, of strings that are equally long on all ranks, in one round."""
        message = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        proofs = self._agreement_proofs
        number = 0 if proofs is None else proofs.next()
        if proofs is not None:
            message = proofs.added(message, number)
        rows = self._gather(message.to(self.device), what, control=True).wait().cpu()
        if proofs is not None:
            rows, wrong = proofs.checked(rows, number)
            if wrong:
                raise PayloadCorrupt(f"{unproven(what, wrong[0])}. {state_after_failure()}")
        return [row.numpy().tobytes() for row in rows]

    def _launched(
        self,
        launches: Sequence[Callable[..., dist.Work]],
        result: Callable[[], Tensor],
        what: str,
        held: Sequence[Tensor],
        *,
        wire_bytes: float,
        rated: bool = True,
        control: bool = False,
    ) -> Pending[Tensor]:
        """Launch all pieces; `held` stays until they end, `wire_bytes` is for the rate."""
        group, launched_s = self._private, time.perf_counter()
        Group.on_the_wire += wire_bytes
        if control and self._shared is not None:
            group = self._shared.control
        works = []
        for launch in launches:
            try:
                work = launch(group=group, async_op=True)
            except RuntimeError as error:
                raise self._explained(error, what, self.timeout_s) from error
            hold(group, work, held)
            works.append(work)

        def finish() -> Tensor:
            here(what, waiting=True)
            begin_s = time.perf_counter()
            try:
                self._wait_for_all(works, what, sum(tensor.nbytes for tensor in held))
                nbytes = wire_bytes if rated else 0.0
                self._rate.ended(nbytes, launched_s, begin_s, time.perf_counter())
            finally:
                self.wait_s += time.perf_counter() - begin_s
                here(what, waiting=False)
            return result()

        return Pending(finish)

    def _wait_for_all(self, works: Sequence[dist.Work], what: str, nbytes: int) -> None:
        begun = told = time.monotonic()
        for done, work in enumerate(works):
            self._wait_for(work, what)
            if len(works) == 1:
                return
            progressed()
            now = time.monotonic()
            if now - told >= _NEWS_S:
                told, share = now, (done + 1) / len(works)
                left = (now - begun) * (1 - share) / share
                rate = nbytes * share / (now - begun) / 1e6
                _log.info(
                    "%s: %.0f %% done, %.2f MB/s, about %.0f s left", what, 100 * share, rate, left
                )

    def _wait_for(self, work: dist.Work, what: str) -> None:
        assert self._shared is not None, "something was launched"
        limit_s, begun, ended = left_s(self.timeout_s), time.monotonic(), False
        longer = denied = False
        while True:
            until_s = limit_s if denied else limit_s - self._asks_ahead_s
            try:
                if self._shared.watched_here:
                    left = until_s - (time.monotonic() - begun)
                    work.wait(datetime.timedelta(seconds=max(min(left, _SLICE_S), 0.001)))
                else:
                    work.wait()
                forget(work)
                if longer:
                    progressed()
                else:
                    waited(time.monotonic() - begun)
                return
            except RuntimeError as error:
                if work.is_completed():
                    forget(work)
                    if not ended:  # perhaps it did so just now, and well
                        ended = True
                        continue
                elif time.monotonic() - begun < until_s:
                    continue
                elif not denied:
                    more_s = self._more_s()
                    waited_s = time.monotonic() - begun
                    if more_s > 0:
                        longer, limit_s = True, max(limit_s, waited_s + more_s)
                        continue
                    denied = True
                    if waited_s < limit_s:
                        continue
                raise self._explained(error, what, limit_s) from error

    def _more_s(self) -> float:
        courier = None if self._shared is None else self._shared.courier
        return 0.0 if courier is None else courier.more_s(whole_s(self.timeout_s))

    def _explained(self, error: RuntimeError, what: str, limit_s: float) -> ThinwireError:
        if isinstance(error, ThinwireError):
            return error
        assert self._shared is not None, "something was launched"
        whole = whole_s(self.timeout_s)
        within = f"{whole:g} s"
        if limit_s > 1.01 * whole:
            within += " after a rank was last known to be busy"
        elif limit_s < 0.99 * whole:
            within = f"the {limit_s:.1f} s that were left of {within} for the whole call"
        courier, place = self._shared.courier, {"rank": self.rank, "size": self.size}
        told = explain_failure(error, what=what, within=within, courier=courier, **place)
        self.abandon(str(told))
        return told


def _head(payload: bytes, common: bytes) -> bytes:
    return _HEAD.pack(len(payload), _digest(payload), _digest(common))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def time_limit_s(
    process_group: dist.ProcessGroup | None, timeout: float | datetime.timedelta | None
) -> float:
    """For how long a rank waits for others in one call: `timeout`, or what the process group says
    itself.

    Raises:
        TypeError, ValueError: `process_group` or `timeout` is none.
    """
    require_process_group(process_group)
    own_s = seconds_of(timeout)
    if own_s is not None:
        return own_s
    parent = None if is_alone() else process_group or dist.group.WORLD
    return timeout_s_of(parent) if isinstance(parent, dist.ProcessGroup) else _ALONE_S


_of_threads: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def used_by_a_thread(private: Private) -> None:
    """Leave these groups out of `collective_calls`, since another thread uses them."""
    _of_threads.update(each for each in (private.group, private.control) if each is not None)


def collective_calls() -> int:
    """Number of collective calls of this process over its groups of gloo and NCCL, whoever made
    them, without those of other threads of this library.
    """
    calls = 0
    for group in dist.distributed_c10d._world.pg_map:
        if group in _of_threads:
            continue
        for backend in map(group._get_backend, group._device_types):
            if backend.name() in ("gloo", "nccl"):
                # torch's backends have it, their stub not
                calls += backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return calls


def require_process_group(value: object) -> None:
    """Raise `TypeError` unless `value` is None, for all ranks, or a process group."""
    if value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        return
    if dist.is_available() and value is dist.GroupMember.NON_GROUP_MEMBER:
        return  # the ranks of the group check it
    raise TypeError(
        "process_group must be a torch.distributed.ProcessGroup or None for all ranks, got "
        f"{value!r} of type {type(value).__name__}: pass what new_group returned"
    )


def _warn_unless_alone() -> None:
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is not None and size.isdigit() and int(size) > 1:
        warnings.warn(
            f"this is rank {rank} of {size} by RANK and WORLD_SIZE, and there is no process group, "
            "so that each rank trains for itself: call "
            'torch.distributed.init_process_group("gloo") first. To train alone, take WORLD_SIZE '
            "out of the environment",
            UserWarning,
            stacklevel=4,
        )


_LEAST_BYTES, _SEEN_S = 2**16, 1e-4
_KEPT = 0.95
"""Of the mean so far at each exchange: it is that of about the last 20."""


class Rate:
    """A moving mean of the payload that this rank sends while an exchange is under way.

    Only exchanges of 64 KiB and more whose end this rank was blocked for count; waiting for ranks
    that come late is in it.
    """

    def __init__(self) -> None:
        self._bytes = self._s = self._until_s = 0.0

    @property
    def bit_s(self) -> float:
        """Bits in a second; 0 before the first exchange that counts."""
        return 8 * self._bytes / self._s if self._s else 0.0

    def ended(self, nbytes: float, launched_s: float, waits_s: float, now_s: float) -> None:
        """Count an exchange of `nbytes`: when it was launched, first waited for, and over."""
        if nbytes < _LEAST_BYTES or now_s - waits_s < _SEEN_S:
            return
        seconds = now_s - max(launched_s, self._until_s)
        self._until_s = now_s
        self._bytes = _KEPT * self._bytes + nbytes
        self._s = _KEPT * self._s + seconds


_LARGEST_BYTES, _SMALLEST_BYTES = 4 << 20, 64 << 10
_BYTES_PER_S = 32 << 10


def piece_bytes(timeout_s: float) -> int:
    """The largest piece, in bytes: one that a line of 0.5 Mbit/s carries within the time-out, two
    being on their way.

    The time-out must be the same on all ranks. Larger pieces than 4 MiB gain nothing on a fast
    line.
    """
    wanted = int(min(timeout_s, 1e6)) * _BYTES_PER_S
    return min(max(wanted, _SMALLEST_BYTES), _LARGEST_BYTES)


def pieces_of(buffer: Tensor, limit_bytes: int) -> Sequence[Tensor]:
    """Views of `buffer`, one after the other; itself where it is small or not contiguous."""
    if buffer.nbytes <= limit_bytes or not buffer.is_contiguous():
        return [buffer]
    return torch.split(buffer.view(-1), limit_bytes // buffer.element_size())


def rows_of(
    out: Tensor, message: Tensor, limit_bytes: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """For every piece of `message`, where it goes in the rows of `out` and the piece itself."""
    for at in range(0, message.numel(), limit_bytes):
        yield [row[at : at + limit_bytes] for row in out], message[at : at + limit_bytes]


def _cut(lengths: Sequence[int], begins: Sequence[int], width: int) -> list[list[int]]:
    """Round by round, how much of each string goes in it."""
    return [[min(max(each - at, 0), width) for each in lengths] for at in begins]
