"""The ranks that exchange, as one object that also works alone."""

import atexit
import contextlib
import datetime
import hashlib
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.failures import explain_failure
from thinwire.errors import PayloadCorrupt, ThinwireError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["DEFAULT_TIMEOUT_S", "Group", "Pending", "new_group", "require_process_group"]

DEFAULT_TIMEOUT_S = 120.0
_DIGEST = struct.Struct("<Q16s")
_T = TypeVar("_T")


@dataclass(slots=True)
class Pending(Generic[_T]):
    """Something launched on the wire; `wait` blocks until it is there, and may be called once."""

    _finish: Callable[[], _T]

    def wait(self) -> _T:
        """The result, or a `thinwire.errors` error that says which exchange failed and why."""
        return self._finish()


class Group:
    """The ranks that exchange with each other; one process without a process group is a group of one.

    A private process group carries the library's traffic, one for each group of the user, so that collectives of the
    user cannot interleave with it; its time-out is the smaller of the given group's own and 120 s.

    Communication: making the first one over given ranks is collective over them. `bytes_sent` counts every byte given
    to an exchange, on one rank too; `bytes_received` what came from others, the result of a sum as a whole; `wait_s`
    the seconds for which this rank was blocked until an exchange was over.
    Failure: a dead or stopped rank is `PeerLost` or `PeerStalled` on the others, within the time-out.
    """

    node_size = 1
    """Ranks that count as one: every rank is a source of its own here; see `Nodes`."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        require_process_group(process_group)
        self.bytes_sent = self.bytes_received = 0
        self.wait_s = 0.0
        self.timeout_s = DEFAULT_TIMEOUT_S
        self._holder: list[dist.ProcessGroup] = []
        self._store: Store | None = None
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise ValueError(
                    "process_group was given but torch.distributed is not initialized: call init_process_group first"
                )
            self.rank, self.size = 0, 1
            return
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("process_group does not contain this rank: pass the group that this rank belongs to")
        if self.size > 1:
            parent = process_group if process_group is not None else dist.group.WORLD
            assert parent is not None
            self.timeout_s = min(_timeout_s(parent), DEFAULT_TIMEOUT_S)
            self._holder = _private_group(parent, self.timeout_s)
            self._store = _store_of(self._holder[0])

    @classmethod
    def over_private(cls, holder: list[dist.ProcessGroup], timeout_s: float) -> "Group":
        """A group over a process group that is the library's own already, in a list that is emptied at exit."""
        group = cls.__new__(cls)
        group.bytes_sent = group.bytes_received = 0
        group.wait_s = 0.0
        group.timeout_s = timeout_s
        group.rank, group.size = dist.get_rank(holder[0]), dist.get_world_size(holder[0])
        group._holder = holder
        group._store = _store_of(holder[0])
        return group

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of this group as the whole job counts them, in the order of the group."""
        return dist.get_process_group_ranks(self._private) if self.size > 1 else [0]

    @property
    def _private(self) -> dist.ProcessGroup:
        if not self._holder:  # never go on alone, nor over the user's own group
            raise ThinwireError("the library's process group has been released: nothing can be exchanged at exit")
        if not _lives(self._holder[0]):
            raise ThinwireError(
                "the process group was destroyed, so nothing can be exchanged over it: call destroy_process_group "
                "after the last step, save and flush; after a new init_process_group make a new engine or optimizer"
            )
        if self._holder[0] in _abandoned:
            raise ThinwireError(
                "an exchange was left half-way, so ranks are at different places "
                f"({_abandoned[self._holder[0]]}): start again from the last checkpoint"
            )
        return self._holder[0]

    def abandon(self, reason: str) -> None:
        """Refuse all further traffic of the library over these ranks: it would meet what is still on its way."""
        if self._holder:
            _abandoned[self._holder[0]] = reason

    @property
    def device(self) -> torch.device:
        """Where small control tensors must lie for this group's backend."""
        if self.size > 1 and dist.get_backend(self._private) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def gather(self, message: Tensor, *, what: str) -> Pending[Tensor]:
        """Launch an all-gather of equally long byte strings.

        Args:
            message: uint8, shape (B,), B the same on every rank; must stay untouched until `wait`.
            what: The exchange in plain words, for errors.

        Returns:
            Pending uint8 tensor of shape (size, B), row r from rank r.
        """
        self.bytes_sent += message.numel()
        self.bytes_received += (self.size - 1) * message.numel()
        if self.size == 1:
            return Pending(lambda: message.unsqueeze(0))
        out = message.new_empty(self.size * message.numel())
        launch = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # the newer name comes with 2.13
        return self._launched(
            lambda: launch(out, message, group=self._private, async_op=True), out.view(self.size, -1), what
        )

    def deal(self, parts: Tensor, lengths: Sequence[int], *, what: str) -> Pending[Tensor]:
        """Launch an exchange in which every rank gives every rank a byte string of its own.

        Args:
            parts: uint8, one dimension: the strings for rank 0, 1, ..., one after the other; must stay untouched until
                `wait`.
            lengths: Of the strings by receiver, in bytes, the same on every rank.
            what: The exchange in plain words, for errors.

        Returns:
            Pending uint8 tensor of shape (size, lengths[rank]), row r from rank r.
        """
        mine = lengths[self.rank]
        self.bytes_sent += parts.numel() - mine
        self.bytes_received += (self.size - 1) * mine
        if self.size == 1:
            return Pending(lambda: parts.unsqueeze(0))
        out = parts.new_empty(self.size * mine)
        return self._launched(
            lambda: dist.all_to_all_single(
                out, parts, [mine] * self.size, list(lengths), group=self._private, async_op=True
            ),
            out.view(self.size, -1),
            what,
        )

    def sum_(self, buffer: Tensor, *, what: str) -> Pending[Tensor]:
        """Launch an all-reduce that overwrites `buffer` with its sum over the ranks, bit-identical on all of them."""
        self.bytes_sent += buffer.numel() * buffer.element_size()
        if self.size == 1:
            return Pending(lambda: buffer)
        self.bytes_received += buffer.numel() * buffer.element_size()
        return self._launched(lambda: dist.all_reduce(buffer, group=self._private, async_op=True), buffer, what)

    def broadcast_(self, buffer: Tensor, *, what: str) -> Pending[Tensor]:
        """Launch a broadcast that overwrites `buffer` with that of rank 0, whose bytes are counted there."""
        if self.size == 1:
            return Pending(lambda: buffer)
        if self.rank == 0:
            self.bytes_sent += buffer.numel() * buffer.element_size()
        else:
            self.bytes_received += buffer.numel() * buffer.element_size()
        return self._launched(
            lambda: dist.broadcast(buffer, group=self._private, group_src=0, async_op=True), buffer, what
        )

    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Every rank's byte string, of any lengths, in rank order.

        One round of 24 bytes where all ranks say the same, which is what they do in a healthy step; a second one,
        padded to the longest, where they differ.
        """
        mine = _head(payload)
        heads = self._gather_now(mine, what)
        if all(head == mine for head in heads):
            return [payload] * self.size
        lengths = [_DIGEST.unpack(head)[0] for head in heads]
        rows = self._gather_now(payload.ljust(max(lengths), b"\0"), what)
        answers = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        for rank, (answer, head) in enumerate(zip(answers, heads, strict=True)):
            if _head(answer) != head:
                raise PayloadCorrupt(f"{what}: what came from rank {rank} was damaged on its way. Nothing was applied")
        return answers

    def _gather_now(self, payload: bytes, what: str) -> list[bytes]:
        message = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
        rows = self.gather(message, what=what).wait().cpu()
        return [row.numpy().tobytes() for row in rows]

    def _launched(self, launch: Callable[[], dist.Work], result: Tensor, what: str) -> Pending[Tensor]:
        work = self._guarded(launch, what)

        def finish() -> Tensor:
            begin_s = time.perf_counter()
            try:
                self._guarded(work.wait, what)
            finally:
                self.wait_s += time.perf_counter() - begin_s
            return result

        return Pending(finish)

    def _guarded(self, call: Callable[[], _T], what: str) -> _T:
        try:
            return call()
        except ThinwireError:
            raise
        except RuntimeError as error:
            raise explain_failure(
                error, what=what, rank=self.rank, size=self.size, timeout_s=self.timeout_s, store=self._store
            ) from error


def _head(payload: bytes) -> bytes:
    return _DIGEST.pack(len(payload), hashlib.blake2b(payload, digest_size=16).digest())


def require_process_group(value: object) -> None:
    """Raise `TypeError` unless `value` is None, for all ranks, or a process group of this rank's."""
    if value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        return
    if dist.is_available() and value is dist.GroupMember.NON_GROUP_MEMBER:
        return  # whoever joins the group says so
    raise TypeError(
        f"process_group must be a torch.distributed.ProcessGroup or None for all ranks, got {value!r} of type "
        f"{type(value).__name__}: pass what new_group returned"
    )


def new_group(ranks: list[int], timeout_s: float) -> dist.ProcessGroup:
    """A process group of the given global ranks, this one among them; collective over them.

    Raises:
        PeerLost, PeerStalled: One of the ranks died, or did not come within the time-out.
    """
    try:
        group: dist.ProcessGroup = dist.new_group(
            ranks=ranks, timeout=datetime.timedelta(seconds=timeout_s), use_local_synchronization=True
        )
    except RuntimeError as error:
        raise explain_failure(
            error,
            what="making a process group",
            rank=ranks.index(dist.get_rank()),
            size=len(ranks),
            timeout_s=timeout_s,
            store=None,
        ) from error
    return group


_abandoned: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()
_shared: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]]" = weakref.WeakKeyDictionary()


def _private_group(parent: dist.ProcessGroup, timeout_s: float) -> list[dist.ProcessGroup]:
    """The library's own group over the ranks of `parent`, made once for each, in a list that is emptied at exit."""
    if parent not in _shared:
        private = new_group(dist.get_process_group_ranks(parent), timeout_s)
        _shared[parent] = [private]
    return _shared[parent]


@atexit.register
def _release_all() -> None:
    """Let go of the private groups, which joins their threads.

    A thread of the backend that lets go of a tensor once the interpreter is finalizing aborts the process.
    """
    for holder in list(_shared.values()):
        if holder and dist.is_initialized():
            with contextlib.suppress(ValueError, AssertionError):  # it belongs to a world that was destroyed before
                dist.destroy_process_group(holder[0])
        holder.clear()


def _lives(group: dist.ProcessGroup) -> bool:
    """Whether nobody has called `destroy_process_group` for it or for the world."""
    try:
        dist.get_backend(group)
    except (ValueError, AssertionError):
        return False
    return True


def _store_of(group: dist.ProcessGroup) -> "Store | None":
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def _timeout_s(group: dist.ProcessGroup) -> float:
    """The time-out that the user gave to a group; torch offers no public way to ask."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else DEFAULT_TIMEOUT_S
