"""Process group of which some messages go through a relay."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from thinwire.comm.private import forget, keep_alive
from thinwire.comm.relay import Contents, Kind, RelayClient, SentMessage

_Received = Mapping[int, bytearray]
"""Relayed messages by sender."""
_Store = Callable[[_Received], None]


class _RelayedWork(Work):
    """Messages awaited from one relay, and `further` works; acknowledgements of the one `sent`."""

    def __init__(
        self,
        client: RelayClient,
        channel: Kind,
        sources: Iterable[int],
        further: Sequence[Work],
        store_results: _Store,
        sent: SentMessage | None = None,
    ) -> None:
        super().__init__()
        self._client = client
        self._channel = channel
        self._store_results = store_results
        self._expected = {source: client.claim(channel, source) for source in sources}
        self._further = further
        self._sent = sent

    def is_completed(self) -> bool:
        if any(work.is_completed() and not work.is_success() for work in self._further):
            return True
        with self._client.changed:
            if self._failure() is not None:
                return True
            return self._is_here() and all(work.is_completed() for work in self._further)

    def is_success(self) -> bool:
        with self._client.changed:
            return self._failure() is None

    def _is_here(self) -> bool:
        acknowledged = self._sent is None or not self._sent.unacknowledged
        return acknowledged and self._client.arrived(self._channel, self._expected)

    def _failure(self) -> RuntimeError | None:
        receivers = set() if self._sent is None else self._sent.unacknowledged
        return self._client.failure(self._channel, self._expected, receivers)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        client = self._client
        limit_s = timeout.total_seconds() or None
        begun = time.monotonic()
        with client.changed:
            if (failure := self._failure()) is not None:
                raise failure
        for work in self._further:
            work.wait(*([] if limit_s is None else [_left(limit_s, begun)]))
            forget(work)
        with client.changed:
            left_s = None if limit_s is None else _left(limit_s, begun).total_seconds()
            client.changed.wait_for(lambda: self._is_here() or self._failure(), left_s)
            if not self._is_here():
                raise self._failure() or RuntimeError(f"Timed out{client.outage()}")
        if self._expected:
            expected, self._expected = self._expected, {}  # a second wait finds all done
            self._store_results(client.pop(self._channel, expected))
        return True


def _left(limit_s: float, begun: float) -> timedelta:
    return timedelta(seconds=max(limit_s - (time.monotonic() - begun), 0.001))


class RelayedGroup(ProcessGroup):
    """What `torch.distributed` calls of a process group, for one kind of messages."""

    def __init__(
        self,
        clients: Sequence[RelayClient],
        channel: Kind,
        size: int,
        direct: ProcessGroup | None,
    ) -> None:
        # what a class of Python's may inherit from; torch's stub has another one
        super().__init__(clients[0].rank, size)  # type: ignore[call-arg]
        self._clients = clients
        self._channel = channel
        self._own_rank = clients[0].rank
        self._direct = direct
        self._relayed = frozenset[int]().union(*(client.others for client in clients))
        self._reached = [] if direct is None else sorted(set(range(size)) - self._relayed)
        """Ranks of `direct`."""

    def _exchanged(
        self,
        contents: Contents | None,
        direct: Sequence[Work],
        sources: Set[int] = frozenset(),
        store_results: _Store = lambda _: None,
    ) -> Work:
        works = direct
        for client in self._clients:
            if contents is not None:
                client.send(self._channel, contents)
            own = client.others & sources
            works = [_RelayedWork(client, self._channel, own, works, store_results)]
        return works[0]

    def _launched(self, launch: Callable[..., Work | None], *tensors: Any, **options: Any) -> Work:
        """Launch a collective of the ranks that reach each other."""
        assert self._direct is not None, "has ranks"
        work = launch(*tensors, **options, group=self._direct, async_op=True)
        assert work is not None, "asynchronous"
        keep_alive(self._direct, work, tensors)
        return work

    def _gathered(self, own: Tensor, rows: Sequence[Tensor]) -> Work:
        rows[self._own_rank].copy_(own)
        direct = []
        if self._reached:
            direct = [self._launched(dist.all_gather, [rows[r] for r in self._reached], own)]
        return self._exchanged(_bytes_of(own), direct, self._relayed, partial(_fill, rows))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._gathered(input, output.view(-1, input.numel()).unbind())

    _allgather_base = all_gather_single
    """Its name before torch 2.13."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._gathered(inputs[0], outputs[0])

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        source = opts.rootRank
        (tensor,) = tensors
        direct = []
        if source in self._reached:
            index = self._reached.index(source)
            direct = [self._launched(dist.broadcast, tensor, group_src=index)]
        if not direct and source != self._own_rank:
            return self.recv(tensors, source, 0)
        return self._exchanged(_bytes_of(tensor) if source == self._own_rank else None, direct)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        rows = torch.split(output, output_sizes)
        parts = torch.split(input, input_sizes)
        rows[self._own_rank].copy_(parts[self._own_rank])
        direct = []
        taken = [output_sizes[r] for r in self._reached]
        received = output.new_empty(sum(taken))
        if self._reached:
            given = torch.cat([parts[r] for r in self._reached])
            sizes = taken, [input_sizes[r] for r in self._reached]
            direct = [self._launched(dist.all_to_all_single, received, given, *sizes)]

        def store(relayed: _Received) -> None:
            _fill(rows, relayed)
            for rank, row in zip(self._reached, torch.split(received, taken), strict=True):
                rows[rank].copy_(row)

        contents = {rank: _bytes_of(parts[rank]) for rank in self._relayed}
        return self._exchanged(contents, direct, self._relayed, store)

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # this form of two

    def send(self, tensors: Any, to: int, tag: int) -> Work:
        # the sender of a state must not run ahead of a slow line, nor close before the end
        [client] = self._clients  # of two ranks
        sent = client.send(self._channel, {to: _bytes_of(tensors[0])})
        return _RelayedWork(client, self._channel, [], [], lambda _: None, sent)

    def recv(self, tensors: Any, source: int, tag: int) -> Work:
        row = {source: tensors[0]}
        return self._exchanged(None, [], {source}, partial(_fill, row))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def _fill(rows: Mapping[int, Tensor] | Sequence[Tensor], received: _Received) -> None:
    """Write what came; zeros, which no checksum has, where it has another length."""
    for rank, content in received.items():
        row = rows[rank]
        if len(content) != row.nbytes:
            row.zero_()
        elif content:
            row.copy_(torch.frombuffer(content, dtype=row.dtype).view_as(row))
