"""Make replicas equal: copy tensors of rank 0 to all ranks."""

import hashlib
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.comm.waiting import Progress, own_deadlines, state_after_failure
from thinwire.errors import PayloadCorrupt

_DIGEST_BYTES = 16
_FIRST_BYTES = 256 << 10
_SMALLEST_BYTES = 16 << 10
_LARGEST_BYTES = 16 << 20
_PIECE_S = 2.0
_SECONDS = struct.Struct("<d")


@torch.no_grad()
def copy_from_first_(tensors: Iterable[Tensor], group: Group, *, action: str) -> None:
    """Overwrite `tensors`, alike on all ranks, with those of rank 0: all or none."""
    # if they arrived damaged here the other ranks do not know
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty:
        return
    content = torch.cat([_bytes_of(tensor).to(group.device) for tensor in nonempty])
    checksum = torch.frombuffer(bytearray(_digest(content)), dtype=torch.uint8)
    message = torch.cat([content, checksum.to(content.device)])
    group.broadcast_(message, action=action).wait()
    content = message[:-_DIGEST_BYTES]
    checksum = message[-_DIGEST_BYTES:]
    if _digest(content) != checksum.cpu().numpy().tobytes():
        raise PayloadCorrupt(
            f"{action}: they arrived damaged on rank {group.rank}. {state_after_failure()}"
        )
    parts = torch.split(content, [tensor.nbytes for tensor in nonempty])
    for tensor, part in zip(nonempty, parts, strict=True):
        _write_(tensor, part)


@torch.no_grad()
def make_equal_(
    tensors: Mapping[str, Tensor], group: Group, *, action: str, source: int = 0
) -> None:
    """Copy those of `tensors` that differ between ranks from rank `source`: all of them or none."""
    # pieces follow the speed; digests are compared before anything is written
    if group.size == 1:
        return
    nonempty = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    with own_deadlines():
        digests = [_digest(_bytes_of(tensor)) for tensor in nonempty.values()]
        rows = group.gather_bytes(b"".join(digests), action=f"{action}: comparing it")
        cuts = [slice(at, at + _DIGEST_BYTES) for at in range(0, len(rows[source]), _DIGEST_BYTES)]
        expected_digests = [rows[source][cut] for cut in cuts]
        moved = [i for i, cut in enumerate(cuts) if len({row[cut] for row in rows}) > 1]
        names = list(nonempty)
        own = list(nonempty.values())
        copies = [_bytes_of(own[i]).to(group.device) for i in moved]
        if group.rank != source:
            copies = [torch.empty_like(copy) for copy in copies]
        _copy_(copies, group, action, source)
        pairs = list(zip(moved, copies, strict=True))
        bad = [names[i] for i, received in pairs if _digest(received) != expected_digests[i]]
        if moved:
            answers = group.gather_bytes("\n".join(bad).encode(), action=f"{action}: verifying it")
            for rank, answer in enumerate(answers):
                if answer:
                    name = answer.decode(errors="replace").split("\n", 1)[0]
                    raise PayloadCorrupt(
                        f"{action}: {name} arrived damaged on rank {rank}. Nothing was written on "
                        "any rank: start again"
                    )
    for i, received in pairs:
        if digests[i] != expected_digests[i]:
            _write_(own[i], received)


def make_models_equal_(
    params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], group: Group, *, source: int = 0
) -> None:
    """Copy a model's parameters and buffers from rank `source`, or from the first site."""
    if group.replicas is None or group.shards is None:
        action = f"copying the model of rank {source}"
        make_equal_({**params, **buffers}, group, action=action, source=source)
        return
    make_equal_(params, group.replicas, action="copying the shards of the first site")
    if group.static_membership:
        make_equal_(buffers, group, action="copying the buffers of rank 0")
    else:  # members exchange only with holders of the same shard
        make_equal_(buffers, group.replicas, action="copying the buffers of the first site")
        make_equal_(buffers, group.shards, action="copying the buffers of the first shard")


def _copy_(buffers: list[Tensor], group: Group, action: str, source: int) -> None:
    total = sum(buffer.numel() for buffer in buffers)
    done = 0
    size = max(min(_FIRST_BYTES, int(group.timeout_s * 8192)), _SMALLEST_BYTES)
    target_s = min(group.timeout_s / 20, _PIECE_S)
    progress = Progress(action, total)
    while done < total:
        parts = list(_parts(buffers, done, done + size))
        piece = torch.cat(parts)
        begin_s = time.monotonic()
        group.broadcast_(piece, action=action, source=source).wait()
        taken_s = time.monotonic() - begin_s
        for part, came in zip(parts, torch.split(piece, list(map(len, parts))), strict=True):
            part.copy_(came)
        done += piece.numel()
        # the slowest rank decides, so that all ranks cut pieces of one size
        times = group.gather_now(_SECONDS.pack(taken_s), action=action)
        slowest_s = max(_SECONDS.unpack(answer)[0] for answer in times)
        growth = min(target_s / max(slowest_s, 1e-9), 4.0)
        size = int(min(max(size * growth, _SMALLEST_BYTES), _LARGEST_BYTES))
        progress.add(piece.numel())


def _parts(buffers: list[Tensor], first: int, end: int) -> Iterator[Tensor]:
    """Yield views of the bytes `first` to `end` of the stream."""
    starts = [0]
    for buffer in buffers:
        starts.append(starts[-1] + buffer.numel())
    for buffer, (start, stop) in zip(buffers, pairwise(starts), strict=True):
        if start < end and stop > first:
            yield buffer[max(first - start, 0) : end - start]


def _digest(content: Tensor) -> bytes:
    return hashlib.blake2b(content.cpu().numpy().data, digest_size=_DIGEST_BYTES).digest()


def _bytes_of(tensor: Tensor) -> Tensor:
    return real_view(tensor).contiguous().reshape(-1).view(torch.uint8)


def _write_(tensor: Tensor, content: Tensor) -> None:
    real = real_view(tensor)
    # a copy, since a view of another type needs an aligned start
    overwrite_(real, content.clone().view(real.dtype).view(real.shape))


def overwrite_(tensor: Tensor, values: Tensor) -> None:
    """Copy as `tensor.copy_(values)`, also into an expanded tensor, which torch refuses."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def real_view(tensor: Tensor) -> Tensor:
    """Return a detached view; of a complex tensor with real and imaginary parts as last axis."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
