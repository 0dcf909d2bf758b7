"""The two ways to update: with an exchange in each step, or on each rank between averagings."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.comm import state_in_errors
from thinwire.compress.dense import not_finite
from thinwire.compress.protocol import Compression
from thinwire.compress.quantized_change import Quantized
from thinwire.compress.residuals import Grads
from thinwire.core.sharded import sharded_like
from thinwire.core.tensors import state_dtype
from thinwire.errors import ThinwireError
from thinwire.exchange.agreement import StepDecision
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.overlap import Overlap
from thinwire.local import saving
from thinwire.local.averager import Averager
from thinwire.local.steps import require_tokens
from thinwire.local.updates import LocalUpdates, count_tokens, counts, make_step, open_averager
from thinwire.optim.folded import FoldedSGD
from thinwire.strategy.engine_checks import Batches, Joining, MovingBuffers
from thinwire.strategy.microsteps import Microsteps, set_grad

_log = logging.getLogger("thinwire")
_AFTER_EXCHANGE = (
    "The gradients had already been exchanged: the sent values have left this rank's residuals, "
    "but no parameter has changed"
)
_UPDATE_MADE = (
    "This rank has made the update before this error: parameters, optimizer and counters are "
    "updated, but the buffers are not yet equal on all ranks"
)


@dataclass(kw_only=True, eq=False)
class EveryStep(Microsteps):
    """Updates whose gradients are exchanged; the exchange may begin in the backward pass."""

    exchange: GradientExchange
    joining: Batches
    compression: Compression
    """Compression of gradients; `Dense` if the exchange compresses no tensor."""
    settled_step: int
    """Step from which on messages have their final length."""
    momentum: FoldedSGD | None
    """Momentum of an SGD that the compression keeps, if it does."""
    buffers: MovingBuffers
    find_unused: bool
    """True if gradients that this rank lacks count as zero in every update."""
    overlap: Overlap | None = None
    """Begins the exchange during the backward pass; None if the exchange follows it."""
    # without annotations: the same for every object
    unsynced = False
    in_lockstep = flush_compares_steps = True
    local = None
    _awaited: bool = False
    """True while other ranks wait for this one, from a microstep's start to its exchange."""

    @property
    def merging(self) -> bool:
        """See `Microsteps`."""
        return self.merge.microsteps + 1 < self.merge_steps

    @property
    def rides(self) -> bool:
        """True if ranks compare the sums of an update in the next one."""
        return self.exchange.rides

    def saved_exchange(self) -> dict[str, Any]:
        """Return this rank's state that later updates depend on, without the optimizer's: live."""
        return self.exchange.state_dict()

    def load_exchange(self, state: Mapping[str, Any]) -> None:
        """Continue from `saved_exchange`. Everything is checked before anything changes."""
        self.exchange.load_state_dict(state)

    def buffers_loaded(self, *, alike: bool) -> None:
        """Note that buffers were loaded; `alike`: ranks have the same ones."""
        # buffers that a merge has changed on each rank are made equal by its update
        self.buffers.forget(equal=not self.merge.microsteps, alike=alike)

    start_anew = buffers_loaded

    def shared(self, name: str, tensor: Tensor) -> Tensor:
        """Return what all ranks have in common of a tensor of the model."""
        return tensor

    def publishes_every(self, updates: int) -> int:
        """Return the events between two versions."""
        return check.integer("updates", updates, at_least=1)

    def ramp_step(self) -> int:
        """Return the updates that a ramp of the compression counts."""
        return self.step if self.momentum is None else self.momentum.position()

    def position(self) -> int:
        """Return the updates."""
        return self.step

    def events(self) -> int:
        """Return the updates, or the averagings, that were applied here."""
        return self.updates_here

    def counts(self) -> dict[str, Any]:
        """Return what this rank counts and measures, by names of `stats`."""
        counters = self.counters()
        found = {
            "sparsity": self.compression.unsent_share(self.ramp_step()),
            "merge_steps": self.merge_steps,
            **counters,
        }
        found |= self.exchange.pace.goodput(self.step, int(counters["dropped_steps"]))
        return self.exchange.traffic() | found | self.clip.counts(self.params.values())

    def refuse(self, problem: str, *, early: bool = False) -> NoReturn:
        """See `Microsteps`."""
        if self.is_whole or self.sharded:
            with self.replica.as_prepared(), self._exchanging(early=early):
                self.update({}, overflow=False, user_error=problem)
        raise RuntimeError(problem)  # stages report it by themselves

    def idle(self) -> None:
        """Take part in the steps of the others as a rank without batches, until none has any."""
        self.joining.has_batch = False
        merge = self.merge
        verdict = None
        while verdict is not StepDecision.END:  # an update of the others, with what is merged here
            self._require_unchanged(early=True)
            self.clear_grads()
            self.joining.merged = merge.microsteps
            merge.microsteps = self.merge_steps - 1
            with self._exchanging(early=True):  # no backward pass, so no hook launches
                verdict = self.add_or_update({}, 1.0, False)
        merge.microsteps = self.joining.merged

    def end(self) -> None:
        """Make what must be equal on all ranks equal, at the end of a flush."""
        self.buffers.synchronize()

    def _require_unchanged(self, *, early: bool, every: bool = False) -> None:
        # all at once while gradients are not steady, as after a parameter was replaced
        super()._require_unchanged(early=early, every=self.exchange.steady is None)

    def _begin(self, tokens: int | None) -> None:
        if tokens is not None:
            require_tokens(tokens, None)

    def _observe(self, loss: Tensor | None) -> None:
        if self.overlap is not None:
            self.overlap.stop()

    @contextlib.contextmanager
    def _exchanging(self, *, early: bool) -> Iterator[None]:
        """See `Microsteps`. An error before the exchange is reported in it."""
        overlap = self.overlap if early and self.joining.all_have else None
        self._awaited = not self.merging
        with self.with_advice(), self.group.one_deadline():
            if overlap is not None:
                overlap.begin(self.step, self._final)
            try:
                yield
            except BaseException as error:
                if self._awaited and self.exchange.group.size > 1:
                    self._tell(error)
                raise
            finally:
                if overlap is not None:
                    overlap.end()

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error here, for they wait for this rank in the exchange.

        Where they cannot be told they see this rank as lost, or stalled.
        """
        gradients = self.exchange
        overlap = self.overlap
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
            at_once = overlap is not None and self.joining.all_have and overlap.applies
            gradients.exchange(self.step, {}, user_error=text, at_once=at_once)
        except ThinwireError as reported:
            if type(reported) is not ThinwireError:  # raised on all ranks by this report itself
                error.add_note(f"while reporting it to the other ranks: {reported}")
        except Exception as other:
            error.add_note(f"while reporting it to the other ranks: {other}")
            gradients.abandon(text)

    def _final(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Return what `p.grad` contributes to the coming update: itself, or a new tensor."""
        factor = 1.0 if self.scaler is None else self.scaler.inverse_scale
        if self.merge.microsteps:
            return self.merge.preview(name, grad, factor, self.merge_avg)
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
        scaler = self.scaler
        overlap = self.overlap
        how: dict[str, Any] = {
            "overflow": overflow if scaler is not None and scaler.checks else None,
            "complete": complete or self.find_unused or not self.joining.has_batch,
            "user_error": user_error,
        }
        # launched buckets may differ from these gradients: the vote decides if they are sent again
        if overlap is not None and overlap.begun:
            how |= {"unusable": overlap.unusable, "at_once": True}
        limited = self._limited(self.ramp_step(), grads)
        self._awaited = False
        verdict = self.exchange.update(self.step, limited, self._apply, **how)
        if verdict is StepDecision.END:
            return verdict
        self.step += verdict is StepDecision.APPLY
        self.updates_here += verdict is StepDecision.APPLY
        if verdict is StepDecision.OVERFLOW:
            _log.info("step %d was dropped for an overflow", self.step)
        if scaler is not None:
            scaler.update(verdict is StepDecision.OVERFLOW)
        self.merge.clear()
        with state_in_errors(_UPDATE_MADE):
            self.buffers.copy_()
        self._end_round()
        return verdict

    def _apply(
        self, means: dict[str, Tensor], own: Grads, norms: Sequence[float]
    ) -> torch.optim.Optimizer | None:
        """See `thinwire.exchange.gradients.Apply`."""
        self.merge.clear()  # other ranks may have made the update
        with state_in_errors(_AFTER_EXCHANGE):
            clipped = self.clip(means, norms)
        exchanging = self._step_optimizers(clipped)
        if self.momentum is not None:
            self.momentum.count_()
        for name, grad in own.items():
            set_grad(self.params[name], grad)
        return exchanging

    def _end_round(self) -> None:
        exchange = self.exchange
        warning = exchange.pace.round(
            self.merge_steps,
            time.perf_counter(),
            self.waited_s(),
            exchange.sources.rate_bit_s,
            compare=self.step > self.settled_step,
        )
        self.plan_warning = warning or self.plan_warning


@dataclass(kw_only=True, eq=False)
class LocalStep(Microsteps):
    """Updates on this rank alone, each of which counts towards the next averaging."""

    exchange: Averager
    joining: Joining
    local: LocalUpdates
    rides = False
    _tokens: int | None = None
    """Tokens of the present microstep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local.on_return = self._vote_with_others

    def _vote_with_others(self) -> None:
        """Take part in the vote of `join` that the others make where this member has entered."""
        now = self.local.synced or not self.local.config.delay
        self.joining.due = self.joining.inside and now

    @property
    def merging(self) -> bool:
        """See `Microsteps`."""
        return self.merge.microsteps + 1 < self.exchange.when.microbatches

    @property
    def flush_compares_steps(self) -> bool:
        """True if nothing in a flush but the engine compares the ranks' steps."""
        return self.in_lockstep and self.merge_steps > 1 and self.group.static_membership

    @property
    def in_lockstep(self) -> bool:
        """True if ranks make equal numbers of steps."""
        return not self.local.config.by_time

    @property
    def unsynced(self) -> bool:
        """True if an averaging is pending."""
        return self.exchange.when.unsynced

    def saved_exchange(self) -> dict[str, Any]:
        """See `EveryStep`."""
        return saving.saved(self.exchange, copy=False)

    def load_exchange(self, state: Mapping[str, Any]) -> None:
        """See `EveryStep`."""
        saving.load(state, open_averager(self.local))

    def buffers_loaded(self, *, alike: bool) -> None:
        """See `EveryStep`."""
        self.exchange.tensors.buffers_restored()

    def start_anew(self, *, alike: bool) -> None:
        """Discard what belongs to the values before; `alike`: ranks have the same buffers now."""
        self.local.start_anew()

    def shared(self, name: str, tensor: Tensor) -> Tensor:
        """See `EveryStep`: of a parameter it is the anchor."""
        config = self.local.config
        anchor = self.exchange.averaging.anchors.get(name)
        if anchor is None:
            return tensor
        if tensor.is_complex():
            anchor = torch.view_as_complex(anchor)
        changes = config.compression
        dtype = tensor.dtype
        one_bit = isinstance(changes, Quantized) and changes.value_bits == 1
        if one_bit and not config.outer_momentum:
            # an averaging changes an anchor by one of few values: fewer bits than rounded
            dtype = anchor.dtype
        return sharded_like(anchor.to(tensor.device, dtype), tensor)

    def publishes_every(self, updates: int) -> int:
        """See `EveryStep`."""
        return 1

    def position(self) -> int:
        """Return the local steps with dropped ones: the same on all ranks."""
        return self.local.step

    def events(self) -> int:
        """See `EveryStep`."""
        return self.exchange.applied

    def counts(self) -> dict[str, Any]:
        """See `EveryStep`."""
        return counts(self.local) | self.counters() | self.clip.counts(self.params.values())

    def refuse(self, problem: str, *, early: bool = False) -> NoReturn:
        """See `Microsteps`."""
        with self.with_advice():
            self.exchange.refuse(problem)
        raise RuntimeError(problem)

    def idle(self) -> None:
        """See `EveryStep`."""
        while not self.joining.due or self.joining.vote(active=False):
            with self._exchanging(early=False):
                if self.in_lockstep:
                    self.clear_grads()
                    self.add_or_update({}, 1.0, False)
                else:
                    self.local.end_round()
                    self.joining.due |= self.local.synced

    def end(self) -> None:
        """See `EveryStep`."""
        self.local.flush()

    def _begin(self, tokens: int | None) -> None:
        if tokens is not None:
            require_tokens(tokens, self.local.config)
        self._tokens = tokens
        if self.joining.due:
            self.joining.vote(active=True)

    def _observe(self, loss: Tensor | None) -> None:
        if loss is not None:
            self.local.observe(loss)
        if self._tokens is not None:
            count_tokens(self.local, self._tokens)

    @contextlib.contextmanager
    def _exchanging(self, *, early: bool) -> Iterator[None]:
        """See `Microsteps`."""
        with self.with_advice(), self.group.one_deadline():
            yield

    def update(
        self, grads: dict[str, Tensor], *, overflow: bool, complete: bool = False
    ) -> StepDecision:
        """Run a local step, or skip it for an overflow of the ranks that share the loss scale."""
        local = self.local
        scaler = self.scaler
        if grads and scaler is not None:
            overflow = scaler.checks and scaler.agree(overflow)
            # first, since local updates may send the new scale to other ranks in this step
            scaler.update(overflow)
        if grads and overflow:
            _log.info("step %d was dropped for an overflow", self.step)
            self._uncounted["dropped_steps"] += 1
        if not grads or overflow or self._drops(grads):
            self.merge.clear()
            local.skip_step()  # it counts towards the next averaging
        else:
            make_step(local, partial(self._step_here, self._limited(local.step, grads)))
        self.joining.due |= self.joining.inside and local.synced
        return StepDecision.APPLY

    def _drops(self, grads: Grads) -> bool:
        """Count this local step as dropped if a gradient is not finite, where ranks check that."""
        # a loss scale has checked the gradients; clipping waits for other stages and shards
        if not self.is_whole or self.scaler is not None:
            return False
        culprit = next(iter(not_finite(grads)), None)
        if culprit is None:
            self.exchange.drops.applied()
        else:
            self.exchange.drops.dropped_here(self.local.step + 1, culprit)
        return culprit is not None

    def _step_here(self, grads: dict[str, Tensor]) -> None:
        """Make a local step. An averaging that follows, and may fail, does not undo it."""
        self._step_optimizers(self.clip(grads, []))
        self.step += 1
        self.merge.clear()


Steps = EveryStep | LocalStep
