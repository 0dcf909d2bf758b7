"""An optimizer of another method, told the same as the one that is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.core.precision import state_dtype
from thinwire.optim.base import CommonOptimizer
from thinwire.optim.groups import Exclusion, TakenOver, excluded_flags, require_matches

__all__ = ["Recipe", "decided_exclusion", "rebuilt"]

_COMMON_KEYS = (
    "lr",
    "grad_centralization",
    "regularizer",
    "maximize",
    "foreach",
    "initial_lr",
    "name",
)


@dataclass(slots=True, kw_only=True)
class Recipe:
    """How an optimizer becomes one of another method."""

    kind: type[Any]
    """A `CommonOptimizer`."""
    arguments: dict[str, Any]
    """Of the constructor, beside those that all have in common."""
    keys: Mapping[str, Callable[[Any], Any]]
    """Own keys of a group that mean the same there, each with what makes it the kind of value that
    ours take."""
    unused: Mapping[str, Any]
    """Keys that mean nothing there, with the value that asks for nothing."""
    state: Sequence[str]
    """Keys of a parameter's state that mean the same there."""
    patterns: tuple[str, ...] = ()
    """Names without decay, beside those that the optimizer excludes."""
    own_decay: float | None = None
    """A group's weight_decay that is not taken over, because the method has one of its own."""
    problems: list[str] = field(default_factory=list)
    """What stands in the way."""
    notes: list[str] = field(default_factory=list)
    """What is taken over, and what is not."""


@dataclass(eq=False)
class _Decided:
    """A predicate that answers as decided before, and by the rules for parameters that come
    later.
    """

    answers: dict[Tensor, bool]
    rules: tuple[Exclusion, ...]

    def __call__(self, name: str, param: Tensor) -> bool:
        if param in self.answers:
            return self.answers[param]
        return any(excluded_flags(rule, [(name, param)])[0] for rule in self.rules)


def decided_exclusion(
    told: TakenOver, patterns: tuple[str, ...], names: Mapping[Tensor, str]
) -> Exclusion:
    """Who has no decay: whom the optimizer excludes, and whose name matches; decided for all stages
    of a pipeline.

    Raises:
        ValueError: A pattern matches no name.
    """
    require_matches(patterns, names.values())
    if not patterns and not told.exclude:
        return None
    pairs = [(names[param], param) for param in told.excluded]
    flags = zip(pairs, excluded_flags(patterns, pairs), strict=True)
    answers = {param: told.excluded[param] or flag for (_, param), flag in flags}
    return _Decided(answers, tuple(rule for rule in (told.exclude, patterns) if rule))


def rebuilt(
    recipe: Recipe,
    told: TakenOver,
    state: Mapping[Tensor, Mapping[str, Any]],
    names: Mapping[Tensor, str],
    keep: Callable[[Tensor], bool],
) -> CommonOptimizer:
    """The optimizer of the other method, at the same update, with the state that means the same
    there.

    Args:
        recipe: What to make.
        told: What the given optimizer was told; read only.
        state: Of the given optimizer; tensors of the right type are shared, not copied.
        names: Of all its parameters.
        keep: Which parameters this process trains. Groups stay where they are, empty ones too.

    Raises:
        TypeError, ValueError: What the constructor refuses.
    """
    groups: list[dict[str, Any]] = []
    for group in told.groups:
        kept = [param for _, param in group["params"] if keep(param)]
        values = {key: recipe.keys[key](group[key]) for key in recipe.keys if key in group}
        if recipe.own_decay is not None and values.get("weight_decay") == recipe.own_decay:
            del values["weight_decay"]
        common = {key: group[key] for key in _COMMON_KEYS if key in group}
        groups.append(
            {"params": kept, "param_names": [names[param] for param in kept], **common, **values}
        )
    order = (
        []
        if told.order is None
        else [{"order_params": [param for param in told.order if keep(param)]}]
    )
    new: CommonOptimizer = recipe.kind(
        [*groups, *order],
        lr=told.lr,
        grad_clip=told.grad_clip,
        regularizer=told.regularizer,
        exclude_from_weight_decay=decided_exclusion(told, recipe.patterns, names),
        **recipe.arguments,
    )
    _keep_labels_(new, told, recipe)
    saved = new.state_dict()
    everything = [param for group in new.param_groups for param in group["params"]]
    saved["position"] = told.position
    saved["state"] = {
        i: entries
        for i, param in enumerate(everything)
        if (entries := _entries(param, state.get(param, {}), recipe))
    }
    new.load_state_dict(saved)
    return new


def _keep_labels_(new: CommonOptimizer, told: TakenOver, recipe: Recipe) -> None:
    """Changes the groups of `new`: keys of the user's own, which no optimizer reads, stay beside
    the others.
    """
    known = {*_COMMON_KEYS, "params", *recipe.keys, *recipe.unused}
    for group, before in zip(new.param_groups, told.groups, strict=True):
        group.update(
            {key: value for key, value in before.items() if key not in known and key not in group}
        )


def _entries(param: Tensor, entries: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The state of one parameter in the types that ours have."""
    new: dict[str, Any] = {}
    for key in recipe.state:
        value = entries.get(key)
        if key == "step" and value is not None:
            new[key] = torch.tensor(float(value), dtype=torch.float32)
        elif isinstance(value, Tensor):
            dense = value if value.layout is torch.strided else value.to_dense()
            new[key] = dense.to(dense.dtype if dense.is_complex() else state_dtype(param))
    return new
