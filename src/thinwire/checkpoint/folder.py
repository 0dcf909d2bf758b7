"""The names in a directory of checkpoints, and what stands there."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire._files import read_regular
from thinwire.checkpoint.files import is_regular
from thinwire.checkpoint.manifest import MANIFEST, Manifest
from thinwire.errors import CheckpointCorrupt, CheckpointError

__all__ = [
    "Found",
    "found",
    "found_at",
    "leftovers",
    "missing_file",
    "name_of",
    "staging_name",
    "token_name",
]

_NAME = re.compile(r"step_([0-9]{10,18})(?:_[0-9]{1,9})?")
_MOST_BYTES = 1 << 27
"""Of a manifest, which has about 200 bytes for each rank and for each parameter."""
_LEFTOVER = re.compile(r"\.step_[0-9_]+\.tmp-[0-9a-f]+|\.rank_[0-9]+\.token-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Found:
    """A folder with the name of a checkpoint, and its manifest or the reason why there is none to
    go by.

    A reason that is no `CheckpointCorrupt` is a newer format.
    """

    path: Path
    step: int
    manifest: Manifest | None
    key: str
    """Tells it from other checkpoints, on all ranks alike: SHA-256 in hex of the manifest's bytes.
    """
    problem: CheckpointError | None


def name_of(step: int, taken: Iterable[str]) -> str:
    """Name for a new checkpoint beside those that exist, some of the same step maybe."""
    base, used = f"step_{step:010d}", set(taken)
    return (
        base
        if base not in used
        else next(n for i in range(2, len(used) + 3) if (n := f"{base}_{i}") not in used)
    )


def staging_name(name: str, token: str) -> str:
    """Name of a checkpoint that is being written or deleted; no reader looks at it."""
    return f".{name}.tmp-{token}"


def token_name(rank: int, token: str) -> str:
    """Name of the file by which other ranks see that they share the directory with this one."""
    return f".rank_{rank:05d}.token-{token}"


def found(directory: Path) -> list[Found]:
    """Every folder with the name of a checkpoint; the content of its files is not looked at.

    Raises:
        OSError: The directory cannot be read; one that is not there is empty.
    """
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    return [_read(path, int(match[1])) for path in paths if (match := _NAME.fullmatch(path.name))]


def found_at(path: Path) -> Found:
    """One checkpoint by its own folder, whatever that is named; its files are not looked at."""
    return _read(path, None)


def leftovers(directory: Path) -> list[Path]:
    """Leftovers of saves that were interrupted."""
    return [path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name)]


def missing_file(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The first of the files that is not there in the right size."""
    for name in names:
        path = folder / name
        if not is_regular(path) or path.stat().st_size != manifest.files[name][0]:
            return name
    return None


def _read(path: Path, step: int | None) -> Found:
    manifest_path = path / MANIFEST
    try:
        if not is_regular(manifest_path):
            raise CheckpointCorrupt("it is not there")
        raw = read_regular(manifest_path, _MOST_BYTES)
        manifest = Manifest.from_bytes(raw)
        if step not in (None, manifest.step):
            raise CheckpointCorrupt(f"it is of step {manifest.step}")
        return Found(path, manifest.step, manifest, hashlib.sha256(raw).hexdigest(), None)
    except (CheckpointError, OSError, ValueError) as error:
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointCorrupt
        return Found(path, step or 0, None, "", kind(f"{manifest_path}: {error}"))
