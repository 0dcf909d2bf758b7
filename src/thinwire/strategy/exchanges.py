"""The three ways in which ranks share an update, behind one small protocol: the engine never asks
which it has.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.comm import state_told
from thinwire.comm.group import collective_calls
from thinwire.compress import buckets_of
from thinwire.compress.dense import not_finite
from thinwire.compress.dgc import DGC
from thinwire.compress.figures import left_out
from thinwire.compress.protocol import Compression, Limit
from thinwire.core.several import all_of
from thinwire.core.sharded import Shards, shard_of, sharded_like
from thinwire.core.tensors import with_own_storage
from thinwire.exchange.agreement import Drops, Verdict
from thinwire.exchange.checks import SameHyperparameters
from thinwire.exchange.gradients import GradientExchange, Outcome
from thinwire.exchange.round import Round
from thinwire.exchange.synchronizer import NO_TRAFFIC
from thinwire.local.updates import LocalUpdates
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.dgc_momentum import DGCMomentum
from thinwire.strategy.clipping import Clipping
from thinwire.strategy.holding import passing

__all__ = ["Exchange", "ExchangingStep", "LocalSteps", "MeanThenStep"]

Grads = Mapping[str, Tensor]
"""Gradients by parameter name, unscaled, of this rank's own mean loss."""


class Exchange(Protocol):
    """One update over the ranks; what has a body is that of one in every step.

    Attributes:
        local: Whether ranks are on their own between two averagings.
        dropped_steps: Updates dropped for a gradient that is not finite.
        k_steps: Updates between two exchanges that are in force.
        pending: What `flush` would do, in words; empty if nothing.
        moved: Whether an `update` that raised did so after its exchange, so that others have made
            it; or after this rank's own step.
    """

    local: bool

    def traffic(self) -> dict[str, Any]:
        """See `Synchronizer.traffic`."""

    def counts(self, step: int) -> dict[str, Any]:
        """`traffic`, and further numbers of `thinwire.core.stats`, ahead of update `step`."""

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
        """Hear the loss of one microstep."""
        return

    def update(self, step: int, grads: Grads, **how: Any) -> Verdict:
        """Exchange and update; or why the update was dropped, on all ranks that share it.

        Args:
            step: Updates made before.
            grads: Of this rank.
            how: See `GradientExchange.exchange`; nothing between averagings.
        """

    def skip(self) -> None:
        """An update is dropped for an overflow."""
        return

    def flush(self) -> None:
        """Finish what is on its way."""
        return

    def require_equal(self, step: int) -> None:
        """Raise `Diverged` on all ranks that share an update unless they hold what they must."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what later updates depend on, the optimizer's aside."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def buffers_loaded(self) -> None:
        """The buffers of the model were written, after `load_state_dict`."""
        return

    def start_anew(self) -> None:
        """Parameters and buffers were replaced on all ranks alike, before the first update."""
        return

    def close(self) -> None:
        """Take every hook off."""
        return


class _EveryStep(Exchange):
    """What the two ways that exchange in every update have in common."""

    local = False
    moved = False
    first_bytes: int
    bucket_bytes: int

    gradients: Any
    """A `GradientExchange`; None before the first update."""

    @property
    def dropped_steps(self) -> int:
        exchange = self.gradients
        return 0 if exchange is None else exchange.drops.total

    def traffic(self) -> dict[str, Any]:
        exchange = self.gradients
        return dict(NO_TRAFFIC if exchange is None else exchange.traffic())

    @contextlib.contextmanager
    def _spoiling(self, step: int, gradients: GradientExchange) -> Iterator[None]:
        """Around what follows the exchange: where it fails, others have made the update and must
        hear of it.
        """
        try:
            yield
        except Exception as error:
            self.moved = True
            gradients.spoiled = _spoiled(step, error)
            error.add_note(_SPOILED_HERE)
            raise


class MeanThenStep(_EveryStep):
    """The mean gradient, dense or compressed, is what an ordinary optimizer gets."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, Parameter],
        gradients: GradientExchange,
        clip: Clipping,
        compression: Compression | None,
        limit: Limit | None = None,
    ) -> None:
        self._limit = limit
        self.gradients: GradientExchange = gradients
        gradients.add_check(SameHyperparameters(optimizer))
        if clip.over_stages:
            gradients.measure = lambda came, grads: clip.norm(self._means(came, grads))
        self._optimizer, self._params, self._clip = optimizer, params, clip
        self.first_bytes, self.bucket_bytes = buckets_of(compression)
        some = compression is not None and any(map(compression.compresses, Shards(params).values()))
        self._compression = compression if some else None

    def counts(self, step: int) -> dict[str, Any]:
        return self.traffic() | {"sparsity": left_out(self._compression, step)}

    def set_buckets(self, buckets: Sequence[Sequence[str]]) -> None:
        self.gradients.buckets = buckets

    def place(self, step: int) -> int:
        return step

    def launching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update(self, step: int, grads: Grads, **how: Any) -> Verdict:
        self.moved = False
        limited = grads if self._limit is None else self._limit(step, grads)
        outcome = self.gradients.exchange(step, limited, **how)
        if outcome.came is not None:
            self._finish(step, outcome, outcome.came)
        return outcome.verdict

    def _finish(self, step: int, outcome: Outcome, came: Round) -> None:
        grads = outcome.grads
        self.gradients.commit_(came, grads)
        # buffers of gradients that nobody else sees become those of the means: only after the
        # commit, which reads the gradients a last time
        means = self._means(came, grads, with_own_storage(grads))
        with self._spoiling(step, self.gradients):
            with state_told(_EXCHANGED):
                clipped = self._clip(means, outcome.answers.of_my_replica("measured"))
            exchanging = apply_(self._optimizer, self._params, clipped)
            if exchanging is not None and self.gradients.group.size > 1:
                self.gradients.likeness.step_exchanged(exchanging)

    def _means(self, came: Round, grads: Grads, mine: Collection[str] = ()) -> dict[str, Tensor]:
        """By name, in the memory of those gradients that are in `mine`."""
        shards = Shards(self._params)
        means = {
            name: came.arrived[name].mean(name, shards[name], grad if name in mine else None)
            for name, grad in grads.items()
        }
        return _as_given(means, came.rows_only)

    def require_equal(self, step: int) -> None:
        self.gradients.require_equal(step)

    def state_dict(self) -> dict[str, Any]:
        return self.gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gradients.load_state_dict(state)


class ExchangingStep(_EveryStep):
    """The optimizer updates from what arrived, entry by entry, and holds the state of the
    compression.
    """

    def __init__(self, optimizer: DGCMomentum, params: Mapping[str, Parameter]) -> None:
        self._optimizer, self._params = optimizer, params
        self.first_bytes, self.bucket_bytes = buckets_of(DGC)

    @property
    def gradients(self) -> GradientExchange | None:
        return self._optimizer.synchronizer.gradients

    def counts(self, step: int) -> dict[str, Any]:
        return self.traffic() | {"sparsity": self._optimizer.sparsity}

    def set_buckets(self, buckets: Sequence[Sequence[str]]) -> None:
        self._optimizer.synchronizer.set_buckets(buckets)

    def place(self, step: int) -> int:
        return self._optimizer.position

    def launching(self) -> contextlib.AbstractContextManager[None]:
        return self._optimizer.synchronizer.launching()

    def update(self, step: int, grads: Grads, **how: Any) -> Verdict:
        self.moved = False
        optimizer, sync = self._optimizer, self._optimizer.synchronizer
        with optimizer.one_deadline():
            gradients = sync.joined()
            outcome = gradients.exchange(optimizer.position, sync.limited(grads), **how)
            sync.agreed()
            if outcome.came is None:
                return outcome.verdict
            with self._spoiling(step, gradients), optimizer.updating_from(outcome.came):
                apply_(optimizer, self._params, outcome.grads)
            for name, grad in {**outcome.grads, **grads}.items():  # this rank's own, as ever
                param = self._params[name]
                param.grad = sharded_like(_laid_out(grad, shard_of(param)), param)
        return outcome.verdict

    def require_equal(self, step: int) -> None:
        self._optimizer.require_equal()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class LocalSteps:
    """Every rank updates on its own; `LocalUpdates` follows the optimizer's steps and averages
    parameters.

    With `checks` a rank leaves out a step whose gradients are not finite, and counts it.
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

    @property
    def dropped_steps(self) -> int:
        return self._drops.total

    def traffic(self) -> dict[str, Any]:
        return self.sync.traffic()

    def counts(self, step: int) -> dict[str, Any]:
        return self.sync.counts()

    @property
    def k_steps(self) -> int:
        return self.sync.k_steps

    @property
    def pending(self) -> str:
        return "an averaging" if self.sync.apart else ""

    def observe(self, loss: Tensor) -> None:
        self.sync.observe(loss)

    def update(self, step: int, grads: Grads, **how: Any) -> Verdict:
        self.moved = False
        if self._checks:
            culprit = next(iter(not_finite(grads)), None)
            if culprit is None:
                self._drops.applied()
            else:
                self._drops.dropped_here(self.sync.step + 1, culprit)
            self.sync.give_up(self._drops.given_up)
            if culprit is not None:
                self.sync.skip_step()
                return Verdict.DROP
        limited = dict(grads) if self._limit is None else self._limit(self.sync.step, grads)
        made = self.sync.steps_made
        try:
            apply_(self._optimizer, self._params, self._clip(limited, []))
        finally:  # the step is this rank's own, and made before an averaging can fail
            self.moved = self.sync.steps_made > made
        return Verdict.APPLY

    def skip(self) -> None:
        self.sync.skip_step()

    def flush(self) -> None:
        self.sync.flush()

    def require_equal(self, step: int) -> None:
        self.sync.require_equal()

    def state_dict(self) -> dict[str, Any]:
        return self.sync.plain_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sync.load_state_dict(state)

    def buffers_loaded(self) -> None:
        self.sync.buffers_loaded()

    def start_anew(self) -> None:
        self.sync.start_anew()

    def close(self) -> None:
        self.sync.close()


_EXCHANGED = (
    "The gradients had been exchanged before it: what was sent has left this rank's residuals, no "
    "parameter has moved"
)
_SPOILED_HERE = (
    "this came after the exchange of the update, which other ranks have made and this one has not, "
    "or not all of it: what it sent may have left its residuals. They hear of it in the next one. "
    "Restart all ranks from the last checkpoint"
)


def _spoiled(step: int, error: Exception) -> str:
    """What other ranks are told of an update that this one could not finish."""
    return (
        f"after the exchange of update {step + 1} its optimizer, or a hook of it, raised "
        f"{type(error).__name__}: {error}. Others have made that update; restart all ranks from "
        "the last checkpoint"
    )


def apply_(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Parameter], grads: Grads
) -> torch.optim.Optimizer | None:
    """One step of `optimizer` from `grads`, which replace what is in `p.grad`; wide ones stay wide
    where they can.

    Returns:
        One of another library that made collective calls in its `step`, if any did.
    """
    for name, param in params.items():
        param.grad = None
        if name in grads:
            param.grad = sharded_like(_laid_out(grads[name], shard_of(param)), param)
    wide = any(grad.dtype != params[name].dtype for name, grad in grads.items())
    pairs = [(params[name], sharded_like(g, params[name])) for name, g in grads.items()]
    every = all_of(optimizer)
    exchanging: torch.optim.Optimizer | None = None
    with passing(optimizer):
        for each in every:
            # those of this library exchange norms and matrices of shards
            ours = isinstance(each, CommonOptimizer)
            calls = 0 if ours else collective_calls()
            if wide and isinstance(each, CommonOptimizer):
                mine = {p for group in each.param_groups for p in group["params"]}
                each.apply_gradients(
                    pairs if len(every) == 1 else [pair for pair in pairs if pair[0] in mine]
                )
            else:
                each.step()
            if not ours and collective_calls() > calls:
                exchanging = each
    return exchanging


def _as_given(means: Mapping[str, Tensor], row_sparse: Collection[str]) -> dict[str, Tensor]:
    """Means of row-sparse gradients as row-sparse tensors again, for optimizers that touch the rows
    present only.

    One that is dense on any rank is dense on all, as torch adds up a dense and a row-sparse
    gradient.
    """
    return {name: _rows(mean) if name in row_sparse else mean for name, mean in means.items()}


def _rows(dense: Tensor) -> Tensor:
    present = dense.reshape(dense.shape[0], -1).any(dim=1).nonzero().view(-1)
    where, rows = present.unsqueeze(0), dense[present]
    return torch.sparse_coo_tensor(
        where, rows, dense.shape, is_coalesced=True, check_invariants=False
    )


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    if grad.is_sparse or (grad.dtype == param.dtype and grad.stride() == param.stride()):
        return grad.to(param.dtype)
    return torch.empty_like(param, requires_grad=False).copy_(
        grad
    )  # fused kernels walk parameter and gradient alike
