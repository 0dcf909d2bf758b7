"""Publishes the model of an engine beside its training."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._wording import warn_user
from thinwire.comm.waiting import busy
from thinwire.compress.quantized_change import Quantized
from thinwire.core.sharded import is_sharded, sharded_like, whole_of
from thinwire.errors import ThinwireError
from thinwire.strategy.parts import Parts
from thinwire.stream.files import tensors_of
from thinwire.stream.publisher import Publisher, publish


class EnginePublisher:
    """Result of `Engine.publish`: writes a version after updates, on a thread of rank 0."""

    def __init__(
        self,
        parts: Parts,
        position: Callable[[], int],
        where: str,
        updates: int,
        how: Mapping[str, Any],
    ) -> None:
        self._sync, self._position = parts.sync, position
        self._updates = check.integer("updates", updates, at_least=1)
        if parts.runner is not None:
            raise RuntimeError(
                "engine.publish does not work under pipeline, where each rank has a stage of the "
                "model: save checkpoints, and export them"
            )
        local = None if self._sync is None else self._sync.config
        self._one_bit = (
            local is not None
            and isinstance(local.compression, Quantized)
            and local.compression.value_bits == 1
            and not local.outer_momentum
        )
        """True if an averaging changes an anchor by one of few values: fewer bits than rounded."""
        self._tensors, tied = tensors_of(parts.model)
        self._sharded = any(map(is_sharded, self._tensors.values()))
        shards = parts.group.shards
        self._copies: dict[str, Tensor] = {}
        self._last = self._published = self._count()
        self._thread: threading.Thread | None = None
        self._publisher: Publisher | None = None
        if parts.group.rank == 0 and (shards is None or shards.rank == 0):
            for name, tensor in self._tensors.items():
                dtype = self._shared(name, tensor).dtype
                self._copies[name] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            state = self._copies | {name: self._copies[first] for name, first in tied.items()}
            self._publisher = publish(where, state, **how)

    def after_update(self) -> None:
        """Write a version if one is due: after an averaging of local updates, or some updates."""
        count = self._count()
        if count >= self._last + (self._updates if self._sync is None else 1):
            self._last = count
            self._begin()

    def _count(self) -> int:
        """Return the averagings of local updates so far, else the updates."""
        return self._position() if self._sync is None else self._sync._when.counters.averagings

    def _shared(self, name: str, tensor: Tensor) -> Tensor:
        """Return what all ranks have in common: for a parameter of local updates its anchor."""
        if self._sync is None or (anchor := self._sync._anchors.get(name)) is None:
            return tensor
        if tensor.is_complex():
            anchor = torch.view_as_complex(anchor)
        dtype = anchor.dtype if self._one_bit else tensor.dtype
        return sharded_like(anchor.to(tensor.device, dtype), tensor)

    def _begin(self) -> None:
        if self._publisher is None and not self._sharded:
            return
        if self._thread is not None and self._thread.is_alive():
            if not (self._sharded or self._one_bit):
                return  # the next version has these changes too
            self.wait()  # two averagings would take ten times the bits of each
        self._published, step = self._last, self._position()
        for name, tensor in self._tensors.items():
            value = whole_of(self._shared(name, tensor))  # a collective of the shards
            if name in self._copies:
                self._copies[name].copy_(value)
        if self._publisher is not None:
            args = self._publisher, step
            self._thread = threading.Thread(target=self._write, args=args, daemon=True)
            self._thread.start()

    def _write(self, publisher: Publisher, step: int) -> None:
        with _failure_warned(f"the version of step {step}"):
            publisher.update(step)

    def wait(self) -> None:
        """Wait for the version in progress."""
        if self._thread is not None:
            with busy(24 * 3600):
                self._thread.join()

    def close(self) -> None:
        """Publish the last state, and say that no other follows."""
        self.wait()
        self._last = self._count()
        if self._last > self._published:
            self._begin()
            self.wait()
        if self._publisher is not None:
            with _failure_warned("the end of the versions"):
                self._publisher.close()


@contextmanager
def _failure_warned(subject: str) -> Iterator[None]:
    try:
        yield
    except (ThinwireError, OSError) as error:  # a training does not end for it
        warn_user(f"{subject} was not published: {error}")
