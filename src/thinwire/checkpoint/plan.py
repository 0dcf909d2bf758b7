"""The plan by which ranks write one checkpoint: who shares a directory with whom, and what its
leader does there.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire._version import __version__
from thinwire.checkpoint.files import discard, remove, sync_directory, write_file
from thinwire.checkpoint.folder import leftovers, missing_file, name_of, staging_name
from thinwire.checkpoint.manifest import MANIFEST, Manifest, files_of
from thinwire.checkpoint.writer import Assignment, Survey, assign_tensors
from thinwire.errors import CheckpointError

__all__ = ["Plan", "places_of"]

_SPARE_BYTES = 1 << 20
"""For manifests, directories and what a file system rounds up."""


def places_of(neighbours: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sets of ranks that share a directory, from what each rank sees there.

    Raises:
        CheckpointError: Two ranks do not see the same, as on a file system that shows new files
            late; a rank does not see its own.
    """
    for rank, seen in enumerate(neighbours):
        if rank not in seen:
            raise CheckpointError(
                f"the file by which others see rank {rank} is gone from its directory: another run "
                "saves there. Give each run a directory of its own"
            )
        for other in seen:
            if neighbours[other] != seen:
                raise CheckpointError(
                    f"rank {rank} sees files of the ranks {list(seen)} in its directory, and rank "
                    f"{other} sees those of {list(neighbours[other])}: either all of them share a "
                    "directory or they have different ones. A network file system must show a new "
                    "file to all machines at once"
                )
    return sorted(list(seen) for seen in {tuple(seen) for seen in neighbours})


class Plan:
    """The same on all ranks but for `rank` and the directory; all but the leader of a place only
    read it.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        step: int,
        places: list[list[int]],
        surveys: Sequence[Survey],
        facts: Any,
    ) -> None:
        [self._place] = [place for place in places if rank in place]
        self.leads = rank == self._place[0]
        self.root, self.step, self._places, self._facts = root, step, places, facts
        name = name_of(step, (name for row in surveys for name in row["names"]))
        self.path = root / name
        self.token = surveys[0]["token"]
        self.staging = root / staging_name(name, self.token)
        self._parts = [row["part"] for row in surveys]
        # not the next number alone: a manifest that cannot be read just now hides the newest one's
        self.serial = max(surveys[0]["now_ms"], 1 + max(row["serial"] for row in surveys))
        here = {r: surveys[r] for r in self._place}
        self.writing: Assignment = assign_tensors(here)
        sizes = {checksum: size for row in here.values() for _, checksum, size in row["tensors"]}
        # the table of tensors repeats their names
        self._needed_bytes = sum(sizes.values()) + sum(
            row["plain_bytes"] + sum(2 * len(name) + 100 for name, _, _ in row["tensors"])
            for row in here.values()
        )
        self._committed = False

    def make_room(self) -> list[str]:
        """Remove what interrupted saves left behind, and make the staging folder if there is space
        for its content.

        Returns:
            What could not be removed, in words.
        """
        if not self.leads:
            return []
        stuck = []
        for path in leftovers(self.root):
            try:
                remove(path)
            except OSError as error:
                stuck.append(
                    f"what an interrupted save left behind in {path} could not be removed: {error}"
                )
        free = shutil.disk_usage(self.root).free
        if free < self._needed_bytes + _SPARE_BYTES:
            raise CheckpointError(
                f"no space left: a checkpoint of {_mib(self._needed_bytes)} does not fit into the "
                f"{_mib(free)} that are free in {self.root}. Delete files there, save elsewhere, "
                "or keep fewer checkpoints"
            )
        self.staging.mkdir()
        return stuck

    def seal(self, files: dict[str, list[Any]]) -> None:
        """Add the manifest and force the whole folder to the disk."""
        if not self.leads:
            return
        manifest = Manifest(
            thinwire=__version__,
            torch=str(torch.__version__),
            step=self.step,
            serial=self.serial,
            parts=self._parts,
            places=self._places,
            facts=self._facts,
            files=files,
        )
        gone = missing_file(self.staging, manifest, files_of(self._place))
        if gone is not None:
            raise CheckpointError(
                f"{self.staging / gone}, which has just been written, is not there in its size: "
                "another run saves in this directory. Give each run one of its own"
            )
        write_file(self.staging / MANIFEST, manifest.to_bytes())
        sync_directory(self.staging)

    def commit(self) -> None:
        """Give the folder its name: from here on it is a checkpoint."""
        if self.leads:
            self.staging.rename(self.path)
            self._committed = True
            sync_directory(self.root)

    def remove(self) -> None:
        """Leave nothing of this checkpoint behind."""
        if self.leads:
            # the failure that led here is being raised; the next save cleans up
            with contextlib.suppress(OSError):
                discard(self.path if self._committed else self.staging, self.staging)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
