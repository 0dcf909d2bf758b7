"""Process groups whose messages go through a relay."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, Work

from thinwire.comm.direct import Direct
from thinwire.comm.relay import Kind, RelayClient, RelayEndpoint

__all__ = ["Relayed"]

_JOIN_S = 2.0


class _RelayedWork(Work):
    """Messages that are awaited."""

    def __init__(
        self,
        client: RelayClient,
        channel: Kind,
        sources: Sequence[int],
        take: Callable[[Mapping[int, bytearray]], None],
    ) -> None:
        super().__init__()
        self._client, self._channel, self._take = client, channel, take
        self._wanted = {source: client.claim(channel, source) for source in sources}
        self._done = False

    def is_completed(self) -> bool:
        with self._client.news:
            return self._is_over()

    def _is_over(self) -> bool:
        place = self._channel, self._wanted
        return self._done or self._client.arrived(*place) or bool(self._client.failure(*place))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        client, limit_s = self._client, timeout.total_seconds() or None
        with client.news:
            client.news.wait_for(self._is_over, limit_s)
            if not self._done and not client.arrived(self._channel, self._wanted):
                error = client.failure(self._channel, self._wanted)
                raise error or RuntimeError(f"Timed out{client.away()}")
        if not self._done:
            self._done = True
            self._take(client.take(self._channel, self._wanted))
        return True


class _RelayedGroup(ProcessGroup):
    """What `torch.distributed` calls of a process group, for one kind of messages."""

    def __init__(self, client: RelayClient, channel: Kind) -> None:
        # what a class of Python's may inherit from; torch's stub has another one
        super().__init__(client.rank, len(client.others) + 1)  # type: ignore[call-arg]
        self._client, self._channel, self._me = client, channel, client.rank

    def _exchanged(
        self,
        contents: bytes | Mapping[int, bytes],
        sources: Sequence[int],
        take: Callable[[Mapping[int, bytearray]], None],
    ) -> Work:
        if isinstance(contents, bytes) or contents:
            self._client.send(self._channel, contents)
        return _RelayedWork(self._client, self._channel, sources, take)

    def _gathered(self, mine: Tensor, rows: Sequence[Tensor]) -> Work:
        rows[self._me].copy_(mine)
        others = sorted(self._client.others)
        return self._exchanged(_bytes_of(mine), others, lambda came: _fill(rows, came))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._gathered(input, output.view(-1, input.numel()).unbind())

    _allgather_base = all_gather_single
    """Its name before torch 2.13."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._gathered(inputs[0], outputs[0])

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        # torch calls the first of its three forms; the sum is in the order of the ranks
        (total,) = tensors
        rows = [torch.empty_like(total) for _ in range(self.size())]
        rows[self._me].copy_(total)

        def add(came: Mapping[int, bytearray]) -> None:
            _fill(rows, came)
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)

        return self._exchanged(_bytes_of(total), sorted(self._client.others), add)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        source = opts.rootRank
        if source == self._me:
            return self._exchanged(_bytes_of(tensors[0]), [], lambda _: None)
        return self.recv(tensors, source, 0)

    def alltoall_base(
        self, output: Tensor, input: Tensor, taken: list[int], given: list[int], opts: Any = None
    ) -> Work:
        rows, parts = torch.split(output, taken), torch.split(input, given)
        rows[self._me].copy_(parts[self._me])
        others = sorted(self._client.others)
        contents = {rank: _bytes_of(parts[rank]) for rank in others}
        return self._exchanged(contents, others, lambda came: _fill(rows, came))

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # this form of two

    def send(self, tensors: Any, to: int, tag: int) -> Work:
        return self._exchanged({to: _bytes_of(tensors[0])}, [], lambda _: None)

    def recv(self, tensors: Any, source: int, tag: int) -> Work:
        return self._exchanged({}, [source], lambda came: _fill({source: tensors[0]}, came))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def _fill(rows: Mapping[int, Tensor] | Sequence[Tensor], came: Mapping[int, bytearray]) -> None:
    """Write what came; zeros, which no checksum has, where it has another length."""
    for rank, content in came.items():
        row = rows[rank]
        if len(content) != row.nbytes:
            row.zero_()
        elif content:
            row.copy_(torch.frombuffer(content, dtype=row.dtype).view_as(row))


class Relayed(Direct):
    """As `Direct`, of ranks that reach a relay and not each other.

    A relay that is lost is connected with anew until the caller's time is up, and what was on its
    way is sent again. Sums are gathered, and added in the order of the ranks.
    """

    relayed = True
    _client: RelayClient | None = None

    def _made(
        self, store: Store, rank: int, size: int, timeout_s: float, way: RelayEndpoint
    ) -> tuple[ProcessGroup, ProcessGroup]:
        # torch's store of a run has a prefix and a session, which nobody else has
        room = getattr(store, "room", "")
        self._client = client = RelayClient(way, room, rank, size)
        if not client.wait_for_everybody(timeout_s):
            raise client.refusal or RuntimeError(f"Timed out{client.away()}")
        return _RelayedGroup(client, Kind.DATA), _RelayedGroup(client, Kind.CONTROL)

    def disconnect(self) -> None:
        """See `Direct.disconnect`; what was sent before still arrives."""
        if self._client is not None:
            self._client.close()

    def release(self) -> None:
        """See `Direct.release`."""
        if self._client is not None:
            self._client.close(_JOIN_S)
        self.group = self.control = None
