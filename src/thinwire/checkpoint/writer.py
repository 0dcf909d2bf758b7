"""The writing end of one rank: its tree, the tensors in it, and which of them another rank writes
for it.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.files import make_directory, write_file
from thinwire.checkpoint.folder import found, token_name
from thinwire.checkpoint.manifest import plain_file, tensor_file
from thinwire.checkpoint.tensor_file import digest, write_tensors
from thinwire.checkpoint.tree import encoded, table_entry

__all__ = ["RankWriter", "Survey", "assign_tensors"]

Survey = dict[str, Any]
"""The facts that a rank tells the others before anything is written."""
Assignment = dict[str, tuple[int, str]]
"""By digest: the rank that writes such a tensor, and the name under which it does."""


class RankWriter:
    """This rank's contribution to a checkpoint.

    **State**: the encoded tree, references to its tensors, their digests, a token file in the
    directory.
    """

    def __init__(self, root: Path, rank: int, token: str) -> None:
        self._token_path = root / token_name(rank, token)
        self._root, self._rank, self._token = root, rank, token
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._tree: Any = None
        self.facts: Any = None

    def survey(self, state: Any, facts: Mapping[str, Any], part: int) -> Survey:
        """Survey the state, make the directory and leave a token in it by which ranks see that they
        share it.
        """
        if isinstance(state, Exception):
            raise state
        self.facts = encoded(dict(facts), None)
        self._tree = encoded(state, self._tensors)
        for device in {tensor.device for tensor in self._tensors.values() if tensor.is_cuda}:
            # this thread knows nothing of the streams of the caller's
            torch.cuda.synchronize(device)
        self._digests = {name: digest(tensor) for name, tensor in self._tensors.items()}
        make_directory(self._root)
        here = found(self._root)
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
        """The ranks whose tokens are in this rank's directory, itself included."""
        paths = [self._root / token_name(rank, row["token"]) for rank, row in enumerate(surveys)]
        return [rank for rank, path in enumerate(paths) if path.exists()]

    def close(self) -> None:
        """Take the token away again."""
        with contextlib.suppress(OSError):  # the next save removes it
            self._token_path.unlink(missing_ok=True)

    def write(self, folder: Path, writing: Assignment) -> dict[str, tuple[int, str]]:
        """Write this rank's two files.

        Returns:
            By name: the size in bytes and the SHA-256 in hex.
        """
        names = (plain_file(self._rank), tensor_file(self._rank))
        own = {
            n: t for n, t in self._tensors.items() if writing[self._digests[n]] == (self._rank, n)
        }
        table = {n: table_entry(t, *writing[self._digests[n]]) for n, t in self._tensors.items()}
        plain = json.dumps({"tree": self._tree, "tensors": table}).encode()
        return {
            names[1]: write_tensors(folder / names[1], own),
            names[0]: write_file(folder / names[0], plain),
        }


def assign_tensors(surveys: Mapping[int, Survey]) -> Assignment:
    """Choose who writes which tensor, among ranks that share a directory: the first of those that
    have the same bytes.
    """
    result: Assignment = {}
    for rank, row in surveys.items():
        for name, tensor_digest, _ in row["tensors"]:
            result.setdefault(tensor_digest, (rank, name))
    return result
