"""The two ways to update: with an exchange in each step, or on each rank between averagings."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from thinwire.comm import state_in_errors
from thinwire.compress.dense import not_finite
from thinwire.compress.residuals import Grads
from thinwire.core.tensors import state_dtype
from thinwire.errors import ThinwireError
from thinwire.exchange.agreement import StepDecision
from thinwire.exchange.gradients import GradientExchange
from thinwire.local.steps import require_tokens
from thinwire.local.updates import LocalUpdates, count_tokens, counts, make_step, open_averager
from thinwire.strategy.microsteps import Microsteps, set_grad
from thinwire.strategy.parts import Parts

_log = logging.getLogger("thinwire")
_AFTER_EXCHANGE = (
    "The gradients had already been exchanged: the sent values have left this rank's residuals, "
    "but no parameter has changed"
)
_UPDATE_MADE = (
    "This rank has made the update before this error: parameters, optimizer and counters are "
    "updated, but the buffers are not yet equal on all ranks"
)


class EveryStep(Microsteps):
    """Updates whose gradients are exchanged; the exchange may begin in the backward pass."""

    k_steps = 1
    left = False

    def __init__(self, parts: Parts, gradients: GradientExchange) -> None:
        super().__init__(parts)
        self._gradients = gradients
        self._awaited = False
        """True while other ranks wait for this one, from a microstep's start to its exchange."""

    @property
    def merging(self) -> bool:
        """See `Microsteps`."""
        return self.parts.merge.microsteps + 1 < self.parts.merge_steps

    @property
    def concludes(self) -> bool:
        """True if a step of a pipeline ends without an exchange that tells stages of errors."""
        return self.merging

    @property
    def flush_compares_steps(self) -> bool:
        """True if nothing in a flush but the engine compares the ranks' steps."""
        return True

    def position(self) -> int:
        """See `Microsteps`."""
        return self.step

    def events(self) -> int:
        """Return the updates, or the averagings, that were applied here."""
        return self._updates_here

    def counts(self) -> dict[str, Any]:
        """Return what this rank counts and measures, by names of `stats`."""
        counters, parts = self.counters(), self.parts
        found = {"sparsity": parts.unsent_share(self.step), "merge_steps": parts.merge_steps}
        found |= self.pace.goodput(self.step, int(counters["dropped_steps"])) | counters
        return self.exchange.traffic() | found | parts.clip.counts(parts.params.values())

    def refuse(self, problem: str, *, early: bool = False) -> NoReturn:
        """See `Microsteps`."""
        if early:
            self.clear_grads()
        if self.parts.runner is None:
            with self.parts.replica.as_prepared(), self._exchanging(early=early):
                self.update({}, overflow=False, user_error=problem)
        raise RuntimeError(problem)  # stages report it by themselves

    def idle(self) -> None:
        """Take part in the steps of the others as a rank without batches, until none has any."""
        self.parts.batches.has_batch = False
        while self._idle() is not StepDecision.END:
            pass

    def _idle(self) -> StepDecision:
        """Take part in the next update without a batch, with the gradients merged so far."""
        parts, merge = self.parts, self.parts.merge
        self._require_unchanged(early=True)
        self.clear_grads()
        parts.batches.merged, merge.microsteps = merge.microsteps, parts.merge_steps - 1
        with self._exchanging(early=True):  # no backward pass, so no hook launches
            verdict = self._add_or_update({}, 1.0, overflow=False)
        if verdict is StepDecision.END:
            merge.microsteps = parts.batches.merged
        return verdict

    def end(self) -> None:
        """Make what must be equal on all ranks equal, at the end of a flush."""
        self.parts.buffers.synchronize()

    def _require_unchanged(self, *, early: bool, every: bool = False) -> None:
        # all at once while gradients are not steady, as after a parameter was replaced
        super()._require_unchanged(early=early, every=self._gradients.steady is None)

    def _begin(self, tokens: int | None) -> None:
        if tokens is not None:
            require_tokens(tokens, None)

    def _observe(self, loss: Tensor | None) -> None:
        if self.parts.overlap is not None:
            self.parts.overlap.stop()

    @contextlib.contextmanager
    def _exchanging(self, *, early: bool) -> Iterator[None]:
        """See `Microsteps`. An error before the exchange is reported in it."""
        parts = self.parts
        overlap = parts.overlap if early and parts.batches.all_have else None
        self._awaited = not self.merging
        with self.with_advice(), parts.group.one_deadline():
            if overlap is not None:
                overlap.begin(self.step, self._final)
            try:
                yield
            except BaseException as error:
                if self._awaited and self._gradients.group.size > 1:
                    self._tell(error)
                raise
            finally:
                if overlap is not None:
                    overlap.end()

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error here, for they wait for this rank in the exchange.

        Where they cannot be told they see this rank as lost, or stalled.
        """
        parts, gradients, overlap = self.parts, self._gradients, self.parts.overlap
        text = f"its forward or backward pass ended with {type(error).__name__}: {error}"
        launching = overlap is not None and overlap.launching
        if launching or isinstance(error, ThinwireError) or not isinstance(error, Exception):
            if launching or gradients.in_flight:
                gradients.abandon(text)
            return
        # ranks of a site wait for each other in forward passes, where nothing can be said
        if self.sharded and not gradients.in_flight:
            return
        # the others may wait in a collective of the script, so say it here first
        _log.warning("step %d: %s; telling the other ranks", self.step, text)
        try:
            # as the others exchange at the end of this update
            at_once = overlap is not None and parts.batches.all_have and overlap.applies
            gradients.exchange(self.step, {}, user_error=text, at_once=at_once)
        except ThinwireError as reported:
            if type(reported) is not ThinwireError:  # raised on all ranks by this report itself
                error.add_note(f"while reporting it to the other ranks: {reported}")
        except Exception as other:
            error.add_note(f"while reporting it to the other ranks: {other}")
            gradients.abandon(text)

    def _final(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Return what `p.grad` contributes to the coming update: itself, or a new tensor."""
        parts = self.parts
        factor = 1.0 if parts.scaler is None else parts.scaler.inverse_scale
        if parts.merge.microsteps:
            return parts.merge.preview(name, grad, factor, parts.merge_avg)
        return grad if grad is None or factor == 1.0 else grad.to(state_dtype(grad)) * factor

    def update(
        self,
        grads: dict[str, Tensor],
        *,
        overflow: bool,
        complete: bool = False,
        user_error: str | None = None,
    ) -> StepDecision:
        """See `Microsteps`."""
        parts, scaler, overlap = self.parts, self.parts.scaler, self.parts.overlap
        how: dict[str, Any] = {
            "overflow": overflow if scaler is not None and scaler.checks else None,
            "complete": complete or parts.find_unused or not parts.batches.has_batch,
            "user_error": user_error,
        }
        # launched buckets may differ from these gradients: the vote decides if they are sent again
        if overlap is not None and overlap.begun:
            how |= {"unusable": overlap.unusable, "at_once": True}
        limited, self._awaited = self._limited(grads), False
        verdict = self._gradients.update(self.step, limited, self._apply, **how)
        if verdict is StepDecision.END:
            return verdict
        self.step += verdict is StepDecision.APPLY
        self._updates_here += verdict is StepDecision.APPLY
        if verdict is StepDecision.OVERFLOW:
            _log.info("step %d was dropped for an overflow", self.step)
        if scaler is not None:
            scaler.update(verdict is StepDecision.OVERFLOW)
        self.forget_merged()
        with state_in_errors(_UPDATE_MADE):
            parts.buffers.copy_()
        self._end_round()
        return verdict

    def _apply(
        self, means: dict[str, Tensor], own: Grads, norms: Sequence[float]
    ) -> torch.optim.Optimizer | None:
        """See `thinwire.exchange.gradients.Apply`."""
        self.forget_merged()  # other ranks may have made the update
        with state_in_errors(_AFTER_EXCHANGE):
            clipped = self.parts.clip(means, norms)
        exchanging = self._step_optimizers(clipped)
        if self.parts.momentum is not None:
            self.parts.momentum.count_()
        for name, grad in own.items():
            set_grad(self.parts.params[name], grad)
        return exchanging

    def _end_round(self) -> None:
        compression, rate = self.parts.compression, self.exchange.sources.rate_bit_s
        compare = self.step > (1 if compression is None else compression.settled_step)
        warning = self.pace.round(
            self.parts.merge_steps, time.perf_counter(), self.waited_s(), rate, compare=compare
        )
        self._plan_warning = warning or self._plan_warning


class LocalStep(Microsteps):
    """Updates on this rank alone, each of which counts towards the next averaging."""

    def __init__(self, parts: Parts, local: LocalUpdates) -> None:
        super().__init__(parts)
        self._local, self._averager = local, open_averager(local)
        self._tokens: int | None = None
        """Tokens of the present microstep."""
        # a loss scale has checked the gradients; clipping waits for other stages and shards
        whole = parts.runner is None and not self.sharded
        self._drops_alone = whole and parts.scaler is None

    @property
    def merging(self) -> bool:
        """See `Microsteps`."""
        return self.parts.merge.microsteps + 1 < self._averager.when.microbatches

    @property
    def k_steps(self) -> int:
        """Updates between two averagings."""
        return self._local.k_steps

    @property
    def left(self) -> bool:
        """True if this member has left the run."""
        return self._local.left

    @property
    def concludes(self) -> bool:
        """See `EveryStep`."""
        return True

    @property
    def flush_compares_steps(self) -> bool:
        """See `EveryStep`. By time ranks make unequal numbers of steps."""
        return not self._local.config.by_time and self.parts.merge_steps > 1

    def position(self) -> int:
        """See `Microsteps`."""
        return self._local.step

    def events(self) -> int:
        """See `EveryStep`."""
        return self._averager.applied

    def counts(self) -> dict[str, Any]:
        """See `EveryStep`."""
        clipped = self.parts.clip.counts(self.parts.params.values())
        return counts(self._local) | self.counters() | clipped

    def refuse(self, problem: str, *, early: bool = False) -> NoReturn:
        """See `Microsteps`."""
        if early:
            self.clear_grads()
        with self.with_advice():
            self._averager.refuse(problem)
        raise RuntimeError(problem)

    def idle(self) -> None:
        """See `EveryStep`."""
        assert self.joining is not None, "inside Engine.join"
        while not self.joining.due or self.joining.vote(active=False):
            if self._local.config.by_time:
                self._local.end_round()
                self.joining.due = self._local.synced
                continue
            self.clear_grads()
            with self._exchanging(early=False):
                self._add_or_update({}, 1.0, overflow=False)

    def end(self) -> None:
        """See `EveryStep`."""
        self._local.flush()

    def _begin(self, tokens: int | None) -> None:
        if tokens is not None:
            require_tokens(tokens, self._local.config)
        self._tokens = tokens
        if self.joining is not None and self.joining.due:
            self.joining.vote(active=True)

    def _observe(self, loss: Tensor | None) -> None:
        if loss is not None:
            self._local.observe(loss)
        if self._tokens is not None:
            count_tokens(self._local, self._tokens)

    @contextlib.contextmanager
    def _exchanging(self, *, early: bool) -> Iterator[None]:
        """See `Microsteps`."""
        with self.with_advice(), self.parts.group.one_deadline():
            yield

    def update(
        self, grads: dict[str, Tensor], *, overflow: bool, complete: bool = False
    ) -> StepDecision:
        """Run a local step, or skip it for an overflow of the ranks that share the loss scale."""
        local, scaler = self._local, self.parts.scaler
        if grads and scaler is not None:
            overflow = scaler.checks and scaler.agree(overflow)
            # first, since local updates may send the new scale to other ranks in this step
            scaler.update(overflow)
        if grads and overflow:
            _log.info("step %d was dropped for an overflow", self.step)
            self._uncounted["dropped_steps"] += 1
        if not grads or overflow or self._drops(grads):
            self.forget_merged()
            local.skip_step()  # it counts towards the next averaging
        else:
            make_step(local, partial(self._step_here, self._limited(grads)))
        if self.joining is not None:
            self.joining.due = local.synced
        return StepDecision.APPLY

    def _drops(self, grads: Grads) -> bool:
        """Count this local step as dropped if a gradient is not finite, where ranks check that."""
        culprit = next(iter(not_finite(grads)), None) if self._drops_alone else None
        if culprit is not None:
            self.exchange.drops.dropped_here(self._local.step + 1, culprit)
        elif self._drops_alone:
            self.exchange.drops.applied()
        return culprit is not None

    def _step_here(self, grads: dict[str, Tensor]) -> None:
        """Make a local step. An averaging that follows, and may fail, does not undo it."""
        self._step_optimizers(self.parts.clip(grads, []))
        self.step += 1
        self.forget_merged()


Steps = EveryStep | LocalStep
