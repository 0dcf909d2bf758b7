"""State of all ranks in the checkpoints of frameworks that save only what rank 0 has."""

import shutil
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import _validate as check
from thinwire.checkpoint import on_all_ranks, read_rank_file, write_rank_file
from thinwire.checkpoint.manifest import found_at
from thinwire.comm import Group
from thinwire.core.origin import without_origin
from thinwire.errors import CheckpointCorrupt, StrategyError
from thinwire.strategy.distributed_strategy import DistributedStrategy
from thinwire.strategy.engine import Engine

__all__ = ["Accelerates", "EngineState", "PerRankState", "Stateful", "as_made_", "require_fields"]


class Stateful(Protocol):
    """Whatever has a state_dict of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """All that a later step depends on."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from what `state_dict` gave."""


class Accelerates(Protocol):
    """The part that `PerRankState.register` needs of Accelerate's `Accelerator`."""

    def register_for_checkpointing(self, *objects: Any) -> Any:
        """Save and load the states of objects."""

    def register_save_state_pre_hook(self, hook: Any, /) -> Any:
        """Call `hook(models, weights, output_dir)` before anything is saved."""

    def register_load_state_pre_hook(self, hook: Any, /) -> Any:
        """Call `hook(models, input_dir)` before anything is loaded."""


class PerRankState:
    """The states of all ranks for checkpoints that rank 0 writes alone: each rank writes a file of
    its own beside it.

    Accelerate and Lightning save the optimizer of rank 0 and load it everywhere. The residuals and
    the momentum of an optimizer that exchanges gradients, and everything under local updates,
    differ from rank to rank: that checkpoint alone would give the pending update of one rank to all
    others. With Accelerate `PerRankState(optimizer).register(accelerator)` is all; Lightning's
    callbacks do it by themselves; in a loop of your own set `folder` to that of the checkpoint.

    Args:
        stateful: An optimizer that exchanges gradients, what `local_sgd` returned, or any optimizer
            under local updates.
        process_group: The ranks whose states differ; None for all of them. One process alone works
            too.
        folder: Where the files lie: that of the checkpoint. May be set later, and anew for every
            checkpoint.
        name: Tells it from others in the same folder.

    **State**: names and checksums only, in the dictionary that rank 0 saves; a rank's state in the
    safetensors file `NAME.rank_00000.safetensors` of the folder. One that is there already stays as
    `.NAME.rank_00000.safetensors.before` until the next save: a framework that is killed before it
    has written its own file goes on from that.
    **Communication**: about 100 bytes a rank, in `state_dict` and `load_state_dict`, which all
    ranks must call.
    **Failure**: what one rank cannot write or read is a `CheckpointError` on all of them, with rank
    and cause.
    """

    def __init__(
        self,
        stateful: Stateful,
        process_group: dist.ProcessGroup | None = None,
        *,
        folder: str | Path | None = None,
        name: str = "per_rank",
    ) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(stateful, method, None)):
                raise TypeError(f"stateful must have {method}(), got {type(stateful).__name__}")
        self.folder = folder
        self.name = name
        self._stateful = stateful
        self._process_group = process_group
        self._group: Group | None = None
        self._in_use: Path | None = None
        """The file of this rank with what was loaded or saved last."""

    def register(self, accelerator: Accelerates) -> "PerRankState":
        """Let Accelerate save and load it, and return it: the files lie in the folder of
        `save_state` and `load_state`. Several may be registered with one accelerator.
        """
        number = _registered.get(accelerator, 0)
        _registered[accelerator] = number + 1
        self.name = f"{self.name}_{number}"

        _follow_folder(self, accelerator)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Write this rank's state into its file; to be called by all ranks.

        Returns:
            What belongs into the checkpoint: the same on all ranks, a few bytes for each.

        Raises:
            ValueError: There is no folder yet.
            CheckpointError: A rank's state could not be read or written; on all ranks.
        """
        folder, group = self._required_folder(), self._joined()
        state: Any
        try:
            state = self._stateful.state_dict()
        except Exception as error:  # the others are about to wait for this rank
            state = error

        def write() -> str:
            if isinstance(state, Exception):
                raise state
            file = self._file(folder, self.name, group.rank)
            # until the framework has written its own file, that belongs to the state before
            if file.exists() and self._in_use != _before(file):
                file.replace(_before(file))
            sha256 = write_rank_file(file, state)
            self._in_use = file
            return sha256

        sums = on_all_ranks(group, "writing the states of all ranks", write)
        return {"name": self.name, "sha256": sums}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's own state back; under another number of ranks, the mean of what was
        saved.

        The mean of the residuals is the update that was still pending, so nothing of it is lost,
        and the mean of the momentum is what its next part would have been. All ranks must call it.

        Raises:
            ValueError: It is no such state, or there is no folder yet.
            CheckpointError: A file is missing or damaged, or the ranks differ in more than
                floating-point tensors under another number of ranks; on all ranks. Nothing has
                changed.
        """
        sums, name = state_dict.get("sha256"), state_dict.get("name")
        if not isinstance(sums, Sequence) or not sums or not isinstance(name, str):
            raise ValueError(
                "state_dict must hold the name and the checksums of the ranks' files, got the keys "
                f"{sorted(state_dict)}: load what PerRankState.state_dict() gave"
            )
        folder, group, own = self._required_folder(), self._joined(), list[Any]()

        def read() -> None:
            ranks = [group.rank] if len(sums) == group.size else range(len(sums))
            states = []
            for rank in ranks:
                state, file = _read(self._file(folder, name, rank), sums[rank])
                states.append(state)
                if rank == group.rank:
                    self._in_use = file
            several = len(states) > 1
            where = f"{len(states)} ranks"
            own.append(_mean(without_origin(states), where) if several else states[0])

        on_all_ranks(group, "reading the states of all ranks", read)
        self._stateful.load_state_dict(own[0])

    def remove(self, folder: str | Path, name: str) -> None:
        """Delete this rank's files of a checkpoint that is deleted; no communication."""
        file = self._file(Path(folder), name, self._joined().rank)
        for each in (file, _before(file)):
            each.unlink(missing_ok=True)

    def _required_folder(self) -> Path:
        if self.folder is None:
            raise ValueError(
                "PerRankState does not know where each rank's file belongs: call "
                "PerRankState(...).register(accelerator) instead of "
                "accelerator.register_for_checkpointing, or set folder= to the folder of the "
                "checkpoint"
            )
        return Path(self.folder)

    @staticmethod
    def _file(folder: Path, name: str, rank: int) -> Path:
        return folder / f"{Path(name).name}.rank_{rank:05d}.safetensors"

    def _joined(self) -> Group:
        self._group = self._group or Group(self._process_group)
        return self._group


def _follow_folder(state: "PerRankState | EngineState", accelerator: Accelerates) -> None:
    """Let Accelerate save and load a state, which lies where that saves and loads."""

    def at_save(_: object, __: object, output_dir: str) -> None:
        state.folder = output_dir

    def at_load(_: object, input_dir: str) -> None:
        state.folder = input_dir

    accelerator.register_save_state_pre_hook(at_save)
    accelerator.register_load_state_pre_hook(at_load)
    accelerator.register_for_checkpointing(state)


_registered: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def _before(file: Path) -> Path:
    return file.with_name(f".{file.name}.before")


def _read(file: Path, sha256: str) -> tuple[Any, Path]:
    """The state with that checksum, and which of a rank's two files it is in."""
    try:
        return read_rank_file(file, sha256), file
    except CheckpointCorrupt:
        with suppress(CheckpointCorrupt):  # then what is wrong with `file` is said
            return read_rank_file(_before(file), sha256), _before(file)
        raise


def _mean(values: Sequence[Any], where: str) -> Any:
    """The common value, with floating-point tensors and numbers averaged; of the bytes that each
    has sent, which are for people, the first. `where` is for the error.
    """
    first = values[0]
    if all(isinstance(v, float) for v in values):
        same = all(v == first for v in values)
        return first if same else sum(values) / len(values)
    if all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values):
        return {
            key: first[key]
            if key == "bytes_sent"
            else _mean([v[key] for v in values], f"{where}, {key}")
            for key in first
        }
    if all(isinstance(v, list | tuple) and len(v) == len(first) for v in values):
        return type(first)(
            _mean(entries, f"{where}[{i}]") for i, entries in enumerate(zip(*values, strict=True))
        )
    if all(isinstance(v, Tensor) and v.shape == first.shape for v in values):
        if first.is_floating_point():
            return torch.stack([v.double() for v in values]).mean(0).to(first.dtype)
        if all(torch.equal(v, first) for v in values):
            return first
    elif not any(isinstance(v, Tensor) for v in values) and all(v == first for v in values):
        return first
    raise ValueError(
        f"the states of {where} differ in more than floating-point values, so there is no mean of "
        "them: resume on as many ranks as saved them"
    )


_taken: "weakref.WeakKeyDictionary[Accelerates, set[str]]" = weakref.WeakKeyDictionary()
"""The names that each accelerator has."""


class EngineState:
    """What all ranks hold of an engine, in a folder of the checkpoint that a framework writes, by
    `engine.save` and `engine.load`.

    Frameworks save what rank 0 has. With Accelerate `EngineState(engine).register(accelerator)` is
    all; Lightning's callback does it by itself.

    Args:
        engine: Of this rank.
        folder: Where the folder lies: that of the checkpoint. May be set later, and anew for every
            checkpoint.
        name: Of the folder inside it.

    **State**: the name of the folder and the step, in what rank 0 saves; all else in the folder,
    which keeps the checkpoint before the newest as well where it is saved into again: a framework
    that is killed before it has written its own file goes on from that.
    **Communication** and **Failure**: those of `engine.save` and `engine.load`, in `state_dict` and
    `load_state_dict`, which all ranks must call.
    """

    def __init__(
        self, engine: Engine, *, folder: str | Path | None = None, name: str = "thinwire"
    ) -> None:
        self.folder = folder
        self.name = name
        self._engine = engine

    def register(self, accelerator: Accelerates) -> "EngineState":
        """Let Accelerate save and load it, and return it: the folder lies in that of `save_state`
        and `load_state`. Several may be registered with one accelerator; a name that is taken
        becomes `NAME_1`, and so on.
        """
        taken, name = _taken.setdefault(accelerator, set()), self.name
        for number in range(1, len(taken) + 1):
            if self.name in taken:
                self.name = f"{name}_{number}"
        taken.add(self.name)

        _follow_folder(self, accelerator)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Write what all ranks hold; to be called by all of them.

        Returns:
            What belongs into the checkpoint, the same on all ranks.

        Raises:
            ValueError: There is no folder yet.
            ThinwireError: As `engine.save`.
        """
        # until the framework has written its own file, that may be one of the checkpoint before
        path = self._engine.save(self._place(self.name), keep=2)
        return {"name": self.name, "step": found_at(path).step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back, after the framework has restored what it has; to be called by all ranks.

        Raises:
            ValueError: It is no such state, or there is no folder yet.
            CheckpointError: As `engine.load`; `CheckpointMismatch` where the folder has only
                checkpoints of other steps than the framework's.
        """
        name, step = state_dict.get("name"), state_dict.get("step")
        if not isinstance(name, str) or not isinstance(step, int):
            raise ValueError(
                "state_dict must hold the name of the engine's folder and a step, got the keys "
                f"{sorted(state_dict)}: load what EngineState.state_dict() gave"
            )
        self._engine.load(self._place(name), step=step)

    def remove(self, folder: str | Path, name: str) -> None:
        """Delete the folder of a checkpoint that is deleted; any rank may, no communication."""
        shutil.rmtree(Path(folder) / Path(name).name, ignore_errors=True)

    def _place(self, name: str) -> Path:
        if self.folder is None:
            raise ValueError(
                "EngineState does not know where the checkpoint is: call "
                "EngineState(...).register(accelerator) instead of "
                "accelerator.register_for_checkpointing, or set folder= to that of the checkpoint"
            )
        return Path(self.folder) / Path(name).name


def require_fields(strategy: object, instead: Mapping[str, str]) -> None:
    """Raise `StrategyError` where a Trainer has an argument of its own for a field of `strategy`:
    `instead` says what to use, by field.
    """
    check.instance("strategy", strategy, DistributedStrategy)
    assert isinstance(strategy, DistributedStrategy)
    refused = [f"{name}: use {text}" for name, text in instead.items() if name in strategy.on]
    if refused:
        raise StrategyError(
            "the Trainer has arguments of its own for fields of this strategy. "
            + "; ".join(refused)
        )


def as_made_(optimizer: torch.optim.Optimizer) -> None:
    """Changes `optimizer`, which has loaded the state of what it became before the checkpoint: the
    engine's has all of it.
    """
    optimizer.state.clear()
    kept = {*optimizer.defaults, "params", "param_names", "initial_lr"}
    for group in optimizer.param_groups:
        for key in group.keys() - kept:
            del group[key]
        for key in optimizer.defaults.keys() - group.keys():
            group[key] = optimizer.defaults[key]
