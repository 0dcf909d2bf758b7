"""The three ways in which ranks share an update, behind one small protocol: the engine never asks which it has."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.comm import state_told
from thinwire.optim.dgc_momentum import DGCMomentum
from thinwire.optim.two_phase import TwoPhase
from thinwire.strategy.holding import passing
from thinwire.sync.dgc_config import DGC
from thinwire.sync.exchange import Verdict
from thinwire.sync.gradient_mean import GradientMean, locally_clipped
from thinwire.sync.local_sgd import LocalUpdates

__all__ = ["EarlyExchange", "Exchange", "InOptimizer", "LocalSteps", "MeanThenStep"]

Grads = Mapping[str, Tensor]
"""Gradients by parameter name, unscaled, of this rank's own mean loss."""
Clipping = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Exchange(Protocol):
    """One update over the ranks.

    Attributes:
        local: Whether ranks are on their own between two averagings.
        bytes_sent: What this rank gave to others so far.
        dropped_steps: Updates dropped for a gradient that is not finite, those of a loss scale aside.
        k_steps: Updates between two exchanges that are in force.
        pending: What `flush` would do, in words; empty if nothing.
        moved: Whether an `update` that raised did so after its exchange, so that others have made it.
    """

    local: bool

    def counts(self, step: int) -> dict[str, float]:
        """Further numbers of `thinwire.core.stats`, ahead of update `step`."""

    @property
    def moved(self) -> bool: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def dropped_steps(self) -> int: ...
    @property
    def k_steps(self) -> int: ...
    @property
    def pending(self) -> str: ...

    def observe(self, loss: Tensor) -> None:
        """Hear the loss of one microstep."""

    def update(self, step: int, grads: Grads) -> bool:
        """Exchange and update; False if the update was dropped, on all ranks that share it."""

    def skip(self) -> None:
        """An update is dropped for an overflow."""

    def flush(self) -> None:
        """Finish what is on its way."""

    def require_equal(self, step: int) -> None:
        """Raise `Diverged` on all ranks that share an update unless they hold what they must."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what later updates depend on, the optimizer's aside."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def start_anew(self) -> None:
        """Parameters were replaced on all ranks alike, before the first update."""

    def close(self) -> None:
        """Take every hook off."""


class EarlyExchange(Exchange, Protocol):
    """One whose messages can leave before all gradients are there: `launch` each bucket, `settle`, then `update`.

    Attributes:
        steady: The parameters that must be launched, all of them; None while ranks have to agree first.
    """

    @property
    def steady(self) -> frozenset[str] | None: ...

    def cut(self, buckets: Sequence[Sequence[str]]) -> None:
        """Which parameters travel together."""

    def launch(self, step: int, bucket: int, grads: Grads) -> None:
        """Send one bucket, dense gradients as `update` will get them."""

    def settle(self, step: int, grads: Grads, **told: Any) -> Verdict:
        """Wait for all of them and agree what becomes of them; `told` is what `GradientExchange.settle` takes."""

    def release(self) -> None:
        """Forget what was settled and not taken by `update`."""

    def abandon(self, reason: str) -> None:
        """Leave the step half-way; nothing can be exchanged any more."""


class _EveryStep:
    """What the two ways that exchange in every update have in common."""

    local = False
    moved = False
    k_steps = 1
    pending = ""

    def observe(self, loss: Tensor) -> None:
        pass

    def skip(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def start_anew(self) -> None:
        pass

    def close(self) -> None:
        pass


class MeanThenStep(_EveryStep):
    """The mean gradient, dense or compressed, is what an ordinary optimizer gets."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Mapping[str, Parameter], mean: GradientMean, clip: Clipping
    ) -> None:
        self._optimizer, self._params, self._mean, self._clip = optimizer, params, mean, clip
        mean.serve(optimizer)

    @property
    def bytes_sent(self) -> int:
        return self._mean.bytes_sent

    def counts(self, step: int) -> dict[str, float]:
        return self._mean.counts(step)

    @property
    def dropped_steps(self) -> int:
        return self._mean.drops.total

    def update(self, step: int, grads: Grads) -> bool:
        means = self._mean.reduce(step, grads, reuse=True)
        if means is None:
            return False
        try:
            with state_told(_EXCHANGED):
                clipped = self._clip(_as_given(means, self._mean.row_sparse))
            apply_(self._optimizer, self._params, clipped)
        except Exception as error:
            self.moved = True
            self._mean.spoil(_spoiled(step, error))
            error.add_note(_SPOILED_HERE)
            raise
        return True

    @property
    def steady(self) -> frozenset[str] | None:
        return self._mean.steady

    def cut(self, buckets: Sequence[Sequence[str]]) -> None:
        self._mean.cut(buckets)

    def launch(self, step: int, bucket: int, grads: Grads) -> None:
        self._mean.launch(step, bucket, grads)

    def settle(self, step: int, grads: Grads, **told: Any) -> Verdict:
        return self._mean.settle(step, grads, **told)

    def require_equal(self, step: int) -> None:
        self._mean.require_equal(step)

    def release(self) -> None:
        self._mean.release()

    def abandon(self, reason: str) -> None:
        self._mean.abandon(reason)

    def state_dict(self) -> dict[str, Any]:
        return self._mean.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mean.load_state_dict(state)


class InOptimizer(_EveryStep):
    """The optimizer, `DGCMomentum`, exchanges by itself."""

    def __init__(self, optimizer: DGCMomentum, params: Mapping[str, Parameter]) -> None:
        self._optimizer, self._params = optimizer, params
        self._names: dict[Tensor, str] = {p: name for name, p in params.items()}

    @property
    def bytes_sent(self) -> int:
        return int(self._optimizer.stats()["bytes_sent"])

    def counts(self, step: int) -> dict[str, float]:
        stats = self._optimizer.stats()
        counts = {key: stats[key] for key in ("bytes_received", "wait_s", "sparsity")}
        if stats["bytes_between_nodes"] != stats["bytes_sent"]:  # there are nodes
            counts["bytes_between_nodes"] = stats["bytes_between_nodes"]
        return counts

    @property
    def dropped_steps(self) -> int:
        return int(self._optimizer.stats()["dropped_steps"])

    def update(self, step: int, grads: Grads) -> bool:
        before = self._optimizer.position
        try:
            apply_(self._optimizer, self._params, grads)
        except Exception as error:
            if self._optimizer.position > before:
                self.moved = True
                self._optimizer.spoil(_spoiled(step, error))
                error.add_note(_SPOILED_HERE)
            raise
        return self._optimizer.position > before

    @property
    def steady(self) -> frozenset[str] | None:
        params = self._optimizer.steady
        if params is None or not params <= self._names.keys():
            return None
        return frozenset(self._names[p] for p in params)

    def cut(self, buckets: Sequence[Sequence[str]]) -> None:
        self._optimizer.cut([[self._params[name] for name in names] for names in buckets])

    def launch(self, step: int, bucket: int, grads: Grads) -> None:
        self._optimizer.launch(bucket, {self._params[name]: grad for name, grad in grads.items()})

    def settle(self, step: int, grads: Grads, **told: Any) -> Verdict:
        return self._optimizer.settle({self._params[name]: grad for name, grad in grads.items()}, **told)

    def require_equal(self, step: int) -> None:
        self._optimizer.require_equal()

    def release(self) -> None:
        self._optimizer.release()

    def abandon(self, reason: str) -> None:
        self._optimizer.abandon(reason)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class LocalSteps:
    """Every rank updates on its own; `LocalUpdates` follows the optimizer's steps and averages parameters."""

    local = moved = True
    dropped_steps = 0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, Parameter],
        sync: LocalUpdates,
        dgc: DGC | None,
        trainers: int,
        clip: Clipping,
    ) -> None:
        self._optimizer, self._params, self.sync, self._clip = optimizer, params, sync, clip
        self._dgc, self._trainers = dgc, trainers

    @property
    def bytes_sent(self) -> int:
        return int(self.sync.stats()["bytes_sent"])

    def counts(self, step: int) -> dict[str, float]:
        stats = self.sync.stats()
        return {key: stats[key] for key in ("bytes_received", "wait_s", "sparsity", "averagings", "applied_share")}

    @property
    def k_steps(self) -> int:
        return self.sync.k_steps

    @property
    def pending(self) -> str:
        return "an averaging" if self.sync.step > self.sync.whole else ""

    def observe(self, loss: Tensor) -> None:
        self.sync.observe(loss)

    def update(self, step: int, grads: Grads) -> bool:
        limited = dict(grads)
        if self._dgc is not None and self._dgc.local_grad_clip_norm is not None:
            limited = {
                name: locally_clipped(self._dgc, self.sync.step, self._trainers, self._params[name], grad)
                for name, grad in grads.items()
            }
        apply_(self._optimizer, self._params, self._clip(limited))
        return True

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

    def start_anew(self) -> None:
        self.sync.start_anew()

    def close(self) -> None:
        self.sync.close()


_EXCHANGED = (
    "The gradients had been exchanged before it: what was sent has left this rank's residuals, no parameter has moved"
)
_SPOILED_HERE = (
    "this came after the exchange of the update: what was sent has left this rank's residuals, other ranks have made "
    "the update, and they hear of it in the next one. Restart all ranks from the last checkpoint"
)


def _spoiled(step: int, error: Exception) -> str:
    """What other ranks are told of an update that this one could not finish."""
    return (
        f"after the exchange of update {step + 1} its optimizer, or a hook of it, raised {type(error).__name__}: "
        f"{error}. Others have made that update; restart all ranks from the last checkpoint"
    )


def apply_(optimizer: torch.optim.Optimizer, params: Mapping[str, Parameter], grads: Grads) -> None:
    """One step of `optimizer` from `grads`, which replace what is in `p.grad`; wide ones stay wide where they can."""
    for name, param in params.items():
        param.grad = _laid_out(grads[name], param) if name in grads else None
    wide = any(grad.dtype != params[name].dtype for name, grad in grads.items())
    with passing(optimizer):
        if wide and isinstance(optimizer, TwoPhase):
            optimizer.apply_gradients([(params[name], grad) for name, grad in grads.items()])
        else:
            optimizer.step()


def _as_given(means: Mapping[str, Tensor], row_sparse: Collection[str]) -> dict[str, Tensor]:
    """Means of row-sparse gradients as row-sparse tensors again, for optimizers that touch the rows present only.

    One that is dense on any rank is dense on all, as torch adds up a dense and a row-sparse gradient.
    """
    return {name: _rows(mean) if name in row_sparse else mean for name, mean in means.items()}


def _rows(dense: Tensor) -> Tensor:
    present = dense.reshape(dense.shape[0], -1).any(dim=1).nonzero().view(-1)
    where, rows = present.unsqueeze(0), dense[present]
    return torch.sparse_coo_tensor(where, rows, dense.shape, is_coalesced=True, check_invariants=False)


def _laid_out(grad: Tensor, param: Parameter) -> Tensor:
    if grad.is_sparse or (grad.dtype == param.dtype and grad.stride() == param.stride()):
        return grad.to(param.dtype)
    return torch.empty_like(param, requires_grad=False).copy_(grad)  # fused kernels walk parameter and gradient alike
