"""Writing a checkpoint into a staging folder, agreeing that it is whole, and only then giving it
its name.
"""

import secrets
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from thinwire._validate import integer
from thinwire.checkpoint.all_ranks import clean_up, on_all_ranks
from thinwire.checkpoint.plan import Plan, places_of
from thinwire.checkpoint.pruning import prune
from thinwire.checkpoint.writer import RankWriter
from thinwire.comm import Group, require_agreement
from thinwire.errors import CheckpointError

__all__ = ["save"]


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
    """Save the state of all ranks as one checkpoint, the newest from now on.

    Whatever happens in here, what `load` returns afterwards is the state of before or this one,
    whole: files are written into a staging folder and forced to the disk, the ranks agree, the
    manifest with the checksums of all files follows, and one renaming makes it a checkpoint.
    Tensors that are bit-identical on several ranks of a directory are written once.

    Args:
        directory: Where checkpoints are kept, one folder each; made with its parents. Ranks on
            machines without a common file system each name one of their own, which then holds the
            files of its own ranks.
        state: Of this rank: nested dicts (str or int keys), lists and tuples of None, bool, int,
            float, str, bytes and dense tensors of any device, dtype and strides. Read only. An
            exception stands for a state that this rank failed to put together: all ranks hear of
            it.
        step: Updates done, or local steps where ranks update on their own; the same on all ranks.
        group: The ranks.
        facts: What is common to all ranks, as `state` but without tensors.
        part: Pipeline stage, or shard, of this rank.
        keep: How many whole checkpoints may stay, this one included; at least 1, None for all of
            them. Older ones are deleted after this one is whole, and so is an older one of the same
            step. See `prune`.

    Returns:
        The folder of the checkpoint.

    Raises:
        TypeError, ValueError: `step`, `part` or `keep` is not an integer in the range.
        Mismatch: `step`, `keep` or `facts` differ between ranks.
        CheckpointError: On every rank, when it failed on any: no space left, not writable, a disk
            that hangs (nothing read or written for the time-out of the group), a value of a type
            that a checkpoint does not hold. Training may go on; earlier checkpoints are untouched,
            and what is left behind the next save removes.

    Communication: eight rounds, and one for each older checkpoint that is read, which carry, all in
    all, about 120 bytes for every tensor of the state.
    Failure: a rank that dies is `PeerLost` on the others; what it leaves behind is removed by the
    next save.
    """
    step, part = integer("step", step, at_least=0), integer("part", part, at_least=0)
    keep = None if keep is None else integer("keep", keep, at_least=1)
    root = Path(directory)
    writer = RankWriter(root, group.rank, secrets.token_hex(8))
    plan = _planned(writer, root, state, facts, group=group, step=step, part=part, keep=keep)
    try:
        stuck = on_all_ranks(group, "making room for a checkpoint", plan.make_room)[group.rank]
        written = on_all_ranks(
            group, "writing a checkpoint", lambda: writer.write(plan.staging, plan.writing)
        )
        files = {name: list(entry) for row in written for name, entry in row.items()}
        on_all_ranks(group, "completing a checkpoint", lambda: plan.seal(files))
        on_all_ranks(group, "naming a checkpoint", plan.commit)
    except CheckpointError:
        clean_up(plan.remove)
        raise
    for text in [*stuck, *prune(group, plan, keep)]:
        warnings.warn(text, UserWarning, stacklevel=2)
    return plan.path


def _planned(
    writer: RankWriter,
    root: Path,
    state: Any,
    facts: Mapping[str, Any],
    *,
    group: Group,
    step: int,
    part: int,
    keep: int | None,
) -> Plan:
    """Plan of all ranks, from what each of them has; nothing is left in the directory."""
    try:
        surveys = on_all_ranks(
            group, "preparing a checkpoint", lambda: writer.survey(state, facts, part)
        )
        common = {"step": step, "keep": keep, "facts": writer.facts}
        require_agreement(group, common, what="saving a checkpoint")
        seen = on_all_ranks(
            group, "looking for the other ranks of a directory", lambda: writer.neighbours(surveys)
        )
    finally:
        clean_up(writer.close)
    return Plan(root, group.rank, step, places_of(seen), surveys, writer.facts)
