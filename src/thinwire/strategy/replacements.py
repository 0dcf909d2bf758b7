"""The two methods by which a strategy replaces an optimizer, and what each takes over."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.core.tensors import state_dtype
from thinwire.optim import SGD, Adam, AdamW, Lamb, Lars, LazyAdam
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.groups import Exclusion, excluded_flags, require_matches
from thinwire.optim.layerwise import LAMB, LARS
from thinwire.optim.settings import OptimizerSettings

_COMMON_KEYS = "lr grad_centralization regularizer maximize foreach initial_lr name"
"""Keys of a group that every class has."""
_Converters = Mapping[str, Callable[[Any], Any]]
"""Converters of values, by key."""


@dataclass(slots=True, kw_only=True)
class Replacement:
    """Conversion of an optimizer to another method."""

    kind: type[Any]
    """The new class, a `CommonOptimizer`."""
    arguments: dict[str, Any]
    """Arguments of the constructor, beside those that all optimizers have in common."""
    keys: _Converters
    """Keys of a group with the same meaning in the new class, each with a converter of its
    value.
    """
    unused: Sequence[str]
    """Keys without meaning in the new class."""
    state: Sequence[str]
    """Keys of a parameter's state with the same meaning in the new class."""
    patterns: tuple[str, ...] = ()
    """Patterns of names without decay, beside those that the optimizer excludes."""
    problems: list[str] = field(default_factory=list)
    """Obstacles to the conversion."""
    notes: list[str] = field(default_factory=list)
    """Notes on settings that are taken over, and on those that are not."""


@dataclass(eq=False)
class _FixedExclusion:
    """A predicate that repeats earlier decisions, and applies the rules to later parameters."""

    answers: dict[Tensor, bool]
    rules: tuple[Exclusion, ...]

    def __call__(self, name: str, param: Tensor) -> bool:
        if param in self.answers:
            return self.answers[param]
        return any(excluded_flags(rule, [(name, param)])[0] for rule in self.rules)


def exclusion_predicate(
    settings: OptimizerSettings, patterns: tuple[str, ...], names: Mapping[Tensor, str]
) -> Exclusion:
    """Return the predicate for parameters without decay: those that the optimizer excludes, and
    those whose name matches. Decided for all stages of a pipeline; refuses an idle pattern.
    """
    require_matches(patterns, names.values())
    if not patterns and not settings.exclude:
        return None
    pairs = [(names[param], param) for param in settings.excluded]
    flags = zip(pairs, excluded_flags(patterns, pairs), strict=True)
    answers = {param: settings.excluded[param] or flag for (_, param), flag in flags}
    return _FixedExclusion(answers, tuple(rule for rule in (settings.exclude, patterns) if rule))


def convert_optimizer(
    replacement: Replacement,
    settings: OptimizerSettings,
    state: Mapping[Tensor, Mapping[str, Any]],
    names: Mapping[Tensor, str],
    keep: Callable[[Tensor], bool],
) -> CommonOptimizer:
    """Return the optimizer of the other method, at the same update, with the state of the
    same meaning.
    """
    groups: list[dict[str, Any]] = []
    for group in settings.groups:
        kept = [param for _, param in group["params"] if keep(param)]
        values = {
            key: replacement.keys[key](group[key]) for key in replacement.keys if key in group
        }
        common = {key: group[key] for key in _COMMON_KEYS.split() if key in group}
        groups.append(
            {"params": kept, "param_names": [names[param] for param in kept], **common, **values}
        )
    if settings.order is not None:
        groups.append({"order_params": [param for param in settings.order if keep(param)]})
    new: CommonOptimizer = replacement.kind(
        groups,
        lr=settings.lr,
        grad_clip=settings.grad_clip,
        regularizer=settings.regularizer,
        exclude_from_weight_decay=exclusion_predicate(settings, replacement.patterns, names),
        **replacement.arguments,
    )
    _keep_labels_(new, settings, replacement)
    saved = new.state_dict()
    everything = [param for group in new.param_groups for param in group["params"]]
    saved["position"] = settings.position
    saved["state"] = {
        i: entries
        for i, param in enumerate(everything)
        if (entries := _entries(param, state.get(param, {}), replacement))
    }
    new.load_state_dict(saved)
    return new


def _keep_labels_(
    new: CommonOptimizer, settings: OptimizerSettings, replacement: Replacement
) -> None:
    """Copy the user's own keys, which no optimizer reads, to the groups of `new`. Changes `new`."""
    known = {*_COMMON_KEYS.split(), "params", *replacement.keys, *replacement.unused}
    for group, before in zip(new.param_groups, settings.groups, strict=True):
        group.update(
            {key: value for key, value in before.items() if key not in known and key not in group}
        )


def _entries(param: Tensor, entries: Mapping[str, Any], replacement: Replacement) -> dict[str, Any]:
    """Return the state of one parameter in the types of thinwire's optimizers."""
    new: dict[str, Any] = {}
    for key in replacement.state:
        value = entries.get(key)
        if key == "step" and value is not None:
            new[key] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
        elif isinstance(value, Tensor):
            dense = value if value.layout is torch.strided else value.to_dense()
            new[key] = dense.to(dense.dtype if dense.is_complex() else state_dtype(param))
    return new


SGDS = (torch.optim.SGD, SGD)
ADAMS = (torch.optim.Adam, torch.optim.AdamW, Adam, AdamW, LazyAdam)

_SGD_KEYS: _Converters = {"momentum": float, "nesterov": bool, "weight_decay": float}
_SGD_UNUSED = ("dampening", "differentiable", "fused")
_ADAM_UNUSED = ("eps", "amsgrad", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def as_lars(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, lars: LARS
) -> Replacement:
    """Return the conversion of an SGD to `Lars`."""
    arguments = {
        **{key: kind(optimizer.defaults[key]) for key, kind in _SGD_KEYS.items()},
        "maximize": bool(optimizer.defaults["maximize"]),
        "trust_coefficient": lars.lars_coeff,
        "weight_decay": lars.lars_weight_decay,
        "eps": lars.epsilon,
    }
    replacement = Replacement(
        kind=Lars, arguments=arguments, keys=_SGD_KEYS, unused=_SGD_UNUSED, state=()
    )
    replacement.patterns = lars.exclude_from_weight_decay
    _decide_decay_(replacement, optimizer, settings, "lars")
    return replacement


def as_lamb(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, lamb: LAMB
) -> Replacement:
    """Return the conversion of an Adam to `Lamb`."""
    arguments = {
        "betas": _floats(optimizer.defaults["betas"]),
        "maximize": bool(optimizer.defaults["maximize"]),
        "weight_decay": lamb.lamb_weight_decay,
    }
    keys: _Converters = {"betas": _floats, "weight_decay": float}
    state = ("step", "exp_avg", "exp_avg_sq")
    replacement = Replacement(
        kind=Lamb, arguments=arguments, keys=keys, unused=_ADAM_UNUSED, state=state
    )
    replacement.patterns = lamb.exclude_from_weight_decay
    if any(group.get("amsgrad") for group in settings.groups):
        replacement.problems.append(
            "lamb has no amsgrad, but the optimizer uses it: set amsgrad=False"
        )
    _decide_decay_(replacement, optimizer, settings, "lamb")
    replacement.notes.append(
        f"eps is LAMB's own 1e-06, not the optimizer's {optimizer.defaults['eps']:g}"
    )
    return replacement


def refused_settings(field: str, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what no method of a strategy has: dampening, and a step that records a graph."""
    dampening = [group["dampening"] for group in groups if group.get("dampening")]
    if dampening:
        yield f"{field} has no dampening, but the optimizer has {dampening[0]}: set dampening=0"
    if any(group.get("differentiable") for group in groups):
        yield (
            f"{field} is not differentiable, but the optimizer has differentiable=True: set "
            "differentiable=False"
        )


def _decide_decay_(
    replacement: Replacement,
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    field: str,
) -> None:
    """Set the decay so that nothing decays twice and each choice is kept; note all obstacles."""
    replacement.problems += refused_settings(field, settings.groups)
    decay = replacement.arguments["weight_decay"]
    own = float(optimizer.defaults["weight_decay"])
    decays = [float(group["weight_decay"]) for group in settings.groups]
    if set(decays) != {own}:
        of_groups = ", ".join(map(str, decays))
        replacement.notes.append(f"each group keeps its weight_decay: {of_groups}")
        return
    usual = float(inspect.signature(type(optimizer)).parameters["weight_decay"].default)
    if own not in (0.0, usual, decay):
        replacement.problems.append(
            f"the optimizer's weight_decay={own} and {field}_weight_decay={decay} both apply to "
            f"the same parameters: set {field}_weight_decay={own} and omit it in the optimizer"
        )
    replacement.keys = {
        key: kind for key, kind in replacement.keys.items() if key != "weight_decay"
    }
    replacement.notes.append(f"weight_decay is {field}'s {decay}")


def _floats(betas: Any) -> tuple[float, ...]:
    return tuple(float(beta) for beta in betas)
