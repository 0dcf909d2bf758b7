"""Buffers that change while a model trains, such as running statistics: after every update those of rank 0 count."""

import torch
from torch import Tensor, nn

from thinwire.comm import Group
from thinwire.comm.replicate import copy_from_first_

__all__ = ["MovingBuffers"]


class MovingBuffers:
    """Keeps the buffers of replicas equal, by sending those that changed since the last time.

    DDP copies all buffers of rank 0 before every forward pass; this does it after the update and leaves out what did
    not change, so replicas are equal whenever somebody looks, and masks and tables are never sent.

    Communication: nothing for a model without buffers, or on one rank; else 24 bytes a rank and the changed ones from
        rank 0.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._group = group
        self._seen: dict[str, Tensor] = {}
        self.forget()

    @property
    def bytes_sent(self) -> int:
        """By this rank."""
        return self._group.bytes_sent

    @property
    def bytes_received(self) -> int:
        """By this rank."""
        return self._group.bytes_received

    @property
    def wait_s(self) -> float:
        """Of this rank."""
        return self._group.wait_s

    def forget(self) -> None:
        """Take the buffers as they are now for equal: after loading a state."""
        if self._group.size > 1:
            self._seen = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    @torch.no_grad()
    def settle(self) -> None:
        """Make them equal; all ranks must call it."""
        if not self._seen or self._group.size == 1:
            return
        buffers = dict(self._model.named_buffers())
        mine = "\n".join(self._changed(buffers))
        answers = self._group.gather_bytes(mine.encode(), what="comparing which buffers changed")
        changed = {name for answer in answers for name in answer.decode().split("\n")}
        moved = [name for name in buffers if name in changed]
        if moved:
            copy_from_first_((buffers[name] for name in moved), self._group, what="copying the buffers of rank 0")
        self._seen.update({name: buffers[name].detach().clone() for name in moved})

    def _changed(self, buffers: dict[str, Tensor]) -> list[str]:
        # by value: batch norm writes its statistics without raising their version counter
        names = list(buffers)
        flags = [_differs(buffers[name], self._seen.get(name)) for name in names]
        together = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        return [name for name, flag in zip(names, together, strict=True) if flag]


def _differs(now: Tensor, before: Tensor | None) -> Tensor:
    if before is None or before.shape != now.shape or before.dtype != now.dtype or before.device != now.device:
        return torch.ones((), dtype=torch.bool, device=now.device)
    return (now != before).any()
