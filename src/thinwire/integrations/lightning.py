"""Callbacks and a strategy for Lightning's Trainer. Imports the optional package `lightning`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy

from thinwire import _validate as check
from thinwire.comm import busy
from thinwire.core.gradients import ClipByGlobalNorm, ClipByValue
from thinwire.errors import CheckpointMissing
from thinwire.integrations.per_rank import (
    LONGEST,
    EngineState,
    PerRankState,
    change_,
    follow_run,
    require_fields,
    require_member_settings,
    reset_optimizer_,
)
from thinwire.local.config import LocalConfig
from thinwire.local.updates import LocalUpdates, local_sgd
from thinwire.members.members import Members, member_of
from thinwire.optim import DGCMomentum
from thinwire.strategy.distributed_strategy import DistributedStrategy
from thinwire.strategy.engine import Engine

__all__ = ["CompressedExchange", "LocalAveraging", "ThinwireCallback", "UnwrappedDDP"]

_INSTEAD = {
    "amp": 'precision="bf16-mixed" of the Trainer',
    "gradient_merge": "accumulate_grad_batches of the Trainer: it sends once per update",
    "pipeline": (
        "engine.train_step in your own loop: the Trainer runs the whole model on every rank"
    ),
}


class _PerRankCallback(Callback):
    """Saves the state of every rank beside Lightning's checkpoint, which has that of rank 0
    only.
    """

    # Lightning reads the state of callbacks before the path is known: the path is taken from the
    # trainer's strategy, whose `save_checkpoint` and `remove_checkpoint` run on all ranks

    sync: LocalUpdates | None = None

    def __init__(self, members: Members | None = None) -> None:
        self._members = members
        self._states: list[PerRankState | EngineState] = []
        self._saved: list[dict[str, Any]] | None = None
        self._fit = ExitStack()
        """Undoes the changes of a fit."""
        self._validating = ExitStack()
        self._saving = ExitStack()
        """Undoes those that stay after a fit, for a checkpoint of its end."""
        self._flush: Callable[[], None] = lambda: None
        """Averages, during a fit under local updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return the dictionary that `save_checkpoint` fills. Lightning calls this on all ranks."""
        return {"states": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for later: optimizers, restored after callbacks, would overwrite it."""
        self._saved = state_dict["states"]

    def _resumes(self, trainer: Trainer) -> bool:
        """Look at the checkpoint that the fit resumes; True if it has the state of the ranks."""
        if trainer.ckpt_path is None:  # `validate` and `test` load the state of callbacks too
            self._saved = None
        if self._saved == []:
            raise CheckpointMissing(
                f"{trainer.ckpt_path} has no state of the ranks for {type(self).__name__}: it was "
                "saved after an exception, when the ranks were out of step. Resume from a "
                "checkpoint saved during the fit or after it. To start a new run from its "
                "parameters, load them into the module and omit ckpt_path"
            )
        return self._saved is not None

    def _attach_states(
        self,
        trainer: Trainer,
        *states: PerRankState | EngineState,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        resumes = self._resumes(trainer)
        self._states = list(states)
        if not (self._members and self._members.step):  # else the members have sent the state
            for state, saved in zip(self._states, self._saved or [], strict=resumes):
                state.folder = Path(trainer.ckpt_path).parent
                state.load_state_dict(saved)
        self._saved = None
        change_(self._fit, self, _flush=flush)
        self._saving.close()
        # after callbacks that put other weights into the model, but before those that save it
        callbacks = sorted(
            trainer.callbacks, key=lambda part: (isinstance(part, Checkpoint), part is self)
        )
        change_(self._fit, trainer, callbacks=callbacks)
        strategy, save_all = trainer.strategy, trainer.save_checkpoint
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def save_equal(*args: Any, **kwargs: Any) -> None:
            self._average()
            if self._writes:
                with self._alone():
                    save_all(*args, **kwargs)

        def save_checkpoint(
            checkpoint: dict[str, Any], filepath: str | Path, *args: Any, **kwargs: Any
        ) -> None:
            if self.state_key in checkpoint.get("callbacks", {}):
                checkpoint["callbacks"][self.state_key] = {"states": self._written(filepath)}
            save(checkpoint, filepath, *args, **kwargs)

        def remove_checkpoint(filepath: str | Path) -> None:
            if not self._writes:
                return
            remove(filepath)
            for i, state in enumerate(self._states):
                state.remove(Path(filepath).parent, _name(filepath, i))

        change_(
            self._saving,
            strategy,
            save_checkpoint=save_checkpoint,
            remove_checkpoint=remove_checkpoint,
        )
        change_(self._saving, trainer, save_checkpoint=save_equal)

    def _alone(self) -> AbstractContextManager[None]:
        """Announce that other members wait for this one."""
        return nullcontext() if self._members is None else busy(LONGEST)

    def _average(self) -> None:
        if self._members is None:  # they validate and save right after an averaging
            self._flush()

    @property
    def _writes(self) -> bool:
        return self._members is None or self._members.rank == 0

    def _written(self, filepath: str | Path) -> list[dict[str, Any]]:
        if "://" in str(filepath):
            raise ValueError(
                f"the checkpoint goes to {filepath}, but ranks can write their files to a local "
                "path only: save to a folder of the file system, and copy it from there"
            )
        for i, state in enumerate(self._states):
            state.folder = Path(filepath).parent
            state.name = _name(filepath, i)
        return [state.state_dict() for state in self._states]

    def on_exception(self, *_: Any) -> None:
        """Undo all changes to trainer, strategy, model and optimizer, without an averaging."""
        self._validating.close()
        self._fit.close()
        self._saving.close()

    def on_train_end(self, *_: Any) -> None:
        """Average once more and end. Saving stays in place, for a checkpoint after the fit."""
        self._flush()
        self._fit.close()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Observe the loss of a batch, which Lightning has divided by the accumulated batches."""
        if self.sync is not None:
            self.sync.observe(loss.detach() * trainer.accumulate_grad_batches)

    def on_validation_start(self, *_: Any) -> None:
        """Average first, so that all ranks validate the same model; a member announces it."""
        self._average()
        self._validating.enter_context(self._alone())

    def on_validation_end(self, *_: Any) -> None:
        """Announce the end of the validation."""
        self._validating.close()

    def on_train_epoch_end(self, *_: Any) -> None:
        """Average, so that another callback's average over epochs is equal on all ranks."""
        self._average()


def _name(filepath: str | Path, i: int) -> str:
    return f"{Path(filepath).name}.{i}"


class CompressedExchange(_PerRankCallback):
    """Attaches the optimizer of `configure_optimizers` to the model that `DDPStrategy` wrapped. The
    optimizer must have `attach`.

    The exchange then runs in the backward pass. Without this callback DDP would average densely
    first. Batches that `accumulate_grad_batches` only accumulates send nothing. Clip with
    `local_grad_clip_norm` of the optimizer; `gradient_clip_val` is an error, since it would change
    gradients that were already sent. Residuals and momentum of all ranks are in files beside
    Lightning's checkpoints.

    Example::

        trainer = Trainer(strategy="ddp", callbacks=[CompressedExchange()])
        trainer.fit(module)  # configure_optimizers returns a DGCMomentum

    Raises:
        TypeError: At the start of the fit: the one optimizer does not exchange gradients itself, or
            the model is not wrapped in DDP.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach. Lightning calls this after it has restored a checkpoint."""
        optimizer = _only_optimizer(trainer)
        check.instance("the optimizer of configure_optimizers", optimizer, DGCMomentum)
        self._attach_states(trainer, PerRankState(optimizer))
        if trainer.world_size > 1:
            self._fit.callback(optimizer.attach(trainer.strategy.model).remove)


class UnwrappedDDP(DDPStrategy):
    """`DDPStrategy` without the DDP wrapper: no gradient is averaged.

    Example::

        trainer = Trainer(strategy=UnwrappedDDP(), callbacks=[LocalAveraging(LocalSGD(k_steps=16))])
    """

    def configure_ddp(self) -> None:
        """Leave the model as it is."""


class LocalAveraging(_PerRankCallback):
    """Averages the parameters of local updates at their interval. Needs `strategy=UnwrappedDDP()`.

    Works with any optimizer of the module. From the start of the fit, `sync` is the result of
    `local_sgd`. An adaptive interval follows the loss that `training_step` returns. The state of
    all ranks is in files beside Lightning's checkpoints. It averages as `ThinwireCallback` does.

    Example::

        averaging = LocalAveraging(LocalSGD(k_steps=16))
        Trainer(strategy=UnwrappedDDP(), callbacks=[averaging]).fit(module)

    Args:
        config: `LocalSGD` or `AdaptiveLocalSGD`.
        process_group: The ranks that average; None for all of them.

    Raises:
        TypeError: At the start of the fit: the optimizer exchanges gradients itself.
        ValueError: The model is wrapped in DDP, the precision needs a gradient scaler, or there is
            not one optimizer.
    """

    def __init__(self, config: LocalConfig, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._config = config
        self._process_group = process_group

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the block of local updates, after Lightning has restored a checkpoint."""
        _require_unwrapped(trainer, pl_module)
        optimizer = _only_optimizer(trainer)
        self.sync = sync = local_sgd(
            pl_module, optimizer, self._config, process_group=self._process_group
        ).__enter__()
        self._fit.callback(sync.close)
        self._attach_states(trainer, PerRankState(sync), PerRankState(optimizer), flush=sync.flush)


class ThinwireCallback(_PerRankCallback):
    """Trains under a strategy in Lightning's Trainer.

    The Trainer runs the backward passes, `accumulate_grad_batches` per update. Then the engine of
    the strategy runs the update: exchange, clipping, optimizer. `gradient_clip_val` limits the
    gradient that the optimizer gets: the mean over the ranks, or under local updates this rank's
    own gradient. The state of all ranks is in a folder beside Lightning's checkpoints. Under local
    updates all ranks also average after every epoch, before validations and checkpoints, and at the
    end, where weights that another callback puts into the model are averaged too.

    Example::

        callback = ThinwireCallback(DistributedStrategy(dgc=DGC()))
        Trainer(strategy=UnwrappedDDP(), callbacks=[callback]).fit(module)

    Args:
        strategy: A `DistributedStrategy` with any fields but `amp`, `gradient_merge` and
            `pipeline`, or without one.
        members: Result of `thinwire.join`, for local updates without torchrun, with `max_steps` of
            the run and without `max_epochs`. The first member validates and saves, while the others
            wait; it validates after the averaging at or after the step that asks for it.

    Raises:
        StrategyError: At construction: the Trainer has its own argument for a field; the text names
            it. At the start of the fit: an optimizer that does not go with the strategy, or
            settings of the Trainer that do not go with members.
        Mismatch: At the start of the fit: `max_steps` differs between members.
        ValueError: At the start of the fit: as `LocalAveraging`.
    """

    engine: Engine
    """The engine, from the start of the fit on. `engine.stats()` works after the fit too."""

    def __init__(self, strategy: DistributedStrategy, *, members: Members | None = None) -> None:
        super().__init__(members)
        require_fields(strategy, _INSTEAD)
        self._strategy_of_engine = strategy

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the engine. Lightning calls this after it has restored a checkpoint."""
        _require_unwrapped(trainer, pl_module)
        optimizer = _only_optimizer(trainer)
        if self._resumes(trainer):
            reset_optimizer_(optimizer)
        if (member := member_of(self._members)) is not None:
            problems = {
                "early stopping, and schedules by epochs, a metric or every few steps: one member "
                "validates, and members share epochs. Choose among the checkpoints afterwards": (
                    trainer.early_stopping_callbacks
                    or any(
                        config.reduce_on_plateau
                        or config.interval != "step"
                        or config.frequency > 1
                        for config in trainer.lr_scheduler_configs
                    )
                ),
                "max_epochs, since members share an epoch: set -1": trainer.max_epochs != -1,
                "val_check_interval without a number of batches: set it": (
                    trainer.val_check_batch in (None, float("inf"))
                ),
            }
            require_member_settings(
                member, self._strategy_of_engine, trainer.max_steps, trainer.world_size, problems
            )
        clip = None
        if limit := trainer.gradient_clip_val:
            by_value = trainer.gradient_clip_algorithm == "value"
            clip = ClipByValue(limit) if by_value else ClipByGlobalNorm(limit)
        self.engine = engine = self._strategy_of_engine.prepare(
            pl_module, optimizer, grad_clip=clip, members=self._members
        )
        self._fit.callback(engine.close)
        change_(self._fit, trainer, gradient_clip_val=None)  # the engine clips, after the exchange
        self.sync = engine.sync
        engine.follow_steps(lambda: None)
        self._attach_states(trainer, EngineState(engine), flush=engine.flush)
        if self._members is not None:
            self._batches, self._validated = trainer.limit_val_batches, self._members.step
            self._every = max(int(trainer.val_check_batch) // trainer.accumulate_grad_batches, 1)
            change_(self._fit, trainer, limit_val_batches=0, val_check_batch=1)
            self.on_train_batch_end(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Continue at the step of the run; let its first member alone validate."""
        if (members := self._members) is None:
            return
        sync: Any = self.sync
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        loop.optim_progress.optimizer.step.total.completed = step = members.step
        schedulers = (config.scheduler for config in trainer.lr_scheduler_configs)
        if ends := follow_run(members, trainer.max_steps, schedulers):
            self.engine.flush()
            trainer.should_stop = True
        now = ends or (sync.synced and step // self._every > self._validated // self._every)
        self._validated = step if now else self._validated
        trainer.limit_val_batches = self._batches if now and members.rank == 0 else 0


def _require_unwrapped(trainer: Trainer, pl_module: LightningModule) -> None:
    if trainer.strategy.model is not pl_module:
        raise ValueError(
            f"the model is wrapped in {type(trainer.strategy.model).__name__}, whose ranks "
            "exchange in every step: pass Trainer(strategy=UnwrappedDDP())"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"precision {trainer.precision!r} skips steps on single ranks, which would then "
            'diverge: pass Trainer(precision="bf16-mixed")'
        )


def _only_optimizer(trainer: Trainer) -> Any:
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"configure_optimizers must return one optimizer, got {len(trainer.optimizers)}"
        )
    return trainer.optimizers[0]
