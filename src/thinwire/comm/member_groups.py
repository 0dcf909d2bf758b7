"""Process groups of members, which reach each other directly or through a relay."""

import contextlib
import datetime
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store, Work

from thinwire.comm.elastic import (
    PrefetchingStore,
    answering,
    connections_between,
    exchange_endpoints,
    gloo_group,
    listening_device,
)
from thinwire.comm.failures import explain_failure
from thinwire.comm.private import forget, keep_alive, made_within, released_at_exit
from thinwire.comm.relay import Kind, RelayClient, RelayEndpoint, relay_times
from thinwire.comm.relayed import RelayedGroup
from thinwire.comm.sockets import Connection, Endpoint, connections, resend_every_second, shut_down
from thinwire.errors import PayloadCorrupt, PeerLost, PeerStalled, ThinwireError

_JOIN_S = 2.0


class MemberGroups:
    """Process groups of ranks that met at a store; the counterpart of `Private` for members."""

    # ranks that listen reach each other directly, all other pairs through a relay; where one takes
    # part, sums are gathered and added in the order of the ranks. `abort` of torch's groups does
    # not end a wait; closing its connections does (`disconnect`)

    heartbeats = None
    """Heartbeat thread of `Private`; here members send heartbeats to the store themselves."""
    watched = True
    from_host = True
    round_trip_s = float("inf")

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        endpoint: RelayEndpoint,
        reached: list[int] | None = None,
    ) -> None:
        # to `reached`, if given, the ranks are added that can be reached, whether all can or not
        self.abandoned: tuple[type[ThinwireError], str] | None = None
        self.group: ProcessGroup | None = None
        self.control: ProcessGroup | None = None
        self._rank = rank
        self._size = size
        # torch's store of a run has a prefix and a session, which nobody else has
        self._room = getattr(store, "room", "")
        self._connections: list[Connection] = []
        self._clients: list[RelayClient] = []
        self.more: list[ProcessGroup] = []
        self.name = ""
        self.launched = [0, 0]
        self.most_streams = 0
        self._listening: Any = None, None
        if endpoint.own_address is not None:
            self._listening = listening_device(endpoint.own_address)
        self._direct: Mapping[int, Endpoint] = {}
        """Where ranks listen; empty on a rank that does not listen."""
        self._by_relay: defaultdict[str, set[int]] = defaultdict(set)
        """Ranks that this one reaches through a relay, by its name."""

        def meet() -> list[ProcessGroup]:
            of_members: Any = store
            self._relays = of_members.relays(endpoint)
            times = relay_times(self._relays, timeout_s / 4)
            endpoints, times_of_all = exchange_endpoints(
                store, rank, size, timeout_s, self._listening[1], times
            )
            found = {r: (at[0], at[1]) for r, at in enumerate(endpoints) if at is not None}
            self._direct = found if rank in found else {}
            for other in set(range(size)) - self._direct.keys() - {rank}:
                theirs = times_of_all[other]
                # both ranks of a pair compute the same; "" is the relay of the host
                sums = [(times[name] + theirs[name], name) for name in times.keys() & theirs.keys()]
                self._by_relay[min(sums, default=(0.0, ""))[1]].add(other)
            if reached is not None:
                refused = self._direct.keys() - answering(self._direct, timeout_s / 3)
                reached.extend(other for other in range(size) if other not in refused)
            self._store = PrefetchingStore(store, len(found))
            return self._connect("", (Kind.DATA, Kind.CONTROL), timeout_s)

        self.group, self.control = self._made(meet, timeout_s)
        self.relayed = bool(self._by_relay)
        self.copies = max(len(self._direct) - 1, 0) + len(self._by_relay)
        released_at_exit(self)

    def add_streams(self, count: int, timeout_s: float) -> None:
        """Make further groups for data, up to `count`, on all ranks."""
        for number in range(len(self.more), count):
            make = partial(self._connect, f"stream {number}", [Kind.DATA], timeout_s)
            self.more += self._made(make, timeout_s)

    def _made(self, make: Callable[[], list[ProcessGroup]], timeout_s: float) -> list[ProcessGroup]:
        began_s = time.monotonic()
        try:
            return made_within(timeout_s, make)
        except RuntimeError as error:
            self.disconnect()
            within = f"{timeout_s:.3g} s ({time.monotonic() - began_s:.1f} s taken)"
            raise explain_failure(
                error,
                action="making a process group",
                rank=self._rank,
                size=self._size,
                within=within,
                advice="",
            ) from error

    def _connect(self, name: str, kinds: Sequence[Kind], timeout_s: float) -> list[ProcessGroup]:
        """Return a group for each kind of messages."""
        direct: list[Any] = [None] * len(kinds)
        if len(self._direct) > 1:
            direct = self._connect_directly([f"{name}{kind.name}" for kind in kinds], timeout_s)
            if not self._by_relay:
                return direct
        others = set(range(self._size)) - {self._rank}
        own = self._room + name, self._rank, self._size
        clients = [
            RelayClient(self._relays[relay], *own, others - ranks)
            for relay, ranks in self._by_relay.items()
        ]
        self._clients += clients
        for client in clients:
            if not client.wait_for_all(timeout_s):
                raise client.refusal or RuntimeError(f"Timed out{client.outage()}")
        return [
            RelayedGroup(clients, kind, self._size, group)
            for kind, group in zip(kinds, direct, strict=True)
        ]

    def _connect_directly(self, names: Sequence[str], timeout_s: float) -> list[ProcessGroup]:
        device, local = self._listening
        assert local is not None, "others reach it"
        before = connections()
        ranks = sorted(self._direct)
        remote = set(self._direct.values()) - {local}
        here = ranks.index(self._rank), len(ranks), timeout_s, device
        with ThreadPoolExecutor(len(names)) as pool:  # a group makes one connection after the other
            made = []
            for name in names:
                self._store.fetched.clear()
                made.append(pool.submit(gloo_group, PrefixStore(name, self._store), *here))
                made[-1].add_done_callback(lambda _: self._store.fetched.set())
                self._store.fetched.wait(timeout_s)  # all ranks ask the store in the same order
            groups = [one.result() for one in made]
        for one in connections_between(local, remote):
            if one not in before:
                self._connections.append(one)
                resend_every_second(one)
        return groups

    @property
    def lives(self) -> bool:
        """True until `release`."""
        return self.group is not None

    def disconnect(self, wait_s: float = 0.0) -> None:
        """Close the connections, which ends all waits; what was sent to the relay arrives."""
        for connection in self._connections:
            shut_down(connection)
        for client in self._clients:
            client.close(wait_s)

    def release(self) -> None:
        """Close the connections and drop the groups; may be called twice."""
        self.disconnect(_JOIN_S)
        self.group = self.control = None
        self.more = []


_HEAD = struct.Struct("<QQ")
"""Bytes of the content, and of the second message after this one."""
_AHEAD = 2
_COPYING = "copying the state of a member"
_LEAST_BYTES = 512
_MOST_BYTES = 8 << 20


class Channel:
    """Byte strings between two processes, in order, both ways."""

    # a message leaves only when the other end awaits its length: two are awaited at any time, and
    # each announces the length of the second one after it

    def __init__(
        self, store: Store, *, sending: bool, timeout_s: float, endpoint: RelayEndpoint
    ) -> None:
        self._groups = MemberGroups(store, 0 if sending else 1, 2, timeout_s, endpoint)
        self._timeout_s = timeout_s
        self._other = 1 if sending else 0
        self._sizes = deque([_LEAST_BYTES] * _AHEAD)
        self._sent = deque[Work]()
        self._awaited = deque[tuple[Work, bytearray] | RuntimeError]()
        for _ in range(_AHEAD):
            self._await(_LEAST_BYTES)

    @property
    def rooms(self) -> list[int]:
        """Bytes that each of the next two messages can hold."""
        return [size - _HEAD.size for size in self._sizes]

    def send(self, content: Any, then_bytes: int = 0) -> None:
        """Send a message, and give the second one after it room for `then_bytes`."""
        message = bytearray(self._sizes.popleft())
        self._sizes.append(min(max(then_bytes + _HEAD.size, _LEAST_BYTES), _MOST_BYTES))
        _HEAD.pack_into(message, 0, len(content), self._sizes[-1])
        message[_HEAD.size : _HEAD.size + len(content)] = content
        with self._explaining():
            self._sent.append(self._launched(message, sending=True)[0])
            while len(self._sent) >= _AHEAD:
                self._wait(self._sent.popleft())

    def receive(self) -> memoryview:
        """Return the content of the next message."""
        with self._explaining():
            awaited = self._awaited.popleft()
            if isinstance(awaited, RuntimeError):
                raise awaited
            self._wait(awaited[0])
        message = memoryview(awaited[1])
        nbytes, size = _HEAD.unpack_from(message)
        if nbytes > len(message) - _HEAD.size or not _LEAST_BYTES <= size <= _MOST_BYTES:
            self.close()
            raise PayloadCorrupt("a message of a member that sends its state is damaged")
        self._await(size)
        return message[_HEAD.size : _HEAD.size + nbytes]

    def _await(self, nbytes: int) -> None:
        try:
            self._awaited.append(self._launched(bytearray(nbytes), sending=False))
        except RuntimeError as error:  # raised when it is waited for: there may be no other message
            self._awaited.append(error)

    def _launched(self, message: bytearray, *, sending: bool) -> tuple[Work, bytearray]:
        group = self._groups.group
        tensor = torch.frombuffer(message, dtype=torch.uint8)
        if group is None:
            raise PeerLost(f"{_COPYING}: the connection was closed")
        work = (group.send if sending else group.recv)([tensor], self._other, 0)
        keep_alive(group, work, [tensor])
        return work, message

    def _wait(self, work: Work) -> None:
        work.wait(datetime.timedelta(seconds=self._timeout_s))
        forget(work)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.close()
            within = f"{self._timeout_s:g} s"
            own = 1 - self._other
            explained = explain_failure(
                error, action=_COPYING, rank=own, size=2, within=within, advice=""
            )
            known = isinstance(explained, PeerLost | PeerStalled)
            raise (explained if known else PeerLost(str(explained))) from error.__context__

    def close(self) -> None:
        """Close the connections, and end what nobody will wait for."""
        self._groups.release()
        # gloo marks a send or receive as completed in a wait alone; `keep_alive` would keep them,
        # and with them the group. Copies, since the thread of the channel may still use both
        left = [entry[0] for entry in list(self._awaited) if isinstance(entry, tuple)]
        for work in left + list(self._sent):
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(milliseconds=1))
            forget(work)
