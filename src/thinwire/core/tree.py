"""Trees of state: mappings, lists and tuples inside each other, with values at the leaves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]
"""Keys and indices from the top of a tree to a node."""
Kinds = type | UnionType


def leaves(tree: Any, kinds: Kinds = Tensor, depth: int = -1) -> Iterator[Any]:
    """Yield the leaves of these kinds, in order; with a `depth`, only down to so many levels."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for node in tree if depth else ():
            yield from leaves(node, kinds, depth - 1)
    elif isinstance(tree, kinds):
        yield tree


def mapped(change: Callable[[Any], Any], tree: Any, kinds: Kinds = Tensor) -> Any:
    """Return the tree with all leaves of these kinds changed; mappings become dicts."""
    inner = joined(lambda _, nodes: mapped(change, nodes[0], kinds), (), [tree])
    if inner is not None:
        return inner
    return change(tree) if isinstance(tree, kinds) else tree


def joined(join: Callable[[Path, list[Any]], Any], path: Path, nodes: Sequence[Any]) -> Any:
    """Join the nodes of several trees at one path, entry by entry; None if they are leaves.

    A missing node or entry is None. Mappings are joined, keys in order of their first appearance.
    Lists and tuples are leaves unless they are of one kind and length.
    """
    present = [node for node in nodes if node is not None]
    if present and all(isinstance(node, Mapping) for node in present):
        keys = dict.fromkeys(key for node in present for key in node)
        return {
            key: join((*path, key), [None if node is None else node.get(key) for node in nodes])
            for key in keys
        }
    lists = [node for node in present if isinstance(node, list | tuple)]
    if len(lists) < len(present) or len({(type(node), len(node)) for node in lists}) != 1:
        return None
    entries = [
        join((*path, i), [None if node is None else node[i] for node in nodes])
        for i in range(len(lists[0]))
    ]
    kind = type(lists[0])
    return kind(*entries) if hasattr(kind, "_fields") else kind(entries)


def equal(a: Any, b: Any) -> bool:
    """Return True for equal plain values, and for equal tensors on any devices."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.cpu(), b.cpu())
    return bool(a == b)
