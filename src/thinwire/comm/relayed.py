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
        store_results: Callable[[Mapping[int, bytearray]], None],
    ) -> None:
        super().__init__()
        self._client, self._channel, self._store_results = client, channel, store_results
        self._expected = {source: client.claim(channel, source) for source in sources}
        self._done = False

    def is_completed(self) -> bool:
        with self._client.changed:
            return self._is_finished()

    def _is_finished(self) -> bool:
        request = self._channel, self._expected
        return self._done or self._client.arrived(*request) or bool(self._client.failure(*request))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        client, limit_s = self._client, timeout.total_seconds() or None
        with client.changed:
            client.changed.wait_for(self._is_finished, limit_s)
            if not self._done and not client.arrived(self._channel, self._expected):
                error = client.failure(self._channel, self._expected)
                raise error or RuntimeError(f"Timed out{client.outage()}")
        if not self._done:
            self._done = True
            self._store_results(client.pop(self._channel, self._expected))
        return True


class _RelayedGroup(ProcessGroup):
    """What `torch.distributed` calls of a process group, for one kind of messages."""

    def __init__(self, client: RelayClient, channel: Kind) -> None:
        # what a class of Python's may inherit from; torch's stub has another one
        super().__init__(client.rank, len(client.others) + 1)  # type: ignore[call-arg]
        self._client, self._channel, self._own_rank = client, channel, client.rank

    def _exchanged(
        self,
        contents: bytes | Mapping[int, bytes],
        sources: Sequence[int],
        store_results: Callable[[Mapping[int, bytearray]], None],
    ) -> Work:
        if isinstance(contents, bytes) or contents:
            self._client.send(self._channel, contents)
        return _RelayedWork(self._client, self._channel, sources, store_results)

    def _gathered(self, own: Tensor, rows: Sequence[Tensor]) -> Work:
        rows[self._own_rank].copy_(own)
        others = sorted(self._client.others)
        return self._exchanged(_bytes_of(own), others, lambda received: _fill(rows, received))

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
        rows[self._own_rank].copy_(total)

        def add(received: Mapping[int, bytearray]) -> None:
            _fill(rows, received)
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)

        return self._exchanged(_bytes_of(total), sorted(self._client.others), add)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        source = opts.rootRank
        if source == self._own_rank:
            return self._exchanged(_bytes_of(tensors[0]), [], lambda _: None)
        return self.recv(tensors, source, 0)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        rows, parts = torch.split(output, output_sizes), torch.split(input, input_sizes)
        rows[self._own_rank].copy_(parts[self._own_rank])
        others = sorted(self._client.others)
        contents = {rank: _bytes_of(parts[rank]) for rank in others}
        return self._exchanged(contents, others, lambda received: _fill(rows, received))

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # this form of two

    def send(self, tensors: Any, to: int, tag: int) -> Work:
        return self._exchanged({to: _bytes_of(tensors[0])}, [], lambda _: None)

    def recv(self, tensors: Any, source: int, tag: int) -> Work:
        return self._exchanged({}, [source], lambda received: _fill({source: tensors[0]}, received))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def _fill(rows: Mapping[int, Tensor] | Sequence[Tensor], received: Mapping[int, bytearray]) -> None:
    """Write what came; zeros, which no checksum has, where it has another length."""
    for rank, content in received.items():
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

    def _connect(
        self, store: Store, rank: int, size: int, timeout_s: float, endpoint: RelayEndpoint
    ) -> tuple[ProcessGroup, ProcessGroup]:
        # torch's store of a run has a prefix and a session, which nobody else has
        room = getattr(store, "room", "")
        self._client = client = RelayClient(endpoint, room, rank, size)
        if not client.wait_for_all(timeout_s):
            raise client.refusal or RuntimeError(f"Timed out{client.outage()}")
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
