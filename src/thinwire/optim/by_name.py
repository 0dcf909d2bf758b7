"""Whose state it is: names decide, not the order in which an optimizer was given its parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["in_order", "names_of"]

Groups = Sequence[Mapping[str, Any]]
_WRAPPERS = ("module", "_orig_mod")
"""The prefixes that DistributedDataParallel and torch.compile put into the names of a model inside
them."""


def names_of(groups: Groups) -> list[list[str]] | None:
    """The names of the parameters by group, where named ones were given to all groups; else
    None.
    """
    if not all("param_names" in group for group in groups):
        return None
    return [list(group["param_names"]) for group in groups]


def in_order(
    saved: Groups, came: Sequence[Sequence[str]] | None, here: Sequence[Sequence[str]] | None
) -> list[dict[str, Any]]:
    """The saved groups of a state_dict in the order of the groups and parameters that are here.

    Args:
        saved: `param_groups` of a state_dict; `params` are the keys of the parameters in its
            `state`. Read only.
        came: The names of the saved groups' parameters; None where they were saved without.
        here: Those of the optimizer that loads; None where it has none.

    Returns:
        Groups for torch to load, which goes by position; as they came where one side has no names.

    Raises:
        ValueError: A group here has other parameters than any that was saved; names the first.
    """
    groups = [dict(group) for group in saved]
    if (
        came is None
        or here is None
        or [len(names) for names in came] != [len(g["params"]) for g in groups]
    ):
        return groups
    known = [[_plain(name) for name in names] for names in came]
    same_count = len(known) == len(here)
    result = []
    for i, names in enumerate(map(_plain_names, here)):
        # groups without parameters, such as those of other stages, all look alike: they keep their
        # place
        match = (
            next((k for k in [i, *range(len(known))] if set(known[k]) == set(names)), None)
            if same_count
            else None
        )
        if match is None:
            raise ValueError(_difference(i, names, known, len(here)))
        keys = dict(zip(known[match], groups[match]["params"], strict=True))
        group = {**groups[match], "params": [keys[name] for name in names]}
        if "param_names" in group:
            labels = dict(zip(known[match], group["param_names"], strict=True))
            group["param_names"] = [labels[name] for name in names]
        result.append(group)
    return result


def _difference(i: int, names: list[str], known: list[list[str]], count: int) -> str:
    advice = "Give the optimizer the same groups of parameters, in any order"
    if len(known) != count:
        return (
            f"the state has {len(known)} parameter groups, and the optimizer has {count}. {advice}"
        )
    everywhere = {name for theirs in known for name in theirs}
    new = next((name for name in names if name not in everywhere), None)
    if new is not None:
        return f"parameter group {i} has {new}, which is in no group of the state. {advice}"
    closest = max(known, key=lambda theirs: len(set(theirs) & set(names)))
    name = next(iter(sorted(set(names) ^ set(closest))))
    return (
        f"parameter group {i} and the groups of the state are divided otherwise: {name} is in one, "
        f"not in the other. {advice}"
    )


def _plain_names(names: Sequence[str]) -> list[str]:
    return [_plain(name) for name in names]


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
