"""A callback that trains under a strategy in the Trainer of the package `transformers`."""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain, repeat, takewhile
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
)

from thinwire._names import named_parameters
from thinwire.checkpoint import on_all_ranks
from thinwire.comm import Group, busy
from thinwire.core.checksum import checksum
from thinwire.core.gradients import ClipByGlobalNorm
from thinwire.core.tensors import living
from thinwire.errors import CheckpointMismatch, CheckpointMissing, StrategyError
from thinwire.integrations.per_rank import (
    LONGEST,
    change_,
    follow_run,
    refuse_settings,
    require_fields,
    require_member_settings,
    reset_optimizer_,
)
from thinwire.local.model import bare_optimizer
from thinwire.logs import PREFIX, log_stats
from thinwire.members.members import Member, Members, member_of
from thinwire.sampler import ShardedSampler
from thinwire.strategy.distributed_strategy import DistributedStrategy
from thinwire.strategy.engine import Engine

__all__ = ["ThinwireCallback"]

_SHARDED = ("DEEPSPEED", "MEGATRON_LM", "XLA")
"""Distributed types of Accelerate, by name, that exchange gradients in their own way."""
_INSTEAD = {
    "amp": "bf16=True of TrainingArguments",
    "recompute": (
        "activation_checkpointing=True of TrainingArguments (gradient_checkpointing in older "
        "versions of transformers)"
    ),
    "gradient_merge": "gradient_accumulation_steps of TrainingArguments: it sends once per update",
    "pipeline": (
        "fsdp of TrainingArguments without this callback, or engine.train_step in your own loop: "
        "the Trainer runs the whole model on every rank"
    ),
}


_SOME = "dropped_steps averagings bytes_sent ratio rate_bit_s waiting_share"
_PRINTED = {PREFIX + name for name in _SOME.split()}


class ThinwireCallback(TrainerCallback):
    """Trains under a strategy inside `transformers.Trainer`, started by torchrun.

    The Trainer runs the backward passes, `gradient_accumulation_steps` per update. Then the engine
    of the strategy runs the update: exchange, clipping, optimizer. The DDP wrapper of the Trainer
    averages nothing meanwhile. Rates, schedulers, bf16, evaluation, logs and checkpoints are the
    Trainer's. Each log of the training loss, and so every `report_to`, has the numbers of
    `log_stats` too; six are printed. `max_grad_norm` limits the norm of what the optimizer gets:
    the mean over the ranks, or under local updates this rank's own gradient. The `grad_norm` in the
    logs is that of this rank's own gradient before the exchange. If ranks use different parameters
    in a step, set `ddp_find_unused_parameters=True`.

    Every checkpoint of the Trainer gets a folder `thinwire` with the state of all ranks; it must be
    in `output_dir`. Training resumes from it bit for bit, or from the mean on another number of
    ranks. Under local updates all ranks average before each evaluation and checkpoint, and after
    the last step; the next averaging is `k_steps` later. Weights that another callback puts into
    the model at the end are averaged too.

    With `members` there is no torchrun. `max_steps` and `global_step` are those of the run, and
    `epoch` counts the passes of all members over the data, of which `ShardedSampler` gives this
    one a part. The first member is process 0: it evaluates and saves, after the averaging at or
    after the step that asks for it, while the others wait. If it is lost the next one does. With
    `load_best_model_at_end` it ends with the best model, and the others with the last one.
    `trainer.args` is then a copy of your arguments, whose process index is the member's rank.

    Example::

        callback = ThinwireCallback(DistributedStrategy(dgc=DGC()))
        Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

    Args:
        strategy: A `DistributedStrategy` with any fields but `amp`, `recompute`,
            `gradient_merge` and `pipeline`, or without one.
        members: Result of `thinwire.join`, for local updates by members that come and go.
        publish: Folder or address where `Engine.publish` publishes the model, or a dict of its
            arguments; None for none.

    Raises:
        StrategyError: At construction: the Trainer has its own argument for a field; the text names
            it. When training begins: arguments of the Trainer, or an optimizer, that do not go with
            the strategy.
        Mismatch: When training begins: `max_steps` differs between members.
        CheckpointError: When training begins: the checkpoint to resume from has no state of this
            strategy.
    """

    engine: Engine
    """The engine, from the start of a training on. `engine.stats()` works after it too."""

    def __init__(
        self,
        strategy: DistributedStrategy,
        *,
        members: Members | None = None,
        publish: str | Mapping[str, Any] | None = None,
    ) -> None:
        require_fields(strategy, _INSTEAD)
        self._strategy = strategy
        self._members = members
        self._publish = {"where": publish} if isinstance(publish, str) else publish
        self._sampler: ShardedSampler | None = None
        self._due = set[str]()
        """Evaluation and saving that wait for the next averaging of members."""
        self._alone = ExitStack()
        """Announces that the others wait for this member."""
        self._ended = False
        self._undo = ExitStack()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Follow the trainings of this Trainer, whose failures it reports to no callback."""
        trainer = _trainer_in(state)
        trainer.train = partial(self._train, trainer, trainer.train)
        if self._members is not None:  # for what the Trainer and other callbacks write
            trainer.args = copy.copy(args)
            trainer.args.distributed_state = _MemberState(args.distributed_state, self._members)

    def _train(self, trainer: Trainer, train: Any, *args: Any, **kwargs: Any) -> Any:
        """Train, and undo all changes; keep DDP from sending frozen parameters when it is made."""
        model: Any = trainer.model
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        with self._undo:
            change_(self._undo, model, _ddp_params_and_buffers_to_ignore=frozen)
            return train(*args, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare the engine without DDP's averaging, and resume from the loaded checkpoint."""
        self._undo.close()  # DDP has been made
        members, model, wrapper = self._members, kwargs["model"], kwargs["optimizer"]
        _require_arguments(args, state, wrapper)
        trainer = _trainer_in(state)
        if (member := member_of(members)) is not None:
            _require_member_arguments(trainer, member, self._strategy)
            self._share_samples(args, state, kwargs["train_dataloader"])
        optimizer: Any = bare_optimizer(wrapper)
        resumed = state.global_step > 0
        if resumed:
            reset_optimizer_(optimizer)
        loaded = _checksum(model)
        clip = ClipByGlobalNorm(args.max_grad_norm) if args.max_grad_norm > 0 else None
        try:
            self.engine = self._strategy.prepare(
                *(model, optimizer),
                grad_clip=clip,
                find_unused_parameters=bool(args.ddp_find_unused_parameters),
                members=members,
            )
        except StrategyError as error:
            if clip is None:
                raise
            raise StrategyError(
                f"{error}. Inside the Trainer grad_clip is max_grad_norm={args.max_grad_norm} of "
                "TrainingArguments: 0 turns it off"
            ) from error.__cause__
        undo = self._undo
        undo.callback(self.engine.close)
        undo.callback(self._alone.close)
        if self._publish is not None:
            self.engine.publish(**self._publish)
        for ddp in living(DistributedDataParallel):
            if ddp.module is model:
                undo.enter_context(ddp.no_sync())
        change_(undo, self, _trainer=trainer)
        if self.engine.sync is not None:
            change_(undo, trainer, training_step=partial(self._observe, trainer.training_step))
        self.engine.follow_steps()
        self._log_numbers_in(trainer)
        # after those that ask for evaluations, or put other weights into the model
        handler = trainer.callback_handler
        callbacks = sorted(handler.callbacks, key=lambda callback: callback is self)
        change_(undo, handler, callbacks=callbacks)
        # the engine clips, after the exchange
        clip_ = trainer.accelerator.clip_grad_norm_
        change_(
            undo,
            trainer.accelerator,
            clip_grad_norm_=lambda parameters, *_: clip_(parameters, math.inf),
        )
        self._ended = False
        if resumed and not (members and members.step):  # else they have sent the state
            self._resume(_folder(args, state), state, loaded)
        if members is not None:
            self._continue(members, state, kwargs["lr_scheduler"])

    def _log_numbers_in(self, trainer: Trainer) -> None:
        """Add the numbers of the engine to the Trainer's logs of the training loss."""
        log = trainer.log

        def log_with_numbers(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                log_stats(self.engine, lambda numbers, _: logs.update(numbers))
            log(logs, *args, **kwargs)

        change_(self._undo, trainer, log=log_with_numbers)
        for printer in trainer.callback_handler.callbacks:
            if isinstance(printer, PrinterCallback | ProgressCallback):
                change_(self._undo, printer, on_log=partial(_print_some, printer.on_log))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Announce that the others need not wait any more."""
        self._alone.close()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply pending work before an evaluation, before a checkpoint, and after the last step."""
        if self._members is not None:
            self._follow_members(self._members, state, control, kwargs["lr_scheduler"])
        elif control.should_evaluate or control.should_save or control.should_training_stop:
            self.engine.flush()

    on_epoch_end = on_step_end  # also if another callback has ended the training

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Write the state of all ranks into the checkpoint."""
        if not args.save_only_model:
            extra = {
                "step": state.global_step,
                "parameters": _checksum(kwargs["model"]),
                "sampler": self._sampler,
            }
            self.engine.save(_folder(args, state), extra=extra, keep=1)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Close the engine."""
        if not (self._ended or (args.load_best_model_at_end and state.best_model_checkpoint)):
            self.engine.flush()
        self._undo.close()

    def _share_samples(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Let this member take its part of the samples, where the Trainer's sampler takes all."""
        batches: Any = getattr(loader, "batch_sampler", None)
        given = getattr(batches, "sampler", None)
        self._sampler = given if isinstance(given, ShardedSampler) else None
        if isinstance(given, RandomSampler | SequentialSampler):
            self._sampler = ShardedSampler(
                loader.dataset,
                seed=args.data_seed or args.seed,
                shuffle=isinstance(given, RandomSampler),
                members=self._members,
            )
        if self._sampler is not None:
            # of a resumed training: the sampler continues
            change_(self._undo, args, ignore_data_skip=True)
            passes = chain.from_iterable(repeat(self._sampler))  # whatever the Trainer counts
            left = takewhile(lambda _: state.global_step < state.max_steps, passes)
            change_(self._undo, batches, sampler=left)

    def _continue(self, members: Members, state: TrainerState, scheduler: Any) -> bool:
        """Continue at the run's step, later than the Trainer's for one that was away; return True
        if the run ends.
        """
        jump = members.step - state.global_step
        state.global_step = members.step
        # the Trainer divides sums of losses by steps since these
        self._trainer._globalstep_last_logged += jump
        self._trainer._initial_global_step += jump
        return follow_run(members, state.max_steps, [scheduler])

    def _follow_members(
        self, members: Members, state: TrainerState, control: TrainerControl, scheduler: Any
    ) -> None:
        """End with the run; evaluate and save on its first member, right after an averaging."""
        sync: Any = self.engine.sync
        self._alone.close()
        ends = self._continue(members, state, scheduler) or control.should_training_stop
        control.should_training_stop = ends
        if ends and not self._ended:
            self.engine.flush()
            self._ended = True
        state.is_world_process_zero = first = members.rank == 0
        if self._sampler is not None:
            state.epoch = float(self._sampler.epoch)
        now = ends or sync.synced
        for name in ("should_evaluate", "should_save"):
            if getattr(control, name):
                self._due.add(name)
            setattr(control, name, first and now and name in self._due)
        if now:
            self._due.clear()
        if first and now:
            self._alone.enter_context(busy(LONGEST))

    def _resume(self, folder: Path, state: TrainerState, loaded: int) -> None:
        try:
            self.engine.load(folder)
        except CheckpointMissing as error:
            raise CheckpointMissing(
                f"the Trainer resumes at step {state.global_step}, but {folder} has no state of a "
                "strategy: resume from a checkpoint in output_dir that was written with this "
                "callback. To start a new run from its parameters, load them into the model that "
                "you pass to the Trainer"
            ) from error.__cause__
        group = Group(None)
        extra = dict(self.engine.extra or {})
        sampler = extra.pop("sampler", None)
        if self._sampler is not None and sampler is not None:
            self._sampler.load_state_dict(sampler)

        def is_the_same() -> None:
            expected = {"step": state.global_step, "parameters": loaded}
            # the Trainer has loaded rank 0's state on all ranks
            if group.rank == 0 and extra != expected:
                raise CheckpointMismatch(
                    f"the Trainer has loaded another checkpoint than {folder.parent}: resume from "
                    "a checkpoint in output_dir, with the folder that this callback wrote"
                )

        on_all_ranks(group, "comparing the checkpoint with that of the Trainer", is_the_same)

    def _observe(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Train a microstep and observe its loss, of which the Trainer has taken a part."""
        loss = step(*args, **kwargs)
        sync: Any = self.engine.sync
        sync.observe(loss * self._trainer.current_gradient_accumulation_steps)
        return loss


class _MemberState:
    """Accelerate's state as `TrainingArguments` have it, whose process index is a member's rank."""

    def __init__(self, given: Any, members: Members) -> None:
        self._given = given
        self._members = members

    @property
    def process_index(self) -> int:
        """Rank of the member: the Trainer writes where it is 0."""
        return self._members.rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def __reduce__(self) -> Any:  # the Trainer writes its arguments beside the model
        return copy.copy, (self._given,)


def _print_some(on_log: Callable[..., None], *args: Any, logs: Any = None, **kwargs: Any) -> None:
    hidden = {name for name in logs if name.startswith(PREFIX)} - _PRINTED
    on_log(*args, logs={name: logs[name] for name in logs if name not in hidden}, **kwargs)


def _trainer_in(state: TrainerState) -> Any:
    [trainer] = [one for one in living(Trainer) if getattr(one, "state", None) is state]
    return trainer


def _require_arguments(args: TrainingArguments, state: TrainerState, wrapper: Any) -> None:
    kind = str(getattr(wrapper.accelerator_state.distributed_type, "value", ""))
    problems = {
        "fp16=True scales the loss, and single ranks would skip updates: use bf16=True": (
            getattr(wrapper, "scaler", None)
        ),
        "fsdp shards over all ranks and exchanges gradients itself: turn it off and start the "
        "Trainer with torchrun. A model that needs several devices trains in your own loop: "
        "fully_shard(model, mesh=mesh['shard']), then prepare(..., mesh=mesh)": kind == "FSDP",
        f"{kind} exchanges gradients itself: turn it off and start the Trainer with torchrun, "
        "which then uses DistributedDataParallel": kind in _SHARDED,
        f"{args.n_gpu} GPUs in one process: start one process per GPU with torchrun": (
            args.n_gpu > 1
        ),
        "auto_find_batch_size restarts training on single ranks: set per_device_train_batch_size": (
            args.auto_find_batch_size
        ),
        "hyperparameter_search: train each trial with its own Trainer": state.is_hyper_param_search,
    }
    refuse_settings(problems)


def _require_member_arguments(
    trainer: Trainer, member: Member, strategy: DistributedStrategy
) -> None:
    args = trainer.args
    problems = {
        "eval_strategy and save_strategy by epochs, which members share: set 'steps'": (
            "epoch" in (args.eval_strategy, args.save_strategy)
        ),
        "EarlyStoppingCallback, and the schedules reduce_lr_on_plateau and greedy: one member "
        "evaluates, and the others do not know the result": (
            args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
            or any(
                isinstance(one, EarlyStoppingCallback) for one in trainer.callback_handler.callbacks
            )
        ),
        "add_callback: give the callback to the constructor of the Trainer": (
            not isinstance(args.distributed_state, _MemberState)
        ),
        "eval_on_start: call evaluate() before train()": args.eval_on_start,
        "train_sampling_strategy would give all members the same batches: set 'random' or "
        "'sequential'": args.train_sampling_strategy not in ("random", "sequential"),
    }
    require_member_settings(member, strategy, args.max_steps, args.world_size, problems)


def _checksum(model: nn.Module) -> int:
    return checksum([p for _, p in named_parameters(model)])


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "thinwire"
