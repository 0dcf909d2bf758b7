"""The engine, which makes a whole update in one call per mini-batch."""

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire import _validate as check
from thinwire.checkpoint.manifest import next_folder
from thinwire.comm import mapping_of, require_agreement, wrong_call_site
from thinwire.comm.stats import numbers
from thinwire.core.several import all_of
from thinwire.core.sharded import shard_of
from thinwire.errors import CheckpointMissing
from thinwire.local.updates import LocalUpdates
from thinwire.optim import Lamb, Lars
from thinwire.strategy import checkpoints, saving
from thinwire.strategy.following import Following
from thinwire.strategy.model_files import load_model_file
from thinwire.strategy.publishing import EnginePublisher, Where
from thinwire.strategy.saving import BackgroundSave
from thinwire.strategy.stages import Stages, Whole
from thinwire.strategy.updates import Steps

_log = logging.getLogger("thinwire")


class Engine:
    """Trains a model under a strategy. `train_step` runs a whole step; `minimize` starts from a
    loss you computed.

    `DistributedStrategy.prepare` makes the engine.

    Example::

        engine = DistributedStrategy(dgc=DGC()).prepare(model, optimizer, loss_fn)
        for inputs, targets in loader:
            loss = engine.train_step(inputs, targets)
        engine.save("checkpoints")
        engine.close()

    **State** in `state_dict`: parameters, buffers, extra state of modules, optimizer, residuals,
    merged gradients, intervals, loss scale, counters, random numbers; every rank has its own.
    **Communication**: see `DistributedStrategy.explain`. **Failure**: an exchange that fails raises
    on every rank and leaves parameters and state as before the update.
    """

    def __init__(self, steps: Steps, division: Whole | Stages) -> None:
        self._steps = steps
        self._division = division
        self.extra: Any = None
        """The argument `extra` of `save`, after `load`; None before it, or if none was given."""
        self._following: Following | None = None
        self._publisher: EnginePublisher | None = None
        self._background_save = BackgroundSave()
        # hooks of the engine are on the model and the optimizer, and must not outlive the engine
        self._finalizer = weakref.finalize(self, steps.undo.close)

    @property
    def step(self) -> int:
        """Updates made by this rank. Without local updates the same on all ranks."""
        return self._steps.step

    @property
    def model(self) -> nn.Module:
        """The model, or this rank's stage of it under a pipeline."""
        return self._steps.model

    @property
    def sync(self) -> LocalUpdates | None:
        """The local updates that `local_sgd` returns; None if every update is exchanged.
        `sync.step`, `sync.synced` and `sync.k_steps` are the same on all ranks.
        """
        return self._steps.local

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer passed to `prepare` (the same object). Its groups, schedulers and
        `state_dict` stay live.

        The first optimizer if several were given. Do not call its `step` yourself before `close`.
        """
        return self.optimizers[0]

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers passed to `prepare`."""
        return all_of(self._steps.optimizer)

    def train_step(self, inputs: Any, targets: Any, *, tokens: int | None = None) -> Tensor:
        """Run forward pass, backward pass, exchange and update from one mini-batch.

        With a gradient merge only every k-th call updates.

        Example::

            for inputs, targets in loader:
                loss = engine.train_step(inputs, targets)

        Args:
            inputs: Arguments of the model: a tensor, a tuple of several arguments, or a mapping of
                keyword arguments.
            targets: Second argument of the loss function.
            tokens: Weight of this rank in timed rounds (`LocalSGD(round_seconds=...)`): tokens or
                samples of this mini-batch, >= 1. Give it on all ranks or on none.

        Returns:
            This rank's mean loss, shape (), detached and unscaled. Under a pipeline: the mean loss
            of its replica.

        Raises:
            RuntimeError: The strategy was prepared without a loss function. Or since then a
                parameter became trainable or was replaced, or the optimizer got another parameter.
            ValueError: The loss is no scalar. The number of micro-batches does not divide the
                batch. Tokens are given but nothing is weighted by them.
            ThinwireError: The exchange failed: see `thinwire.errors`.
        """
        self._require_open()
        return self._division.train(self._steps, inputs, targets, tokens)

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of one mini-batch, without gradients or update. The mode (train or
        eval) is that of `engine.model`.

        Other ranks may wait for this one in their next step. Their time-out starts at this rank's
        last call. For other work of one rank alone see `thinwire.busy`.

        Example::

            engine.model.eval()
            loss = engine.mean_loss(engine.evaluate(inputs, targets))
            engine.model.train()

        Args:
            inputs: As in `train_step`.
            targets: As in `train_step`.

        Returns:
            This rank's mean loss, shape (). Under a pipeline all stages must call this, and the
            loss is that of the replica.

        Raises:
            TypeError, ValueError: The loss is no tensor, or no scalar.
        """
        self._require_open()
        return self._division.evaluate(self._steps, inputs, targets)

    def minimize(
        self, loss: Tensor, *, tokens: int | None = None
    ) -> tuple[list[Any], list[tuple[Parameter, Tensor]]]:
        """Run backward pass, exchange and update from a loss you computed. Counts as one microstep.

        Old gradients are cleared first. Afterwards `p.grad` holds the unscaled gradient that the
        optimizer got: the mean over the ranks. It is this rank's own gradient if the optimizer
        exchanges by itself or ranks train locally.

        Example::

            loss = loss_fn(model(inputs), targets) + penalty(model)
            engine.minimize(loss)

        Args:
            loss: Shape () or one element, this rank's mean loss, unscaled.
            tokens: As in `train_step`.

        Returns:
            An empty list and the pairs (parameter, its gradient).

        Raises:
            TypeError: The loss is no tensor.
            ValueError: The loss has more than one element, or depends on no parameter; tokens, as
                in `train_step`.
            RuntimeError: Under a pipeline, since only the last stage has the loss. Trainable
                parameters changed since `prepare`, as in `train_step`.
            ThinwireError: The exchange failed: see `thinwire.errors`.
        """
        self._require_works("minimize")
        self._steps.begin(tokens, early=True)
        self._steps.minimize(lambda: loss)
        return [], [(p, p.grad) for p in self._steps.params.values() if p.grad is not None]

    def apply_gradients(self, loss: Tensor | None = None, *, tokens: int | None = None) -> None:
        """Run exchange and update from the gradients in `p.grad`. Counts as one microstep.

        For a framework that runs the backward passes itself, one or more per call. Nothing else may
        have averaged the gradients over the ranks. The exchange follows the backward pass.
        Afterwards `p.grad` is as after `minimize`; the caller clears it.

        Example::

            loss_fn(model(inputs), targets).backward()
            engine.apply_gradients()
            model.zero_grad()

        Args:
            loss: As in `minimize`. Needed only if the interval of local updates follows the loss.
            tokens: As in `train_step`.

        Raises:
            ValueError: Tokens, as in `train_step`.
            RuntimeError: Under a pipeline or a loss scale, which need the loss before its backward
                pass. Trainable parameters changed since `prepare`, as in `train_step`.
            ThinwireError: The exchange failed: see `thinwire.errors`.
        """
        self._require_works("apply_gradients")
        self._steps.apply(loss, tokens)

    def follow_steps(self, loss: Callable[[], Tensor | None] | None = None) -> Following:
        """Make `engine.optimizer.step()` run the update, for a training loop that you cannot
        change. It then calls `apply_gradients`. With several optimizers, the last one stepped runs
        the update of all, after one backward pass: a generator and its critic need an engine each.

        The loop runs the backward passes and calls `step()` of the optimizer, or of a wrapper
        around it. Nothing else may average over the ranks. A closure is called first; its result is
        the loss.

        Example::

            engine.follow_steps()
            loss.backward()
            optimizer.step()  # exchanges, then updates

        Args:
            loss: Returns the loss of the update; called at each step if the interval of local
                updates follows the loss.

        Returns:
            A handle. Its `remove`, or `close`, ends this mode.

        Raises:
            RuntimeError: As in `apply_gradients`; steps are followed already. At a step: an enabled
                `GradScaler` calls it, on two ranks or more; or not all steps follow one backward.
        """
        self._require_works("follow_steps")
        if self._following is not None and self._following.active:
            raise RuntimeError(
                "follow_steps is already active for this optimizer: first call remove() of the "
                "handle that it returned"
            )
        self._following = Following(self._steps, loss)
        self._steps.undo.callback(self._following.remove)
        return self._following

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Enclose a loop whose ranks have unequal numbers of batches.

        A rank without batches keeps taking part in the exchanges, with a gradient of zero, until no
        rank has a batch left. All ranks then have made the same updates. Means are over all ranks,
        also over ranks without batches, so the last updates are smaller
        (`divide_by_initial_world_size` of DDP's join). Such a rank keeps sending its residual.
        Under local updates it makes no local steps but takes part in the averagings; its weight in
        timed rounds is zero. It cannot step a scheduler of torch. All ranks need the same rate if
        every update is exchanged: use a schedule of `thinwire.schedules`, or step the scheduler
        after the block.

        Enclose the loop on all ranks, and leave the block at the end of the loop. An error inside
        it leaves the block at once, as without `join`.

        Example::

            with engine.join():
                for inputs, targets in loader:
                    engine.train_step(inputs, targets)

        Raises:
            RuntimeError: The block is nested; the strategy has a pipeline, whose stages share their
                batches; a mesh is in use.
            Mismatch: Another rank is in a step outside `join`.

        Communication: one exchange of zeros at the end. Under local updates 24 bytes a rank for
        every averaging.
        """
        self._require_works("join()")
        joining = self._steps.joining
        if joining.inside:
            raise RuntimeError("engine.join() is nested: use a single one around the whole loop")
        joining.begin(inside=True)
        try:
            yield
            self._steps.idle()
        finally:
            joining.begin(inside=False)

    def flush(self) -> None:
        """Finish pending work: leftovers of a merge, local updates under way, the last averaging.

        Call it on all ranks at the end of training, and under local updates before an evaluation.
        Afterwards all ranks have the same model, and the next averaging is `k_steps` steps later.
        If nothing is pending it only compares steps. A member that has left only drops its merge;
        one at an earlier step than the others leaves after their next averaging.

        Example::

            engine.flush()
            loss = engine.mean_loss(engine.evaluate(inputs, targets))

        Raises:
            Mismatch: Ranks have made unequal numbers of steps.
            ThinwireError: The exchange failed.
        """
        self._require_open()
        steps = self._steps
        merge = steps.merge
        if self.sync is not None and self.sync.left:  # this member has left the run
            merge.clear()
            return
        following = self._following
        if following is not None and following.active and (why := following.unfinished()):
            steps.refuse(why)
        with steps.with_advice(), steps.group.one_deadline():
            if steps.flush_compares_steps:
                position = {
                    "step": steps.position(),
                    "microsteps of the unfinished update": merge.microsteps,
                }
                require_agreement(steps.group, position, action="engine.flush()")
            if merge.microsteps:
                steps.clear_grads()  # before a second set is made
                left = merge.take(avg=steps.merge_avg)
                steps.update(left, overflow=merge.overflowed, complete=True)
            steps.end()
        steps.replica.record_gradients()

    def mean_loss(self, loss: Tensor | float) -> Tensor:
        """Return the mean of a loss over the ranks, with equal weights. All ranks must call this.

        Example::

            loss = engine.mean_loss(engine.train_step(inputs, targets))

        Args:
            loss: Mean over this rank's batch, one element, as `train_step` returns it.

        Returns:
            Shape (), float64, on the CPU, equal on all ranks.

        Raises:
            TypeError, ValueError: The loss is no such number.
            RuntimeError: Members join and leave.
            Mismatch: Another rank makes another call, as one without batches does inside
                `engine.join()`.

        Communication: about 40 bytes a rank.
        """
        came = loss if isinstance(loss, Tensor) else torch.as_tensor(loss, device="cpu")
        if came.dtype == torch.bool or came.is_complex():
            raise TypeError(f"loss must be a real number or a tensor of one, got {loss!r}")
        if came.numel() != 1:
            raise ValueError(f"loss must have one element, got {came.numel()}: take its mean first")
        group = self._steps.group
        name = "the mean loss"
        if not group.static_membership:
            raise RuntimeError(
                "engine.mean_loss does not work with members=, since a joining member would not "
                "make the same calls: log the loss of this member"
            )
        with self._steps.with_advice():
            answers = group.gather_bytes(json.dumps({name: came.item()}).encode(), action=name)
            rows = [mapping_of(answer) for answer in answers]
            for rank, row in enumerate(rows):
                if name not in row:
                    raise wrong_call_site(name, rank, row)
        mean = sum(row[name] for row in rows) / group.size
        return torch.tensor(mean, dtype=torch.float64, device="cpu")

    def stats(self) -> dict[str, float]:
        """Return statistics of this rank, as a flat dict of numbers. Steps, averagings, bytes and
        `wait_s` continue after a resume; shares and rates are those of this process.

        - `step`: updates made by this rank; `microsteps`: of an unfinished update;
          `dropped_steps`, `averagings`; `k_steps`: current interval; `loss_scale`.
        - `merge_steps`: microbatches of this rank in an update; `batch_share`: those of all members
          over those of their first round.
        - `sparsity`: fraction of the next exchange that is not sent; `applied_share`: as in
          `LocalUpdates.stats`.
        - `bytes_sent`: put on the wire, each copy, headers and agreements included, of which
          `bytes_between_nodes`; `bytes_received`; `bytes_between_stages`: of a pipeline, in no
          other sum.
        - `bytes_dense`: 4 bytes per trainable element and update; `ratio`: bytes_dense /
          bytes_sent, larger is better.
        - `wait_s`: seconds of waiting for exchanges; `waiting_share`: share of the time for
          which this process was blocked, a moving mean over about 20 rounds (an update, or the
          local steps up to an averaging).
        - `rate_bit_s`: payload of this process's link in bits a second, late ranks included. It
          is a moving mean over about 20 blocking exchanges of at least 64 KiB.
        - `goodput`: useful steps over the steps possible without the losses, in [0, 1];
          `lost_waiting`, `lost_regrouping`, `lost_joining`, `lost_saving`: shares of the time that
          went to waiting, to forming a new generation of members, to joining and to saving.
        - `grad_norm`: before a clip by global norm, else of `p.grad`; `clipped_share`: share of
          updates that the clip scaled; `error_norm`: of residuals; `drift`: norm of what this rank
          sent in the last averaging over that of the mean: 1 if ranks agree.
        - `published_step`: step of the newest version that this rank has written; see `publish`.

        Example::

            stats = engine.stats()
            print(stats["step"], stats["bytes_sent"], stats["ratio"])

        Returns:
            The counters by name.
        """
        steps = self._steps
        publisher = self._publisher
        return numbers(
            microsteps=steps.merge.microsteps,
            k_steps=1 if steps.local is None else steps.local.k_steps,
            loss_scale=1.0 if steps.scaler is None else steps.scaler.scale,
            bytes_dense=4 * steps.step * sum(shard_of(p).numel() for p in steps.params.values()),
            published_step=0 if publisher is None else publisher.step,
            **steps.counts(),
        )

    @property
    def _last_loss(self) -> Tensor | None:
        return self._steps.last_loss

    @property
    def pending(self) -> str:
        """Pending work of `flush`, such as "2 merged microsteps"; empty if there is none."""
        microsteps = self._steps.merge.microsteps
        waiting = [f"{microsteps} merged microsteps"] if microsteps else []
        if self._steps.unsynced:
            waiting.append("an averaging")
        return " and ".join(waiting)

    def trust_ratios(self) -> dict[str | Tensor, float]:
        """Return the trust ratio of every parameter in the last update, by name, under LARS and
        LAMB; else an empty dict.

        Example::

            smallest = min(engine.trust_ratios().values(), default=1.0)
        """
        found: dict[str | Tensor, float] = {}
        for optimizer in self.optimizers:
            found |= optimizer.trust_ratios() if isinstance(optimizer, Lamb | Lars) else {}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a later step of this rank depends on: plain values and copies of
        tensors. No communication.

        It includes schedulers of torch that drive the optimizer, and the extra state of modules
        (`get_extra_state`).

        Raises:
            TypeError: A file cannot hold the state of a scheduler or a module.
        """
        return saving.state_dict(self._steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of the same rank, bit for bit, on all ranks. No communication.

        Example::

            state = engine.state_dict()
            engine.load_state_dict(state)

        Warns:
            UserWarning: The state is another rank's. Or a scheduler or a module's extra state is
                missing on one side.

        Raises:
            TypeError: The state is no mapping.
            ValueError: The state belongs to another model or strategy; nothing has changed.
        """
        self._require_open()
        self._continue(saving.load(state, self._steps))

    def save(
        self,
        directory: str | Path,
        extra: Any = None,
        keep: int | None = 2,
        *,
        frozen: bool = True,
        wait: bool = True,
        only: Literal["model"] | None = None,
    ) -> Path:
        """Write a checkpoint. Every rank writes its part; the folder and its parents are created.

        Until the new checkpoint is complete, `load` returns the previous one.

        The folder is named after the number of updates. Under local updates it is named after the
        local steps, dropped steps included, since this number is the same on all ranks.

        Members that join and leave save independently, at any time. Such a checkpoint is one of a
        single rank. All members may load it at the start of a new run.

        Example::

            engine.save("checkpoints", extra={"sampler": sampler}, keep=2)

        Args:
            directory: The folder of all checkpoints of this run; on a file system shared by all
                ranks, or local to each machine.
            extra: Other state of this rank to save: plain values, tensors, and objects with a
                `state_dict` (a sampler, an average of the weights, a `GradScaler`), in dicts, lists
                and tuples. Torch's schedulers that drive `engine.optimizer` are saved anyway.
            keep: Number of checkpoints to keep, this one included; at least 1, None for all. Before
                an older one is deleted, the newest kept beside this one is verified. A damaged one
                does not count.
            frozen: True if parameters that do not train are written too. If false, `load` compares
                digests and needs the same values in the model: for fine-tuning a base model that is
                stored elsewhere.
            wait: True if the call returns when the checkpoint is complete. If false, a thread
                writes a copy during training. The next `save`, `close` or `wait_for_save` waits for
                it and raises its error. So does the end of the script, with status 1.
            only: "model" writes parameters and buffers alone, in a directory of its own.

        Returns:
            The folder of this checkpoint. Without `wait`: its expected folder, unless others write
            there.

        Raises:
            CheckpointError: A rank could not write the checkpoint, or `extra`, a scheduler or a
                module's extra state holds a value that cannot be saved. Raised on all ranks;
                training may continue.
            Diverged: The states of ranks differ; nothing was written.
            Mismatch: Ranks are out of step, or some of them did not call this.
        """
        steps = self._steps
        step = steps.position()
        if steps.group.static_membership:
            require_agreement(steps.group, {"step of the checkpoint": step}, action="saving")
            steps.exchange.require_equal(step)
        check.boolean("frozen", frozen)
        check.boolean("wait", wait)
        check.one_of("only", only, (None, "model"))
        self.wait_for_save()
        begun_s = time.perf_counter()
        write = checkpoints.save(
            directory, steps, extra, keep, frozen=frozen, copy=not wait, only=only
        )
        if wait:
            path = write(steps.savers)
        else:
            path = next_folder(Path(directory), steps.position())
            self._background_save.begin(steps.savers, write)
        steps.exchange.pace.exclude(time.perf_counter() - begun_s)
        return path

    def publish(self, where: Where, *, updates: int = 1, **how: Any) -> EnginePublisher:
        """Publish the model to `thinwire.follow` from now on: after each averaging of local
        updates, as it left the parameters, else after every so many updates. A thread of rank 0
        writes; among members the first one of an averaging, so that the next one takes over.

        A version is left out while others are late; the next one has its changes. A failure is a
        warning here, and an error of `close`. At one bit without outer momentum parameters are
        float32: an entry then changes by one of few values, which takes fewer bits.

        Args:
            where: Folder or address, as in `thinwire.publish`.
            updates: Updates between two versions, without local updates.
            how: Further arguments of `thinwire.publish`.

        Returns:
            A handle, whose `wait` waits for the version in progress. `engine.close` publishes the
            last state and ends the loops of followers.

        Raises:
            StreamError: The storage does not answer, or has versions of another model.
            ValueError: Members publish into a folder without `shared=True`.
        """
        self._require_works("publish")
        if self._publisher is not None and not self._publisher.closed:
            raise RuntimeError("this engine publishes already: close the handle of the first call")
        self._publisher = publisher = EnginePublisher(self._steps, where, updates, how)
        self._steps.publish = publisher.after_update
        self._steps.undo.callback(publisher.abandon)
        return publisher

    def wait_for_save(self) -> Path | None:
        """Wait until the checkpoint of `save(..., wait=False)` is complete; on all ranks.

        Example::

            engine.save("checkpoints", wait=False)
            loss = engine.train_step(inputs, targets)
            folder = engine.wait_for_save()

        Returns:
            The folder of the checkpoint; None if no save was in progress.

        Raises:
            CheckpointError: A rank could not write it.
        """
        return self._background_save.finish()

    def load(
        self, directory: str | Path, if_any: bool = False, *, step: int | None = None
    ) -> Path | None:
        """Resume from the newest whole checkpoint in `directory`. It may be one of another number
        of ranks.

        With the same number of ranks training continues bit for bit. With another number every rank
        gets the mean of the ranks' floating-point state, which keeps the pending update. All ranks
        take rank 0's `extra` and extra state of modules, and the smallest loss scale. If ranks
        dropped local steps independently, all take rank 0's counts (updates, dropped steps, steps
        of the optimizer's state).

        Settings on which no state depends (intervals, sparsity, clipping, ...) may differ from the
        checkpoint's. This engine's settings count, and the log of `thinwire` lists the changes.
        Parameters and groups of the optimizer are matched by name and may be in another order.

        A buffer registered with persistent=False, such as a cache, keeps its value in this model if
        it is missing on one side or has another shape. A line in the log names it.

        Schedulers of torch that drive `engine.optimizer` resume if they exist already: make them
        before this call. If a rank cannot load its part, nothing changes on any rank.

        Example::

            folder = engine.load("checkpoints", if_any=True)
            if folder is not None:
                sampler.load_state_dict(engine.extra["sampler"])

        Args:
            directory: The argument of `save`.
            if_any: True if None is returned when there is no checkpoint yet, as at the first start
                of a run.
            step: Step of the checkpoint, as in the name of its folder; None for the newest.

        Members at the start of a new run all load the same checkpoint. A joiner already has the
        state of the others and loads nothing: with `if_any` it gets None.

        Returns:
            The folder that was loaded. `engine.extra` then holds the argument of `save`, with
            `state_dict()` in place of objects: `sampler.load_state_dict(engine.extra["sampler"])`.

        Warns:
            UserWarning: A later checkpoint is damaged. Or a scheduler or a module's extra state is
                missing on one side.

        Raises:
            RuntimeError: This member already has the state of the others, and `if_any` is false.
            CheckpointMissing: There is no checkpoint, not even a damaged one.
            CheckpointMismatch: The checkpoint belongs to another strategy, model or optimizer;
                names all differences. Or there are checkpoints, but none of `step`.
            CheckpointCorrupt: All checkpoints are damaged.
            CheckpointError: Any other failure; base class of these three.
        """
        self._require_open()
        check.boolean("if_any", if_any)
        step = None if step is None else check.integer("step", step, at_least=0)
        if not self._steps.group.static_membership and self._steps.position():
            reason = (
                f"this member already has the state of the others, at step {self._steps.position()}"
            )
            if not if_any:
                raise RuntimeError(
                    f"{reason}: load at the start of a run only, or pass if_any=True"
                )
            _log.info("%s: nothing is loaded", reason)
            return None
        try:
            path, restored = checkpoints.load(directory, self._steps, step)
        except CheckpointMissing:
            if not if_any:
                raise
            self.extra = None
            _log.info("no checkpoint in %s yet: training starts from the beginning", directory)
            return None
        self._continue(restored)
        return path

    def load_parameters(self, source: str | Path, *, torch_checkpoint: bool = False) -> Path:
        """Load only the parameters and buffers of the newest whole checkpoint, to start a new run
        from them.

        Use it for a checkpoint of another strategy or optimizer, which `load` refuses. If ranks
        saved different values, all get the mean. Momentum, residuals, counters, schedules and
        `extra` stay those of this engine. Other formats are read too: a safetensors file with the
        names of `model.state_dict()`, as `thinwire export` writes it, or torch's own format with
        the model at the top or under "model". Each rank takes its own rows if the model is sharded.

        Example::

            engine.load_parameters("pretrained.safetensors")

        Args:
            source: The argument of `save`, or such a file or folder.
            torch_checkpoint: Read `source` as a folder of `torch.distributed.checkpoint`, or as a
                file of `torch.save`. Such a folder is unpickled, which runs the code in it: load
                only files that you trust. Refused for folders that `save` has written.

        Returns:
            The folder or file that was read.

        Raises:
            RuntimeError: This engine has made updates.
            CheckpointMissing, CheckpointMismatch, CheckpointCorrupt: As in `load`; nothing has
                changed.
            CheckpointError: The format is torch's, and `torch_checkpoint` is false. Or a file of
                another format is not the same on all ranks.
        """
        self._require_open()
        check.boolean("torch_checkpoint", torch_checkpoint)
        if self._steps.position():
            raise RuntimeError(
                f"this engine has made {self._steps.position()} updates, and their momentum and "
                "residuals belong to other parameters: call load_parameters right after prepare"
            )
        path = Path(source)
        if torch_checkpoint or path.suffix == ".safetensors":
            return load_model_file(path, self._steps)
        return checkpoints.load_parameters(path, self._steps)

    def close(self) -> None:
        """Remove all hooks from the model and the optimizer, for good. May be called twice.

        The optimizer may be stepped by hand again, or be given to another engine. It stays a `Lars`
        or `Lamb`, or under a pipeline an optimizer of this stage. Under `dgc` an SGD keeps momentum
        and residuals in its `state`, and a new engine with the same fields continues with them.
        """
        try:
            if self._publisher is not None:
                self._publisher.close()
        finally:
            self._finalizer()
            self._background_save.close()

    def _continue(self, restored: Mapping[str, Any]) -> None:
        self._steps.count_from(restored)
        self.extra = restored["extra"]

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this engine was closed: prepare a new one")

    def _require_works(self, call: str) -> None:
        self._require_open()
        if (why := self._steps.refusals.get(call)) is not None:
            raise RuntimeError(f"engine.{call} does not work {why}")
