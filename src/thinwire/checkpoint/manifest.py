"""The manifest of a checkpoint, which completes it and covers every byte of its other files; and
the list of checkpoints in a directory.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from thinwire._files import read_regular
from thinwire.checkpoint.files import is_regular
from thinwire.checkpoint.tree import UNREADABLE, decoded
from thinwire.errors import CheckpointCorrupt, CheckpointError

FORMAT = 2
"""Version of the format; no other one is read."""
MANIFEST = "manifest.json"
_FILE = re.compile(r"rank_[0-9]{5,9}\.(json|safetensors)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


ONLY = "only"
"""Fact of a checkpoint that holds a part of the state."""


def plain_file(rank: int) -> str:
    """Return the name of the file with a rank's plain values."""
    return f"rank_{rank:05d}.json"


def tensor_file(rank: int) -> str:
    """Return the name of the file with the tensors that a rank has written."""
    return f"rank_{rank:05d}.safetensors"


def files_of(ranks: Iterable[int]) -> list[str]:
    """Return the names of all files of these ranks."""
    return [name for rank in ranks for name in (plain_file(rank), tensor_file(rank))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a checkpoint without its state; the same bytes in each of its directories."""

    thinwire: str
    """Version of thinwire that wrote it."""
    torch: str
    """Version of torch that wrote it."""
    step: int
    """Updates done."""
    serial: int
    """Serial number of the save, in each directory strictly increasing. It is the time in
    milliseconds if that increases. The largest is the newest.
    """
    parts: list[int]
    """Pipeline stage, or shard, of each rank."""
    directories: list[list[int]]
    """Ranks that shared a directory, one list for each directory."""
    facts: Any
    """The caller's values for load time, encoded as the trees are."""
    files: dict[str, list[Any]]
    """Size in bytes and SHA-256 in hex of every file of every rank."""

    @property
    def plain_facts(self) -> Any:
        """The caller's values."""
        return decoded(self.facts, _no_tensor)

    @property
    def only(self) -> Any:
        """The part of the state that it holds; None for all of it."""
        return self.plain_facts.get(ONLY)

    def to_bytes(self) -> bytes:
        """Return the bytes of the file: readable JSON with the SHA-256 of the rest."""
        return _with_checksum({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Manifest":
        """Read the file."""
        content = _verified(raw)
        version = content.pop("format", None)
        if version != FORMAT:
            raise CheckpointError(
                f"the checkpoint has format {version!r}, but this version of thinwire reads "
                f"format {FORMAT}: use thinwire {content.get('thinwire')}, which wrote it"
            )
        if set(content) != set(cls.__dataclass_fields__):
            raise CheckpointCorrupt(
                f"its entries are {sorted(content)}, not {sorted(cls.__dataclass_fields__)}"
            )
        manifest = cls(**content)
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Check the contents: the checksum is no secret, and no file outside may be named."""
        integers = (self.step, self.serial, *_flat(self.parts), *_flat(_flat(self.directories)))
        if not all(type(number) is int and number >= 0 for number in integers):
            raise CheckpointCorrupt("its numbers are not non-negative integers")
        if sorted(_flat(self.directories)) != list(range(len(self.parts))):
            raise CheckpointCorrupt(
                f"its directories list the ranks {self.directories}, but it has "
                f"{len(self.parts)} ranks"
            )
        wanted = set(files_of(range(len(self.parts))))
        if not isinstance(self.files, dict) or self.files.keys() != wanted:
            raise CheckpointCorrupt(
                f"it names other files than the two of each of its {len(self.parts)} ranks"
            )
        for name, entry in self.files.items():
            match entry:
                case [int(size), str(checksum)] if (
                    size >= 0 and _SHA256.fullmatch(checksum) and _FILE.fullmatch(name)
                ):
                    continue
            raise CheckpointCorrupt(f"it has {entry!r} for {name}")
        try:
            if not isinstance(self.plain_facts, dict):
                raise ValueError("no mapping")
        except (ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"its facts cannot be read: {error}") from error.__cause__


def _verified(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
        del content["sha256"]
        intact = _with_checksum(content) == raw
    except UNREADABLE as error:
        raise CheckpointCorrupt(
            f"it cannot be read ({type(error).__name__}: {error})"
        ) from error.__cause__
    if not intact:
        raise CheckpointCorrupt("its checksum does not match its bytes")
    return dict(content)


def _with_checksum(content: dict[str, Any]) -> bytes:
    """Return the only valid bytes for this content, the checksum last. Any other byte is damage."""
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()
    )
    checksum = hashlib.sha256(lines.encode()).hexdigest()
    return f'{{\n{lines},\n "sha256": "{checksum}"\n}}\n'.encode()


def _flat(lists: Any) -> list[Any]:
    if not isinstance(lists, list):
        raise CheckpointCorrupt("an entry that must be a list is not one")
    return [entry for inner in lists for entry in (inner if isinstance(inner, list) else [inner])]


def _no_tensor(name: str) -> Any:
    raise ValueError(f"they contain the tensor {name!r}")


_NAME = re.compile(r"step_([0-9]{10,18})(?:_[0-9]{1,9})?")
_MOST_BYTES = 1 << 27
"""Largest size of a manifest, which has about 200 bytes for each rank and for each parameter."""
_LEFTOVER = re.compile(r"\.step_[0-9_]+\.tmp-[0-9a-f]+|\.rank_[0-9]+\.token-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Found:
    """A folder with the name of a checkpoint, with its manifest or the reason why it has no
    usable one.
    """

    path: Path
    step: int
    manifest: Manifest | None
    key: str
    """Identity of the checkpoint, the same on all ranks: SHA-256 in hex of the manifest's bytes."""
    problem: CheckpointError | None


def name_of(step: int, taken: Iterable[str]) -> str:
    """Return a name for a new checkpoint. Existing ones may have the same step."""
    base = f"step_{step:010d}"
    used = set(taken)
    names = (base if i == 1 else f"{base}_{i}" for i in count(1))
    return next(name for name in names if name not in used)


def next_folder(directory: Path, step: int) -> Path:
    """Return the expected folder of a checkpoint of this step, unless others write there."""
    taken = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return directory / name_of(step, taken)


def staging_name(name: str, token: str) -> str:
    """Return the name of a checkpoint that is being written or deleted; readers ignore it."""
    return f".{name}.tmp-{token}"


def token_name(rank: int, token: str) -> str:
    """Return the name of the file by which other ranks see that they share a directory."""
    return f".rank_{rank:05d}.token-{token}"


def found(directory: Path) -> list[Found]:
    """Return every folder with the name of a checkpoint."""
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    return [
        found_at(path, int(match[1])) for path in paths if (match := _NAME.fullmatch(path.name))
    ]


def leftovers(directory: Path) -> list[Path]:
    """Return the leftovers of interrupted saves."""
    return [path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name)]


def missing_file(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Return the first of the files that is missing or has another size."""
    for name in names:
        path = folder / name
        if not is_regular(path) or path.stat().st_size != manifest.files[name][0]:
            return name
    return None


def found_at(path: Path, step: int | None = None) -> Found:
    """Return one checkpoint by its own folder, of a step if given. Its files are not read."""
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
