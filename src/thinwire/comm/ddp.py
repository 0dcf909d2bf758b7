"""Tap DistributedDataParallel's backward pass where gradients become ready, bucket by bucket."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.group import Group

OnBucket = Callable[[int, Sequence[Parameter], Sequence[Tensor]], None]

_taps: "weakref.WeakKeyDictionary[DistributedDataParallel, BucketTap]" = weakref.WeakKeyDictionary()


class BucketTap:
    """Call a function for every bucket; the rank keeps its gradients instead of their average."""

    # DDP cannot remove its one hook: a closed tap passes local gradients on, and is opened again

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.on_bucket: OnBucket | None = None
        self._ddp = weakref.ref(ddp)
        ddp.register_comm_hook(None, self._hook)

    def close(self) -> None:
        """Stop calling the function; gradients pass through."""
        self.on_bucket = None
        if (ddp := self._ddp()) is not None:
            vars(ddp).pop("join_hook", None)

    # DDP inspects this signature: the name `bucket`, and the class itself
    def _hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if self.on_bucket is not None:
            params: Any = bucket.parameters()  # plain tensors in torch's stub
            self.on_bucket(bucket.index(), params, _gradients(bucket))
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        future.set_result(buffer)
        return future


def _gradients(bucket: dist.GradBucket) -> list[Tensor]:
    """Return views of a bucket in the layouts of the parameters, as DDP's reducer lays them out."""
    # `bucket.gradients()` returns some layouts, such as channels_last, in the wrong order
    # Source: torch/csrc/distributed/c10d/reducer.cpp, `initialize_bucket_views`.
    buffer = bucket.buffer()
    at = 0
    found = []
    for param in bucket.parameters():
        part = buffer.narrow(0, at, param.numel())
        at += param.numel()
        dense = torch.empty_like(param, device="meta").stride() == param.stride()
        if dense:
            found.append(part.as_strided(param.shape, param.stride(), part.storage_offset()))
        else:
            found.append(part.view(param.shape))
    return found


def tap_buckets(
    ddp: DistributedDataParallel, group: Group, on_bucket: OnBucket, *, instead: str
) -> BucketTap:
    """Call `on_bucket(index, parameters, gradients)` in synchronising backward passes of `ddp`."""
    # it must not change the gradients, nor wait for other ranks
    if dist.get_world_size(ddp.process_group) != group.size:
        raise ValueError(
            f"ddp spans {dist.get_world_size(ddp.process_group)} ranks and the optimizer "
            f"{group.size}: give both the same process_group"
        )
    tap = _taps.get(ddp)
    if tap is None:
        try:
            tap = BucketTap(ddp)
        except RuntimeError as error:
            raise ValueError(
                "this DistributedDataParallel model has a communication hook already, and torch "
                f"allows one: wrap the model anew ({error})"
            ) from error.__cause__
        _taps[ddp] = tap
    if tap.on_bucket is not None:
        raise ValueError(
            "this DistributedDataParallel model is attached already: call remove() on its handle "
            "first"
        )
    tap.on_bucket = on_bucket

    def refuse_join(**_: Any) -> NoReturn:
        raise RuntimeError(
            "DistributedDataParallel.join() does not work with an attached optimizer, whose ranks "
            "meet in step(), which a rank without batches does not call: give all ranks equally "
            f"many batches, or {instead}"
        )

    vars(ddp)["join_hook"] = refuse_join
    return tap
