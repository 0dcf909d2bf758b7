"""Deletion of older checkpoints that a new one has made superfluous; the last good one stays."""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from thinwire.checkpoint.all_ranks import on_all_ranks
from thinwire.checkpoint.files import checksum, discard
from thinwire.checkpoint.folder import Found, found, found_at, missing_file, staging_name
from thinwire.checkpoint.manifest import Manifest, files_of
from thinwire.checkpoint.plan import Plan
from thinwire.comm import Group

__all__ = ["prune"]

_READERS = 4
"""Files that are read at a time; SHA-256 of one of them keeps a core busy."""
_log = logging.getLogger("thinwire")
_ELSEWHERE = "it is not in the directories of all ranks"
_Older = dict[str, Found]
"""Checkpoints of a directory that were saved before, by the key of the manifest."""


def prune(group: Group, plan: Plan, keep: int | None) -> list[str]:
    """Delete what the new checkpoint has made superfluous; all ranks call it.

    `keep` whole ones stay, the new one included. One is whole that has all files in the right sizes
    in the directories of all ranks. Before one is deleted, every byte of the newest that stays
    beside the new one is read and compared with its checksums; a damaged one does not count, so
    that the last good one stays. With `keep` 1 only the new one stays, and nothing is read. What
    was saved later than the new one, by another run, is left alone.

    Args:
        group: The ranks that saved.
        plan: Of the save whose checkpoint is whole now, so a failure here is no error.
        keep: At least 1, or None: none is deleted but an older one of the same step.

    Returns:
        What could not be deleted by this rank, in words.

    Raises:
        CheckpointError: A disk hangs.

    Communication: two rounds, and one for each checkpoint that is read.
    """
    older: _Older = {}
    rows = on_all_ranks(group, "looking for older checkpoints", partial(_look, plan, older))
    stuck = [rows[group.rank]["problem"]] if rows[group.rank]["problem"] else []
    leaders = [row["older"] for row in rows if row["leads"]]
    gone = {key for row in leaders for key, entry in row.items() if entry["step"] == plan.step}
    known = {(entry["serial"], key) for row in leaders for key, entry in row.items()}
    order = [key for _, key in sorted(known, reverse=True) if key not in gone]
    whole, verified = 1, keep == 1
    for key in order if keep is not None and len(order) >= keep else []:
        if whole == keep:
            gone.add(key)
            continue
        problem = _first(row[key]["problem"] if key in row else _ELSEWHERE for row in leaders)
        if problem is None and not verified:
            damage = partial(_damage, older.get(key))
            problem = _first(on_all_ranks(group, "reading an older checkpoint", damage))
            verified = problem is None
        if problem is None:
            whole += 1
        elif key in older:
            _log.warning(
                "%s is damaged (%s) and does not count as one that is kept",
                older[key].path,
                problem,
            )
    superfluous = [entry for key, entry in older.items() if key in gone]
    delete = partial(_delete, plan, superfluous)
    return stuck + on_all_ranks(group, "deleting older checkpoints", delete)[group.rank]


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _look(plan: Plan, older: _Older) -> dict[str, Any]:
    """What a leader has, for the others; fill `older` with it."""
    row: dict[str, Any] = {"leads": plan.leads, "older": {}, "problem": None}
    if not plan.leads:
        return row
    try:
        for entry in found(plan.root):
            if entry.manifest and entry.manifest.serial < plan.serial:
                older[entry.key] = entry
                problem = _missing(entry)
                told = {"serial": entry.manifest.serial, "step": entry.step, "problem": problem}
                row["older"][entry.key] = told
    except OSError as error:
        older.clear()
        row |= {"older": {}, "problem": f"older checkpoints could not be looked at: {error}"}
    return row


def _delete(plan: Plan, superfluous: Iterable[Found]) -> list[str]:
    """Say what could not be deleted."""
    there = found_at(plan.path).manifest
    # this process may have stood still, and a run that went on may have deleted the new one
    if there is None or there.serial != plan.serial:
        return []
    stuck = []
    for entry in superfluous:
        try:
            discard(entry.path, plan.root / staging_name(entry.path.name, plan.token))
        except OSError as error:
            stuck.append(f"an older checkpoint could not be deleted: {error}")
    return stuck


def _missing(entry: Found) -> str | None:
    """Say what is wrong if the files of no place are all there in the right sizes."""
    assert entry.manifest is not None, "only those are looked at"
    problems = [
        missing_file(entry.path, entry.manifest, names) for names in _places(entry.manifest)
    ]
    return None if None in problems else f"{problems[0]} is not there in the right size"


def _damage(entry: Found | None) -> str | None:
    """Say what is wrong with the content of the files that are here; None: nothing, or another rank
    reads them.
    """
    if entry is None:
        return None
    assert entry.manifest is not None, "only those are looked at"
    manifest = entry.manifest
    here = [
        names for names in _places(manifest) if missing_file(entry.path, manifest, names) is None
    ]
    names = [name for place in here for name in place]
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(
            lambda name: _difference(entry.path / name, manifest.files[name][1]), names
        )
        return next((problem for problem in problems if problem is not None), None)


def _difference(path: Path, wanted: str) -> str | None:
    try:
        return (
            None
            if checksum(path) == wanted
            else f"the checksum of {path.name} is not that of what was written"
        )
    except OSError as error:
        return f"{path.name} cannot be read: {error}"


def _places(manifest: Manifest) -> list[list[str]]:
    """The files of the ranks that shared a directory, for each directory."""
    return [files_of(place) for place in manifest.places]
