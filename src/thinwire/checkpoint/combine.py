"""Combines the states of several ranks into one, for another number of ranks.

Every new rank gets the same state: the mean over the old ranks. Pending state of single ranks
(residuals, merged gradients, changes since the last averaging) enters training through a mean over
ranks, so its effect is kept exactly.

Rules, chosen by path (`model/blocks.0.weight`: keys joined by "/"; the first matching glob pattern
counts):

- `mean`: the default. Floating-point and complex tensors and floats: the mean over the ranks that
  have it, computed in float64 (complex128) in the order of the ranks and rounded once. A value that
  is bit-identical on all of them is unchanged. Anything else under this rule: `first`.
- `mean_zero`: as `mean`, but a rank that lacks the tensor, where others have it, counts as zero.
  For pending state.
- `whole`: as `mean`, but a dict with tensors of ints or bools that differ between ranks comes from
  the first rank that has one: codes mean nothing with another rank's scales.
- `strict`: as `mean`, but values that have no mean must be equal on all ranks.
- `first`: the value of the first rank that has one; of a dict, list or tuple all of it. The default
  of ints, bools, str, bytes and other tensors.
- `min`, `max`: element by element, of ints too; of bools `min` is all and `max` is any.

None counts as absent if another rank has a value. Dicts are joined, keys in order of their first
appearance. Lists and tuples of equal length are joined entry by entry; others are taken from the
first rank. No rule applies to the state of `random_state()`: new rank r takes that of old rank r. A
rank beyond the old ones starts new streams, derived from those of old rank r mod their number.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.checkpoint.random_state import derived, is_random_state
from thinwire.checkpoint.tensor_file import bytes_of, digest
from thinwire.checkpoint.tree import STORED, TensorRef
from thinwire.core.tree import Path, equal, joined, leaves, mapped
from thinwire.errors import CheckpointError

Rule = Literal["mean", "mean_zero", "whole", "first", "strict", "min", "max"]
Rules = Mapping[str, Rule] | None
_MEANS = ("mean", "mean_zero", "whole", "strict")
_ONLY_STORAGE = {getattr(torch, name, None) for name in ("float4_e2m1fn_x2", "float8_e8m0fnu")}
Read = Callable[[Any], Tensor]


def combine(
    states: Sequence[Any],
    rules: Rules = None,
    *,
    rank: int = 0,
    read: Read = lambda leaf: leaf,
) -> Any:
    """Return one rank's state, from the `states` that another number of ranks saved.

    Example:
        >>> combine([{"w": 1.0, "step": 3}, {"w": 3.0, "step": 3}], rank=0)
        {'w': 2.0, 'step': 3}

    Rules by glob pattern over paths are those at the top of this module. `read` returns the tensor
    for a leaf that stands for one, so that not all tensors are in memory at once. Values that do
    not fit together are `CheckpointError`, which names the path.
    """
    return _Combiner(rules or {}, rank, read).node((), list(states))


class _Combiner:
    def __init__(self, rules: Mapping[str, Rule], rank: int, read: Read) -> None:
        self.rules = rules
        self.rank = rank
        self.read = read
        self._own = partial(mapped, read, kinds=STORED)

    def node(self, path: Path, nodes: list[Any]) -> Any:
        """Combine one node. `nodes` has an entry for every old rank, None if it has no value."""
        present = [node for node in nodes if node is not None]
        name = "/".join(map(str, path))
        matching = (r for pattern, r in self.rules.items() if fnmatchcase(name, pattern))
        rule = next(matching, "mean")
        coded = [node for node in present if rule == "whole" and _codes(node)]
        if not present or rule == "first" or len({*map(self._code_digest, coded)}) > 1:
            return self._own(next(iter(coded or present), None))
        if all(is_random_state(node) for node in present):
            state = self._own(present[self.rank % len(present)])
            return state if self.rank < len(present) else derived(state, self.rank)
        inner = joined(self.node, path, nodes)
        if inner is not None:
            return inner
        if rule == "strict" and not all(
            isinstance(node, float) or (isinstance(node, STORED) and _has_mean(node.dtype))
            for node in nodes
        ):
            first, *others = map(self._own, nodes)
            if not all(equal(first, other) for other in others):
                raise CheckpointError(
                    f"the states of {len(nodes)} ranks, {', '.join(map(str, path))}, differ in "
                    "more than floating-point values, so they have no mean: resume with the number "
                    "of ranks that saved them"
                )
        zeros = len(nodes) - len(present) if rule == "mean_zero" else 0
        return self._leaf(name, rule, present, zeros=zeros)

    def _code_digest(self, node: Any) -> tuple[Any, ...]:
        return tuple((c.dtype, tuple(c.shape), digest(self.read(c))) for c in _codes(node))

    def _leaf(self, path: str, rule: str, present: list[Any], *, zeros: int) -> Any:
        if all(isinstance(value, STORED) for value in present):
            return self._tensor(path, rule, present, zeros)
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
            return _number(rule, present, zeros)
        if rule in ("min", "max") and all(isinstance(value, bool) for value in present):
            return (all if rule == "min" else any)(present)
        _require_one(path, present, {type(value).__name__ for value in present})
        return self._own(present[0])

    def _tensor(self, path: str, rule: str, leaves: list[Any], zeros: int) -> Tensor:
        looks = {f"{leaf.dtype} of shape {tuple(leaf.shape)}" for leaf in leaves}
        _require_one(path, leaves, looks)
        dtype = leaves[0].dtype
        if rule in _MEANS:
            return self._mean(leaves, zeros) if _has_mean(dtype) else self.read(leaves[0])
        if dtype.is_complex:
            raise CheckpointError(f"{path} is {dtype}, which has no {rule}: choose another rule")
        fold = Tensor.minimum if rule == "min" else Tensor.maximum
        wide = _wide(dtype) if _has_mean(dtype) else dtype
        return reduce(fold, (self.read(leaf).to(wide) for leaf in leaves)).to(dtype)

    def _mean(self, leaves: list[Any], zeros: int) -> Tensor:
        first = self.read(leaves[0])
        total = first.to(_wide(first.dtype), copy=True)
        equal = zeros == 0
        for leaf in leaves[1:]:
            # ranks with the same bytes refer to the same tensor of a file
            other = first if isinstance(leaf, TensorRef) and leaf == leaves[0] else self.read(leaf)
            equal = equal and torch.equal(bytes_of(first), bytes_of(other))
            total += other.to(total.dtype)
        return first if equal else (total / (len(leaves) + zeros)).to(first.dtype)


def _require_one(path: str, values: list[Any], kinds: set[str]) -> None:
    if len(kinds) > 1:
        raise CheckpointError(
            f"the states of {len(values)} ranks cannot be combined: {path} is "
            f"{' on one rank and '.join(sorted(kinds))} on another. Load with the number of "
            "ranks that saved"
        )


def _number(rule: str, values: list[int | float], zeros: int) -> int | float:
    if rule not in _MEANS:
        return min(values) if rule == "min" else max(values)
    if all(isinstance(value, int) for value in values) or (
        not zeros and len({repr(float(value)) for value in values}) == 1
    ):
        return values[0]
    total = 0.0
    for value in values:
        total += value
    return total / (len(values) + zeros)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _has_mean(dtype: torch.dtype) -> bool:
    """Return True if the tensor stands for numbers by itself. Scales and packed pairs do not."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype not in _ONLY_STORAGE


def _codes(node: Any) -> list[Any]:
    """Return the tensors of a tree that have no mean; one without a dimension is a count."""
    return [leaf for leaf in leaves(node, STORED) if leaf.shape and not _has_mean(leaf.dtype)]
