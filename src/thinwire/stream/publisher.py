"""Publishes the versions of a model, for followers elsewhere."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire import _validate as check
from thinwire.comm import Group, rank_and_size_in, while_busy
from thinwire.core.sharded import is_sharded
from thinwire.errors import StreamError
from thinwire.stream.files import Storage
from thinwire.stream.state import Model, plain_copy, table_of, tensors_of
from thinwire.stream.writer import Settings, Writer

_T = TypeVar("_T")


def publish(
    where: str | PathLike[str],
    model: nn.Module | Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    token: str | bytes | None = None,
    every: int | None = None,
    keep: int = 2,
    timeout: float = 60.0,
    replace: bool = False,
    shared: bool = False,
) -> "Publisher":
    """Publish the versions of a model, which `follow` reads bit for bit.

    `update` copies the model as it is then, and a thread writes the difference to the version
    before, without loss: the step of each entry in units in the last place, coded by the exponent
    of its old value. Now and then it writes a base too, the whole model as a safetensors file, from
    which late followers start. A publisher that starts again continues the versions that are there.

    Example::

        with tw.publish("versions", model, dtype=torch.bfloat16) as publisher:
            for step in range(3):
                publisher.update(step)

    A script that ends with status 0 and still has its publisher closes it; leaving the block by an
    error does not.

    Args:
        where: Folder, or an address that fsspec knows (s3, gs, hf, ...). Nothing else is stored in
            it, and one process at a time publishes there: the one that began last.
        model: Model, whose tensors are looked up by name at each version, or a mapping of tensors.
            They may be sharded (FSDP2). The publisher keeps two copies in host memory.
        dtype: Floating-point tensors are published in this dtype; None for their own.
        token: Secret that readers need too. It proves who wrote a version and hides nothing.
        every: Versions between two bases; None for one when the differences since the last have
            four times its size.
        keep: Number of bases to keep, with all versions since the oldest of them.
        timeout: Seconds without a byte of progress after which a wait for the storage is an error.
        replace: True to publish this model where versions of another one are.
        shared: True if all machines of a run see a folder; asked for among members.

    Raises:
        ImportError: The extra is missing: `pip install 'thinwire[stream]'`.
        StreamError: There are versions of another model, or with another token; the storage does
            not answer; or the state of the model has what is no tensor.
    """
    check.instance("model", model, (nn.Module, Mapping))
    settings = Settings(
        dtype=dtype,
        token=token,
        every=every,
        keep=keep,
        timeout=timeout,
        replace=replace,
        shared=shared,
    )
    sharded = any(map(is_sharded, tensors_of(model)[0].values()))
    group = Group() if sharded else None
    first = rank_and_size_in()[0] == 0
    return Publisher(where, lambda: model, settings, group=group, writes=first)


class Publisher(AbstractContextManager["Publisher"]):
    """Result of `publish`: writes a version for each `update`.

    Rank 0 writes. If the model is sharded, all ranks make the same calls.
    """

    def __init__(
        self,
        where: str | PathLike[str],
        state: Callable[[], Model],
        settings: Settings,
        *,
        group: Group | None,
        writes: bool,
        run: str | None = None,
        generation: int = 0,
    ) -> None:
        # group: the ranks that make each call together, if the model is sharded over them. With
        # `run`, of members, the storage is first asked by the writer's thread
        self._state = state
        self._dtype = settings.dtype
        self._group = group
        self._writer: Writer | None = None
        self._given = 0
        self._step = -1
        self._closed = False
        self._held: Callable[[], int] | None = None

        def begin() -> None:
            if writes:
                storage = Storage(where, settings.token, settings.timeout)
                self._writer = Writer(
                    storage,
                    settings,
                    run or "",
                    generation,
                    needs_close=group is not None or run is not None,
                )
                self._writer.close = weakref.WeakMethod(self.close)
                collected = weakref.finalize(self, self._writer.abandon, collected=True)
                collected.atexit = False  # also in children of a fork, which have no such thread
                if run is None:
                    self._writer.begin(table_of(tensors_of(state())[0], settings.dtype))

        self._alike("beginning to publish", begin)

    @property
    def number(self) -> int:
        """Newest version that was written; 0 before the first. On other ranks that was given."""
        return self._given if self._writer is None else self._writer.number

    def update(self, step: int) -> int:
        """Publish the model as it is now; return the number of this version, from 1.

        It returns when the model is copied; `wait` returns when followers can read the version. If
        the versions before are late, this one is left out, with a warning, and the next one has its
        changes.

        Args:
            step: Number of the training step, which readers see.

        Raises:
            StreamError: A version before could not be written, such as where another process
                publishes; on all ranks if the model is sharded. Nothing was begun by this call.
        """
        check.integer("step", step, at_least=0)
        return self.give(step)

    @property
    def written_step(self) -> int:
        """Step of the newest version that was written here; -1 before it, and on other ranks."""
        return -1 if self._writer is None else self._writer.step

    def wait(self) -> None:
        """Wait until the versions that were given are written; none that was left out.

        Raises:
            StreamError: One could not be written, or no byte moved for the time-out.
        """
        self._alike("waiting for a version", self._wait)

    def close(self, step: int | None = None) -> None:
        """Publish what has changed since the last version, and say that no version will follow,
        which ends the loops of followers. May be called twice.

        Args:
            step: Step of the last version; None for that of the last `update`.

        Raises:
            StreamError: A version could not be written, or no byte moved for the time-out.
        """
        if self._closed:
            return
        step = self._step if step is None else step
        if step >= 0:
            self.give(step, last=True)
        self._alike("ending the versions", self._end)
        self._closed = True

    def abandon(self) -> None:
        """Publish no more. What was given is written; the end is not said."""
        self._closed = True
        if self._writer is not None:
            self._writer.abandon()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def give(self, step: int, *, last: bool = False, held: bool = False) -> int:
        """Copy the model and give it to the writer, if that has room; return the next number.

        The last one needs no room, and is written only if it differs. One that is `held` is
        written after `release`.
        """
        self.release()
        if self._closed:
            raise RuntimeError("this publisher was closed: call tw.publish again")
        self._step = step
        writer = self._writer
        tensors, tied = tensors_of(self._state())

        def room() -> tuple[int, bool]:
            if writer is None:
                return self._given + 1, True
            if not last and (problem := writer.take_problem()) is not None:
                raise problem
            return writer.next_number, last or writer.has_room(step)

        self._given, has_room = self._alike("publishing a version", room)
        if not has_room or (writer is None and self._group is None):
            return self._given
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            value = plain_copy(name, tensor, self._dtype)  # a collective of the shards
            if writer is not None:
                copies[name] = value
        if writer is not None:
            self._held = partial(writer.give, step, copies, tied, changed=last)
        if not held:
            self.release()
        return self._given

    def release(self) -> None:
        """Let the version that is held be written, if there is one."""
        held = self._held
        self._held = None
        if held is not None:
            held()

    def _wait(self) -> None:
        self.release()
        if self._writer is not None:
            self._writer.wait()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.end()

    def _alike(self, action: str, act: Callable[[], _T]) -> _T:
        """Do something on all ranks of a sharded model; return what rank 0 returns, or raise."""
        if self._group is None:
            return act()
        return while_busy(self._group, action, act, error=StreamError)[0]
