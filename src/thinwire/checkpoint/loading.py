"""Finds the newest checkpoint that is whole on all ranks, and reads the parts that a rank needs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from thinwire._wording import warn_user
from thinwire.checkpoint.combine import Rules, combine
from thinwire.checkpoint.files import LATE, on_all_ranks
from thinwire.checkpoint.manifest import (
    MANIFEST,
    Found,
    Manifest,
    found,
    found_at,
    plain_file,
    tensor_file,
)
from thinwire.checkpoint.shards import Sharding
from thinwire.checkpoint.tensor_file import TensorReader, damage_of
from thinwire.checkpoint.tree import UNREADABLE, TensorRef, decoded, parsed_table
from thinwire.comm import Group, by_rank
from thinwire.core.tree import mapped
from thinwire.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
)

EXPORTED = (
    "`thinwire export DIRECTORY model.safetensors` writes the whole model for "
    "engine.load_parameters('model.safetensors')"
)
"""Advice for messages: how to load stages of a pipeline into other stages."""


class CheckpointReader:
    """Reads for one rank from a checkpoint that is a candidate to load."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        parts: Sequence[int],
        rank: int,
        *,
        combined: bool,
        sharding: Callable[[Any], Sharding | None] | None = None,
    ) -> None:
        """Select the files to read; raise `CheckpointMismatch` if there is no state for these
        parts. `sharding` returns the present sharding of the model, from the facts of a checkpoint.
        """
        self._sharding: Sharding | None = None
        if set(parts) != set(manifest.parts) and sharding is not None:
            self._sharding = sharding(manifest.plain_facts)
        if set(parts) != set(manifest.parts) and self._sharding is None:
            raise CheckpointMismatch(
                f"{path} has the state of pipeline stages {sorted(set(manifest.parts))}, but the "
                f"ranks are now stages {sorted(set(parts))}. Load it with the number of stages "
                f"that saved it; or {EXPORTED}"
            )
        self.path = path
        self.manifest = manifest
        peers = [r for r, part in enumerate(parts) if part == parts[rank]]
        resharded = self._sharding is not None
        old = [r for r, part in enumerate(manifest.parts) if resharded or part == parts[rank]]
        self._position = peers.index(rank)
        self._rank = rank
        self._is_own = self._sharding is None and len(old) == len(peers) and not combined
        self._sources = [old[self._position]] if self._is_own else old
        self.trees: list[Any] = []
        """Trees of the old ranks, with references to tensors; set by `verify`."""
        self._intact: set[str] = set()

    @property
    def resharded(self) -> bool:
        """True if the state comes from another number of shards."""
        return self._sharding is not None

    def verify(self) -> None:
        """Verify every byte of the files that this rank needs, and parse the plain ones."""
        self.trees = [self._tree(rank) for rank in self._sources]

    def read(self, rules: Rules) -> Any:
        """Return the state for this rank, its own or the combined one. Call `verify` first."""
        with TensorReader(self.path) as reader:
            if self._is_own:
                return mapped(reader.read, self.trees[0], TensorRef)
            if self._sharding is None:
                return combine(self.trees, rules, rank=self._position, read=reader.read)
            replicas: dict[int, list[Any]] = {}
            for tree, part in zip(self.trees, self.manifest.parts, strict=True):
                replicas.setdefault(part, []).append(tree)
            shards = [
                combine(replicas[part], rules, rank=self._position, read=reader.read)
                for part in sorted(replicas)
            ]
            whole = self._sharding.reshard(shards)
            for key in self._sharding.of_ranks:
                own = [tree[key] for tree in self.trees]
                whole[key] = combine(own, rules, rank=self._rank, read=reader.read)
            return whole

    def _tree(self, rank: int) -> Any:
        name = plain_file(rank)
        self._require_intact(name)
        try:
            content = json.loads((self.path / name).read_bytes())
            table = parsed_table(content["tensors"], len(self.manifest.parts))
            tree = decoded(content["tree"], table.__getitem__)
        except (OSError, *UNREADABLE) as error:
            raise CheckpointCorrupt(
                f"{self.path / name} has a content that this version does not write "
                f"({type(error).__name__}: {error})"
            ) from error.__cause__
        for writer in sorted({rank, *(ref.rank for ref in table.values())}):
            self._require_intact(tensor_file(writer))
        return tree

    def _require_intact(self, name: str) -> None:
        if name in self._intact:
            return
        path = self.path / name
        directories = self.manifest.directories
        if problem := damage_of(path, *self.manifest.files[name]):
            if not path.exists() and len(directories) > 1:
                problem += (
                    f" (the ranks saved into {len(directories)} directories, {directories}, and "
                    "each has the files of its own ranks only: copy the folders "
                    f"{self.path.name} of all directories into one)"
                )
            raise CheckpointCorrupt(f"{path} {problem}")
        self._intact.add(name)


METADATA = ".metadata"
"""The file that marks a folder of `torch.distributed.checkpoint`; it is pickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint, read and verified."""

    state: Any
    """Tree of this rank. Its tensors are on the CPU and own their memory."""
    facts: dict[str, Any]
    """The values common to all ranks."""
    step: int
    """The step that `save` was given."""
    path: Path
    """Its folder."""
    ranks: int
    """Number of ranks that saved. If it differs from the present number, `state` is combined."""
    resharded: bool
    """True if another number of shards saved it."""


def load(
    directory: str | PathLike[str],
    *,
    group: Group,
    part: int = 0,
    rules: Rules = None,
    combined: bool = False,
    sharding: Callable[[Any], Sharding | None] | None = None,
    step: int | None = None,
) -> Loaded:
    """Read the newest checkpoint that is whole on every rank.

    Every byte that a rank needs is verified before any rank gets its state. All ranks get the same
    checkpoint. If one is damaged or missing on any rank, all ranks skip it, with one `UserWarning`
    that names the file. The newest checkpoint is the one saved last, whatever its step. No code in
    the files is ever executed.

    With the same number of ranks of a part, each rank gets its own state. With another number, each
    gets the combined state of `thinwire.checkpoint.combine`.

    `rules` are those of `combine`; `combined`: also with the same number of ranks. `sharding`
    returns the present sharding of the model, from the facts of a checkpoint of other parts; None
    if that has stages, not shards. Each `CheckpointError` is raised on every rank.

    Communication: three small rounds, and one more for every skipped checkpoint.
    """
    root = Path(directory)
    entries: dict[str, Found] = {}
    surveys = on_all_ranks(
        group, "looking for checkpoints", partial(_survey_directory, root, part, entries)
    )
    parts = [row["part"] for row in surveys]
    damaged = {(step, text) for row in surveys for step, text in row["damaged"]}
    problems = sorted(damaged, reverse=True)
    known = {(serial, key): (at, name) for row in surveys for serial, key, at, name in row["whole"]}
    if step is not None:
        there = {at for at, _ in [*known.values(), *problems]}
        if there and step not in there:
            steps = ", ".join(map(str, sorted(there)))
            raise CheckpointMismatch(
                f"{root} has checkpoints of step {steps}, but none of step {step}"
            )
        known = {save: entry for save, entry in known.items() if entry[0] == step}
        problems = [(at, text) for at, text in problems if at == step]
    for (_, key), (at, name) in sorted(known.items(), reverse=True):
        verified: list[CheckpointReader] = []
        reader_of = partial(
            CheckpointReader, parts=parts, rank=group.rank, combined=combined, sharding=sharding
        )
        verify = partial(_verify, root, name, entries.get(key), key, reader_of, verified)
        answers = on_all_ranks(group, "verifying a checkpoint", verify)
        if any(answers):
            problems += [(at, text) for text in by_rank(answers)]
            continue
        path = verified[0].path
        newer = [text for other, text in problems if other >= at]
        if newer:
            text = f"loading {path}, because the newer checkpoints cannot be loaded: "
            warn_user(text + "; ".join(newer))
        return _read(group, verified[0], rules)
    if problems:
        texts = "; ".join(text for _, text in problems)
        raise CheckpointCorrupt(f"no checkpoint is intact on all ranks: {texts}")
    roots = " nor in ".join(sorted({row["root"] for row in surveys}))
    raise CheckpointMissing(
        f"there is no checkpoint in {roots}: no folder named step_ and ten digits has a "
        f"{MANIFEST}. Pass the directory given to save"
    )


def _survey_directory(root: Path, part: int, whole: dict[str, Found]) -> dict[str, Any]:
    """Return the checkpoints that this rank sees, for the others. Fill `whole` by their keys."""
    if (root / MANIFEST).is_file():
        raise CheckpointError(
            f"{root} is a single checkpoint: pass the directory given to save, {root.parent}"
        )
    entries = [] if root.is_file() else found(root)
    if root.is_file() or (not entries and (root / METADATA).exists()):
        raise CheckpointError(
            f"{root} is not a folder of engine.save. If it is a checkpoint of torch, "
            "engine.load_parameters(source, torch_checkpoint=True) reads it; this may run code "
            "in the file, so do it only if you trust it"
        )
    whole.update({entry.key: entry for entry in entries if entry.manifest})
    newest = max((entry.step for entry in whole.values()), default=-1)
    for entry in entries:
        if (
            entry.problem
            and not isinstance(entry.problem, CheckpointCorrupt)
            and entry.step > newest
        ):
            # a newer format: loading an older checkpoint instead would be a silent step back
            raise entry.problem
    return {
        "part": part,
        "root": str(root),
        "whole": [
            (entry.manifest.serial, key, entry.step, entry.path.name)
            for key, entry in whole.items()
            if entry.manifest
        ],
        "damaged": [(entry.step, str(entry.problem)) for entry in entries if entry.problem],
    }


def _verify(
    root: Path,
    name: str,
    entry: Found | None,
    key: str,
    reader_of: Callable[[Path, Manifest], CheckpointReader],
    verified: list[CheckpointReader],
) -> str | None:
    """Return the damage of a checkpoint here, or None and add it to `verified`."""
    entry = entry or found_at(root / name)  # a network file system may list it late
    if entry.manifest is None or entry.key != key:
        return (
            f"{root} lacks the checkpoint {name} that other ranks have: copy its folder there, or, "
            f"if ranks share the directory, {LATE}"
        )
    reader = reader_of(entry.path, entry.manifest)
    try:
        reader.verify()
    except CheckpointCorrupt as error:
        return str(error)
    verified.append(reader)
    return None


def _read(group: Group, reader: CheckpointReader, rules: Rules) -> Loaded:
    states: list[Any] = []
    on_all_ranks(group, "reading a checkpoint", lambda: states.append(reader.read(rules)))
    return Loaded(
        state=states[0],
        facts=reader.manifest.plain_facts,
        step=reader.manifest.step,
        path=reader.path,
        ranks=len(reader.manifest.parts),
        resharded=reader.resharded,
    )
