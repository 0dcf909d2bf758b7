"""The microstep after the forward pass: backward pass, merge, exchange, update."""

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire._wording import warn_user
from thinwire.amp import LossScaler
from thinwire.comm import Group, long_waits_logged
from thinwire.comm.elastic import collective_calls
from thinwire.compress.protocol import Limit
from thinwire.compress.residuals import Grads
from thinwire.core.several import all_of
from thinwire.core.sharded import is_sharded, shard_of, sharded_like
from thinwire.core.tensors import require_loss, state_dtype, with_own_storage
from thinwire.errors import Mismatch, PeerLost, PeerStalled
from thinwire.exchange.agreement import StepDecision
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.replica import Replica
from thinwire.local.averager import Averager
from thinwire.members.members import Member
from thinwire.optim.common import CommonOptimizer
from thinwire.step.merge import GradientSum
from thinwire.strategy.clipping import Clipping
from thinwire.strategy.engine_checks import Batches, Joining
from thinwire.strategy.ownership import allow_step, params_of


@dataclass(kw_only=True, eq=False)
class Microsteps(ABC):
    """Runs the microsteps of an engine, each from its loss, and the updates at the end of some of
    them: exchanged in each step, or made on this rank between two averagings.

    `minimize` runs the backward pass, in which the exchange may begin. `add_or_update` merges the
    gradients, or calls `update`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    params: dict[str, Parameter]
    """Trained parameters of this rank, by the name in the whole model."""
    group: Group
    """All ranks."""
    part: int
    """Index of this rank's pipeline stage or shard; else 0."""
    is_whole: bool
    """True if this rank has a whole model."""
    member: Member | None
    scaler: LossScaler | None
    merge_steps: int
    """Microsteps of an update, as the strategy says."""
    merge_avg: bool
    undo: ExitStack
    """Undoes changes to model and optimizer."""
    clip: Clipping
    limit: Limit | None
    """Clips this rank's gradients before they are compressed."""
    replica: Replica
    facts: dict[str, Any]
    """Facts that a checkpoint must share with the engine that loads it."""
    refusals: Mapping[str, str]
    """Calls of the engine that do not work, with the reasons."""
    bytes_between_stages: Callable[[], int]
    exchange: Averager | GradientExchange
    joining: Batches | Joining
    """The votes inside `Engine.join`."""
    voters: Sequence[Group] = ()
    """Groups of what agrees over the ranks beside the exchange and the loss scale."""
    merge: GradientSum = field(default_factory=GradientSum)
    step: int = 0
    """Updates made by this rank. Without local updates the same on all ranks."""
    updates_here: int = 0
    last_loss: Tensor | None = None
    publish: Callable[[], None] | None = None
    """Publishes the model if that is due, after each microstep."""
    plan_warning: str | None = None

    def __post_init__(self) -> None:
        self.sharded = any(map(is_sharded, self.params.values()))
        self._uncounted: defaultdict[str, float] = defaultdict(int)
        """What neither the exchange nor a vote counts: earlier runs, and drops by a loss scale."""

    @property
    @abstractmethod
    def merging(self) -> bool:
        """True if the present microstep is merged, and no update follows it."""

    @abstractmethod
    def refuse(self, problem: str, *, early: bool = False) -> NoReturn:
        """Raise a user error on all ranks: others wait for this one, now or at an averaging."""

    @abstractmethod
    def update(
        self, grads: dict[str, Tensor], *, overflow: bool, complete: bool = False
    ) -> StepDecision:
        """Run one update from this rank's unscaled gradients; none if a rank has an overflow.

        `complete`: gradients that this rank lacks and another has count as zero, as on ranks
        without batches.
        """

    @abstractmethod
    def _exchanging(self, *, early: bool) -> AbstractContextManager[None]:
        """Enclose a microstep; if it is `early`, its exchange may begin in the backward pass."""

    @abstractmethod
    def _begin(self, tokens: int | None) -> None:
        """Begin a microstep."""

    @abstractmethod
    def _observe(self, loss: Tensor | None) -> None:
        """Note the loss of a microstep."""

    @property
    def savers(self) -> Group:
        """The ranks that write one checkpoint: all; with members a member alone, or its site."""
        if self.group.static_membership:
            return self.group
        return self.group.shards or self.group.node

    @property
    def _votes(self) -> list[Group]:
        scaler = None if self.scaler is None else self.scaler._group
        return [*self.voters, *([] if scaler is None else [scaler])]

    def counters(self) -> dict[str, float]:
        """Return the counters of this rank, earlier runs included."""
        found = self.exchange.counted()
        found["bytes_between_stages"] = self.bytes_between_stages()
        found["dropped_steps"] = self.exchange.drops.total
        for part in self._votes:
            found["bytes_sent"] += part.bytes_sent
            found["bytes_received"] += part.bytes_received
            found["bytes_between_nodes"] += 0 if self.sharded else part.bytes_sent
            found["wait_s"] += part.wait_s
        counted = {name: value + self._uncounted[name] for name, value in found.items()}
        return {"step": self.step, **counted}

    def count_from(self, counters: Mapping[str, float]) -> None:
        """Continue the counters of an earlier run."""
        self.step = int(counters["step"])
        for name, value in self.counters().items():
            if name != "step":
                self._uncounted[name] += counters[name] - value

    def waited_s(self) -> float:
        """Seconds for which other ranks blocked this one, in this process."""
        return self.exchange.waited_s + sum(part.wait_s for part in self._votes)

    @contextlib.contextmanager
    def with_advice(self) -> Iterator[None]:
        """Add advice to errors of the exchanges in the block, and log long waits."""
        try:
            with long_waits_logged(f"step {self.step}", self.waited_s):
                yield
        except (PeerLost, PeerStalled, Mismatch) as error:
            if not self.joining.inside:
                error.add_note(
                    "If ranks have unequal numbers of batches, train inside `with "
                    "engine.join():`, or give all ranks equally many."
                )
            raise

    def clear_grads(self) -> None:
        """Clear gradients, as `zero_grad()` does."""
        for param in self.params.values():
            param.grad = None
        # also of frozen ones, as zero_grad() does: the optimizer would keep updating from them
        for trained in params_of(self.optimizer):
            trained.grad = None

    def _require_unchanged(self, *, early: bool, every: bool = False) -> None:
        if (problem := self.replica.changed(every=every)) is not None:
            if early:
                self.clear_grads()
            self.refuse(problem, early=early)

    def begin(self, tokens: int | None, *, early: bool) -> None:
        """Begin a microstep; `early` if its exchange may begin in the backward pass."""
        self._require_unchanged(early=early)
        self._begin(tokens)
        if early:
            self.replica.warn_of_edits()

    def apply(self, loss: Tensor | None, tokens: int | None = None) -> None:
        """Run one microstep from the gradients in `p.grad`."""
        self.begin(tokens, early=False)
        # no hook launches any more, and no vote is needed before all is sent
        with self._exchanging(early=not self.merging):
            self.add_or_update(*self.gathered(loss))
        self.after_step()

    def minimize(self, compute: Callable[[], Tensor]) -> Tensor:
        """Run one microstep from a loss with one element, which is returned."""
        scaler = self.scaler
        # the block encloses the update too: buckets launched in the backward pass arrive there
        with self._exchanging(early=not self.merging):
            require_loss(loss := compute(), trains=True)
            self.clear_grads()
            scaled = loss if scaler is None else scaler.scaled(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
            self.add_or_update(*self.gathered(loss.detach()))
        self.after_step()
        return loss

    def gathered(self, loss: Tensor | None) -> tuple[dict[str, Tensor], float, bool]:
        """End one backward pass. Return gradients, their factor, and True for an overflow."""
        # torch's schedulers must see a call of the optimizer, whether this microstep updates,
        # merges or is dropped
        for optimizer in all_of(self.optimizer):
            vars(optimizer)["_opt_called"] = True
        self.last_loss = loss
        self._observe(loss)
        held = {n: shard_of(p.grad) for n, p in self.params.items() if p.grad is not None}
        scaler = self.scaler
        if scaler is None:
            return held, 1.0, False
        return held, scaler.inverse_scale, scaler.overflowed(held.values())

    def add_or_update(self, held: dict[str, Tensor], factor: float, overflow: bool) -> StepDecision:
        """Merge the gradients of one microstep, or update from them."""
        merge = self.merge
        if self.merging:
            merge.add(held, factor)
            merge.overflowed = merge.overflowed or overflow
            if factor != 1.0:
                for param in map(self.params.__getitem__, held):
                    assert param.grad is not None
                    param.grad = param.grad * factor
            return StepDecision.APPLY
        grads = held
        if merge.microsteps:
            grads = merge.completed_(held, factor, self.merge_avg)
        elif factor != 1.0:  # narrow ones in float32, so that nothing underflows
            grads = {}
            owned = with_own_storage(held)
            for name, grad in held.items():
                param = self.params[name]
                wide = grad.to(state_dtype(grad))
                new = wide.mul_(factor) if wide is grad and name in owned else wide * factor
                grads[name] = new
                param.grad = sharded_like(new.to(grad.dtype), param)
        return self.update(grads, overflow=overflow or merge.overflowed)

    def _limited(self, step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clip this rank's gradients before they are compressed."""
        return grads if self.limit is None else self.limit(step, grads)

    def _step_optimizers(self, grads: Grads) -> torch.optim.Optimizer | None:
        """Run one step from `grads`, which replace `p.grad`. Wide gradients stay wide if possible.

        Return the optimizer from another library that made collective calls in it, if any.
        """
        params = self.params
        optimizer = self.optimizer
        wide = False
        for name, param in params.items():
            param.grad = None
            if name in grads:
                set_grad(param, grads[name])
                wide |= grads[name].dtype != param.dtype
        exchanging: torch.optim.Optimizer | None = None
        with allow_step(optimizer):
            for single in all_of(optimizer):
                # optimizers of this library exchange norms and matrices of shards; others show
                # in their first steps whether they exchange
                ours = isinstance(single, CommonOptimizer) or self.updates_here > _WATCHED
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

    def after_step(self) -> None:
        """Publish what is due, and warn of a run that left its plan, at the engine's caller."""
        self.replica.record_gradients()
        if self.publish is not None:
            self.publish()
        if self.plan_warning is not None:
            warning = self.plan_warning
            self.plan_warning = None
            warn_user(warning)


_WATCHED = 8
"""Updates in which an optimizer of another library is watched."""


def set_grad(param: Tensor, grad: Tensor) -> None:
    """Set `p.grad` to a gradient, in the type and the strides of the parameter."""
    shard = shard_of(param)
    if grad.is_sparse:
        grad = grad.to(shard.dtype)
    elif grad.dtype != shard.dtype or grad.stride() != shard.stride():
        # fused kernels need equal strides
        grad = torch.empty_like(shard, requires_grad=False).copy_(grad)
    param.grad = sharded_like(grad, param)
