"""Publishes the versions of a model, for followers elsewhere."""

import tempfile
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import _validate as check
from thinwire._wording import warn_user
from thinwire.checkpoint.tensor_file import digest, digests_of, write_tensors
from thinwire.comm import is_alone, rank_and_size_in
from thinwire.core.sharded import whole_of
from thinwire.errors import StreamError
from thinwire.stream.coder import encode
from thinwire.stream.files import (
    Held,
    Storage,
    base_name,
    digest_of,
    step_name,
    table_of,
    tensors_of,
)
from thinwire.stream.follower import Follower

_CHAIN = 4
"""Size of the differences after a base, over its own, at which the next one is due."""


def publish(
    where: str | PathLike[str],
    model: nn.Module | Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    token: str | bytes | None = None,
    every: int | None = None,
    keep: int = 2,
) -> "Publisher":
    """Publish the versions of a model, which `follow` reads bit for bit.

    `update` writes the difference to the version before, without loss: the step of each entry in
    units in the last place, coded by the exponent of its old value. Now and then it writes a base
    too, the whole model as a safetensors file, from which late followers start. A publisher that
    starts again continues the versions that are there.

    Example::

        with tw.publish("versions", model, dtype=torch.bfloat16) as publisher:
            for step in range(3):
                publisher.update(step)

    Args:
        where: Folder, or an address that fsspec knows (s3, gs, hf, ...). Nothing else is stored in
            it, and one process at a time publishes there.
        model: Model, or its `state_dict` if its tensors change in place. They may be sharded
            (FSDP2). The publisher keeps a copy of the last version in host memory.
        dtype: Floating-point tensors are published in this dtype; None for their own.
        token: Secret that readers need too. It proves who wrote a version and hides nothing.
        every: Versions between two bases; None for one when the differences since the last have
            four times its size.
        keep: Number of bases to keep, with all versions since the oldest of them.

    Raises:
        ImportError: The extra is missing: `pip install 'thinwire[stream]'`.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point dtype or None, got {dtype!r}")
    check.instance("model", model, (nn.Module, Mapping))
    if every is not None:
        check.integer("every", every, at_least=1)
    check.integer("keep", keep, at_least=1)
    return Publisher(Storage(where, token), model, dtype, every, keep)


class Publisher(AbstractContextManager["Publisher"]):
    """Result of `publish`: writes a version at each `update`.

    Attributes:
        number: Newest version that was written; 0 before the first. Ranks other than 0 count their
            updates.
    """

    def __init__(
        self,
        storage: Storage,
        model: nn.Module | Mapping[str, Any],
        dtype: torch.dtype | None,
        every: int | None,
        keep: int,
    ) -> None:
        self._storage, self._model, self._dtype = storage, model, dtype
        self._every, self._keep = every, keep
        self._writer = uuid.uuid4().hex
        self._held: Held | None = None
        self._wrote = False
        self.number = 0

    def update(self, step: int) -> int:
        """Write the model as it is now; return the number of this version, from 1.

        Rank 0 writes; if the model is sharded, all ranks call it. It returns when followers can
        read the version. After an error the next call writes a base.

        Args:
            step: Number of the training step, which readers see.

        Raises:
            StreamError: Another process publishes there, or the storage cannot be reached.
            OSError: Writing failed.
        """
        check.integer("step", step, at_least=0)
        tensors, tied = tensors_of(self._model)
        if not is_alone() and rank_and_size_in(None)[0]:
            for tensor in tensors.values():
                whole_of(tensor)
            self.number += 1
            return self.number
        newest = self._newest()
        held, self._held = self._held, None  # an error from here on makes the next version a base
        number: int = newest["number"] + 1
        written: int = newest["written"]
        record = {"number": number, "step": step, "stream": newest["stream"]}
        bases = list(newest["bases"])
        if held is not None and held.tied == tied and self._fits(held, tensors):
            written += self._write_step(held, tensors, record)
        else:
            whole = {name: self._published(tensor) for name, tensor in tensors.items()}
            held, bases = Held(whole, digests_of(whole), tied), []
            record["digest"] = digest_of(table_of(whole), held.digests)
        record["written"] = written
        if self._base_due(bases, number, written):
            bases.append([number, self._write_base(held, record), written])
        kept = bases[-self._keep :]
        oldest = kept[0][0]
        more = {"bases": kept, "oldest": oldest, "writer": self._writer, "closed": False}
        self._storage.name_newest({**record, **more})
        dropped = range(newest["oldest"], oldest + 1) if newest["number"] else ()
        self._storage.discard(map(step_name, dropped))
        self._storage.discard(base_name(b[0]) for b in newest["bases"] if b not in kept)
        held.number, held.step, held.digest, held.written = number, step, record["digest"], written
        self._held, self.number, self._wrote = held, number, True
        return number

    def close(self) -> None:
        """Say that no version will follow, which ends the loops of followers."""
        if self._held is not None:
            self._storage.name_newest({**self._newest(), "closed": True})
            self._held = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _newest(self) -> dict[str, Any]:
        """Return the record of the newest version, after taking over what another one wrote."""
        newest = self._storage.newest()
        if self._wrote:
            if newest is None or newest["writer"] != self._writer:
                raise StreamError(
                    f"{self._storage.where}: another process publishes there too, or its files "
                    "were deleted: give each publisher a folder of its own"
                )
            return newest
        if newest is not None:
            self._storage.clean(newest)
            follower = Follower(self._storage, None)
            try:
                follower.latest()
            except StreamError as error:
                warn_user(f"the next version is a base, since the last one is lost: {error}")
            self._held = follower.held
        none = {"number": 0, "written": 0, "bases": [], "oldest": 0, "stream": self._writer}
        return {**(newest or none), "writer": self._writer}

    def _fits(self, held: Held, tensors: Mapping[str, Tensor]) -> bool:
        now = [(name, self._dtype_of(tensor), tensor.shape) for name, tensor in tensors.items()]
        return now == [(name, own.dtype, own.shape) for name, own in held.tensors.items()]

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype

    def _published(self, tensor: Tensor) -> Tensor:
        """Return a tensor as it is published: whole, on the CPU, in memory of its own."""
        value = whole_of(tensor).to("cpu", self._dtype_of(tensor))
        return value.clone(memory_format=torch.contiguous_format)

    def _write_step(self, held: Held, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> int:
        """Write the difference and change what is held; return the payload's bytes."""
        lengths = []
        with tempfile.TemporaryFile() as payload:
            for name, tensor in tensors.items():
                new = self._published(tensor)
                lengths.append(payload.write(encode(held.tensors[name], new)))
                held.tensors[name], held.digests[name] = new, digest(new)
            table = table_of(held.tensors)
            record |= {"previous": held.digest, "digest": digest_of(table, held.digests)}
            size = sum(lengths)
            about = {**record, "lengths": lengths, "written": held.written + size}
            self._storage.write_step(about, payload)
        return size

    def _base_due(self, bases: list[list[int]], number: int, written: int) -> bool:
        if not bases:
            return True
        last, size, until = bases[-1]
        return number - last >= self._every if self._every else written - until >= _CHAIN * size

    def _write_base(self, held: Held, record: Mapping[str, Any]) -> int:
        """Write a whole version; return its size in bytes."""
        about = {**record, "table": table_of(held.tensors), "tied": held.tied}
        metadata = {"format": "pt", "thinwire": self._storage.sealed(about)}
        with self._storage.written(base_name(record["number"])) as path:
            return write_tensors(path, held.tensors, metadata)[0]
