"""Parameter groups: allowed keys, exclusion from weight decay, and the order of all parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._names import matches
from thinwire._wording import closest, warn_user
from thinwire.core.gradients import Regularizer

Predicate = Callable[[str, Tensor], bool]
Exclusion = tuple[str, ...] | Predicate | None
"""Glob patterns over names, a predicate, or None."""

COMMON_KEYS = ("params", "lr", "weight_decay", "grad_centralization", "regularizer")
ALSO_ACCEPTED = ("param_names", "initial_lr", "name")


@dataclass(frozen=True, slots=True)
class ParamRecord:
    """Facts about a parameter that stay the same while it is in an optimizer."""

    index: int
    """Position in the order of the groups, from 0."""
    group_index: int
    """Index of its group in `param_groups`."""
    name: str | None
    """Name, if named parameters were given."""
    excluded: bool
    """True if it has no weight decay."""

    @property
    def label(self) -> str:
        """Name of the parameter in messages."""
        return f"parameter {self.index}" if self.name is None else self.name


class ParamFacts(NamedTuple):
    """Settings of one parameter in the current update."""

    group_index: int
    """Index of its group in `param_groups`."""
    group: dict[str, Any]
    """Its group (the live dictionary): hyper-parameters are read from it at every update."""
    weight_decay: float
    """Weight decay of the group, or 0 if the parameter is excluded."""


def listed(group: dict[str, Any]) -> list[tuple[str | None, Tensor]]:
    """Return the parameters of a group, each with its name or None.

    Changes `group`: an iterator of parameters becomes a list. Entries of a wrong kind are left for
    torch to refuse.
    """
    params = group["params"]
    if isinstance(params, set):
        return []
    if isinstance(params, Tensor):
        params = [params]
    if not isinstance(params, Iterable):
        raise TypeError(f"params must be a tensor or an iterable of tensors, got {params!r}")
    group["params"] = list(params)
    entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in group["params"]]
    if not all(isinstance(param, Tensor) for _, param in entries):
        return []
    group["params"] = [param if name is None else (name, param) for name, param in entries]
    if "param_names" in group and all(name is None for name, _ in entries):
        entries = list(zip(group["param_names"], (param for _, param in entries), strict=True))
    if len({param for _, param in entries}) != len(entries):
        raise ValueError(
            "some parameters appear more than once in a parameter group; list every parameter once"
        )
    return entries


def require_layout(grad: Tensor, method: str, name: str, *, rows: bool) -> None:
    """Raise `RuntimeError` unless a gradient is dense or, with `rows`, row-sparse."""
    if grad.layout is torch.strided:
        return
    if not rows:
        raise RuntimeError(
            f"{method} takes dense gradients only, but that of {name} is {grad.layout}; use "
            "LazyAdam, Ftrl or ProximalAdagrad for it, or sparse=False in its layer"
        )
    coo = grad.layout is torch.sparse_coo
    if not coo or grad.sparse_dim() != 1:
        raise RuntimeError(
            f"{method} takes dense gradients and sparse COO ones with sparse_dim 1, but that of "
            f"{name} has {f'sparse_dim {grad.sparse_dim()}' if coo else grad.layout}"
        )


def check_common_values(values: dict[str, Any]) -> None:
    """Check the common keys of a group. Tensors of one element become numbers."""
    check.instance("regularizer", values.get("regularizer"), (*get_args(Regularizer), NoneType))
    check.boolean("grad_centralization", values.get("grad_centralization", False))
    check.boolean("maximize", values.get("maximize", False))
    if values.get("foreach") is not None:
        check.boolean("foreach", values["foreach"])
    if "weight_decay" in values:
        decay = check.scalar("weight_decay", values["weight_decay"], at_least=0)
        values["weight_decay"] = decay
        if decay >= 1:
            warn_user(f"weight_decay is usually below 1, got {decay}")


def check_nesterov(values: Mapping[str, Any]) -> None:
    """Raise unless Nesterov momentum is off, or has a momentum and no dampening."""
    momentum = values["momentum"]
    dampening = values.get("dampening", 0)
    if check.boolean("nesterov", values["nesterov"]) and (momentum == 0 or dampening != 0):
        raise ValueError(
            "nesterov needs a momentum above 0 and no dampening, got "
            f"momentum={momentum} and dampening={dampening}"
        )


def check_betas(values: Mapping[str, Any]) -> None:
    """Raise unless `betas` is a pair of numbers in [0, 1)."""
    betas = values["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers in [0, 1), got {betas!r}")
    check.sequence(check.real, "betas", betas, at_least=0, below=1)


def check_keys(group: Mapping[str, Any], own_keys: Iterable[str]) -> None:
    """Raise `ValueError` for a key that this optimizer does not know, or if `params` is missing."""
    known = dict.fromkeys([*COMMON_KEYS, *own_keys, *ALSO_ACCEPTED])
    for key, value in group.items():
        if key not in known:
            hint = closest(key, [*known, "order_params"])
            raise ValueError(
                f"unknown key {key!r} with value {value!r} in a parameter group{hint} (allowed: "
                f"{', '.join(known)})"
            )
    if "params" not in group:
        raise ValueError(f"a parameter group must have the key 'params', got {list(group)}")


def parse_exclusion(exclude: object) -> Exclusion:
    """Check and return the argument `exclude_from_weight_decay`; a single str is a `TypeError`."""
    if exclude is None or (callable(exclude) and not isinstance(exclude, type)):
        return exclude
    advice = "write a single pattern as ('*.bias',), or a predicate (name, parameter) -> bool"
    return check.words("exclude_from_weight_decay", exclude, advice=advice)


def excluded_flags(exclude: Exclusion, entries: Sequence[tuple[str | None, Tensor]]) -> list[bool]:
    """Return True for each pair that is excluded; a predicate is called once per pair."""
    if not exclude:
        return [False] * len(entries)
    if callable(exclude):
        return [_ask(exclude, name, param) for name, param in entries]
    names = [name for name, _ in entries if name is not None]
    if len(names) < len(entries):
        raise ValueError(
            "exclude_from_weight_decay has patterns over names, but the parameters have no names; "
            "pass model.named_parameters() instead of model.parameters()"
        )
    return [any(matches(name, pattern) for pattern in exclude) for name in names]


def require_matches(exclude: Exclusion, names: Iterable[str | None]) -> None:
    """Raise `ValueError` for a pattern that matches none of `names`."""
    if not exclude or callable(exclude):
        return
    given = [name for name in names if name is not None]
    for pattern in exclude:
        if not any(matches(name, pattern) for name in given):
            bare = pattern.replace("*", "").replace("?", "")
            ends = (name.rpartition(".")[2] for name in given)
            hint = closest(bare, [*given, *ends]) or f"; the names begin with {given[:5]}"
            raise ValueError(
                f"exclude_from_weight_decay: the pattern {pattern!r} matches no parameter "
                f"name{hint}"
            )


def split_order(params: object) -> tuple[Any, list[Tensor] | None]:
    """Return `params` without the entry `order_params`, and the order."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params must be parameters or groups of them, got the module {type(params).__name__}: "
            "write model.named_parameters(), or for Muon muon_groups(model)"
        )
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        return params, None
    entries = list(params)
    orders = [entry for entry in entries if isinstance(entry, Mapping) and "order_params" in entry]
    if not orders:
        return entries, None
    if len(orders) > 1:
        raise ValueError(f"order_params must be given once, got it in {len(orders)} entries")
    if len(orders[0]) > 1:
        others = [key for key in orders[0] if key != "order_params"]
        raise ValueError(
            f"order_params must be alone in its dictionary, got {others} beside it; move them to a "
            "group"
        )
    order = check.entries("order_params", orders[0]["order_params"], "parameters")
    params = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in order]
    advice = "give parameters or (name, parameter) pairs"
    for i, param in enumerate(params):
        check.instance(f"order_params[{i}]", param, Tensor, advice=advice)
    return [entry for entry in entries if entry is not orders[0]], params


def ordered(order: Sequence[Tensor], records: Mapping[Tensor, ParamRecord]) -> list[Tensor]:
    """Return `order`; raise unless it holds exactly the parameters of the groups, each once."""
    seen: set[Tensor] = set()
    for i, param in enumerate(order):
        if param not in records:
            raise ValueError(
                f"order_params[{i}], of shape {tuple(param.shape)}, is in none of the parameter "
                "groups"
            )
        if param in seen:
            raise ValueError(
                f"order_params[{i}] ({records[param].label}) is given twice; list every parameter "
                "once"
            )
        seen.add(param)
    missing = [record.label for param, record in records.items() if param not in seen]
    if missing:
        raise ValueError(
            f"order_params misses {len(missing)} of {len(records)} parameters: "
            f"{', '.join(missing[:5])}"
        )
    return list(order)


def _ask(predicate: Predicate, name: str | None, param: Tensor) -> bool:
    try:
        # None only without named parameters
        answer: object = predicate(name, param)  # type: ignore[arg-type]
    except (TypeError, AttributeError) as error:
        if name is not None:
            raise
        raise ValueError(
            "exclude_from_weight_decay failed for a parameter without a name; pass "
            "model.named_parameters() instead of model.parameters()"
        ) from error
    if not isinstance(answer, bool):
        raise TypeError(
            f"exclude_from_weight_decay must return True or False, got {answer!r} of type "
            f"{type(answer).__name__} for parameter {name!r}"
        )
    return answer
