"""Plans how ranks write one checkpoint: the ranks that share a directory, the tensors that each
writes, and the work of the directory's leader.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire._version import __version__
from thinwire.checkpoint.files import (
    LATE,
    discard,
    make_directory,
    remove,
    sync_directory,
    write_pieces,
)
from thinwire.checkpoint.manifest import (
    MANIFEST,
    ONLY,
    Found,
    Manifest,
    files_of,
    found,
    leftovers,
    missing_file,
    name_of,
    plain_file,
    staging_name,
    tensor_file,
    token_name,
)
from thinwire.checkpoint.tensor_file import Hash, by_name, hash_of, synchronize, write_tensors
from thinwire.checkpoint.tree import encoded, table_entry
from thinwire.errors import CheckpointError

Survey = dict[str, Any]
"""Facts that a rank reports to the others before anything is written."""
Assignment = dict[str, tuple[int, str]]
"""Rank that writes each tensor, and the tensor's name there, by digest."""


class RankWriter:
    """Writer of one rank's part of a checkpoint."""

    def __init__(self, root: Path, rank: int, token: str) -> None:
        self._token_path = root / token_name(rank, token)
        self._root = root
        self._rank = rank
        self._token = token
        self._tensors: dict[str, Tensor] = {}
        self._hashes: dict[str, Hash] = {}
        self._digests: dict[str, str] = {}
        self._tree: Any = None
        self.facts: Any = None

    def survey(self, state: Any, facts: Mapping[str, Any], part: int) -> Survey:
        """Survey the state, and leave a token in the directory, which shows that ranks share it."""
        if isinstance(state, Exception):
            raise state
        self.facts = encoded(dict(facts), None)
        self._tree = encoded(state, self._tensors)
        synchronize(self._tensors.values())
        self._hashes = by_name(hash_of, self._tensors)
        self._digests = {
            name: f"{tensor.dtype} {tuple(tensor.shape)} {self._hashes[name][0].hex()}"
            for name, tensor in self._tensors.items()
        }
        make_directory(self._root)
        here = found(self._root)
        _require_alike(here, facts)
        self._token_path.write_bytes(b"")
        return {
            "token": self._token,
            "part": part,
            "serial": max((entry.manifest.serial for entry in here if entry.manifest), default=0),
            "now_ms": time.time_ns() // 1_000_000,
            "names": [entry.path.name for entry in here],
            "plain_bytes": len(json.dumps(self._tree)),
            "tensors": [[name, self._digests[name], t.nbytes] for name, t in self._tensors.items()],
        }

    def neighbours(self, surveys: Sequence[Survey]) -> list[int]:
        """Return the ranks whose tokens are in this rank's directory, itself included."""
        paths = [self._root / token_name(rank, row["token"]) for rank, row in enumerate(surveys)]
        return [rank for rank, path in enumerate(paths) if path.exists()]

    def close(self) -> None:
        """Remove the token."""
        with contextlib.suppress(OSError):  # the next save removes it
            self._token_path.unlink(missing_ok=True)

    def write(self, folder: Path, writing: Assignment) -> dict[str, tuple[int, str]]:
        """Write this rank's two files; return size in bytes and SHA-256 in hex, by file name."""
        names = (plain_file(self._rank), tensor_file(self._rank))
        own = {
            n: t for n, t in self._tensors.items() if writing[self._digests[n]] == (self._rank, n)
        }
        table = {n: table_entry(t, *writing[self._digests[n]]) for n, t in self._tensors.items()}
        plain = json.dumps({"tree": self._tree, "tensors": table}).encode()
        return {
            names[1]: write_tensors(folder / names[1], own, None, self._hashes),
            names[0]: (write_pieces(folder / names[0], [plain]), hashlib.sha256(plain).hexdigest()),
        }


def _require_alike(there: Sequence[Found], facts: Mapping[str, Any]) -> None:
    """Refuse to mix whole states and models alone, since `keep` deletes the older ones."""
    only = facts.get(ONLY)
    for entry in there:
        if entry.manifest is not None and entry.manifest.only != only:
            raise CheckpointError(
                f"{entry.path} was saved with only={entry.manifest.only!r}, and this call has "
                f"only={only!r}: give each a directory of its own"
            )


_SPARE_BYTES = 1 << 20
"""Spare bytes for manifests, directories and rounding by the file system."""


def directories_of(neighbours: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the sets of ranks that share a directory, from the view of each rank."""
    # views differ on a file system that shows new files late
    for rank, seen in enumerate(neighbours):
        if rank not in seen:
            raise CheckpointError(
                f"the token file of rank {rank} has disappeared from its directory: another run "
                "saves there too. Give each run its own directory"
            )
        for other in seen:
            if neighbours[other] != seen:
                raise CheckpointError(
                    f"rank {rank} sees files of the ranks {list(seen)} in its directory, but rank "
                    f"{other} sees those of {list(neighbours[other])}. Use one shared directory "
                    f"or separate ones; {LATE}"
                )
    return sorted(list(seen) for seen in {tuple(seen) for seen in neighbours})


class SaveLayout:
    """The same plan on all ranks of a directory. Only the leader of the directory writes by it."""

    def __init__(
        self,
        root: Path,
        rank: int,
        step: int,
        directories: list[list[int]],
        surveys: Sequence[Survey],
        facts: Any,
    ) -> None:
        [self._neighbours] = [directory for directory in directories if rank in directory]
        self.leads = rank == self._neighbours[0]
        self.root = root
        self.step = step
        self._directories = directories
        self._facts = facts
        name = name_of(step, (name for row in surveys for name in row["names"]))
        self.path = root / name
        self.token = surveys[self._neighbours[0]]["token"]
        self._tokens = {row["token"] for row in surveys}
        self.staging = root / staging_name(name, self.token)
        self._parts = [row["part"] for row in surveys]
        # the time too: an unreadable manifest may hide the newest serial number
        self.serial = max(surveys[0]["now_ms"], 1 + max(row["serial"] for row in surveys))
        here = {r: surveys[r] for r in self._neighbours}
        self.writing: Assignment = {}
        for writer, row in here.items():  # the first rank that has the bytes
            for tensor, tensor_digest, _ in row["tensors"]:
                self.writing.setdefault(tensor_digest, (writer, tensor))
        sizes = {checksum: size for row in here.values() for _, checksum, size in row["tensors"]}
        # the table of tensors repeats their names
        self._needed_bytes = sum(sizes.values()) + sum(
            row["plain_bytes"] + sum(2 * len(name) + 100 for name, _, _ in row["tensors"])
            for row in here.values()
        )
        self._committed = False

    def make_room(self) -> list[str]:
        """Remove leftovers of interrupted saves, and return those that could not be, in words."""
        if not self.leads:
            return []
        failed_deletions = []
        for path in leftovers(self.root):
            if path.name.rpartition("-")[2] in self._tokens:
                continue
            try:
                remove(path)
            except OSError as error:
                failed_deletions.append(
                    f"the remains of an interrupted save in {path} could not be removed: {error}"
                )
        free = shutil.disk_usage(self.root).free
        if free < self._needed_bytes + _SPARE_BYTES:
            raise CheckpointError(
                f"no space left: a checkpoint of {self._needed_bytes / 2**20:.1f} MiB does not fit "
                f"into the {free / 2**20:.1f} MiB free in {self.root}. Delete files there, save to "
                "another directory, or keep fewer checkpoints"
            )
        self.staging.mkdir()
        return failed_deletions

    def complete(self, files: dict[str, list[Any]]) -> None:
        """Add the manifest and force the whole folder to the disk."""
        if not self.leads:
            return
        manifest = Manifest(
            thinwire=__version__,
            torch=str(torch.__version__),
            step=self.step,
            serial=self.serial,
            parts=self._parts,
            directories=self._directories,
            facts=self._facts,
            files=files,
        )
        gone = missing_file(self.staging, manifest, files_of(self._neighbours))
        if gone is not None:
            raise CheckpointError(
                f"{self.staging / gone}, which has just been written, is missing or has another "
                f"size: another run saves in this directory (give each run its own), or {LATE}"
            )
        write_pieces(self.staging / MANIFEST, [manifest.to_bytes()])
        sync_directory(self.staging)

    def commit(self) -> None:
        """Rename the staging folder to its final name. From here on it is a checkpoint."""
        if self.leads:
            # the one atomic step: a kill before it leaves the previous checkpoint, after it the new
            # one
            try:
                self.staging.rename(self.path)
            except OSError as error:
                if not self.path.is_dir():
                    raise
                raise CheckpointError(
                    f"{self.path} is there already: another run saves in this directory (give each "
                    f"run its own), or ranks did not see each other's files in it: {LATE}"
                ) from error.__cause__
            self._committed = True
            sync_directory(self.root)

    def remove(self) -> None:
        """Remove everything of this checkpoint."""
        if self.leads:
            # the first failure is being raised; the next save cleans up
            with contextlib.suppress(OSError):
                discard(self.path if self._committed else self.staging, self.staging)
