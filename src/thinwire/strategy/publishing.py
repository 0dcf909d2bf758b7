"""Publishes the model of an engine beside its training."""

import hashlib
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import Tensor

from thinwire._wording import warn_user
from thinwire.comm import Group, while_busy
from thinwire.core.sharded import is_sharded
from thinwire.errors import StreamError
from thinwire.strategy.updates import Steps
from thinwire.stream.files import Storage
from thinwire.stream.publisher import Publisher
from thinwire.stream.state import tensors_of
from thinwire.stream.writer import Overtaken, Settings

Where = str | PathLike[str]


class EnginePublisher:
    """Result of `Engine.publish`: publishes after updates, by the first rank or site.

    Among members the first one of an averaging publishes: after a loss the next one takes over.
    """

    def __init__(
        self,
        steps: Steps,
        where: Where,
        updates: int,
        how: Mapping[str, Any],
    ) -> None:
        self._steps = steps
        self._every = steps.publishes_every(updates)
        self._where = where
        self._settings = Settings(**how)
        self._last = steps.events()
        self._member = steps.member
        self.closed = False
        self._publisher: Publisher | None = None
        if self._member is not None:
            self._try_storage()
        elif any(map(is_sharded, tensors_of(steps.model)[0].values())):
            self._begin_together()
        elif self._is_first():
            self._publisher = self._made()

    @property
    def step(self) -> int:
        """Step of the newest version that this rank has written; 0 before it."""
        return 0 if self._publisher is None else max(self._publisher.written_step, 0)

    def after_update(self) -> None:
        """Publish if a version is due: after an averaging of local updates, or some updates."""
        events = self._steps.events()
        if self._publisher is not None and events > self._last:
            self._publisher.release()  # ranks have agreed on the sums that it has
        if self.closed or events < self._last + self._every:
            return
        self._last = events
        if self._is_first():
            self._publish()

    @property
    def _ranks(self) -> Group:
        """All ranks, with those of this site if the model is sharded."""
        return self._steps.exchange.group

    def _is_first(self) -> bool:
        """Return True on the rank, or on the ranks of the site, that publishes now."""
        group = self._ranks
        member = self._member
        if member is not None:
            return member.rank == 0
        return (group.replicas or group).rank == 0

    def _begin_together(self) -> None:
        """Begin on the first site, or raise on all ranks."""
        failure: StreamError | None = None
        try:
            self._publisher = self._made() if self._is_first() else None
        except StreamError as error:
            failure = error

        def agree() -> None:
            if failure is not None:
                raise failure

        while_busy(self._ranks, "beginning to publish", agree, error=StreamError)

    def _try_storage(self) -> None:
        """Raise unless this member can publish: it may have to take over."""
        storage = Storage(self._where, self._settings.token, self._settings.timeout)
        if storage.is_folder and not self._settings.shared:
            raise ValueError(
                f"{storage.where} is a folder, and members may be on several machines, each of "
                "which may have to publish: give an address that all reach, or shared=True if all "
                "see this folder"
            )
        if self._writes:
            storage.try_write()

    @property
    def _writes(self) -> bool:
        shards = self._ranks.shards
        return shards is None or shards.rank == 0

    def _made(self, run: str | None = None, generation: int = 0) -> Publisher:
        return Publisher(
            self._where,
            self._state,
            self._settings,
            group=self._ranks.shards,
            writes=self._writes,
            run=run,
            generation=generation,
        )

    def _publish(self) -> None:
        """Give the writer a version; a failure is a warning, since a training does not end for it.

        After the failure of a version before, this one is given all the same.
        """
        member = self._member
        step = self._steps.position()
        for _ in range(2):
            try:
                if self._publisher is None and member is not None:
                    room = hashlib.sha256(member.kv.store.room.encode()).hexdigest()
                    self._publisher = self._made(room, member.present()[0])
                assert self._publisher is not None, "made when publishing began"
                self._publisher.give(step, held=self._steps.rides)
                return
            except StreamError as error:
                warn_user(f"a version was not published: {error}")
                if member is not None and isinstance(error, Overtaken):
                    self._publisher = None  # this member was away meanwhile

    def _state(self) -> dict[str, Tensor]:
        """Return what all ranks have in common."""
        tensors, tied = tensors_of(self._steps.model)
        shared = {name: self._steps.shared(name, tensor) for name, tensor in tensors.items()}
        return shared | {name: shared[first] for name, first in tied.items()}

    def wait(self) -> None:
        """Wait for the version in progress.

        Raises:
            StreamError: It could not be written, or no byte moved for the time-out.
        """
        if self._publisher is not None:
            self._publisher.wait()

    def close(self) -> None:
        """Publish the last state, and say that no other follows; not for a member that leaves.

        Raises:
            StreamError: The last version could not be written.
        """
        publisher = self._publisher
        member = self._member
        if not self.closed and publisher is not None:
            if member is not None and (member.left or member.leaving):
                publisher.abandon()
                publisher.wait()
            else:
                publisher.close(self._steps.position())
        self.closed = True

    def abandon(self) -> None:
        """Stop publishing without a word, and without a collective."""
        if self._publisher is not None and not self.closed:
            self._publisher.abandon()
