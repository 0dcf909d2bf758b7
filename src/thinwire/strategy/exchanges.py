"""The two ways in which ranks share an update, behind one protocol."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.comm import state_in_errors
from thinwire.comm.group import collective_calls
from thinwire.compress.dense import not_finite
from thinwire.compress.protocol import Compression, Limit
from thinwire.core.several import all_of
from thinwire.core.sharded import Shards, shard_of, sharded_like
from thinwire.core.tensors import sparse_rows, with_own_storage
from thinwire.exchange.agreement import Drops, StepDecision
from thinwire.exchange.checks import SameHyperparameters
from thinwire.exchange.gradients import GradientExchange, Outcome
from thinwire.exchange.round import Round
from thinwire.local.saving import saved
from thinwire.local.updates import LocalUpdates
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.folded import FoldedSGD
from thinwire.strategy.clipping import Clipping
from thinwire.strategy.ownership import allow_step

Grads = Mapping[str, Tensor]
"""Gradients of this rank's mean loss by parameter name, unscaled."""


class Exchange(Protocol):
    """One update over the ranks.

    Attributes:
        local: True if ranks train independently between two averagings.
        pending: Work that `flush` would do, in words; empty if none.
        moved: True if a failed `update` raised after its exchange, or after this rank's own step.
    """

    local: bool

    def traffic(self) -> dict[str, Any]:
        """See `Synchronizer.traffic`."""

    def counts(self, step: int) -> dict[str, Any]:
        """Return `traffic` and further numbers of `thinwire.core.stats`, before update `step`."""

    @property
    def moved(self) -> bool: ...
    @property
    def dropped_steps(self) -> int: ...
    @property
    def k_steps(self) -> int:
        return 1

    @property
    def pending(self) -> str:
        return ""

    def observe(self, loss: Tensor) -> None:
        """Observe the loss of one microstep."""
        return

    def update(self, step: int, grads: Grads, **how: Any) -> StepDecision:
        """Exchange and update, after `step` updates. If the update is dropped, return the reason,
        on all ranks that share it. `how`: see `GradientExchange.exchange`; unused between
        averagings.
        """

    def skip(self) -> None:
        """Drop an update for an overflow."""
        return

    def flush(self) -> None:
        """Finish pending work."""
        return

    def require_equal(self, step: int) -> None:
        """Raise `Diverged` on all ranks that share an update unless their states agree."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state that later updates depend on, without the optimizer's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict`."""
        return

    def buffers_loaded(self) -> None:
        """Note that the model's buffers were written, after `load_state_dict`."""
        return

    def start_anew(self) -> None:
        """Note that all ranks replaced parameters and buffers alike, before the first update."""
        return

    def close(self) -> None:
        """Remove every hook."""
        return


class MeanThenStep(Exchange):
    """Gives the mean gradient, dense or compressed, to an optimizer.

    `momentum`: of an SGD whose momentum the compressor keeps. Tensors that it compresses are
    updated by it, and their `p.grad` stays this rank's own.
    """

    local = False
    moved = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, Parameter],
        gradients: GradientExchange,
        clip: Clipping,
        compression: Compression | None,
        limit: Limit | None = None,
        momentum: FoldedSGD | None = None,
    ) -> None:
        self._limit, self._momentum = limit, momentum
        self.gradients = gradients
        gradients.add_check(SameHyperparameters(optimizer))
        if clip.over_stages:
            gradients.measure = lambda received, grads: clip.norm(self._means(received, grads))
        self._optimizer, self._params, self._clip = optimizer, params, clip
        some = compression is not None and any(map(compression.compresses, Shards(params).values()))
        self._compression = compression if some else None

    @property
    def dropped_steps(self) -> int:
        return self.gradients.drops.total

    def traffic(self) -> dict[str, Any]:
        return self.gradients.traffic()

    @contextlib.contextmanager
    def _reporting_failure(self, step: int) -> Iterator[None]:
        """Report a failure in the block to other ranks, which have made the update."""
        try:
            yield
        except Exception as error:
            self.moved = True
            alone = self.gradients.group.size == 1
            self.gradients.poisoned = _failure_text(step, error, alone=alone)
            error.add_note(self.gradients.poisoned if alone else _FAILED_HERE)
            raise

    def counts(self, step: int) -> dict[str, Any]:
        unsent = self._compression and self._compression.unsent_share(self._position(step))
        return self.traffic() | {"sparsity": unsent or 0.0}

    def _position(self, step: int) -> int:
        """Return the updates that a ramp counts."""
        return step if self._momentum is None else self._momentum.position

    def update(self, step: int, grads: Grads, **how: Any) -> StepDecision:
        self.moved = False
        limited = grads if self._limit is None else self._limit(self._position(step), grads)
        outcome = self.gradients.exchange(step, limited, **how)
        if outcome.received is not None:
            self._finish(step, outcome, outcome.received)
        return outcome.verdict

    def _finish(self, step: int, outcome: Outcome, received: Round) -> None:
        grads, gradients = outcome.grads, self.gradients
        # other ranks may have made the update from here on: a failure is reported to them
        with self._reporting_failure(step):
            updated = gradients.commit_(received, grads)
            others = {name: grad for name, grad in grads.items() if name not in updated}
            # the means reuse buffers of gradients that nothing else refers to; only after the
            # commit, which reads the gradients a last time
            means = self._means(received, others, () if updated else with_own_storage(grads))
            with state_in_errors(_AFTER_EXCHANGE):
                clipped = self._clip(means, outcome.answers.of_my_replica("measured"))
            exchanging = apply_(self._optimizer, self._params, clipped)
            if self._momentum is not None:
                self._momentum.count_()
            if exchanging is not None and gradients.group.size > 1:
                gradients.duplicates.step_exchanged(exchanging)
        for name, grad in grads.items() if updated else ():  # this rank's own
            param = self._params[name]
            param.grad = sharded_like(_laid_out(grad, shard_of(param)), param)

    def _means(
        self, received: Round, grads: Grads, owned: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return the means by name, in the memory of gradients that are in `owned`."""
        shards = Shards(self._params)
        means = {
            name: received.arrived[name].mean(name, shards[name], grad if name in owned else None)
            for name, grad in grads.items()
        }
        # row-sparse on all ranks: an optimizer may update the present rows only. A gradient that is
        # dense on any rank is dense on all, as in torch's sum of a dense and a row-sparse one
        return {n: _rows(mean) if n in received.rows_only else mean for n, mean in means.items()}

    def require_equal(self, step: int) -> None:
        self.gradients.require_equal(step)

    def state_dict(self) -> dict[str, Any]:
        return self.gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gradients.load_state_dict(state)


class LocalSteps:
    """Updates each rank independently. `LocalUpdates` hooks the optimizer and averages parameters.

    With `checks` a rank skips and counts a step whose gradients are not finite.
    """

    local = True
    moved = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, Parameter],
        sync: LocalUpdates,
        clip: Clipping,
        limit: Limit | None = None,
        *,
        checks: bool,
    ) -> None:
        self._limit, self._checks, self._drops = limit, checks, Drops()
        self._optimizer, self._params, self.sync, self._clip = optimizer, params, sync, clip
        self._averager = sync._open_averager()

    @property
    def dropped_steps(self) -> int:
        return self._drops.total

    def traffic(self) -> dict[str, Any]:
        return self._averager.traffic()

    def counts(self, step: int) -> dict[str, Any]:
        return self.sync._counts()

    @property
    def k_steps(self) -> int:
        return self.sync.k_steps

    @property
    def pending(self) -> str:
        return "an averaging" if self._averager.when.unsynced else ""

    def observe(self, loss: Tensor) -> None:
        self.sync.observe(loss)

    def update(self, step: int, grads: Grads, **how: Any) -> StepDecision:
        self.moved = False
        if self._checks:
            culprit = next(iter(not_finite(grads)), None)
            if culprit is None:
                self._drops.applied()
            else:
                self._drops.dropped_here(self.sync.step + 1, culprit)
            self._averager.given_up = self._drops.given_up
            if culprit is not None:
                self.sync.skip_step()
                return StepDecision.DROP
        limited = dict(grads) if self._limit is None else self._limit(self.sync.step, grads)
        made = self._averager.when.steps_made
        try:
            apply_(self._optimizer, self._params, self._clip(limited, []))
        finally:  # the local step precedes an averaging, which may fail
            self.moved = self._averager.when.steps_made > made
        return StepDecision.APPLY

    def skip(self) -> None:
        self.sync.skip_step()

    def flush(self) -> None:
        self.sync.flush()

    def require_equal(self, step: int) -> None:
        self.sync.require_equal()

    def state_dict(self) -> dict[str, Any]:
        return saved(self._averager)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sync.load_state_dict(state)

    def buffers_loaded(self) -> None:
        self._averager.tensors.buffers_restored()

    def start_anew(self) -> None:
        self.sync.start_anew()

    def close(self) -> None:
        self.sync.close()


_AFTER_EXCHANGE = (
    "The gradients had already been exchanged: the sent values have left this rank's residuals, "
    "but no parameter has changed"
)
_FAILED_HERE = (
    "This error came after the exchange: other ranks have made the update, but this rank has not, "
    "or only in part. They will get an error in the next update; restart all ranks from the last "
    "checkpoint"
)


def _failure_text(step: int, error: Exception, *, alone: bool) -> str:
    """Return the error that all ranks get after an update that this rank could not finish."""
    state = "That update may be made in part" if alone else "Other ranks have made that update"
    return (
        f"the optimizer, or a hook of it, failed after the exchange of update {step + 1} with "
        f"{type(error).__name__}: {error}. {state}: restart {'' if alone else 'all ranks '}"
        "from the last checkpoint"
    )


def apply_(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Parameter], grads: Grads
) -> torch.optim.Optimizer | None:
    """Run one step of `optimizer` from `grads`, which replace `p.grad`. Wide gradients stay wide if
    possible.

    Returns:
        The optimizer from another library that made collective calls in its `step`, if any.
    """
    for name, param in params.items():
        param.grad = None
        if name in grads:
            param.grad = sharded_like(_laid_out(grads[name], shard_of(param)), param)
    wide = any(grad.dtype != params[name].dtype for name, grad in grads.items())
    every = all_of(optimizer)
    exchanging: torch.optim.Optimizer | None = None
    with allow_step(optimizer):
        for single in every:
            # optimizers of this library exchange norms and matrices of shards
            ours = isinstance(single, CommonOptimizer)
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


def _rows(dense: Tensor) -> Tensor:
    present = dense.reshape(dense.shape[0], -1).any(dim=1).nonzero().view(-1)
    where, rows = present.unsqueeze(0), dense[present]
    return sparse_rows(where, rows, dense.shape)


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    if grad.is_sparse or (grad.dtype == param.dtype and grad.stride() == param.stride()):
        return grad.to(param.dtype)
    # fused kernels need equal strides
    return torch.empty_like(param, requires_grad=False).copy_(grad)
