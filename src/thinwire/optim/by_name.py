"""Match saved state to parameters by name instead of by position."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from thinwire._names import plain_name

__all__ = ["in_order", "names_of"]

Groups = Sequence[Mapping[str, Any]]
_Name = tuple[str, int]
_WRAPPER = "module"
"""Prefix that DistributedDataParallel puts before the names of the wrapped model."""


def names_of(groups: Groups) -> list[list[str]] | None:
    """Return the parameter names by group, or None unless every group has named parameters."""
    if not all("param_names" in group for group in groups):
        return None
    return [list(group["param_names"]) for group in groups]


def in_order(
    saved: Groups, came: Sequence[Sequence[str]] | None, here: Sequence[Sequence[str]] | None
) -> list[dict[str, Any]]:
    """Reorder the saved groups of a state_dict to the groups and parameters of this optimizer.

    Args:
        saved: `param_groups` of a state_dict; `params` are the keys of the parameters in its
            `state`. Read only.
        came: The names of the saved groups' parameters; None where they were saved without.
        here: The names in the optimizer that loads; None where it has none.

    Returns:
        Groups for torch, which loads by position. Unchanged where one side has no names.

    Raises:
        ValueError: No saved group has the parameters of a group here; names the first such group.
    """
    groups = [dict(group) for group in saved]
    if (
        came is None
        or here is None
        or [len(names) for names in came] != [len(g["params"]) for g in groups]
    ):
        return groups
    places = _matched(list(map(_numbered, came)), list(map(_numbered, here)))
    if places is None:  # a wrapper may have changed the names
        known, wanted = (list(map(_plain_names, each)) for each in (came, here))
        told = [len(set(names)) for names in (*came, *here)]
        if [len(set(names)) for names in (*known, *wanted)] == told:  # plain names are still unique
            places = _matched(list(map(_numbered, known)), list(map(_numbered, wanted)))
        if places is None:
            _refuse(known, wanted)
    result = []
    for group_place, params in places:
        group = groups[group_place]
        ordered = {**group, "params": [group["params"][place] for place in params]}
        if "param_names" in group:
            ordered["param_names"] = [group["param_names"][place] for place in params]
        result.append(ordered)
    return result


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Pair each name with its count so far: a group may hold the parameters of several models."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def _matched(
    known: Sequence[Sequence[_Name]], wanted: Sequence[Sequence[_Name]]
) -> list[tuple[int, list[int]]] | None:
    """Return, for every wanted group, the index of the known group with the same names and the
    index of each name in it.

    None if a group has no match.
    """
    if len(known) != len(wanted):
        return None
    found = []
    for i, names in enumerate(wanted):
        # groups without parameters, such as those of other stages, are all equal: try the same
        # index first
        match = next((k for k in [i, *range(len(known))] if set(known[k]) == set(names)), None)
        if match is None:
            return None
        places = {name: place for place, name in enumerate(known[match])}
        found.append((match, [places[name] for name in names]))
    return found


def _refuse(known: list[list[str]], wanted: list[list[str]]) -> NoReturn:
    """Raise the error that says what differs; list all names that differ only in their prefixes."""
    for i, names in enumerate(wanted):
        if len(known) != len(wanted) or all(sorted(names) != sorted(each) for each in known):
            raise ValueError(_difference(i, names, known, len(wanted)))
    raise ValueError(
        "the groups of the state hold parameters of the same names under other prefixes, which "
        "cannot be told apart. Load it into a model that is wrapped as the saved one was"
    )


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
    more = (Counter(names) - Counter(closest)) + (Counter(closest) - Counter(names))
    name = min(more)
    return (
        f"parameter group {i} and the groups of the state are divided otherwise: {name} is in one, "
        f"not in the other. {advice}"
    )


def _plain_names(names: Sequence[str]) -> list[str]:
    return [_plain(name) for name in names]


def _plain(name: str) -> str:
    return ".".join(part for part in plain_name(name).split(".") if part != _WRAPPER)
