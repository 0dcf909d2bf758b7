"""Groups of torch for ranks that come and go, and every private name of torch's groups.

`reconfigure` of a later torch may replace some: see tests/comm/test_private_names.py.
"""

import contextlib
import datetime
import json
import socket
import threading
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import ProcessGroup, Store

from thinwire.comm.sockets import Connection, Endpoint, connections, listeners

NEVER_S = 30 * 86400.0
UNKNOWN_S = 1800.0
"""Time-out of a backend that does not report its own, and of a rank alone; torch's default."""
_Gloo: Any = ProcessGroupGloo  # torch has more of it than its stub
_groups: Any = dist.distributed_c10d
_DEVICES_TRIED = 20
_listening = threading.Lock()


def exchange_endpoints(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    local: Endpoint | None,
    times: Mapping[str, float],
) -> list[Any]:
    """Return where the ranks listen, or None, and their times to relays."""
    keys = [f"endpoint/{other}" for other in range(size)]
    of_members: Any = store  # torch's stubs know neither call
    of_members.announce(keys[rank], json.dumps([local, times]))
    found = of_members.multi_get(keys, datetime.timedelta(seconds=timeout_s))
    return [*zip(*map(json.loads, found), strict=True)]


def connections_between(local: Endpoint, remote: Set[Endpoint]) -> list[Connection]:
    """Return the connections that this process accepted at `local` or made to one of `remote`."""
    # the port alone is ambiguous: this process may use it on another machine too
    return [
        connection
        for connection in connections()
        if connection.local == local or connection.remote in remote
    ]


def answering(endpoints: Mapping[int, Endpoint], limit_s: float) -> set[int]:
    """Return the ranks whose endpoint accepts a connection within the limit."""
    found: set[int] = set()

    def look(rank: int) -> None:
        with contextlib.suppress(OSError), socket.create_connection(endpoints[rank], limit_s):
            found.add(rank)

    with ThreadPoolExecutor(len(endpoints) or 1) as pool:
        list(pool.map(look, endpoints))
    return found


class PrefetchingStore(Store):
    """Store that asks once for what all ranks set, as gloo does not; it must outlive its groups."""

    def __init__(self, store: Store, size: int) -> None:
        super().__init__()
        self._store: Any = store  # torch's stubs know values of text only
        self._size = size
        self._cached: dict[str, bytes] = {}
        self.fetched = threading.Event()
        """Set whenever something was fetched."""

    def set(self, key: str, value: str | bytes) -> None:
        self._store.announce(key, value)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            if key not in self._cached:
                prefix = key.rpartition("/")[0]
                of_all = [f"{prefix}/{rank}" for rank in range(self._size)]
                self._cached |= zip(of_all, self._store.multi_get(of_all, timeout), strict=True)
                self.fetched.set()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._cached[key]


def listening_device(address: str) -> tuple[Any, Endpoint]:
    """Return a gloo device that listens on an address of this machine, and where."""
    with _listening:  # the new one is recognised by what was there before
        for _ in range(_DEVICES_TRIED):
            before = listeners()
            device = _Gloo.create_device(hostname=address, lazy_init=False)
            new = {one for one in listeners() if one not in before}
            if len(new) == 1:  # else other threads have begun to listen meanwhile
                return device, new.pop()
    raise RuntimeError(
        f"{_DEVICES_TRIED} times in a row, another thread of this process began to listen too"
    )


def gloo_group(
    store: Store, rank: int, size: int, timeout_s: float, device: Any = None
) -> ProcessGroup:
    """Return a gloo group that is not in torch's registry. Without a device it uses torch's own."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if device is None:
        backend = _Gloo(store, rank, size, timeout)
    else:
        options = _Gloo._Options()
        options._devices = [device]
        options._timeout = timeout
        backend = _Gloo(store, rank, size, options)
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    # set afterwards: the same value limits the making; the caller that waits watches the time
    backend._set_default_timeout(datetime.timedelta(seconds=NEVER_S))
    return group


def group_like(
    parent: ProcessGroup, ranks: Sequence[int], rank: int, store: Store, name: str, timeout_s: float
) -> ProcessGroup:
    """Return a group over ranks of the world, with the backend of the parent."""
    # as `new_group` does, whose names depend on the groups that this rank has made before
    made: tuple[ProcessGroup, Any] = _groups._new_process_group_helper(
        *(len(ranks), rank, ranks, dist.get_backend(parent), store, name),
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=_groups._get_default_group().bound_device_id,
    )
    _groups._world.pg_group_ranks[made[0]] = {r: i for i, r in enumerate(ranks)}
    return made[0]


def backends_of(group: ProcessGroup) -> dict[str, Any]:
    """Return the backends of a group by their types of device."""
    return {device.type: group._get_backend(device) for device in group._device_types}


def limit_waits(backend: Any, limit_s: float) -> None:
    """Set the time-out of a backend, and what it reports as such."""
    limit = datetime.timedelta(seconds=limit_s)
    backend.options._timeout = limit
    backend._set_default_timeout(limit)


def timeout_s_of(group: ProcessGroup) -> float:
    """Return the time-out that the user gave to a group; torch has no public way to read it."""
    options = getattr(group._get_backend(min(group._device_types, key=str)), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else UNKNOWN_S


def collective_calls() -> int:
    """Return the number of collectives of this process over its gloo and NCCL groups."""
    # those of other libraries count, those of other threads of this library do not
    groups = _groups._world.pg_map
    backends: list[Any] = [g._get_backend(device) for g in groups for device in g._device_types]
    return sum(
        backend._get_sequence_number_for_group()
        for backend in backends
        if backend.name() in ("gloo", "nccl")
    )
