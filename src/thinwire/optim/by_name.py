"""Match saved state to parameters by name instead of by position."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from thinwire._names import plain_name

Groups = Sequence[Mapping[str, Any]]
_WRAPPER = "module"
"""Prefix that DistributedDataParallel puts before the names of the wrapped model."""


def names_of(groups: Groups) -> list[list[str]] | None:
    """Return the parameter names by group, or None unless every group has named parameters."""
    if not all("param_names" in group for group in groups):
        return None
    return [list(group["param_names"]) for group in groups]


def in_order(
    saved: Groups,
    saved_names: Sequence[Sequence[str]] | None,
    own_names: Sequence[Sequence[str]] | None,
) -> list[dict[str, Any]]:
    """Reorder the saved groups of a state_dict to the groups and parameters of this optimizer, by
    name. Without names, given by group, they stay as they are: torch loads by position.
    """
    groups = [dict(group) for group in saved]
    if (
        saved_names is None
        or own_names is None
        or [len(names) for names in saved_names] != [len(g["params"]) for g in groups]
    ):
        return groups
    matches = _matched(saved_names, own_names)
    if matches is None:  # a wrapper may have changed the names
        known, wanted = (
            [[_plain(name) for name in names] for names in groups_of_names]
            for groups_of_names in (saved_names, own_names)
        )
        counts = [len(set(names)) for names in (*saved_names, *own_names)]
        # plain names are still unique
        if [len(set(names)) for names in (*known, *wanted)] == counts:
            matches = _matched(known, wanted)
        if matches is None:
            _refuse(known, wanted)
    result = []
    for group_index, positions in matches:
        group = groups[group_index]
        keys = [key for key in ("params", "param_names") if key in group]
        result.append(group | {key: [group[key][i] for i in positions] for key in keys})
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
    known_names: Sequence[Sequence[str]], wanted_names: Sequence[Sequence[str]]
) -> list[tuple[int, list[int]]] | None:
    """Return for each wanted group its known one and the index of each name there, or None."""
    known, found = list(map(_numbered, known_names)), []
    if len(known) != len(wanted_names):
        return None
    for i, names in enumerate(map(_numbered, wanted_names)):
        # groups without parameters, such as those of other stages, are all equal: try the same
        # index first
        match = next((k for k in [i, *range(len(known))] if set(known[k]) == set(names)), None)
        if match is None:
            return None
        positions = {name: position for position, name in enumerate(known[match])}
        found.append((match, [positions[name] for name in names]))
    return found


def _refuse(known: list[list[str]], wanted: list[list[str]]) -> NoReturn:
    """Raise the error that says what differs; list all names that differ only in their prefixes."""
    advice = "Give the optimizer the same groups of parameters, in any order"
    if len(known) != len(wanted):
        raise ValueError(
            f"the state has {len(known)} parameter groups, but the optimizer has {len(wanted)}. "
            f"{advice}"
        )
    everywhere = {name for names in known for name in names}
    for i, names in enumerate(wanted):
        for name in names:
            if name not in everywhere:
                raise ValueError(
                    f"parameter group {i} has {name}, which no group of the state has. {advice}"
                )
        if all(sorted(names) != sorted(others) for others in known):
            closest = max(known, key=lambda others: len(set(others) & set(names)))
            name = min(set(names) ^ set(closest), default=names[0])
            raise ValueError(
                f"parameter group {i} is divided differently in the state: {name} is in only one "
                f"of the two. {advice}"
            )
    raise ValueError(
        "the parameter names of the state match only without their prefixes, and are then "
        "ambiguous. Load it into a model wrapped like the saved one"
    )


def _plain(name: str) -> str:
    return ".".join(part for part in plain_name(name).split(".") if part != _WRAPPER)
