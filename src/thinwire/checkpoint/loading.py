"""Finding the newest checkpoint that is whole on all ranks, and reading it."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from thinwire._validate import integer
from thinwire.checkpoint.all_ranks import by_rank, on_all_ranks
from thinwire.checkpoint.combine import Rule, require_rules
from thinwire.checkpoint.folder import Found, found
from thinwire.checkpoint.manifest import MANIFEST, Manifest
from thinwire.checkpoint.reader import CheckpointReader
from thinwire.checkpoint.shards import Cut
from thinwire.checkpoint.tree import decoded
from thinwire.comm import Group
from thinwire.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
)

__all__ = ["METADATA", "Loaded", "load"]

METADATA = ".metadata"
"""The file that makes a folder one of `torch.distributed.checkpoint`; it is pickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint, read and verified."""

    state: Any
    """This rank's tree, tensors on the CPU in memory of their own."""
    facts: dict[str, Any]
    """The values common to all ranks."""
    step: int
    """The step that `save` was given."""
    path: Path
    """Its folder."""
    ranks: int
    """Number of ranks that saved; where it is another than now, `state` is the combined one."""
    cut_anew: bool
    """Whether it was saved by another number of shards."""


def load(
    directory: str | PathLike[str],
    *,
    group: Group,
    part: int = 0,
    rules: Mapping[str, Rule] | None = None,
    combined: bool = False,
    cut: Callable[[Any], Cut | None] | None = None,
    step: int | None = None,
) -> Loaded:
    """Read the newest checkpoint that is whole on every rank.

    Every byte that a rank needs is verified before any rank gets anything. All ranks get the same
    checkpoint: one that is damaged or missing on any rank is passed over by all of them, with one
    `UserWarning` that names the file. The newest is the one that was saved last, whatever its step.
    Nothing of the files is ever executed.

    With as many ranks of a part as have saved, each gets back what it had saved. With another
    number, each gets what `thinwire.checkpoint.combine` makes of all of them.

    Args:
        directory: What `save` was given.
        group: The ranks.
        part: Pipeline stage, or shard, of this rank.
        rules: For another number of ranks: what to do with the values at which paths, see
            `combine`.
        combined: Whether ranks get what `combine` makes even where as many go on as have saved.
        cut: How the model is cut into shards now, from the facts of a checkpoint of other parts;
            None from it where that has no shards, but stages.
        step: Only a checkpoint of this step; None for the newest of any.

    Raises:
        TypeError, ValueError: `part` or `rules` is not what it must be.
        CheckpointCorrupt: There are checkpoints, and all of them are damaged or incomplete; names
            the files.
        CheckpointMissing: There is none.
        CheckpointMismatch: It is of other pipeline stages; there are checkpoints, and none of
            `step`.
        CheckpointError: It is of a newer format, or its states do not fit together. All on every
            rank.

    Communication: three small rounds, and one more for every checkpoint that is passed over.
    """
    part, root = integer("part", part, at_least=0), Path(directory)
    rules = require_rules(rules)
    entries: dict[str, Found] = {}
    surveys = on_all_ranks(group, "looking for checkpoints", partial(_look, root, part, entries))
    parts = [row["part"] for row in surveys]
    damaged = {(step, text) for row in surveys for step, text in row["damaged"]}
    problems = sorted(damaged, reverse=True)
    known = {(serial, key): at for row in surveys for serial, key, at in row["whole"]}
    if step is not None:
        there = {*known.values(), *(at for at, _ in problems)}
        if there and step not in there:
            told = ", ".join(map(str, sorted(there)))
            raise CheckpointMismatch(
                f"{root} has checkpoints of step {told}, and none of step {step}"
            )
        known = {place: at for place, at in known.items() if at == step}
        problems = [(at, text) for at, text in problems if at == step]
    for (_, key), at in sorted(known.items(), reverse=True):
        verified: list[CheckpointReader] = []
        reader_of = partial(
            CheckpointReader, parts=parts, rank=group.rank, combined=combined, cut=cut
        )
        verify = partial(_verify, root, entries.get(key), at, reader_of, verified)
        answers = on_all_ranks(group, "verifying a checkpoint", verify)
        if any(answers):
            problems += [(at, text) for text in by_rank(answers)]
            continue
        _warn_of([text for other, text in problems if other >= at], verified[0].path)
        return _read(group, verified[0], rules)
    raise _none_whole(sorted({row["root"] for row in surveys}), [text for _, text in problems])


def _look(root: Path, part: int, whole: dict[str, Found]) -> dict[str, Any]:
    """List what this rank sees, for the others; fill `whole` by the key of the manifest."""
    if (root / MANIFEST).is_file():
        raise CheckpointError(
            f"{root} is one checkpoint itself: pass the directory that was given to save, "
            f"{root.parent}"
        )
    entries = [] if root.is_file() else found(root)
    if root.is_file() or (not entries and (root / METADATA).exists()):
        raise CheckpointError(
            f"{root} is no folder of engine.save. If it is torch's, engine.load_parameters(source, "
            "torch_checkpoint=True) reads it: that may run the code in it, so only if you trust it"
        )
    whole.update({entry.key: entry for entry in entries if entry.manifest})
    newest = max((entry.step for entry in whole.values()), default=-1)
    for entry in entries:
        if (
            entry.problem
            and not isinstance(entry.problem, CheckpointCorrupt)
            and entry.step > newest
        ):
            # of a newer format: an older one instead of it would be a silent step back
            raise entry.problem
    return {
        "part": part,
        "root": str(root),
        "whole": [
            (entry.manifest.serial, key, entry.step)
            for key, entry in whole.items()
            if entry.manifest
        ],
        "damaged": [(entry.step, str(entry.problem)) for entry in entries if entry.problem],
    }


def _verify(
    root: Path,
    entry: Found | None,
    step: int,
    reader_of: Callable[[Path, Manifest], CheckpointReader],
    verified: list[CheckpointReader],
) -> str | None:
    """Say what is wrong with a checkpoint on this rank; None: nothing, and it is added to
    `verified`.
    """
    if entry is None or entry.manifest is None:
        return (
            f"{root} lacks the checkpoint of step {step} that other ranks have: copy its folder "
            "there"
        )
    reader = reader_of(entry.path, entry.manifest)
    try:
        reader.verify()
    except CheckpointCorrupt as error:
        return str(error)
    verified.append(reader)
    return None


def _read(group: Group, reader: CheckpointReader, rules: Mapping[str, Rule]) -> Loaded:
    states: list[Any] = []
    on_all_ranks(group, "reading a checkpoint", lambda: states.append(reader.read(rules)))
    return Loaded(
        state=states[0],
        facts=decoded(reader.manifest.facts, dict[str, Any]().__getitem__),
        step=reader.manifest.step,
        path=reader.path,
        ranks=len(reader.manifest.parts),
        cut_anew=reader.cut_anew,
    )


def _warn_of(problems: list[str], path: Path) -> None:
    if problems:
        message = (
            f"loading {path}, because what was saved later cannot be loaded: {'; '.join(problems)}"
        )
        warnings.warn(message, UserWarning, stacklevel=3)


def _none_whole(roots: list[str], problems: list[str]) -> CheckpointError:
    if problems:
        return CheckpointCorrupt(f"no checkpoint is whole on all ranks: {'; '.join(problems)}")
    return CheckpointMissing(
        f"there is no checkpoint in {' nor in '.join(roots)}: looked for folders named step_ and "
        f"ten digits, with a {MANIFEST} inside. Pass the directory that was given to save"
    )
