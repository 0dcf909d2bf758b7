"""Process groups over a store alone, without `init_process_group`, for ranks that come and go."""

import datetime
import json
import threading
import time
from collections.abc import Set
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import ProcessGroup

from thinwire.comm.failures import explain_failure
from thinwire.comm.private import made_within, released_at_exit
from thinwire.comm.sockets import Connection, Place, connections, listeners, shut_down

__all__ = ["Direct"]

_NEVER = datetime.timedelta(days=30)
_DEVICES_TRIED = 20
_listening = threading.Lock()


class Direct:
    """Process groups of ranks that met at a store; the counterpart of `Private` for members.

    Attributes:
        group: Process group of the data; None after `release`.
        control: Process group of the small messages by which ranks agree.

    Args:
        store: Store at which the ranks meet; a fresh prefix.
        rank: Rank of this process.
        size: Ranks, at least 2.
        timeout_s: For the making, which is collective.
        way: The address of this machine, on which the groups listen; of `Relayed` the relay.

    Raises:
        PeerLost, PeerStalled: One of the ranks died, or did not come within the time-out.

    Source: `ProcessGroupGloo` and `ProcessGroup` in torch/csrc/distributed/c10d. `abort` does not
    end a wait there; closing its connections does (`disconnect`).
    """

    courier = None
    """What tells who is alive; the store of the members does that here."""
    watched_here = True
    relayed = False
    """Whether what is for all ranks is sent once, to a relay."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, way: Any) -> None:
        self.abandoned: str | None = None
        self.group: ProcessGroup | None
        self.control: ProcessGroup | None
        self._store: Store | None = None
        """Reference that keeps the store alive: torch holds none to a store implemented in
        Python.
        """
        self._connections: list[Connection] = []
        begun = time.monotonic()
        try:
            self.group, self.control = made_within(
                timeout_s, lambda: self._made(store, rank, size, timeout_s, way)
            )
        except RuntimeError as error:
            self.disconnect()
            within = f"{timeout_s:.3g} s ({time.monotonic() - begun:.1f} s taken)"
            action = "making a process group"
            raise explain_failure(
                error, action=action, rank=rank, size=size, within=within
            ) from error
        released_at_exit(self)

    def _made(
        self, store: Store, rank: int, size: int, timeout_s: float, way: Any
    ) -> tuple[ProcessGroup, ProcessGroup]:
        device, here = _device(way)
        ahead = _Ahead(store, size)
        ahead.set(f"place/{rank}", json.dumps(here))
        before = {each.inode for each in connections()}
        made = [
            _gloo(PrefixStore(kind, ahead), rank, size, timeout_s, device)
            for kind in ("data", "control")
        ]
        there = {
            tuple(json.loads(ahead.get(f"place/{other}"))) for other in range(size) if other != rank
        }
        self._store = ahead
        self._connections = [each for each in between(here, there) if each.inode not in before]
        return made[0], made[1]

    @property
    def lives(self) -> bool:
        """True until `release`."""
        return self.group is not None

    def disconnect(self) -> None:
        """Close the connections, which ends every wait of this process and of the others at
        once.
        """
        for each in self._connections:
            shut_down(each)

    def release(self) -> None:
        """Close the connections and drop the groups, which joins their threads. May be called
        twice.
        """
        self.disconnect()
        self.group = self.control = None


def between(here: Place, there: Set[Place]) -> list[Connection]:
    """Return the connections that this process accepted at `here` or made to one of `there`.

    The port alone is ambiguous: this process may use the same port on another machine.
    """
    return [each for each in connections() if each.here == here or each.there in there]


class _Ahead(Store):
    """Store that fetches the addresses of all ranks at once; gloo asks for one after another."""

    def __init__(self, store: Store, size: int) -> None:
        super().__init__()
        self._store: Any = store  # torch's stubs know values of text only
        self._size = size
        self._there: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            if key not in self._there:
                place = key.rpartition("/")[0]
                of_all = [f"{place}/{rank}" for rank in range(self._size)]
                if timeout is not None:
                    self._store.wait(of_all, timeout)
                self._there |= zip(of_all, self._store.multi_get(of_all), strict=True)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._there[key]

    def has_extended_api(self) -> bool:
        return False


def _device(address: str) -> tuple[Any, Place]:
    kind: Any = ProcessGroupGloo  # torch has it, its stub not
    with _listening:  # the new one is recognised by what was there before
        for _ in range(_DEVICES_TRIED):
            before = listeners()
            device = kind.create_device(hostname=address, lazy_init=False)
            places = {place for one, place in listeners().items() if one not in before}
            if len(places) == 1:  # else threads that are not ours have begun to listen meanwhile
                return device, places.pop()
    told = "times in a row another thread of this process began to listen while this one did"
    raise RuntimeError(f"{_DEVICES_TRIED} {told}")


def _gloo(store: Store, rank: int, size: int, timeout_s: float, device: Any) -> ProcessGroup:
    """Return a gloo group that is not in torch's registry."""
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices = [device]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    backend = kind(store, rank, size, options)
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    # set afterwards: the same value limits the making; the caller that waits watches the time
    backend._set_default_timeout(_NEVER)
    return group
