"""The microstep after the forward pass: backward pass, merge, exchange, update."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire._wording import warn_user
from thinwire.comm import long_waits_logged, state_in_errors
from thinwire.comm.group import collective_calls
from thinwire.compress.dense import not_finite
from thinwire.compress.residuals import Grads
from thinwire.core.several import all_of
from thinwire.core.sharded import is_sharded, shard_of, sharded_like
from thinwire.core.tensors import require_loss, state_dtype, with_own_storage
from thinwire.errors import Mismatch, PeerLost, PeerStalled, ThinwireError
from thinwire.exchange.agreement import StepDecision
from thinwire.exchange.synchronizer import COUNTED
from thinwire.local.steps import require_tokens
from thinwire.local.updates import LocalUpdates, count_tokens, counts, make_step, open_averager
from thinwire.optim.common import CommonOptimizer
from thinwire.strategy.engine_checks import Joining
from thinwire.strategy.ownership import allow_step, params_of
from thinwire.strategy.parts import Parts
from thinwire.strategy.publishing import EnginePublisher

_log = logging.getLogger("thinwire")


class Microsteps:
    """Runs the microsteps of an engine, each from its loss, and the updates at the end of some of
    them.

    `minimize` runs the backward pass, in which the exchange may begin. `finish` takes the gradients
    and merges them, or calls `update`. `update` exchanges and steps the optimizer.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts, self.sync = parts, parts.sync
        self.exchange, self.pace = parts.exchange, parts.exchange.pace
        self.step = self._updates_here = 0
        """Updates made by this rank. Without local updates the same on all ranks."""
        self._uncounted: dict[str, float] = dict.fromkeys(
            (*COUNTED, "bytes_between_stages", "dropped_steps"), 0
        )
        """What neither the exchange nor a vote counts: earlier runs, and drops by a loss scale."""
        self.tokens: int | None = None
        """Tokens of the present microstep."""
        self._awaited = False
        """True while other ranks wait for this one, from a microstep's start to its exchange."""
        self.joining: Joining | None = None
        """The votes inside `Engine.join`; None outside."""
        # a loss scale has checked the gradients; clipping waits for other stages and shards
        self.sharded = any(map(is_sharded, parts.params.values()))
        whole = parts.runner is None and not self.sharded
        self._drops_alone = whole and parts.scaler is None
        self._plan_warning: str | None = None
        self.last_loss: Tensor | None = None
        self.publisher: EnginePublisher | None = None

    @property
    def merging(self) -> bool:
        """True if the present microstep is merged, and no update follows it."""
        parts, local = self.parts, self.parts.averager
        steps = parts.merge_steps if local is None else local.when.microbatches
        return parts.merge.microsteps + 1 < steps

    def position(self) -> int:
        """Return updates, or local steps with dropped ones: the same on all ranks."""
        return self.step if self.sync is None else self.sync.step

    @property
    def by_time(self) -> LocalUpdates | None:
        """The local updates if their rounds end by time, so that steps are unequal; else None."""
        return self.sync if self.sync is not None and self.sync.config.by_time else None

    def counters(self) -> dict[str, float]:
        """Return the counters of this rank, earlier runs included."""
        runner, found = self.parts.runner, self.exchange.counted()
        found["bytes_between_stages"] = 0 if runner is None else runner.bytes_sent
        found["dropped_steps"] = self.exchange.drops.total
        for part in self.parts.votes():
            found["bytes_sent"] += part.bytes_sent
            found["bytes_received"] += part.bytes_received
            found["bytes_between_nodes"] += 0 if self.sharded else part.bytes_sent
            found["wait_s"] += part.wait_s
        counted = {name: value + self._uncounted[name] for name, value in found.items()}
        return {"step": self.step, **counted}

    def events(self) -> int:
        """Return the averagings that were applied here, or without local updates the updates. A
        state that is loaded changes nothing.
        """
        averager = self.parts.averager
        return self._updates_here if averager is None else averager.applied

    def count_from(self, counters: Mapping[str, float]) -> None:
        """Continue the counters of an earlier run."""
        self.step = int(counters["step"])
        for name, value in self.counters().items():
            if name != "step":
                self._uncounted[name] += counters[name] - value

    def waited_s(self) -> float:
        """Seconds for which other ranks blocked this one, in this process."""
        return self.exchange.waited_s + sum(part.wait_s for part in self.parts.votes())

    def counts(self) -> dict[str, Any]:
        """Return what this rank counts and measures, by names of `stats`."""
        counters = self.counters() | self.parts.clip.counts(self.parts.params.values())
        if self.sync is not None:
            return counts(self.sync) | counters
        goodput = self.pace.goodput(self.step, int(counters["dropped_steps"]))
        parts = self.parts
        found = {"sparsity": parts.unsent_share(self.step), "merge_steps": parts.merge_steps}
        return self.exchange.traffic() | found | goodput | counters

    def idle_locally(self) -> None:
        """Take part in local updates as a rank without a batch, while others have one."""
        if (uneven := self.by_time) is not None:
            uneven.end_round()
            if self.joining is not None:
                self.joining.due = uneven.synced
            return
        self.clear_grads()
        with self.with_advice(), self.parts.group.one_deadline():
            self._add_or_update({}, 1.0, overflow=False)

    def idle(self) -> StepDecision:
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

    def refuse(self, problem: str, *, early: bool = False) -> NoReturn:
        """Raise a user error on all ranks: others wait for this one, now or at an averaging."""
        if early:
            self.clear_grads()
        if self.sync is not None:
            with self.with_advice():
                open_averager(self.sync).refuse(problem)
        elif self.parts.runner is None:
            with self.parts.replica.as_prepared(), self._exchanging(early=early):
                self.update({}, overflow=False, user_error=problem)
        raise RuntimeError(problem)  # stages report it by themselves

    def _require_unchanged(self, *, early: bool) -> None:
        gradients = self.parts.gradients
        # all at once while gradients are not steady, as after a parameter was replaced
        every = gradients is not None and gradients.steady is None
        if (problem := self.parts.replica.changed(every=every)) is not None:
            self.refuse(problem, early=early)

    @contextlib.contextmanager
    def with_advice(self) -> Iterator[None]:
        """Add advice to errors of the exchanges in the block, and log long waits."""
        try:
            with long_waits_logged(f"step {self.step}", self.waited_s):
                yield
        except (PeerLost, PeerStalled, Mismatch) as error:
            if self.joining is None:
                error.add_note(
                    "If ranks have unequal numbers of batches, train inside `with "
                    "engine.join():`, or give all ranks equally many."
                )
            raise

    def clear_grads(self) -> None:
        """Clear gradients, as `zero_grad()` does."""
        for param in self.parts.params.values():
            param.grad = None
        # also of frozen ones, as zero_grad() does: the optimizer would keep updating from them
        for trained in params_of(self.parts.optimizer):
            trained.grad = None

    def begin(self, tokens: int | None, *, early: bool) -> None:
        """Begin a microstep; `early` if its exchange may begin in the backward pass."""
        if tokens is not None:
            require_tokens(tokens, None if self.sync is None else self.sync.config)
        self.tokens = tokens
        self._require_unchanged(early=early)
        if self.joining is not None and self.joining.due and self.sync is not None:
            self.joining.vote(active=True)
        if early:
            self.parts.replica.warn_of_edits()

    def apply(self, loss: Tensor | None, tokens: int | None = None) -> None:
        """Run one microstep from the gradients in `p.grad`."""
        self.begin(tokens, early=False)
        # no hook launches any more, and no vote is needed before all is sent
        with self._exchanging(early=not self.merging):
            self.finish(loss)
        self.after_step()

    def minimize(self, compute: Callable[[], Tensor]) -> Tensor:
        """Run one microstep from a loss with one element, which is returned."""
        scaler = self.parts.scaler
        # the block encloses the update too: buckets launched in the backward pass arrive there
        with self._exchanging(early=not self.merging):
            require_loss(loss := compute(), trains=True)
            self.clear_grads()
            scaled = loss if scaler is None else scaler.scaled(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
            self.finish(loss.detach())
        self.after_step()
        return loss

    @contextlib.contextmanager
    def _exchanging(self, *, early: bool) -> Iterator[None]:
        """Enclose a microstep; if it is `early`, its exchange may begin in the backward pass.

        An error before the exchange is reported in it.
        """
        parts = self.parts
        overlap = parts.overlap if early and parts.batches.all_have else None
        self._awaited = not self.merging
        with self.with_advice(), parts.group.one_deadline():
            if overlap is not None:
                overlap.begin(self.step, self._final)
            try:
                yield
            except BaseException as error:
                if self._awaited:
                    self._tell(error)
                raise
            finally:
                if overlap is not None:
                    overlap.end()

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error here, for they wait for this rank in the exchange.

        Where they cannot be told they see this rank as lost, or stalled.
        """
        parts, gradients, overlap = self.parts, self.parts.gradients, self.parts.overlap
        if gradients is None or gradients.group.size == 1:
            return
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

    def finish(self, loss: Tensor | None) -> None:
        """Finish one microstep after its backward pass. `loss` may be None."""
        parts = self.parts
        # torch's schedulers must see a call of the optimizer, whether this microstep updates,
        # merges or is dropped
        for optimizer in all_of(parts.optimizer):
            vars(optimizer)["_opt_called"] = True
        self.last_loss = loss
        if parts.overlap is not None:
            parts.overlap.stop()
        if self.sync is not None:
            if loss is not None:
                self.sync.observe(loss)
            if self.tokens is not None:
                count_tokens(self.sync, self.tokens)
        held = {n: shard_of(p.grad) for n, p in parts.params.items() if p.grad is not None}
        scaler = parts.scaler
        overflow = scaler is not None and scaler.overflowed(held.values())
        factor = 1.0 if scaler is None else scaler.inverse_scale
        self._add_or_update(held, factor, overflow=overflow)

    def _add_or_update(
        self, held: dict[str, Tensor], factor: float, *, overflow: bool
    ) -> StepDecision:
        """Merge the gradients of one microstep, or update from them."""
        parts, merge = self.parts, self.parts.merge
        if self.merging:
            merge.add(held, factor)
            merge.overflowed = merge.overflowed or overflow
            if factor != 1.0:
                for param in map(parts.params.__getitem__, held):
                    assert param.grad is not None
                    param.grad = param.grad * factor
            return StepDecision.APPLY
        if merge.microsteps:
            grads = merge.completed_(held, factor, parts.merge_avg)
        else:
            grads = _unscaled(parts.params, held, factor)
        return self.update(grads, overflow=overflow or merge.overflowed)

    def update(
        self,
        grads: dict[str, Tensor],
        *,
        overflow: bool,
        complete: bool = False,
        user_error: str | None = None,
    ) -> StepDecision:
        """Run one update from this rank's unscaled gradients; none if a rank has an overflow.

        `complete`: gradients that this rank lacks and another has count as zero, as on ranks
        without batches.
        """
        parts, gradients = self.parts, self.parts.gradients
        if gradients is None:
            self._update_here(grads, overflow=overflow)
            return StepDecision.APPLY
        scaler, overlap = parts.scaler, parts.overlap
        how: dict[str, Any] = {
            "overflow": overflow if scaler is not None and scaler.checks else None,
            "complete": complete or parts.find_unused or not parts.batches.has_batch,
            "user_error": user_error,
        }
        # launched buckets may differ from these gradients: the vote decides if they are sent again
        if overlap is not None and overlap.begun:
            how |= {"unusable": overlap.unusable, "at_once": True}
        limited, self._awaited = self._limited(grads), False
        verdict = gradients.update(self.step, limited, self._apply, **how)
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

    def _update_here(self, grads: dict[str, Tensor], *, overflow: bool) -> None:
        """Run a local step, or skip it for an overflow of the ranks that share the loss scale."""
        sync, scaler = self.sync, self.parts.scaler
        assert sync is not None, "ranks train locally"
        if grads and scaler is not None:
            overflow = scaler.checks and scaler.agree(overflow)
            # first, since local updates may send the new scale to other ranks in this step
            scaler.update(overflow)
        if grads and overflow:
            _log.info("step %d was dropped for an overflow", self.step)
            self._uncounted["dropped_steps"] += 1
        if not grads or overflow or self._drops_here(sync, grads):
            self.forget_merged()
            sync.skip_step()  # it counts towards the next averaging
        else:
            make_step(sync, partial(self._step_here, self._limited(grads)))
        if self.joining is not None:
            self.joining.due = sync.synced

    def _drops_here(self, sync: LocalUpdates, grads: Grads) -> bool:
        """Count this local step as dropped if a gradient is not finite, where ranks check that."""
        culprit = next(iter(not_finite(grads)), None) if self._drops_alone else None
        if culprit is not None:
            self.exchange.drops.dropped_here(sync.step + 1, culprit)
        elif self._drops_alone:
            self.exchange.drops.applied()
        return culprit is not None

    def _limited(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clip this rank's gradients before they are compressed."""
        parts = self.parts
        step = self.step if self.sync is None else self.sync.step
        return grads if parts.limit is None else parts.limit(parts.ramp_step(step), grads)

    def _step_here(self, grads: dict[str, Tensor]) -> None:
        """Make a local step. An averaging that follows, and may fail, does not undo it."""
        self._step_optimizers(self.parts.clip(grads, []))
        self.step += 1
        self.forget_merged()

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
            _set_grad(self.parts.params[name], grad)
        return exchanging

    def _step_optimizers(self, grads: Grads) -> torch.optim.Optimizer | None:
        """Run one step from `grads`, which replace `p.grad`. Wide gradients stay wide if possible.

        Return the optimizer from another library that made collective calls in it, if any.
        """
        params, optimizer, wide = self.parts.params, self.parts.optimizer, False
        for name, param in params.items():
            param.grad = None
            if name in grads:
                _set_grad(param, grads[name])
                wide |= grads[name].dtype != param.dtype
        exchanging: torch.optim.Optimizer | None = None
        with allow_step(optimizer):
            for single in all_of(optimizer):
                # optimizers of this library exchange norms and matrices of shards; others show
                # in their first steps whether they exchange
                ours = isinstance(single, CommonOptimizer) or self._updates_here > _WATCHED
                calls = 0 if ours else collective_calls()
                if wide and isinstance(single, CommonOptimizer):
                    own = {p for group in single.param_groups for p in group["params"]}
                    pairs = ((params[name], grad) for name, grad in grads.items())
                    single.apply_gradients([(p, sharded_like(g, p)) for p, g in pairs if p in own])
                else:
                    single.step()
                if not ours and collective_calls() > calls:
                    exchanging = single
        return exchanging

    def _end_round(self) -> None:
        compression, rate = self.parts.compression, self.exchange.sources.rate_bit_s
        compare = self.step > (1 if compression is None else compression.settled_step)
        warning = self.pace.round(
            self.parts.merge_steps, time.perf_counter(), self.waited_s(), rate, compare=compare
        )
        self._plan_warning = warning or self._plan_warning

    def after_step(self) -> None:
        """Publish what is due, and warn of a run that left its plan, at the engine's caller."""
        self.parts.replica.record_gradients()
        if self.publisher is not None:
            self.publisher.after_update()
        if self._plan_warning is not None:
            warning, self._plan_warning = self._plan_warning, None
            warn_user(warning)

    def forget_merged(self) -> None:
        """Clear the merge, after its update was made or dropped."""
        if self.parts.merge.microsteps:
            self.parts.merge.clear()


_WATCHED = 8
"""Updates in which an optimizer of another library is watched."""
_AFTER_EXCHANGE = (
    "The gradients had already been exchanged: the sent values have left this rank's residuals, "
    "but no parameter has changed"
)
_UPDATE_MADE = (
    "This rank has made the update before this error: parameters, optimizer and counters are "
    "updated, but the buffers are not yet equal on all ranks"
)


def _unscaled(
    params: Mapping[str, Parameter], grads: Mapping[str, Tensor], factor: float
) -> dict[str, Tensor]:
    """Return the gradients times `factor`; narrow ones in float32, so that nothing underflows."""
    if factor == 1.0:
        return dict(grads)
    new, owned = {}, with_own_storage(grads)
    for name, grad in grads.items():
        wide = grad.to(state_dtype(grad))
        new[name] = wide.mul_(factor) if wide is grad and name in owned else wide * factor
        params[name].grad = sharded_like(new[name].to(grad.dtype), params[name])
    return new


def _set_grad(param: Tensor, grad: Tensor) -> None:
    shard = shard_of(param)
    if grad.is_sparse:
        grad = grad.to(shard.dtype)
    elif grad.dtype != shard.dtype or grad.stride() != shard.stride():
        # fused kernels need equal strides
        grad = torch.empty_like(shard, requires_grad=False).copy_(grad)
    param.grad = sharded_like(grad, param)
