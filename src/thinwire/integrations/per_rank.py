"""Saves the state of all ranks in checkpoints of frameworks that save only rank 0's."""

import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.distributed as dist

from thinwire import _validate as check
from thinwire.checkpoint import combine, on_all_ranks, read_rank_file, write_rank_file
from thinwire.checkpoint.manifest import found_at
from thinwire.comm import Group
from thinwire.errors import CheckpointCorrupt, StrategyError
from thinwire.exchange.provenance import without_provenance
from thinwire.members.members import Member, Members
from thinwire.strategy.distributed_strategy import DistributedStrategy
from thinwire.strategy.engine import Engine

LONGEST = timedelta(days=1)
"""Time for which the other members wait while one evaluates and saves."""


@runtime_checkable
class Stateful(Protocol):
    """Protocol of objects with a state_dict of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a later step depends on."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Resume from `state_dict`."""


class _BesideCheckpoint:
    """State in the folder of a framework's checkpoint, under a name."""

    def __init__(self, folder: str | Path | None, name: str) -> None:
        self.folder = folder
        self.name = name

    def register(self, accelerator: Any) -> Self:
        """Register the state with Accelerate, and return this object. Several may be registered:
        where the name is in use, it becomes `NAME_1`, and so on.
        """
        taken = _taken.setdefault(accelerator, set())
        numbered = (f"{self.name}_{number}" for number in range(1, len(taken) + 1))
        self.name = next(choice for choice in (self.name, *numbered) if choice not in taken)
        taken.add(self.name)

        def follow(*given: Any) -> None:  # the last argument is where it saves or loads
            self.folder = given[-1]

        accelerator.register_save_state_pre_hook(follow)
        accelerator.register_load_state_pre_hook(follow)
        accelerator.register_for_checkpointing(self)
        return self

    def _parent(self) -> Path:
        if self.folder is None:
            kind = type(self).__name__
            raise ValueError(
                f"{kind} does not know where the checkpoint is: call "
                f"{kind}(...).register(accelerator) instead of "
                "accelerator.register_for_checkpointing, or set folder= to the folder of the "
                "checkpoint"
            )
        return Path(self.folder)

    def _entries(self, state_dict: Mapping[str, Any], **kinds: Any) -> list[Any]:
        """Return entries of a state that this class saved, of these kinds."""
        found = [state_dict.get(name) for name in kinds]
        if not all(map(isinstance, found, kinds.values())):
            raise ValueError(
                f"state_dict must hold {' and '.join(kinds)}, got the keys {sorted(state_dict)}: "
                f"pass the result of {type(self).__name__}.state_dict()"
            )
        return found


_taken: "weakref.WeakKeyDictionary[Any, set[str]]" = weakref.WeakKeyDictionary()
"""Names in use, by accelerator."""


class PerRankState(_BesideCheckpoint):
    """Saves a file of each rank beside a checkpoint that only rank 0 writes.

    Accelerate and Lightning save the optimizer of rank 0 and load it everywhere. But residuals and
    momentum of an optimizer that exchanges gradients, and all state under local updates, differ
    between ranks. Their checkpoint alone would give the pending update of one rank to all others.
    In your own loop, set `folder` to that of the checkpoint.

    Example::

        PerRankState(optimizer).register(accelerator)
        accelerator.save_state("checkpoint")

    Args:
        stateful: An optimizer that exchanges gradients, the result of `local_sgd`, or any optimizer
            under local updates.
        process_group: The ranks whose states differ; None for all. A single process works too.
        folder: Folder of the files: that of the checkpoint. May be set later, for every checkpoint.
        name: Distinguishes it from others in the same folder.

    **State**: names and checksums only, in the dictionary that rank 0 saves; a rank's state in the
    safetensors file `NAME.rank_00000.safetensors` of the folder. An existing file stays as
    `.before_NAME.rank_00000.safetensors` until the next save. A framework that is killed before it
    has written its own file resumes from that one.
    **Communication**: about 100 bytes a rank, in the two methods, which all ranks must call.
    **Failure**: if one rank cannot write or read, all ranks raise `CheckpointError` that names it.
    """

    def __init__(
        self,
        stateful: Stateful,
        process_group: dist.ProcessGroup | None = None,
        *,
        folder: str | Path | None = None,
        name: str = "per_rank",
    ) -> None:
        check.instance(
            "stateful", stateful, Stateful, advice="with state_dict() and load_state_dict()"
        )
        super().__init__(folder, name)
        self._stateful = stateful
        self._process_group = process_group
        self._in_use: Path | None = None
        """File of this rank that was last loaded or saved."""

    def state_dict(self) -> dict[str, Any]:
        """Write this rank's state into its file. All ranks must call this.

        Returns:
            The entry for the checkpoint: the same on all ranks, a few bytes for each.

        Raises:
            ValueError: There is no folder yet.
            CheckpointError: A rank's state could not be read or written; on all ranks.
        """
        folder = self._parent()
        group = self._group

        def write() -> str:
            state = self._stateful.state_dict()
            file = self._file(folder, self.name, group.rank)
            # until the framework has written its own file, that one belongs to the previous state
            if file.exists() and self._in_use != _before(file):
                file.replace(_before(file))
            sha256 = write_rank_file(file, state)
            self._in_use = file
            return sha256

        sums = on_all_ranks(group, "writing the states of all ranks", write)
        return {"name": self.name, "sha256": sums}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's own state. With another number of ranks, load the mean of the saved
        states.

        The mean of the residuals is the update that was still pending. All ranks must call this.

        Raises:
            ValueError: The argument is no such state, or there is no folder yet.
            CheckpointError: A file is missing or damaged, or the number of ranks has changed and
                saved states differ in more than floating-point tensors. Raised on all ranks;
                nothing has changed.
        """
        sums, name = self._entries(state_dict, sha256=Sequence, name=str)
        folder = self._parent()
        group = self._group
        own = list[Any]()

        def read() -> None:
            ranks = [group.rank] if len(sums) == group.size else range(len(sums))
            states = []
            for rank in ranks:
                state, file = _read(self._file(folder, name, rank), sums[rank])
                states.append(state)
                if rank == group.rank:
                    self._in_use = file
            if len(states) > 1:  # bytes sent are those of the first rank
                bare = without_provenance(states)
                states = [combine(bare, {"traffic": "first", "*/traffic": "first", "*": "strict"})]
            own.append(states[0])

        on_all_ranks(group, "reading the states of all ranks", read)
        self._stateful.load_state_dict(own[0])

    def remove(self, folder: str | Path, name: str) -> None:
        """Delete this rank's files of a checkpoint that is deleted. No communication."""
        file = self._file(Path(folder), name, self._group.rank)
        for path in (file, _before(file)):
            path.unlink(missing_ok=True)

    @staticmethod
    def _file(folder: Path, name: str, rank: int) -> Path:
        return folder / f"{Path(name).name}.rank_{rank:05d}.safetensors"

    @cached_property
    def _group(self) -> Group:
        return Group(self._process_group)


def _before(file: Path) -> Path:
    return file.with_name(f".before_{file.name}")


def _read(file: Path, sha256: str) -> tuple[Any, Path]:
    """Return the state with that checksum, and which of a rank's two files it is in."""
    try:
        return read_rank_file(file, sha256), file
    except CheckpointCorrupt:
        with suppress(CheckpointCorrupt):  # then the error is about `file`
            return read_rank_file(_before(file), sha256), _before(file)
        raise


class EngineState(_BesideCheckpoint):
    """Saves an engine with all its ranks in the folder of a framework's checkpoint.

    It calls `engine.save` and `engine.load`.
    Frameworks save only the state of rank 0. Lightning's callback uses this class by itself.

    Example::

        EngineState(engine).register(accelerator)
        accelerator.save_state("checkpoint")

    Args:
        engine: Engine of this rank.
        folder: Parent of the folder: that of the checkpoint. May be set later, and again for every
            checkpoint.
        name: Name of the folder inside it.

    **State**: rank 0 saves the name of the folder and the step; all else is in the folder. When
    saved into again, the folder keeps the previous checkpoint too. A framework that is killed
    before it has written its own file resumes from that one.
    **Communication** and **Failure**: those of `engine.save` and `engine.load`, in `state_dict` and
    `load_state_dict`, which all ranks must call.
    """

    def __init__(
        self, engine: Engine, *, folder: str | Path | None = None, name: str = "thinwire"
    ) -> None:
        super().__init__(folder, name)
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Write the state of all ranks. All ranks must call this.

        Returns:
            The entry for the checkpoint, the same on all ranks.

        Raises:
            ValueError: There is no folder yet.
            ThinwireError: As `engine.save`.
        """
        # until the framework has written its own file, that one may be of the previous checkpoint
        path = self._engine.save(self._parent() / Path(self.name).name, keep=2)
        return {"name": self.name, "step": found_at(path).step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state, after the framework has restored its own. All ranks must call this.

        Raises:
            ValueError: The argument is no such state, or there is no folder yet.
            CheckpointError: As `engine.load`; `CheckpointMismatch` where the folder has only
                checkpoints of other steps than the framework's.
        """
        name, step = self._entries(state_dict, name=str, step=int)
        self._engine.load(self._parent() / Path(name).name, step=step)

    def remove(self, folder: str | Path, name: str) -> None:
        """Delete the folder of a checkpoint that is deleted. No communication."""
        shutil.rmtree(Path(folder) / Path(name).name, ignore_errors=True)


def require_fields(strategy: DistributedStrategy, instead: Mapping[str, str]) -> None:
    """Raise `StrategyError` for a field with an argument of the Trainer, which `instead` names."""
    check.instance("strategy", strategy, DistributedStrategy)
    refuse_settings({f"{name}: use {text}": name in strategy.on for name, text in instead.items()})


def refuse_settings(problems: Mapping[str, Any]) -> None:
    """Raise `StrategyError` with the texts of the settings that were found."""
    if found := [text for text, wrong in problems.items() if wrong]:
        raise StrategyError(
            "this strategy does not go with settings of the Trainer: " + "; ".join(found)
        )


def require_member_settings(
    member: Member,
    strategy: DistributedStrategy,
    max_steps: int,
    processes: int,
    problems: Mapping[str, Any],
) -> None:
    """Refuse settings that do not go with members, or differ between them."""
    local = strategy.local
    refuse_settings(
        {
            "members and torchrun: start every member by itself": processes > 1,
            "epochs, which members share: set max_steps alone, the steps of the run": max_steps < 1,
            "keep_batch=True, but the Trainer accumulates: train in your own loop": (
                member.terms.keep_batch
            ),
            "round_seconds, where members make unequal steps: train in your own loop": (
                local and local.by_time
            ),
            **problems,
        }
    )
    member.require_same_setup("trainer", {"max_steps": max_steps})


def follow_run(members: Members, max_steps: int, schedulers: Iterable[Any]) -> bool:
    """Step schedulers to the step of the run, of which this process made only some steps; return
    True if the run ends for it.
    """
    for scheduler in schedulers:
        scheduler.optimizer._opt_called = True  # else it warns before the first of them
        while scheduler.last_epoch < members.step:
            scheduler.step()
    return members.left or members.step >= max_steps


def change_(undo: ExitStack, target: Any, **values: Any) -> None:
    """Set attributes of an object until `undo` is closed."""
    for name, value in values.items():
        if name in vars(target):
            undo.callback(setattr, target, name, vars(target)[name])
        else:
            undo.callback(delattr, target, name)
        setattr(target, name, value)


def reset_optimizer_(optimizer: torch.optim.Optimizer) -> None:
    """Reset `optimizer`, after it loaded the state of the class that an engine converted it to."""
    optimizer.state.clear()
    kept = {*optimizer.defaults, "params", "param_names", "initial_lr"}
    for group in optimizer.param_groups:
        for key in group.keys() - kept:
            del group[key]
        for key in optimizer.defaults.keys() - group.keys():
            group[key] = optimizer.defaults[key]
