"""Writes a checkpoint into a staging folder, agrees that it is whole, then renames it. Deletes
checkpoints that it replaces.
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from thinwire._validate import integer
from thinwire._wording import warn_user
from thinwire.checkpoint.files import clean_up, discard, on_all_ranks
from thinwire.checkpoint.manifest import (
    Found,
    Manifest,
    files_of,
    found,
    found_at,
    missing_file,
    staging_name,
)
from thinwire.checkpoint.plan import RankWriter, SaveLayout, directories_of
from thinwire.checkpoint.tensor_file import damage_of
from thinwire.comm import Group, require_agreement
from thinwire.errors import CheckpointError


def save(
    directory: str | PathLike[str],
    state: Any,
    *,
    step: int,
    group: Group,
    facts: Mapping[str, Any],
    part: int = 0,
    keep: int | None = 2,
) -> Path:
    """Save the state of all ranks as one checkpoint, which becomes the newest.

    After a failure at any point `load` returns the previous state or this one, whole. Files are
    written into a staging folder and forced to the disk. The ranks agree, then the manifest with
    the checksums of all files is written. One rename makes the folder a checkpoint. Tensors that
    are bit-identical on several ranks of a directory are written once.

    `state` is read only: nested dicts, lists and tuples of plain values and dense tensors. An
    exception stands for a state that this rank failed to collect; it is reported on all ranks.
    `facts` are common to all ranks. See `prune` for `keep`.

    A failure of any rank is `CheckpointError` on every one; earlier checkpoints are unchanged.

    Communication: eight rounds, and one for each older checkpoint that is read. Together they carry
    about 120 bytes for every tensor of the state.
    """
    keep = None if keep is None else integer("keep", keep, at_least=1)
    root = Path(directory)
    writer = RankWriter(root, group.rank, secrets.token_hex(8))
    try:
        surveys = on_all_ranks(
            group, "preparing a checkpoint", lambda: writer.survey(state, facts, part)
        )
        common = {"step": step, "keep": keep, "facts": writer.facts}
        require_agreement(group, common, action="saving a checkpoint")
        seen = on_all_ranks(
            group, "looking for the other ranks of a directory", lambda: writer.neighbours(surveys)
        )
    finally:
        # tokens can go: each rank knows by now which ranks share its directory
        clean_up(writer.close)
    plan = SaveLayout(root, group.rank, step, directories_of(seen), surveys, writer.facts)
    try:
        failed_deletions = on_all_ranks(group, "making room for a checkpoint", plan.make_room)[
            group.rank
        ]
        written = on_all_ranks(
            group, "writing a checkpoint", lambda: writer.write(plan.staging, plan.writing)
        )
        files = {name: list(entry) for row in written for name, entry in row.items()}
        # the manifest comes last: it has the checksums of all ranks and marks the folder as whole
        on_all_ranks(group, "completing a checkpoint", lambda: plan.complete(files))
        on_all_ranks(group, "naming a checkpoint", plan.commit)
    except CheckpointError:
        clean_up(plan.remove)
        raise
    for text in [*failed_deletions, *prune(group, plan, keep)]:
        warn_user(text)
    return plan.path


_log = logging.getLogger("thinwire")
_NOT_ON_ALL_RANKS = "not all ranks have it in their directories"
_Older = dict[str, Found]
"""Checkpoints of a directory that were saved before, by the key of the manifest."""


def prune(group: Group, plan: SaveLayout, keep: int | None) -> list[str]:
    """Delete checkpoints that the new one has made superfluous; all ranks call this."""
    # `keep` whole checkpoints stay, the new one included. Before a deletion every byte of the
    # newest one beside the new one is verified, so that the last good one stays. With `keep` 1
    # nothing is read; with None only an older one of the same step goes. Those that another run
    # saved later stay
    older: _Older = {}
    rows = on_all_ranks(
        group, "looking for older checkpoints", partial(_survey_directory, plan, older)
    )
    failed_deletions = [rows[group.rank]["problem"]] if rows[group.rank]["problem"] else []
    leaders = [row["older"] for row in rows if row["leads"]]
    gone = {key for row in leaders for key, entry in row.items() if entry["step"] == plan.step}
    known = {(entry["serial"], key) for row in leaders for key, entry in row.items()}
    order = [key for _, key in sorted(known, reverse=True) if key not in gone]
    whole = 1
    verified = keep == 1
    for key in order if keep is not None and len(order) >= keep else []:
        if whole == keep:
            gone.add(key)
            continue
        found_here = (row[key]["problem"] if key in row else _NOT_ON_ALL_RANKS for row in leaders)
        problem = next(filter(None, found_here), None)
        if problem is None and not verified:
            damage = partial(_damage, older.get(key))
            damages = on_all_ranks(group, "reading an older checkpoint", damage)
            problem = next(filter(None, damages), None)
            verified = problem is None
        if problem is None:
            whole += 1
        elif key in older:
            text = "%s is damaged (%s) and does not count towards keep"
            _log.warning(text, older[key].path, problem)
    delete = partial(_delete, plan, [entry for key, entry in older.items() if key in gone])
    return failed_deletions + on_all_ranks(group, "deleting older checkpoints", delete)[group.rank]


def _survey_directory(plan: SaveLayout, older: _Older) -> dict[str, Any]:
    """Return a leader's checkpoints for the others. Fill `older` with them."""
    row: dict[str, Any] = {"leads": plan.leads, "older": {}, "problem": None}
    if not plan.leads:
        return row
    try:
        for entry in found(plan.root):
            if entry.manifest and entry.manifest.serial < plan.serial:
                older[entry.key] = entry
                problem = _missing(entry)
                facts = {"serial": entry.manifest.serial, "step": entry.step, "problem": problem}
                row["older"][entry.key] = facts
    except OSError as error:
        older.clear()
        row |= {"older": {}, "problem": f"older checkpoints could not be read: {error}"}
    return row


def _delete(plan: SaveLayout, superfluous: Iterable[Found]) -> list[str]:
    there = found_at(plan.path).manifest
    # this process may have been stopped, and another run may have deleted the new one
    if there is None or there.serial != plan.serial:
        return []
    failed_deletions = []
    for entry in superfluous:
        try:
            discard(entry.path, plan.root / staging_name(entry.path.name, plan.token))
        except OSError as error:
            failed_deletions.append(f"an older checkpoint could not be deleted: {error}")
    return failed_deletions


def _missing(entry: Found) -> str | None:
    """Return the problem unless some directory's files are all here in the right sizes."""
    assert entry.manifest is not None, "checked by the caller"
    problems = [
        missing_file(entry.path, entry.manifest, names) for names in _directories(entry.manifest)
    ]
    return None if None in problems else f"{problems[0]} is missing or has another size"


def _damage(entry: Found | None) -> str | None:
    """Return the damage of the files here; None if there is none, or if another rank reads them."""
    if entry is None:
        return None
    assert entry.manifest is not None, "checked by the caller"
    manifest = entry.manifest
    here = [
        names
        for names in _directories(manifest)
        if missing_file(entry.path, manifest, names) is None
    ]
    names = [name for directory in here for name in directory]
    damages = ((name, damage_of(entry.path / name, *manifest.files[name])) for name in names)
    return next((f"{name} {damage}" for name, damage in damages if damage), None)


def _directories(manifest: Manifest) -> list[list[str]]:
    return [files_of(directory) for directory in manifest.directories]
