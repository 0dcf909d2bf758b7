"""Process groups of members, which reach each other directly or through a relay."""

import time
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from thinwire.comm.direct import (
    connections_between,
    exchange_endpoints,
    gloo_groups,
    listening_device,
)
from thinwire.comm.failures import explain_failure
from thinwire.comm.private import made_within, released_at_exit
from thinwire.comm.relay import Kind, RelayClient, RelayEndpoint
from thinwire.comm.relayed import RelayedGroup
from thinwire.comm.sockets import Connection, Endpoint, connections, shut_down
from thinwire.errors import ThinwireError

_JOIN_S = 2.0


class MemberGroups:
    """Process groups of ranks that met at a store; the counterpart of `Private` for members."""

    # ranks that listen reach each other directly, all other pairs through a relay; where one takes
    # part, sums are gathered and added in the order of the ranks
    # Source: `ProcessGroupGloo` and `ProcessGroup` in torch/csrc/distributed/c10d. `abort` does not
    # end a wait there; closing its connections does (`disconnect`).

    heartbeats = None
    """Heartbeat thread of `Private`; here members send heartbeats to the store themselves."""
    watched = frozenset({"cpu"})
    _client: RelayClient | None = None

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, endpoint: RelayEndpoint
    ) -> None:
        self.abandoned: tuple[type[ThinwireError], str] | None = None
        self.relayed, self.copies = False, size - 1
        self.group: ProcessGroup | None
        self.control: ProcessGroup | None
        self._store: Store | None = None
        """Keeps the store alive: torch holds no reference to a store implemented in Python."""
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
        self, store: Store, rank: int, size: int, timeout_s: float, endpoint: RelayEndpoint
    ) -> tuple[ProcessGroup, ProcessGroup]:
        device, local = None, None
        if endpoint.own_address is not None:
            device, local = listening_device(endpoint.own_address)
        endpoints = exchange_endpoints(store, rank, size, timeout_s, local)
        reached = endpoints.keys() - {rank} if rank in endpoints else set()
        made: tuple[ProcessGroup | None, ProcessGroup | None] = None, None
        if reached:
            data, control = made = self._connect_directly(store, rank, endpoints, timeout_s, device)
            if len(endpoints) == size:
                return data, control
        self.relayed, self.copies = True, len(reached) + 1
        # torch's store of a run has a prefix and a session, which nobody else has
        room = getattr(store, "room", "")
        self._client = client = RelayClient(endpoint, room, rank, size, reached)
        if not client.wait_for_all(timeout_s):
            raise client.refusal or RuntimeError(f"Timed out{client.outage()}")
        data, control = (
            RelayedGroup(client, kind, size, group)
            for kind, group in zip((Kind.DATA, Kind.CONTROL), made, strict=True)
        )
        return data, control

    def _connect_directly(
        self,
        store: Store,
        rank: int,
        endpoints: Mapping[int, Endpoint],
        timeout_s: float,
        device: Any,
    ) -> tuple[ProcessGroup, ProcessGroup]:
        before = {connection.inode for connection in connections()}
        ranks, remote = sorted(endpoints), set(endpoints.values()) - {endpoints[rank]}
        self._store, data, control = gloo_groups(
            store, ranks.index(rank), len(ranks), timeout_s, device
        )
        self._connections = [
            connection
            for connection in connections_between(endpoints[rank], remote)
            if connection.inode not in before
        ]
        return data, control

    def streams(self, count: int, timeout_s: float) -> list[ProcessGroup]:
        """Return the group of data alone."""
        assert self.group is not None, "not released"
        return [self.group]

    @property
    def lives(self) -> bool:
        """True until `release`."""
        return self.group is not None

    def disconnect(self) -> None:
        """Close the connections, which ends all waits; what was sent to the relay arrives."""
        self._disconnect(0.0)

    def _disconnect(self, wait_s: float) -> None:
        for connection in self._connections:
            shut_down(connection)
        if self._client is not None:
            self._client.close(wait_s)

    def release(self) -> None:
        """Close the connections and drop the groups; may be called twice."""
        self._disconnect(_JOIN_S)
        self.group = self.control = None
