"""Deletion of older checkpoints that a new one has made superfluous; the last good one stays."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from thinwire.checkpoint.files import checksum, discard
from thinwire.checkpoint.folder import Found, found, missing_file, staging_name
from thinwire.checkpoint.manifest import Manifest, plain_file, tensor_file
from thinwire.checkpoint.plan import Plan

__all__ = ["prune"]

_READERS = 4
"""Files that are read at a time; SHA-256 of one of them keeps a core busy."""
_log = logging.getLogger("thinwire")


def prune(plan: Plan, keep: int | None) -> list[str]:
    """Delete what the new checkpoint has made superfluous, where this rank leads.

    `keep` whole ones stay, the new one included. Before one is deleted, every byte of the newest
    that stays beside the new one is read and compared with its checksums; a damaged one does not
    count, so that the last good one stays. With `keep` 1 only the new one stays, and nothing is
    read. The others that stay must have all files in the right sizes.

    Args:
        plan: Of the save whose checkpoint is whole now, so a failure here is no error.
        keep: At least 1, or None: none is deleted but an older one of the same step.

    Returns:
        What could not be deleted, in words.
    """
    if not plan.leads:
        return []
    stuck = []
    try:
        for entry in _superfluous(plan, keep):
            try:
                discard(entry.path, plan.root / staging_name(entry.path.name, plan.token))
            except OSError as error:
                stuck.append(f"an older checkpoint could not be deleted: {error}")
    except OSError as error:
        stuck.append(f"older checkpoints could not be looked at: {error}")
    return stuck


def _superfluous(plan: Plan, keep: int | None) -> Iterator[Found]:
    others = [entry for entry in found(plan.root) if entry.manifest and entry.path != plan.path]
    others.sort(key=lambda entry: -entry.manifest.serial if entry.manifest else 0)
    yield from (entry for entry in others if entry.step == plan.step)
    older = [entry for entry in others if entry.step != plan.step]
    if keep is None or len(older) < keep:
        return
    whole, verified = 1, keep == 1
    for entry in older:
        if whole >= keep:
            yield entry
            continue
        problem = _missing(entry)
        if problem is None and not verified:
            problem = _damage(entry)
            verified = problem is None
        if problem is None:
            whole += 1
        else:
            _log.warning(
                "%s is damaged (%s) and does not count as one that is kept", entry.path, problem
            )


def _missing(entry: Found) -> str | None:
    """Say what is wrong if the files of no place are all there in the right sizes."""
    assert entry.manifest is not None, "only those are looked at"
    problems = [
        missing_file(entry.path, entry.manifest, names) for names in _places(entry.manifest)
    ]
    return None if None in problems else f"{problems[0]} is not there in the right size"


def _damage(entry: Found) -> str | None:
    """Say what is wrong with the content of the files that are here."""
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
    return [
        [name for rank in place for name in (plain_file(rank), tensor_file(rank))]
        for place in manifest.places
    ]
