"""Buffers that change while a model trains, such as running statistics: after every update those of rank 0 count."""

from torch import Tensor, nn

from thinwire.comm import Group
from thinwire.comm.replicate import copy_from_first_

__all__ = ["MovingBuffers"]


class MovingBuffers:
    """Keeps the buffers of replicas equal, by sending those that changed since the last time.

    DDP copies all buffers of rank 0 before every forward pass; this does it after the update and leaves out what did
    not change, so replicas are equal whenever somebody looks, and masks and tables are never sent.

    Communication: nothing for a model without buffers; else 24 bytes a rank and the changed ones from rank 0.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._group = group
        self._seen = self._versions()

    @property
    def bytes_sent(self) -> int:
        """By this rank."""
        return self._group.bytes_sent

    def settle(self) -> None:
        """Make them equal; all ranks must call it."""
        if not self._seen or self._group.size == 1:
            return
        changed = ",".join(name for name, now in self._versions().items() if not _same(self._seen.get(name), now))
        answers = self._group.gather_bytes(changed.encode(), what="comparing which buffers changed")
        names = {name for answer in answers for name in answer.decode().split(",")}
        buffers = dict(self._model.named_buffers())
        moved: list[Tensor] = [buffers[name] for name in buffers if name in names]
        if moved and self._group.size > 1:
            copy_from_first_(moved, self._group, what="copying the buffers of rank 0")
        self._seen = self._versions()

    def forget(self) -> None:
        """Take the buffers as they are now for equal: after loading a state."""
        self._seen = self._versions()

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        """What tells that a buffer was replaced or written; it is held, so that its identity is not used again."""
        return {name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()}


def _same(before: tuple[Tensor, int] | None, now: tuple[Tensor, int]) -> bool:
    return before is not None and before[0] is now[0] and before[1] == now[1]
