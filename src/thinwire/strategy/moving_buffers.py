"""Buffers that change while a model trains, such as running statistics: after every update those of
rank 0 count.
"""

import json

import torch
from torch import Tensor, nn

from thinwire._names import named_buffers
from thinwire.comm import Group, elsewhere, mapping_of
from thinwire.comm.replicate import copy_from_first_
from thinwire.errors import Mismatch, PayloadCorrupt
from thinwire.local.model import changed_since, looks

__all__ = ["MovingBuffers"]


class MovingBuffers:
    """Keeps the buffers of replicas equal, by sending those that changed since the last time.

    DDP copies all buffers of rank 0 before every forward pass; this does it after the update and
    leaves out what did not change, so replicas are equal whenever somebody looks, and masks and
    tables are never sent.

    Communication: nothing for a model without buffers, or on one rank; else 24 bytes a rank, and
    the changed ones with a digest from rank 0.
    Failure: those that arrive damaged are an error here and, if this rank goes on, on all ranks at
    the next time.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model = model
        self._group = group
        self._seen: dict[str, Tensor] = {}
        self._damage: str | None = None
        self._alike = True
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

    def forget(self, *, equal: bool = True, alike: bool = True) -> None:
        """Take the buffers as they are now for equal, or, where they need not be, send all of them
        at the next time: after loading a state.

        Args:
            equal: Whether all ranks hold the same values.
            alike: Whether all ranks have the same buffers, whatever their values; the same on all.
                Where not, those without any take part at the next time too, which compares.
        """
        self._equal, self._alike = equal and alike, alike
        if self._group.size > 1:
            self._seen = {
                name: buffer.detach().clone() for name, buffer in named_buffers(self._model)
            }

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make them equal; all ranks must call it.

        Raises:
            Mismatch: A buffer is of another shape or type on some of the ranks, or is there on some
                of them only; on all ranks, before any buffer is copied.
            PayloadCorrupt: They arrived damaged, now here or before on any rank; none was written
                there.
        """
        if self._group.size == 1 or (self._alike and not self._seen):
            return
        buffers = dict(named_buffers(self._model))
        gone = sorted(self._seen.keys() - buffers.keys())
        changed_here = changed_since(self._seen if self._equal else {}, buffers)
        mine = {name: looks(buffers[name]) for name in changed_here}
        mine |= dict.fromkeys(gone, "not there")
        what = "comparing which buffers changed"
        report = (
            {"buffers": mine} if self._damage is None else {"buffers": mine, "damage": self._damage}
        )
        answers = self._group.gather_bytes(json.dumps(report).encode(), what=what)
        told = [mapping_of(answer) for answer in answers]
        for rank, row in enumerate(told):
            if "buffers" not in row:
                raise elsewhere(what, rank, row)
            if "damage" in row:
                raise PayloadCorrupt(row["damage"])
        rows: list[dict[str, str]] = [row["buffers"] for row in told]
        changed = dict.fromkeys(name for row in rows for name in row)
        for name in changed:
            before = looks(self._seen[name]) if name in self._seen else "not there"
            _require_alike(name, [row.get(name, before) for row in rows])
        moved = [name for name in buffers if name in changed]
        for name in gone:
            del self._seen[name]
        if moved:
            try:
                copy_from_first_(
                    (buffers[name] for name in moved),
                    self._group,
                    what="copying the buffers of rank 0",
                )
            except PayloadCorrupt as error:
                self._damage = str(error)
                raise
        self._seen.update({name: buffers[name].detach().clone() for name in moved})
        self._equal = self._alike = True


def _require_alike(name: str, by_rank: list[str]) -> None:
    for rank, each in enumerate(by_rank):
        if each != by_rank[0]:
            raise Mismatch(
                f"buffer {name} is {by_rank[0]} on rank 0 and {each} on rank {rank}, so that of "
                "rank 0 cannot be copied to all. Keep what differs from rank to rank, such as a "
                "cache, in a plain attribute of the module. The update before this was made, and "
                "no buffer was copied"
            )
