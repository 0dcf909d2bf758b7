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
from thinwire.comm.sockets import Connection, Endpoint, connections, listeners, shut_down

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
        timeout_s: Time-out of the construction, which is collective.
        endpoint: Address of this machine, on which the groups listen; the relay for `Relayed`.

    Raises:
        PeerLost, PeerStalled: One of the ranks died, or did not come within the time-out.

    Source: `ProcessGroupGloo` and `ProcessGroup` in torch/csrc/distributed/c10d. `abort` does not
    end a wait there; closing its connections does (`disconnect`).
    """

    heartbeats = None
    """Heartbeat thread of `Private`; here members send heartbeats to the store themselves."""
    watched_here = True
    relayed = False
    """True if messages for all ranks are sent once, to a relay."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, endpoint: Any) -> None:
        self.abandoned: str | None = None
        self.group: ProcessGroup | None
        self.control: ProcessGroup | None
        self._store: Store | None = None
        """Reference that keeps the store alive: torch holds none to a store implemented in
        Python.
        """
        self._connections: list[Connection] = []
        began_s = time.monotonic()
        try:
            self.group, self.control = made_within(
                timeout_s, lambda: self._connect(store, rank, size, timeout_s, endpoint)
            )
        except RuntimeError as error:
            self.disconnect()
            within = f"{timeout_s:.3g} s ({time.monotonic() - began_s:.1f} s taken)"
            action = "making a process group"
            raise explain_failure(
                error, action=action, rank=rank, size=size, within=within
            ) from error
        released_at_exit(self)

    def _connect(
        self, store: Store, rank: int, size: int, timeout_s: float, endpoint: Any
    ) -> tuple[ProcessGroup, ProcessGroup]:
        device, local = _device(endpoint)
        prefetching = _PrefetchingStore(store, size)
        prefetching.set(f"endpoint/{rank}", json.dumps(local))
        before = {connection.inode for connection in connections()}
        made = [
            _gloo(PrefixStore(kind, prefetching), rank, size, timeout_s, device)
            for kind in ("data", "control")
        ]
        others = [other for other in range(size) if other != rank]
        remote = {tuple(json.loads(prefetching.get(f"endpoint/{other}"))) for other in others}
        self._store = prefetching
        self._connections = [
            connection
            for connection in connections_between(local, remote)
            if connection.inode not in before
        ]
        return made[0], made[1]

    @property
    def lives(self) -> bool:
        """True until `release`."""
        return self.group is not None

    def disconnect(self) -> None:
        """Close the connections, which ends every wait of this process and of the others at
        once.
        """
        for connection in self._connections:
            shut_down(connection)

    def release(self) -> None:
        """Close the connections and drop the groups, which joins their threads. May be called
        twice.
        """
        self.disconnect()
        self.group = self.control = None


def connections_between(local: Endpoint, remote: Set[Endpoint]) -> list[Connection]:
    """Return the connections that this process accepted at `local` or made to one of `remote`.

    The port alone is ambiguous: this process may use the same port on another machine.
    """
    return [
        connection
        for connection in connections()
        if connection.local == local or connection.remote in remote
    ]


class _PrefetchingStore(Store):
    """Store that fetches the addresses of all ranks at once; gloo asks for one after another."""

    def __init__(self, store: Store, size: int) -> None:
        super().__init__()
        self._store: Any = store  # torch's stubs know values of text only
        self._size = size
        self._cached: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            if key not in self._cached:
                prefix = key.rpartition("/")[0]
                of_all = [f"{prefix}/{rank}" for rank in range(self._size)]
                if timeout is not None:
                    self._store.wait(of_all, timeout)
                self._cached |= zip(of_all, self._store.multi_get(of_all), strict=True)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._cached[key]

    def has_extended_api(self) -> bool:
        return False


def _device(address: str) -> tuple[Any, Endpoint]:
    kind: Any = ProcessGroupGloo  # torch has it, its stub not
    with _listening:  # the new one is recognised by what was there before
        for _ in range(_DEVICES_TRIED):
            before = listeners()
            device = kind.create_device(hostname=address, lazy_init=False)
            new = {endpoint for inode, endpoint in listeners().items() if inode not in before}
            if len(new) == 1:  # else other threads have begun to listen meanwhile
                return device, new.pop()
    text = "times in a row, another thread of this process began to listen at the same time"
    raise RuntimeError(f"{_DEVICES_TRIED} {text}")


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
