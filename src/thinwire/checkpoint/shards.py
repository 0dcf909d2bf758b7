"""Trees of sharded models: joined, and resharded for another number of shards.

A shard holds consecutive rows (first dimension), as `torch.chunk` cuts them. All shards have
equally many rows, except that the last ones may have fewer or none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.combine import entry_of

Path = tuple[Any, ...]


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
        return self._node((), list(trees), trees[0])

    def _node(self, path: Path, nodes: list[Any], tree: Any) -> Any:
        present = [node for node in nodes if node is not None]
        first = present[0] if present else None
        if all(isinstance(node, Mapping) for node in present) and present:
            keys = dict.fromkeys(key for node in present for key in node)
            return {
                key: self._node((*path, key), [entry_of(node, key) for node in nodes], tree)
                for key in keys
            }
        if isinstance(first, list | tuple):
            return type(first)(
                self._node((*path, at), [entry_of(node, at) for node in nodes], tree)
                for at in range(len(first))
            )
        if not isinstance(first, Tensor):
            return first
        name = self.owner(tree, path)
        if name is None:
            return first
        shape = self.shapes[name]
        lengths = [len(rows_of(shape, len(nodes), shard)) for shard in range(len(nodes))]
        # none, such as the residual of a shard that was too small to be compressed, is zeros
        parts = [
            first.new_zeros(length, *shape[1:]) if node is None else node
            for length, node in zip(lengths, nodes, strict=True)
        ]
        if [part.shape for part in parts] != [(length, *shape[1:]) for length in lengths]:
            return first
        rows = rows_of(shape, self.shards, self.shard)
        return torch.cat(parts)[rows.start : rows.stop].clone()


def words(path: Path) -> Iterator[str]:
    """Return the words of all keys on a path through a tree, the innermost key first."""
    for key in reversed(path):
        if isinstance(key, str):
            yield key
            yield from key.split(" ")
