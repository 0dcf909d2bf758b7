"""Process groups of the library: made in limited time, shared, freed at exit without blocking."""

import atexit
import contextlib
import copy
import ctypes
import datetime
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

from thinwire._watchdog import Late, within
from thinwire._wording import warn_user
from thinwire.comm.elastic import NEVER_S, backends_of, gloo_group, group_like, limit_waits
from thinwire.comm.failures import HeartbeatThread, explain_failure, stop_all
from thinwire.comm.waiting import launches, left_s, one_deadline, waited
from thinwire.errors import ThinwireError

_T = TypeVar("_T")
_Pending = tuple[ProcessGroup, dist.Work, Sequence[Tensor]]


_EXIT_PATIENCE_S = 0.5
_SMALL_BYTES = 64 << 10
_SLACK_S = 1.6
"""Slack for waits at the store, which end up to a second late."""
_RESTART_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Private:
    """A process group with its heartbeat thread, shared by all users of the same ranks."""

    # `control` is separate from the data: a rank that makes another call then meets the others in
    # an agreement, never in a message of another length, for which gloo aborts the process. It is
    # gloo whatever the job has, and so are data between sites (`gloo`). torch's registry does not
    # have these groups: they end with their last reference

    def __init__(
        self,
        parent: ProcessGroup,
        timeout_s: float,
        ranks: list[int],
        name: str,
        *,
        gloo: bool = False,
        timed: bool = False,
    ) -> None:
        self.ranks = ranks
        self.parent: Callable[[], ProcessGroup | None] | None = weakref.ref(parent)
        self._here = ranks.index(dist.get_rank()), len(ranks)
        self.name = f"thinwire/{parent.group_name}/{name}"
        """The same on its ranks, whatever other groups they have made."""
        self.launched = launches[self.name] = [0, 0]
        self._store = PrefixStore(self.name, parent.get_group_store())
        self.more: list[ProcessGroup] = []
        """Further groups for data, of `add_streams`."""
        self.most_streams = 0
        """Most groups for data that all ranks can open; 0 until they have agreed on it."""
        self.abandoned: tuple[type[ThinwireError], str] | None = None
        self.heartbeats: HeartbeatThread | None = None
        self.round_trip_s = math.inf
        """Shortest time of a control message to all ranks and back."""
        data = self._gloo("data", timeout_s) if gloo else self._like(parent, timeout_s)
        self.group: ProcessGroup | None = data
        """None after `release`."""
        found = backends_of(data)
        self.from_host = "cpu" in found
        """True if data travels from the host's memory."""
        backends = {k: one for k, one in found.items() if one.name() == "gloo"}
        self.watched = "cpu" in backends and not timed
        """True if data travels by gloo, from the host's memory."""
        self.control = data if timed else self._gloo("control", timeout_s)
        for backend in backends.values():
            # set afterwards: the same value limits the construction, by the rest of a deadline
            limit_waits(backend, timeout_s if timed else NEVER_S)
        if not timed:
            self.heartbeats = HeartbeatThread(self._store, *self._here, timeout_s)
            weakref.finalize(self, self.heartbeats.stop).atexit = False
        released_at_exit(self)

    def _gloo(self, name: str, timeout_s: float) -> ProcessGroup:
        store = PrefixStore(name, self._store)
        return self._limited(timeout_s, partial(gloo_group, store, *self._here))

    def _like(self, parent: ProcessGroup, timeout_s: float) -> ProcessGroup:
        """Return a group with the backend of the parent."""
        make = partial(group_like, parent, self.ranks, self._here[0], self._store, self.name)
        own = "cpu" in backends_of(parent)  # nccl stays on the thread of its device
        return self._limited(timeout_s, make, own_thread=own)

    def _limited(
        self,
        timeout_s: float,
        make: Callable[[float], ProcessGroup],
        *,
        own_thread: bool = True,
    ) -> ProcessGroup:
        """Return the group of `make`, which gets the time left."""
        limit_s = max(left_s(timeout_s), 0.1)
        begun = time.monotonic()
        try:
            # a store whose host is stopped never answers, whatever its time-out
            return made_within(limit_s, partial(make, limit_s)) if own_thread else make(limit_s)
        except RuntimeError as error:
            within = f"{limit_s:g} s"
            rank, size = self._here
            raise explain_failure(
                error, action="making a process group", rank=rank, size=size, within=within
            ) from error.__context__
        finally:
            waited(time.monotonic() - begun)

    def detached(self, timeout_s: float) -> "Private":
        """Return a gloo group over the same ranks, for the agreements of one other thread."""
        new = copy.copy(self)
        parent = self.group
        assert parent is not None, "an exchange has just succeeded"
        new.group = new.control = self._gloo(f"detached/{next_identity(parent)}", timeout_s)
        new.name = ""
        new.launched = [0, 0]  # heartbeats tell what the other threads wait for
        new.more = []
        new.abandoned = None
        new.watched = True
        new.parent = None
        released_at_exit(new)
        return new

    def add_streams(self, count: int, timeout_s: float) -> None:
        """Make further groups for data, up to `count`, on all ranks."""
        for number in range(len(self.more), count):
            self.more.append(self._gloo(f"stream/{number}", timeout_s))

    def disconnect(self) -> None:
        """Close the connections of gloo, which ends every wait for this rank at once."""
        if self.group is None or self.heartbeats is None:
            return
        others = set(range(len(self.ranks))) - {self._here[0]}
        groups = [self.control, *self.more, *([self.group] if self.watched else [])]
        for group, peer in product(groups, others):
            # gloo closes all connections of a group when a receive of it runs out
            with contextlib.suppress(RuntimeError):
                work = group.recv([torch.empty(1, device="cpu")], peer, tag=1)
                work.wait(datetime.timedelta(milliseconds=1))

    @property
    def lives(self) -> bool:
        """True until `destroy_process_group` is called for its parent or for the world."""
        try:
            parent = None if self.parent is None else self.parent()
            return self.parent is None or (parent is not None and bool(dist.get_backend(parent)))
        except (ValueError, AssertionError):
            return False

    def release(self) -> None:
        """Drop the groups, which joins their threads, unless one of these may be blocked."""
        if self.group is None:
            return
        groups = dict.fromkeys([self.group, self.control])
        self.group = None
        del self.control
        self.more.clear()  # they end with their last reference, those in flight too
        for group in groups:
            stuck = any(pending[0] is group for pending in _pending.values())
            if not stuck and dist.is_initialized():
                # it belongs to a world that was destroyed
                with contextlib.suppress(ValueError, AssertionError):
                    dist.destroy_process_group(group)


_made: list[weakref.ref[Any]] = []
_shared: "weakref.WeakKeyDictionary[ProcessGroup, dict[str, Private]]" = weakref.WeakKeyDictionary()
_pending: dict[int, _Pending] = {}


def private_group(
    parent: ProcessGroup, name: str, timeout_s: float, ranks: list[int], **how: bool
) -> Private:
    """Return the library's own group of this name over ranks of `parent`, made once."""
    made = _shared.setdefault(parent, {})
    if name not in made:
        warn_of_restarts()
        with one_deadline(timeout_s):
            made[name] = Private(parent, timeout_s, ranks, name, **how)
    return made[name]


def released_at_exit(groups: Any) -> None:
    """Register groups for `_release_all`, which frees them before the interpreter ends."""
    _made[:] = [made for made in _made if made() is not None]
    _made.append(weakref.ref(groups))


def keep_alive(group: ProcessGroup, work: dist.Work, tensors: Sequence[Tensor]) -> None:
    """Keep an exchange in flight: its group and its tensors must live until it ends."""
    if len(_pending) > 1000:
        forget_ended()
    _pending[id(work)] = group, work, tensors


def forget_ended(patience_s: float = 0.0) -> None:
    """Drop all exchanges that have ended, so that no group of an earlier membership is kept."""
    until = time.monotonic() + patience_s
    while True:
        for key, (_, work, _) in list(_pending.items()):
            if work.is_completed():
                _pending.pop(key, None)
        if not _pending or time.monotonic() >= until:
            return
        time.sleep(0.01)


def forget(work: dist.Work) -> None:
    """Drop an exchange kept by `keep_alive`, which has ended, with or without success."""
    _pending.pop(id(work), None)


def in_flight(groups: Sequence[ProcessGroup | None]) -> bool:
    """Return True while a large exchange of one of these groups is kept and has not ended."""
    return any(
        owner in groups and sum(t.nbytes for t in held) > _SMALL_BYTES and not work.is_completed()
        for owner, work, held in list(_pending.values())
    )


@cache
def warn_of_restarts() -> None:
    """Warn once, on rank 0, if torchrun may restart this job and the restart is likely to fail."""
    # Source: pytorch issue 135712: workers that start again meet keys of the last start
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    first = os.environ.get("RANK") == "0"
    if first and restarts.isdigit() and int(restarts) > 0 and shared == "True":
        warn_user(
            f"torchrun --max-restarts={restarts} fails in init_process_group on most restarts with "
            f"torch 2.13 (pytorch issue 135712): set {_RESTART_VARIABLE}=1 in the environment of "
            "torchrun, on every machine"
        )


def made_within(limit_s: float, make: Callable[[], _T]) -> _T:
    """Return the result of `make`, which waits for other ranks for `limit_s` seconds by itself."""
    try:
        return within(limit_s + _SLACK_S, make, name="thinwire-connect")
    except Late:
        raise RuntimeError("Timed out: another rank, or the store, does not answer") from None


@atexit.register
def _release_all() -> None:
    """Free all groups, the latest first, which joins their threads."""
    # a backend thread that frees a tensor while the interpreter is finalizing aborts the process:
    # exchanges in flight are never freed
    stop_all()
    forget_ended(_EXIT_PATIENCE_S)
    for pending in _pending.values():  # leaked on purpose
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pending))
    for private in [made() for made in reversed(_made)]:
        if private is not None:
            private.release()


_numbered: "weakref.WeakKeyDictionary[ProcessGroup, int]" = weakref.WeakKeyDictionary()


def is_alone() -> bool:
    """Return True if this process has no process group, so that no other rank waits for it."""
    return not dist.is_initialized()


def next_identity(process_group: ProcessGroup | None = None) -> int:
    """Return the number, from 1, of the next object that these ranks (None: all) make."""
    parent = process_group or dist.group.WORLD
    if not isinstance(parent, ProcessGroup):
        return 0
    _numbered[parent] = _numbered.get(parent, 0) + 1
    return _numbered[parent]


def rank_and_size_in(process_group: ProcessGroup | None = None) -> tuple[int, int]:
    """Return this rank's index among these ranks and their number; (0, 1) without a group."""
    if is_alone():
        return 0, 1
    return max(dist.get_rank(process_group), 0), max(dist.get_world_size(process_group), 1)
