"""Trees of sharded models: joined, and resharded for another number of shards.

A shard holds consecutive rows (first dimension), as `torch.chunk` cuts them. All shards have
equally many rows, except that the last ones may have fewer or none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.tree import Path, joined


def rows_of(shape: Sequence[int], shards: int, shard: int) -> range:
    """Return the rows of a tensor that one of several shards holds."""
    length = -(-shape[0] // shards)
    return range(*(min(edge * length, shape[0]) for edge in (shard, shard + 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding of a model."""

    shards: int
    shard: int
    shapes: Mapping[str, tuple[int, ...]]
    owner: Callable[[Any, Path], str | None]
    of_ranks: tuple[str, ...] = ()

    def reshard(self, trees: Sequence[Any]) -> Any:
        """Return the tree of this shard, from those of all shards of another sharding."""
        # plain values, and tensors that are no rows of a parameter, come from the first shard that
        # has them; rows that a shard lacks and others have are zeros

        def node(path: Path, nodes: list[Any]) -> Any:
            inner = joined(node, path, nodes)
            if inner is not None:
                return inner
            first = next((node for node in nodes if node is not None), None)
            name = self.owner(trees[0], path) if isinstance(first, Tensor) else None
            if first is None or name is None:
                return first
            shape = self.shapes[name]
            shapes = [
                (len(rows_of(shape, len(nodes), shard)), *shape[1:]) for shard in range(len(nodes))
            ]
            # none, such as the residual of a shard that was too small to be compressed, is zeros
            parts = [
                first.new_zeros(wanted) if node is None else node
                for wanted, node in zip(shapes, nodes, strict=True)
            ]
            if [part.shape for part in parts] != shapes:
                return first
            rows = rows_of(shape, self.shards, self.shard)
            return torch.cat(parts)[rows.start : rows.stop].clone()

        return node((), list(trees))


def words(path: Path) -> Iterator[str]:
    """Return the words of all keys on a path through a tree, the innermost key first."""
    for key in reversed(path):
        if isinstance(key, str):
            yield key
            yield from key.split(" ")
