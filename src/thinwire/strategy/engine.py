"""The engine: one call per mini-batch, from the forward pass to the update."""

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire import _validate as check
from thinwire.checkpoint.manifest import next_folder
from thinwire.comm import (
    busy,
    elsewhere,
    mapping_of,
    require_agreement,
)
from thinwire.core.several import all_of
from thinwire.core.sharded import is_sharded, reshard_, shard_of
from thinwire.core.stats import numbers
from thinwire.errors import CheckpointMissing, ThinwireError
from thinwire.exchange.agreement import Verdict
from thinwire.local.model import SCALER, refuse_scaler
from thinwire.local.updates import LocalUpdates
from thinwire.local.work import require_tokens
from thinwire.optim import Lamb, Lars
from thinwire.pipeline.runner import PipelineRunner
from thinwire.strategy import checkpoints, saving
from thinwire.strategy.beside import SaveBeside
from thinwire.strategy.engine_checks import Joining
from thinwire.strategy.holding import (
    step_replaced_,
    taken_off_,
)
from thinwire.strategy.microsteps import Microsteps
from thinwire.strategy.parts import Parts
from thinwire.strategy.whole_models import load_whole_model

__all__ = ["Engine", "Parts"]

_log = logging.getLogger("thinwire")


class Engine:
    """Trains a model as its strategy says: `train_step` does everything, or `minimize` what comes
    after the loss.

    `DistributedStrategy.prepare` makes it.

    **State** in `state_dict`: parameters, buffers, extra state of modules, optimizer, residuals,
    merged gradients, intervals, loss scale, counters, random numbers; every rank has its own.
    **Communication**: see `DistributedStrategy.explain`. **Failure**: an exchange that fails raises
    on every rank and leaves parameters and state as before the update.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._steps = Microsteps(parts)
        self.extra: Any = None
        """What `save` was given as `extra`, after `load`; None before it, and where nothing was
        given."""
        self._sharded = any(map(is_sharded, parts.params.values()))
        self._following: Following | None = None
        self._beside = SaveBeside()
        # the engine's hooks stand on the model and the optimizer, and must not outlive it
        self._finalizer = weakref.finalize(self, _close, parts, self._beside)

    @property
    def step(self) -> int:
        """Updates made by this rank; without local updates the same on all."""
        return self._steps.step

    @property
    def model(self) -> nn.Module:
        """The model; under a pipeline this rank's stage of it."""
        return self._parts.model

    @property
    def sync(self) -> LocalUpdates | None:
        """The local updates, as `local_sgd` returns them: `sync.step`, the same on all ranks,
        `sync.synced`, `sync.k_steps`; None where every update is exchanged.
        """
        return self._steps.sync

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The very object that was given to `prepare`, which trains: its groups, schedulers and
        `state_dict` are live.

        The first of them where several were given. Its `step` may not be called by hand before
        `close`.
        """
        return self.optimizers[0]

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All that were given to `prepare`."""
        return all_of(self._parts.optimizer)

    def train_step(self, inputs: Any, targets: Any, *, tokens: int | None = None) -> Tensor:
        """Forward, backward, exchange and update from one mini-batch.

        Under a gradient merge only every k-th call updates.

        Args:
            inputs: What the model takes: a tensor, a tuple of several arguments, or a mapping of
                keyword arguments.
            targets: Second argument of the loss function.
            tokens: Of this mini-batch, >= 1, or samples: whatever ranks shall count by in rounds
                that end by time (`LocalSGD(round_seconds=...)`); on all ranks or on none.

        Returns:
            This rank's mean loss, shape (), detached and unscaled; under a pipeline that of its
            replica.

        Raises:
            RuntimeError: The strategy was prepared without a loss function; a parameter became
                trainable or was replaced, or the optimizer got another one, since then.
            ValueError: The loss is no scalar; a batch that the micro-batches of a pipeline do not
                divide; tokens where nothing is weighed by them.
            ThinwireError: The exchange failed: see `thinwire.errors`.
        """
        parts = self._parts
        if parts.runner is not None:
            return self._train_stages(parts.runner, inputs, targets, tokens)
        self._begin_microstep(tokens)
        _check_mean(loss := self._loss_of(inputs, targets, "train_step"))
        with self._steps.advised(), parts.group.one_deadline():
            self._steps.minimize(loss)
        self._steps.warn()
        return loss.detach().reshape(())

    def _train_stages(
        self, runner: PipelineRunner, inputs: Any, targets: Any, tokens: int | None
    ) -> Tensor:
        self._require_open()
        problem: Exception | None = None
        try:
            self._begin_microstep(tokens)
            self._steps.clear_grads()
        except ThinwireError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # of this stage; others are told
            problem = error
        with self._parts.group.one_deadline():
            concludes = self._parts.exchange.local or self._steps.merging
            loss = runner.step(inputs, targets, problem, concludes=concludes)
            self._steps.finish(loss)
            loss = runner.conclude() if loss is None else loss
        self._steps.left.remember()
        self._steps.warn()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """The mean loss of one mini-batch, without gradients or update; whether in eval mode is up
        to `engine.model`.

        Ranks that wait for this one in their next step go on waiting until a time-out after its
        last call; see `thinwire.busy` for other work of one rank alone.

        Args:
            inputs: As in `train_step`.
            targets: As in `train_step`.

        Returns:
            This rank's mean loss, shape (); under a pipeline, where all stages must call it, that
            of its replica.

        Raises:
            TypeError, ValueError: The loss is no tensor, or no scalar.
        """
        self._require_open()
        if self._parts.runner is not None:
            with self._parts.group.one_deadline():
                return self._parts.runner.evaluate(inputs, targets)
        with busy(self._parts.group.timeout_s):
            loss = self._loss_of(inputs, targets, "evaluate")
            _check_mean(loss)
        if self._sharded:  # the outermost module has kept whole parameters
            reshard_(self._parts.model)
        return loss.detach().reshape(())

    def minimize(
        self, loss: Tensor, *, tokens: int | None = None
    ) -> tuple[list[Any], list[tuple[Parameter, Tensor]]]:
        """Backward, exchange and update from a loss that was computed outside; counts as one
        microstep.

        Old gradients are cleared first. Afterwards `p.grad` holds what the optimizer got, unscaled:
        the mean over the ranks, or this rank's own where the optimizer exchanges by itself or ranks
        train locally.

        Args:
            loss: Shape () or one element, this rank's mean loss, unscaled.
            tokens: As in `train_step`.

        Returns:
            An empty list and the pairs (parameter, its gradient).

        Raises:
            TypeError: No tensor.
            ValueError: More than one element, or a loss that depends on no parameter; tokens, as
                in `train_step`.
            RuntimeError: Under a pipeline, where the loss lives on the last stage; other parameters
                to train than at `prepare`, as in `train_step`.
            ThinwireError: The exchange failed: see `thinwire.errors`.
        """
        parts = self._parts
        if parts.runner is not None:
            raise RuntimeError(
                "engine.minimize does not work under pipeline: the loss lives on the last stage, "
                "use engine.train_step(inputs, targets)"
            )
        self._begin_microstep(tokens)
        _check_mean(loss)
        with self._steps.advised(), parts.group.one_deadline():
            self._steps.minimize(loss)
        self._steps.warn()
        return [], [(p, p.grad) for p in parts.params.values() if p.grad is not None]

    def apply_gradients(self, loss: Tensor | None = None, *, tokens: int | None = None) -> None:
        """Exchange and update from what `p.grad` holds; counts as one microstep.

        For a framework that makes the backward passes itself, several for one call maybe: nothing
        may have averaged over the ranks what they left. The exchange follows the backward pass.
        Afterwards `p.grad` holds what `minimize` leaves there, and clearing it is up to the caller.

        Args:
            loss: As in `minimize`, where the interval of local updates follows it; else it may be
                left out.
            tokens: As in `train_step`.

        Raises:
            ValueError: Tokens, as in `train_step`.
            RuntimeError: Under a pipeline or a loss scale, which need the loss before its backward
                pass; other parameters to train than at `prepare`, as in `train_step`.
            ThinwireError: The exchange failed: see `thinwire.errors`.
        """
        self._require_unscaled("apply_gradients")
        self._require_ready(tokens)
        with self._steps.advised(), self._parts.group.one_deadline():
            self._steps.finish(loss)
        self._steps.left.remember()
        self._steps.warn()

    def follow_steps(self, loss: Callable[[], Tensor | None] | None = None) -> "Following":
        """Let `engine.optimizer.step()` make the update, for a loop that is not yours: it is
        `apply_gradients` from now on. Of several optimizers, the one that is stepped last.

        The loop makes the backward passes and calls `step()` of the optimizer, or of a wrapper
        around it; nothing else may average over the ranks. A closure is called first, and what it
        returns is the loss.

        Args:
            loss: Called at each step instead, for the loss of the update, where the interval of
                local updates follows it.

        Returns:
            The handle whose `remove` ends it; `close` does too.

        Raises:
            RuntimeError: As in `apply_gradients`; it is followed already. At a step: an enabled
                `GradScaler` calls it, on two ranks or more.
        """
        self._require_open()
        self._require_unscaled("follow_steps")
        if self._following is not None and self._following.active:
            raise RuntimeError(
                "the steps of this optimizer are followed already: call remove() of what "
                "follow_steps returned first"
            )
        engine = weakref.ref(self)  # the optimizer must not keep its engine alive
        called: set[int] = set()

        def update(which: int, closure: Callable[[], Any] | None) -> Any:
            target = engine()
            assert target is not None, "its end takes this off"
            marked = [taken_off_(each) for each in target.optimizers]
            if any(marked):
                raise RuntimeError(SCALER)
            if target._parts.group.size > 1 and target._steps.by_time is None:
                refuse_scaler(target._parts.optimizer)
            value = None
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
            called.add(which)
            if len(called) == len(target.optimizers):
                called.clear()
                told = value if loss is None else loss()
                target.apply_gradients(told if isinstance(told, Tensor) else None)
            return value

        undo = contextlib.ExitStack()
        for place, each in enumerate(self.optimizers):
            undo.callback(step_replaced_(each, partial(update, place)))
        self._following = Following(undo.close)
        self._parts.handles.append(self._following)
        return self._following

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop whose ranks have unequal numbers of batches: `with engine.join(): for x, y
        in loader: ...`.

        A rank that leaves its loop goes on to take part in the exchanges of the others, with a
        gradient of zero, until no rank has a batch left; all ranks then have made the same updates.
        Means are over all ranks, those without batches included, so the last updates are smaller
        (`divide_by_initial_world_size` of DDP's join). What a rank has kept by compression goes on
        being sent. Under local updates it changes nothing by itself, and takes part in the
        averagings; where rounds end by time it counts nothing there. It cannot step a scheduler of
        torch, and where all ranks update alike they need one rate: use a schedule of
        `thinwire.schedules`, or step the scheduler after the block.

        Must stand around the loop on all ranks. Leave the block by the end of the loop: an error
        inside it leaves at once, as without `join`.

        Raises:
            RuntimeError: Inside another one; under pipeline, whose stages have their batches in
                common; with a mesh.
            Mismatch: Another rank is in a step outside `join`.

        Communication: none of its own, but one exchange of zeros at the end; under local updates 24
        bytes a rank for every averaging.
        """
        self._require_open()
        if self._steps.joining is not None:
            raise RuntimeError(
                "engine.join() stands inside another one: use one around the whole loop"
            )
        if self._parts.runner is not None:
            raise RuntimeError(
                "engine.join() does not work under pipeline, whose stages need the same batches: "
                "give all replicas equally many, such as by DistributedSampler"
            )
        if self._sharded:
            raise RuntimeError(
                "engine.join() does not work with mesh=: the ranks of a site gather their shards "
                "in every forward pass, and need equally many batches, as DistributedSampler gives"
            )
        self._steps.joining = joining = Joining(self._parts.group)
        batches = self._parts.batches
        batches.begin()
        try:
            yield
            if self._parts.exchange.local:
                joining.idle(self._steps.idle_locally)
            else:
                batches.mine = False
                while self._steps.idle() is not Verdict.END:
                    pass
        finally:
            self._steps.joining = None
            batches.end()

    def flush(self) -> None:
        """Apply the leftovers of a merge, then what local updates have on their way, then their
        last averaging.

        Call it on all ranks at the end of training, and under local updates before an evaluation:
        afterwards all ranks have the same model, and the next averaging is `k_steps` steps later.
        Does nothing where there is nothing, and nothing but dropping a merge on a member that has
        left the others.

        Raises:
            Mismatch: Ranks are at different places.
            ThinwireError: The exchange failed.
        """
        self._require_open()
        if self.sync is not None and self.sync.left:
            self._steps.forget_merged()
            return
        parts = self._parts
        merge = parts.merge
        with parts.group.one_deadline():
            if merge is not None:
                uneven = self._steps.by_time
                place = {"step": self._steps.place()}
                if uneven is None:
                    place["microsteps of the unfinished update"] = merge.microsteps
                require_agreement(parts.group, place, what="engine.flush()")
                if merge.microsteps:
                    self._steps.clear_grads()  # before there is a second set of them
                    left, overflow = merge.take(avg=parts.merge_avg), merge.overflowed
                    with contextlib.nullcontext() if uneven is None else uneven.counting_only():
                        self._steps.update(left, overflow=overflow, complete=True)
            parts.exchange.flush()
            if not parts.exchange.local:
                parts.buffers.synchronize()
        self._steps.left.remember()

    def mean_loss(self, loss: Tensor | float) -> Tensor:
        """The mean of a loss over the ranks, with equal weights; all ranks must call it.

        Args:
            loss: One element: a mean over this rank's batch, as `train_step` returns it.

        Returns:
            Shape (), float64, on the CPU, equal on all ranks.

        Raises:
            TypeError, ValueError: It is no such number.
            RuntimeError: Members come and go.
            Mismatch: Another rank makes another call, as one without batches does inside
                `engine.join()`.

        Communication: about 40 bytes a rank.
        """
        came = loss if isinstance(loss, Tensor) else torch.as_tensor(loss, device="cpu")
        if came.dtype == torch.bool or came.is_complex():
            raise TypeError(f"loss must be a real number or a tensor of one, got {loss!r}")
        value = came.to(torch.float64).detach().reshape(-1).clone()
        if value.numel() != 1:
            raise ValueError(
                f"loss must have one element, got {value.numel()}: take its mean first"
            )
        group, what = self._parts.group, "the mean loss"
        if not group.stays:
            raise RuntimeError(
                "engine.mean_loss does not work with members=: one who comes between two calls "
                "would have to make them too; log the loss of this member"
            )
        with self._steps.advised():
            answers = group.gather_bytes(json.dumps({what: value.item()}).encode(), what=what)
            told = [mapping_of(answer) for answer in answers]
            for rank, row in enumerate(told):
                if what not in row:
                    raise elsewhere(what, rank, row)
        total = sum(row[what] for row in told)
        return torch.tensor(total / group.size, dtype=torch.float64, device="cpu")

    def stats(self) -> dict[str, float]:
        """This rank so far, flat and in numbers only; the names are those of
        `thinwire.core.stats.numbers`.

        Returns:
            `step` updates made by this rank; `microsteps` of an unfinished update; `dropped_steps`;
            `averagings`; `k_steps` interval in force; `sparsity` of the next exchange, the fraction
            that is not sent; `loss_scale`; `bytes_sent` message bytes given to exchanges, headers
            and agreements included, and of these `bytes_between_nodes`; `bytes_received`;
            `bytes_dense` 4 bytes per trainable element and update; `ratio` bytes_dense /
            bytes_sent, larger is better; `wait_s` seconds of waiting for exchanges; `applied_share`
            as in `LocalUpdates.stats`; `bytes_between_stages` of a pipeline, in no other sum;
            `rate_bit_s` payload that this rank's line carries, in bits
            a second, a moving mean over about the last 20 exchanges of 64 KiB and more that it was
            blocked for, late ranks included; `waiting_share` part of the time for which it was
            blocked, a moving mean over about the last 20 rounds (an update, or the local steps up
            to an averaging). Bytes received, rate and waiting are those of this process.
        """
        parts = self._parts
        counts = parts.exchange.counts(self.step)
        votes = [part for part in (parts.buffers, parts.scaler) if part is not None]
        counts["bytes_received"] += sum(part.bytes_received for part in votes)
        if counts["bytes_between_nodes"] is not None and not self._sharded:
            counts["bytes_between_nodes"] += sum(part.bytes_sent for part in votes)
        if not parts.exchange.local:
            pace, dropped = self._steps.pace, self._steps.dropped_steps()
            counts["waiting_share"] = pace.waiting_share
            counts["goodput"] = pace.goodput(self.step, dropped)
        counts |= {"bytes_sent": self._steps.bytes_sent(), "wait_s": self._steps.wait_s()}
        return numbers(
            step=self.step,
            microsteps=0 if parts.merge is None else parts.merge.microsteps,
            dropped_steps=self._steps.dropped_steps(),
            k_steps=parts.exchange.k_steps,
            loss_scale=1.0 if parts.scaler is None else parts.scaler.scale,
            bytes_between_stages=0 if parts.runner is None else parts.runner.bytes_sent,
            bytes_dense=4 * self.step * sum(shard_of(p).numel() for p in parts.params.values()),
            **counts,
        )

    @property
    def pending(self) -> str:
        """What `flush` would apply, in words, such as "2 merged microsteps"; empty where there is
        nothing.
        """
        parts = self._parts
        microsteps = 0 if parts.merge is None else parts.merge.microsteps
        waiting = [f"{microsteps} merged microsteps"] if microsteps else []
        return " and ".join(
            [*waiting, parts.exchange.pending] if parts.exchange.pending else waiting
        )

    def trust_ratios(self) -> dict[str | Tensor, float]:
        """The trust ratio of every parameter in the last update, by name, under LARS and LAMB;
        empty elsewhere.
        """
        found: dict[str | Tensor, float] = {}
        for each in self.optimizers:
            found |= each.trust_ratios() if isinstance(each, Lamb | Lars) else {}
        return found

    def state_dict(self) -> dict[str, Any]:
        """All that a later step depends on, of this rank: plain values and copies of tensors. No
        communication.

        Schedulers of torch that drive the optimizer are in it, and what modules have as
        `get_extra_state`.

        Raises:
            TypeError: A scheduler's state, or a module's, is nothing that a file can hold.
        """
        return saving.state_dict(self._parts, self._counters())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same rank, bit for bit; on all ranks. No
        communication.

        Warns:
            UserWarning: It is another rank's; a scheduler, or a module's extra state, of then is
            missing now, or the other way round.

        Raises:
            TypeError: No mapping.
            ValueError: The state belongs to another model or strategy; nothing has changed.
        """
        self._require_open()
        self._go_on(saving.load(state, self._parts))

    def save(
        self,
        directory: str | Path,
        extra: Any = None,
        keep: int | None = 2,
        *,
        frozen: bool = True,
        wait: bool = True,
    ) -> Path:
        """Write a checkpoint, every rank its part; the folder and its parents are created.

        Until the new one is whole, the one before it is what loads.

        The extra state of modules (torch's `get_extra_state`) is saved of each rank: plain values
        and tensors, in dicts, lists and tuples.

        The folder is named after the updates made; under local updates, where an overflow concerns
        its rank alone, after the local steps, those dropped included, which are the same on all
        ranks.

        Members that come and go save each for itself, without the others, whenever they like; what
        one has saved is a checkpoint of one rank, which all members may load when they begin a run
        anew.

        Args:
            directory: The folder of all checkpoints of this run; on a file system of all ranks, or
                of each machine.
            extra: Whatever else a later step depends on, of this rank: plain values, tensors, and
                objects with a `state_dict` (a sampler, an average of the weights, a `GradScaler`),
                in dicts, lists and tuples. Torch's schedulers that drive `engine.optimizer` are
                saved without being named.
            keep: How many checkpoints stay, this one included; at least 1, None for all. The newest
                that stays beside this one is read before an older one is deleted: one that is
                damaged does not count.
            frozen: Whether parameters that do not train are written too. Without them `load` needs
                them in the model as they are now, and compares digests: for a fine-tuning whose
                base model is kept elsewhere.
            wait: Whether to return when the checkpoint is whole. Else the state is copied, and
                written on a thread beside training. The next `save`, `close` and `wait_for_save`
                wait for it, and raise what went wrong; a process that is killed before leaves the
                checkpoint before.

        Returns:
            The folder of this checkpoint; without `wait` the one that it gets unless others write
            there.

        Raises:
            CheckpointError: It could not be written, on whichever rank, or `extra`, a scheduler or
                a module's extra state holds what cannot be saved; on all ranks. Training may go on.
            Diverged: Ranks do not hold the same; nothing was written.
            Mismatch: Ranks are at different places, or some of them did not call it.
        """
        if self._parts.group.stays:
            place = {"place of the checkpoint": self._steps.place()}
            require_agreement(self._parts.group, place, what="saving")
            self._parts.exchange.require_equal(self.step)
        check.boolean("frozen", frozen)
        check.boolean("wait", wait)
        self.wait_for_save()
        begun_s = time.perf_counter()
        counters, step, savers = self._counters(), self._steps.place(), self._parts.savers
        write = checkpoints.save(directory, self._parts, counters, extra, step, keep, frozen=frozen)
        path = next_folder(Path(directory), step)
        if wait:
            path = write(savers)
        else:
            self._beside.begin(savers, write)
        lose = self._steps.pace.lose if self.sync is None else self.sync.lose
        lose(time.perf_counter() - begun_s)
        return path

    def wait_for_save(self) -> Path | None:
        """Wait until what `save(..., wait=False)` writes is whole; on all ranks.

        Returns:
            The folder of the checkpoint; None where none was being written.

        Raises:
            CheckpointError: It could not be written, on whichever rank.
        """
        return self._beside.finish()

    def load(
        self, directory: str | Path, if_any: bool = False, *, step: int | None = None
    ) -> Path | None:
        """Continue from the newest whole checkpoint in `directory`, also one of another number of
        ranks.

        With the same number of ranks training continues bit for bit. With another one every rank
        gets the mean of the ranks' floating-point state, so that the update still pending is kept;
        counts of ranks that dropped local steps each for itself (updates made, dropped steps, the
        step of the optimizer's state) go on from those of rank 0, the smallest loss scale is that
        of all, and `extra` and the extra state of modules are those of rank 0.

        Settings of the strategy on which no state depends (intervals, sparsity, clipping, ...) may
        be others than when it was written: those of this engine count, and a line in the log of
        `thinwire` says which have changed. Parameters and groups of the optimizer may be in another
        order: names decide.

        A buffer that was registered with persistent=False, such as a cache that a forward pass
        makes, stays as it is in this model where it is missing on one side or has another shape; a
        line in the log names it.

        Schedulers of torch that drive `engine.optimizer` go on where they were if they are there
        already: make them before this call. Nothing changes on any rank where one of them cannot
        take its part over.

        Args:
            directory: What `save` was given.
            if_any: Whether to return None where there is nothing yet, as at the first start of a
                run.
            step: That of the checkpoint, as its folder is named after; None for the newest.

        Members that begin a run anew load each the same checkpoint. A newcomer has what the others
        hold, and loads nothing: with `if_any` it gets None.

        Returns:
            The folder that was loaded. `engine.extra` is then what `save` was given, `state_dict()`
            instead of
            objects: `sampler.load_state_dict(engine.extra["sampler"])`.

        Warns:
            UserWarning: What was saved later is damaged; a scheduler, or a module's extra state, of
                then is missing now, or the other way round.

        Raises:
            RuntimeError: This member has taken the state of others already, and `if_any` is false.
            CheckpointMissing: There is none, not even a damaged one.
            CheckpointMismatch: It belongs to another strategy, model or optimizer; names all that
                differs. Or there are checkpoints, and none of `step`.
            CheckpointCorrupt: All that are there are damaged.
            CheckpointError: Anything else; these three are of its kind.
        """
        self._require_open()
        check.boolean("if_any", if_any)
        step = None if step is None else check.integer("step", step, at_least=0)
        if not self._parts.group.stays and self._steps.place():
            told = f"this member has taken the state of the others, at step {self._steps.place()}"
            if not if_any:
                raise RuntimeError(f"{told}: load where a run begins, or give if_any=True")
            _log.info("%s: nothing is loaded", told)
            return None
        try:
            path, restored = checkpoints.load(directory, self._parts, step)
        except CheckpointMissing:
            if not if_any:
                raise
            self.extra = None
            _log.info("no checkpoint in %s yet: training starts from the beginning", directory)
            return None
        self._go_on(restored)
        return path

    def load_parameters(self, source: str | Path, *, torch_checkpoint: bool = False) -> Path:
        """Take the parameters and buffers of the newest whole checkpoint, and nothing else, to
        begin anew with them.

        For a checkpoint of another strategy or optimizer, which `load` refuses. Ranks that had
        different ones get their mean. Momentum, residuals, counters, schedules and `extra` are
        those of this engine. A whole model of others is taken too: a file of safetensors with the
        names of `model.state_dict()`, as `thinwire export` writes it, or torch's own format with
        the model at the top or under "model"; each rank takes its own rows where the model is
        sharded.

        Args:
            source: What `save` was given, or such a file or folder.
            torch_checkpoint: Read `source` as a folder of `torch.distributed.checkpoint`, or as a
                file of `torch.save`. Such a folder is unpickled, which runs the code in it: load
                only what you trust. Refused where `save` has written.

        Returns:
            The folder or file that was read.

        Raises:
            RuntimeError: This engine has made updates.
            CheckpointMissing, CheckpointMismatch, CheckpointCorrupt: As in `load`; nothing has
                changed.
            CheckpointError: It is torch's, and `torch_checkpoint` is false; a file of others is not
                the same on all ranks.
        """
        self._require_open()
        check.boolean("torch_checkpoint", torch_checkpoint)
        if self._steps.place():
            raise RuntimeError(
                f"this engine has made {self._steps.place()} updates, whose momentum and residuals "
                "belong to other parameters: call load_parameters right after prepare"
            )
        path = Path(source)
        if torch_checkpoint or path.suffix == ".safetensors":
            return load_whole_model(path, self._parts)
        return checkpoints.load_parameters(path, self._parts)

    def close(self) -> None:
        """Take everything off the model and the optimizer; the engine cannot train any more. May be
        called twice.

        The optimizer may be stepped by hand again, and be given to another engine. It stays what it
        became: one whose `step` exchanges, with its residuals, where compression acts inside it; a
        `Lars` or `Lamb`; under a pipeline an optimizer of this stage. A new engine with the same
        fields goes on with it.
        """
        self._finalizer()

    def _go_on(self, restored: Mapping[str, Any]) -> None:
        self._steps.step = restored["step"]
        self._steps.dropped_before += restored["dropped_steps"] - self._steps.dropped_steps()
        self._steps.bytes_before += restored["bytes_sent"] - self._steps.bytes_sent()
        self.extra = restored["extra"]

    def _loss_of(self, inputs: Any, targets: Any, caller: str) -> Tensor:
        self._require_loss_function(caller)
        parts = self._parts
        assert parts.loss_fn is not None, "required just now"
        outputs = _called(parts.model, inputs)
        with contextlib.nullcontext() if parts.autocast is None else parts.autocast():
            return parts.loss_fn(outputs, targets)

    def _require_loss_function(self, caller: str) -> None:
        if self._parts.loss_fn is None:
            raise RuntimeError(
                f"{caller} needs a loss function, and prepare was given none: pass prepare(model, "
                "optimizer, loss_fn), or compute the loss yourself and call engine.minimize(loss)"
            )

    def _counters(self) -> dict[str, int]:
        return {
            "step": self.step,
            "dropped_steps": self._steps.dropped_steps(),
            "bytes_sent": self._steps.bytes_sent(),
        }

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this engine was closed: prepare a new one")

    def _begin_microstep(self, tokens: int | None) -> None:
        self._require_ready(tokens)
        self._steps.left.look()

    def _require_unscaled(self, caller: str) -> None:
        parts = self._parts
        if parts.runner is not None or parts.scaler is not None:
            field = "pipeline" if parts.scaler is None else "the loss scale of amp"
            raise RuntimeError(
                f"engine.{caller} does not work under {field}, which needs the loss before its "
                "backward pass: use engine.train_step(inputs, targets)"
            )

    def _require_ready(self, tokens: int | None) -> None:
        self._require_open()
        if tokens is not None:
            require_tokens(tokens, None if self.sync is None else self.sync.config)
        self._steps.tokens = tokens
        self._steps.trained.require_known()
        if (
            self._steps.joining is not None
            and self._steps.joining.due
            and self._parts.exchange.local
        ):
            self._steps.joining.vote(active=True)


class Following:
    """The handle of `Engine.follow_steps`."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.active = True
        """Whether steps are followed."""
        self._undo = undo

    def remove(self) -> None:
        """Follow no step any more; may be called twice."""
        self.active = False
        self._undo()


def _close(parts: Parts, beside: SaveBeside) -> None:
    parts.exchange.close()
    for handle in parts.handles:
        handle.remove()
    beside.finish()


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _check_mean(loss: object) -> None:
    check.instance("loss", loss, Tensor)
    assert isinstance(loss, Tensor)
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must be a scalar, got shape {tuple(loss.shape)}: take its mean over the "
            "batch"
        )
