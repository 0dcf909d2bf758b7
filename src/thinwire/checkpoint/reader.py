"""One checkpoint as one rank sees it: which of its files it needs, whether they are intact, and
what is in them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.checkpoint.combine import Rule, combine
from thinwire.checkpoint.files import checksum, is_regular
from thinwire.checkpoint.manifest import Manifest, plain_file, tensor_file
from thinwire.checkpoint.shards import Cut
from thinwire.checkpoint.tensor_file import TensorReader
from thinwire.checkpoint.tree import decoded, parsed_table, with_tensors
from thinwire.errors import CheckpointCorrupt, CheckpointMismatch

__all__ = ["EXPORTED", "CheckpointReader"]

EXPORTED = (
    "`thinwire export DIRECTORY model.safetensors` writes the whole model, which "
    "engine.load_parameters('model.safetensors') takes"
)
"""The way from stages of a pipeline to others, for messages."""


class CheckpointReader:
    """The reading end of one rank, of a checkpoint that may be the one to load."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        parts: Sequence[int],
        rank: int,
        *,
        combined: bool,
        cut: Callable[[Any], Cut | None] | None = None,
    ) -> None:
        """`parts` are those of the ranks that load, `rank` is this one of them; `combined`: in any
        case; `cut`: how the model is cut now, from the facts, where its parts are shards then and
        now.

        Raises:
            CheckpointMismatch: There is no state for these parts.
        """
        self._cut: Cut | None = None
        if set(parts) != set(manifest.parts) and cut is not None:
            self._cut = cut(decoded(manifest.facts, dict[str, Any]().__getitem__))
        if set(parts) != set(manifest.parts) and self._cut is None:
            raise CheckpointMismatch(
                f"{path} has the state of pipeline stages {sorted(set(manifest.parts))}, and the "
                f"ranks are now stages {sorted(set(parts))}: a checkpoint is loaded with the "
                f"number of stages that saved it; {EXPORTED}"
            )
        self.path, self.manifest = path, manifest
        peers = [r for r, part in enumerate(parts) if part == parts[rank]]
        every = range(len(manifest.parts))
        old = [r for r in every if self._cut is not None or manifest.parts[r] == parts[rank]]
        self._position, self._rank = peers.index(rank), rank
        self._is_own = self._cut is None and len(old) == len(peers) and not combined
        self._sources = [old[self._position]] if self._is_own else old
        self.trees: list[Any] = []
        """After `verify`: of every old rank that counts here, with references to tensors."""
        self._intact: set[str] = set()

    @property
    def cut_anew(self) -> bool:
        """Whether it has the state of another number of shards."""
        return self._cut is not None

    def verify(self) -> None:
        """Verify every byte of the files that this rank needs, and parse the plain ones.

        Raises:
            CheckpointCorrupt: Names the file.
        """
        self.trees = [self._tree(rank) for rank in self._sources]

    def read(self, rules: Mapping[str, Rule]) -> Any:
        """The state for this rank, its own or the combined one, after `verify`."""
        with TensorReader(self.path) as reader:
            if self._is_own:
                return with_tensors(self.trees[0], reader.read)
            if self._cut is None:
                return combine(self.trees, rules, rank=self._position, read=reader.read)
            replicas: dict[int, list[Any]] = {}
            for tree, part in zip(self.trees, self.manifest.parts, strict=True):
                replicas.setdefault(part, []).append(tree)
            shards = [
                combine(replicas[part], rules, rank=self._position, read=reader.read)
                for part in sorted(replicas)
            ]
            whole = self._cut.anew(shards)
            for key in self._cut.of_ranks:
                own = [tree[key] for tree in self.trees]
                whole[key] = combine(own, rules, rank=self._rank, read=reader.read)
            return whole

    def _tree(self, rank: int) -> Any:
        """The tree of an old rank, with references to its tensors."""
        name = plain_file(rank)
        self._require_intact(name)
        try:
            content = json.loads((self.path / name).read_bytes())
            table = parsed_table(content["tensors"], len(self.manifest.parts))
            tree = decoded(content["tree"], table.__getitem__)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"{self.path / name} is not what this version writes ({type(error).__name__}: "
                f"{error})"
            ) from error
        for writer in sorted({rank, *(ref.rank for ref in table.values())}):
            self._require_intact(tensor_file(writer))
        return tree

    def _require_intact(self, name: str) -> None:
        if name in self._intact:
            return
        path, (size, wanted) = self.path / name, self.manifest.files[name]
        try:
            if not is_regular(path):
                raise CheckpointCorrupt(f"{path} is not there{self._elsewhere()}")
            if path.stat().st_size != size:
                raise CheckpointCorrupt(
                    f"{path} has {path.stat().st_size} bytes, {size} were written"
                )
            if checksum(path) != wanted:
                raise CheckpointCorrupt(
                    f"{path} is damaged: its checksum is not that of what was written"
                )
        except OSError as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
        self._intact.add(name)

    def _elsewhere(self) -> str:
        if len(self.manifest.places) == 1:
            return ""
        return (
            f" (the ranks saved into {len(self.manifest.places)} directories, "
            f"{self.manifest.places}, each of which has the files of its own ranks: copy the "
            f"folders {self.path.name} of all of them together)"
        )
