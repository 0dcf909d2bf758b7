"""Agreement before anything moves: what ranks must have in common, compared once, first difference
named.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.comm.group import Group
from thinwire.errors import Mismatch

__all__ = ["elsewhere", "mapping_of", "require_agreement"]


_SAME_SCRIPT = "All ranks must run the same script with the same settings"
_CALL, _VERSIONS = "call", "versions"
_told: set[str] = set()
"""The warnings that this process has given."""


def require_agreement(
    group: Group,
    facts: Mapping[str, Any],
    *,
    what: str,
    cures: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Compare `facts` over the ranks.

    Args:
        group: The ranks that must agree.
        facts: What they must have in common: strings, numbers, booleans, None, lists and mappings
            of these. The order of entries is the order in which differences are looked for.
        what: The occasion in plain words, for errors.
        cures: What to do where an entry of `facts` differs, by its name; sentences.
        versions: What may differ, and is warned of once in a process.

    Raises:
        Mismatch: On every rank, with the same text: the first entry that differs, both values, both
            ranks. Or a rank compares something else altogether.

    Communication: `Group.gather_bytes`, 24 bytes a rank when all agree.
    """
    told = {_CALL: what, **facts} | ({_VERSIONS: dict(versions)} if versions else {})
    answers = group.gather_bytes(json.dumps(told).encode(), what=what)
    rows = [mapping_of(answer) for answer in answers]
    for rank, row in enumerate(rows):
        if row.pop(_CALL, None) != what:
            raise elsewhere(what, rank, answers[rank])
    builds = [row.pop(_VERSIONS, None) for row in rows]
    if all(
        build is not None for build in builds
    ):  # else a rank compares something else, which is told below
        _warn_of_versions(builds)
    first, *others = (dict(_entries("", row)) for row in rows)
    for rank, other in enumerate(others, start=1):
        pairs = {
            where: (first.get(where, "nothing"), other.get(where, "nothing"))
            for where in [*first, *other]
        }
        differ = {
            where: (ours, theirs) for where, (ours, theirs) in pairs.items() if ours != theirs
        }
        # where one rank has an empty mapping or list, what is in the other one's says more
        clear = [where for where, both in differ.items() if not {"{}", "[]"} & {*both}]
        clear = clear or list(differ)
        if clear:
            where, (ours, theirs) = clear[0], differ[clear[0]]
            cure = (cures or {}).get(where.split(".")[0], _SAME_SCRIPT)
            raise Mismatch(
                f"{what}: {where} differs: rank 0 has {ours}, rank {rank} has {theirs}. {cure}"
            )


def _warn_of_versions(rows: Sequence[Mapping[str, Any]]) -> None:
    """Builds that speak the same over the wire train together, and may round differently."""
    for key in dict.fromkeys(key for row in rows for key in row):
        for rank, row in enumerate(rows):
            if row.get(key) != rows[0].get(key):
                text = (
                    f"{key} is {rows[0].get(key)} on rank 0 and {row.get(key)} on rank {rank}. "
                    "They train together; where builds round differently replicas part, which is "
                    "then an error. The same build everywhere is safest"
                )
                if text not in _told:
                    _told.add(text)
                    warnings.warn(text, UserWarning, stacklevel=4)
                break


def elsewhere(what: str, rank: int, answer: bytes | Mapping[str, Any] = b"") -> Mismatch:
    """The error for a rank whose answer belongs to another call than `what`, which this rank has
    made; some answers tell which.
    """
    call = (mapping_of(answer) if isinstance(answer, bytes) else answer).get(_CALL)
    return Mismatch(
        f"{what}: rank {rank} is in another exchange of this library{f', {call}' if call else ''}. "
        "All ranks must make the same calls; add_param_group, engine.flush() and engine.save too "
        "belong on every rank, not on rank 0 only: save writes one checkpoint for all of them"
    )


def mapping_of(answer: bytes) -> dict[str, Any]:
    """The mapping that a rank sent as JSON; an empty one where its bytes are something else."""
    try:
        value = json.loads(answer)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _entries(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The leaves of nested mappings and lists, printed, with their dotted paths."""
    if isinstance(value, dict | list) and value:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries(f"{path}.{key}" if path else str(key), entry)
    else:
        yield path, repr(value)
