"""Provenance of saved state that differs from rank to rank."""

import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checksum import flat_bytes
from thinwire.core.tree import leaves

PROVENANCE = "provenance"
"""Key of the provenance in a state."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance of a state.

    >>> provenance = Provenance(rank=1, ranks=4, position=100, checksum=7)
    >>> Provenance.read(provenance.packed()) == provenance
    True
    """

    rank: int
    """Rank that saved it."""
    ranks: int
    """Number of ranks then."""
    position: int
    """Updates made before."""
    checksum: int
    """Checksum of the rank's own state, as returned by `checksum_of`."""

    def packed(self) -> Tensor:
        """Return a tensor, which every way of saving keeps: int64, shape (4,)."""
        return torch.tensor(astuple(self), dtype=torch.int64, device="cpu")

    @classmethod
    def read(cls, value: object) -> "Provenance | None":
        """Read the result of `packed`; None for anything else."""
        if not isinstance(value, Tensor) or value.numel() != 4 or value.dtype != torch.int64:
            return None
        return cls(*value.reshape(-1).tolist())

    def problem(self, rank: int, ranks: int, checksum: int) -> str | None:
        """Return the reason for which this rank must not load the state, or None."""
        cure = (
            "Unsent residuals and momentum belong to one rank: let every rank save and load its "
            "own with engine.save and engine.load, thinwire.integrations.PerRankState, or one "
            "file per rank"
        )
        if self.ranks > 1 and (self.rank, self.ranks) != (rank, ranks):
            return (
                f"rank {rank} of {ranks} loads the state that rank {self.rank} of {self.ranks} "
                f"saved. {cure}"
            )
        if self.checksum != checksum:
            return (
                f"rank {rank} of {ranks} loads a state that differs from the saved one: its "
                "tensors were changed, or torch.distributed.checkpoint mixed those of several "
                f"ranks. {cure}"
            )
        return None


def checksum_of(tree: Any) -> int:
    """Return the sum of the CRC-32 of all tensors in a tree, in any order: 63 bits."""
    contents = (flat_bytes(tensor.cpu()).numpy() for tensor in leaves(without_provenance(tree)))
    return sum(zlib.crc32(content.data) for content in contents) % (1 << 63)


def without_provenance(tree: Any) -> Any:
    """Return the same tree without provenance; containers are new, leaves the same.

    >>> without_provenance({"step": 3, PROVENANCE: torch.zeros(4)})
    {'step': 3}
    """
    if isinstance(tree, Mapping):
        return {key: without_provenance(value) for key, value in tree.items() if key != PROVENANCE}
    return type(tree)(map(without_provenance, tree)) if type(tree) in (list, tuple) else tree
