"""An engine's part of the checkpoints that a framework writes."""

import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thinwire import _validate as check
from thinwire.checkpoint.folder import found_at
from thinwire.errors import StrategyError
from thinwire.integrations.per_rank import Accelerates
from thinwire.strategy.distributed_strategy import DistributedStrategy
from thinwire.strategy.engine import Engine

__all__ = ["EngineState", "as_made_", "require_fields"]


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
        """Let Accelerate save and load it: the folder lies in that of `save_state` and
        `load_state`. Several may be registered with one accelerator; a name that is taken
        becomes `NAME_1`, and so on.

        Returns:
            This object.
        """
        taken, name = _taken.setdefault(accelerator, set()), self.name
        for number in range(1, len(taken) + 1):
            if self.name in taken:
                self.name = f"{name}_{number}"
        taken.add(self.name)

        def at_save(_: object, __: object, output_dir: str) -> None:
            self.folder = output_dir

        def at_load(_: object, input_dir: str) -> None:
            self.folder = input_dir

        accelerator.register_save_state_pre_hook(at_save)
        accelerator.register_load_state_pre_hook(at_load)
        accelerator.register_for_checkpointing(self)
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
    """Raise `StrategyError` where a Trainer has an argument of its own for a field of `strategy`.

    Args:
        strategy: What the user gave.
        instead: By field, what to use in its place.
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
