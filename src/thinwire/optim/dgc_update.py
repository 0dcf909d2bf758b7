"""The update of `DGCMomentum`, from what has arrived."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.entries import ArrivedEntries
from thinwire.core.checksum import bit_sums
from thinwire.core.feedback import in_chunks, rounding_seed, step_along_list_, store_
from thinwire.core.gradients import clipped
from thinwire.core.sharded import shard_of
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.round import Round
from thinwire.optim.dgc_settings import DGCSettings, wide_dtype
from thinwire.optim.dgc_synchronizer import DGCSynchronizer

__all__ = ["DGCUpdate"]


class DGCUpdate:
    """Applies what has arrived: entries of compressed tensors as they are, since each rank's
    momentum is in them, and means of all other tensors by SGD with momentum.

    Args:
        optimizer: Whose parameters and state change.
        synchronizer: Of it.
    """

    def __init__(self, optimizer: DGCSettings, synchronizer: DGCSynchronizer) -> None:
        self._optimizer, self._synchronizer = optimizer, synchronizer
        self._apart: frozenset[str] | None = None if optimizer.state else frozenset()
        """Tensors of which ranks hold momentum of their own since they were compressed; None: not
        known, after a load."""

    def state_loaded(self) -> None:
        """Momentum was put in from elsewhere."""
        self._apart = None

    def __call__(self, grads: Mapping[str, Tensor], rates: Sequence[float], done: Round) -> None:
        """Make the update; the exchange is committed.

        Args:
            grads: By name, those that `done` was made from.
            rates: By group.
            done: What has arrived.

        Communication: only where what was compressed before is averaged densely now; see
            `_make_momentum_common`.
        """
        sync = self._synchronizer
        exchange = sync.last
        assert exchange is not None, "something has arrived"
        # what decides here must be common to all ranks: one of them may hold a row-sparse gradient,
        # another a dense one
        arrived = {name: done.arrived[name] for name in grads}
        sparse = [n for n in grads if isinstance(arrived[n], ArrivedEntries)]
        dense = [n for n in grads if not isinstance(arrived[n], ArrivedEntries)]
        self._make_momentum_common(exchange, dense)
        self._apart = None if self._apart is None else self._apart.union(sparse)
        exchange.commit_(done, grads)
        keys = {name: key for key, name in enumerate(sync.params)}
        for name in dense:
            param = sync.params[name]
            lasting = name in done.row_sparse or not self._optimizer.compresses(param)
            rate = rates[self._optimizer._facts(param).group_index]
            mean = arrived[name].mean(name, shard_of(param))
            self._apply_dense(name, mean, keys[name], rate, clip=lasting)
        for names in in_chunks({name: sync.shards[name].numel() for name in sparse}):
            self._step_along(names, rates, done)

    def _state_of(self, name: str) -> dict[str, Any]:
        """State of a tensor, zeros where it has none yet, which enter it with the update."""
        optimizer = self._optimizer
        param, compressor = self._synchronizer.params[name], self._synchronizer.compressor
        assert compressor is not None, "made with the exchange"
        if optimizer.compresses(param):
            return compressor.state_of(name)
        found: dict[str, Any] = optimizer.state.get(param) or {}
        return found

    def _make_momentum_common(self, exchange: GradientExchange, dense: Sequence[str]) -> None:
        """Before a dense update of what was compressed before: each rank has accumulated momentum
        of its own, and all go on from the mean, as another number of ranks would.

        Communication: only then; 24 bytes where all are equal, else what differs, and an agreement.
        """
        optimizer, params = self._optimizer, self._synchronizer.params
        group = exchange.group.replicas or exchange.group
        states: dict[str, dict[str, Any]] = {}
        for name in [n for n in dense if self._apart is None or n in self._apart]:
            state = self._state_of(name)
            if optimizer._facts(params[name]).group["momentum"] and "momentum_buffer" in state:
                states[name] = state
        if not states or group.size == 1:
            return
        held = {name: state["momentum_buffer"] for name, state in states.items()}
        what = "making momentum common"
        sums = torch.stack(bit_sums(list(held.values()))).cpu().numpy().tobytes()
        rows = group.gather_bytes(sums, what=what)
        differ = [
            name
            for at, name in enumerate(held)
            if len({row[8 * at : 8 * at + 8] for row in rows}) > 1
        ]
        wide = {name: held[name].to(wide_dtype(params[name])) for name in differ}
        totals = [group.all_reduce_(each.clone(), what=what) for each in wide.values()]
        means = [total.wait().div_(group.size) for total in totals]
        if differ:
            group.gather_bytes(b"", what=what)  # nothing has moved where one of them failed
        for name, mean in zip(differ, means, strict=True):
            held[name].copy_(mean)
            optimizer.state[params[name]] = states[name]
        known = frozenset(params) if self._apart is None else self._apart
        self._apart = known - set(dense)

    def _step_along(self, names: Sequence[str], rates: Sequence[float], done: Round) -> None:
        """P <- p - lr * mean, at the entries that anybody sent."""
        params = [self._synchronizer.params[name] for name in names]
        wide = [wide_dtype(p) for p in params]
        entries = [
            done.arrived[name].entries(name, dtype) for name, dtype in zip(names, wide, strict=True)
        ]
        step_along_list_(
            [shard_of(param).detach() for param in params],
            [each for each in entries if each is not None],
            [rates[self._optimizer._facts(param).group_index] for param in params],
            done.arrived[names[0]].context.sources,
            wide,
        )

    def _apply_dense(self, name: str, mean: Tensor, key: int, rate: float, *, clip: bool) -> None:
        """One step of SGD with momentum."""
        optimizer = self._optimizer
        param = self._synchronizer.params[name]
        shard, wide = shard_of(param).detach(), wide_dtype(param)
        state = self._state_of(name)
        if "momentum_buffer" not in state:
            zeros = torch.zeros(shard.shape, dtype=wide, device=param.device)
            state = {**state, "momentum_buffer": zeros}
        optimizer.state[param] = state
        group, stored = optimizer._facts(param).group, state["momentum_buffer"]
        buffer = stored.to(wide)
        grad = mean.to(buffer.dtype)
        if group["maximize"]:
            grad = -grad
        if clip and optimizer.grad_clip is not None:
            grad = clipped(optimizer.grad_clip, [grad])[0]
        grad = optimizer._with_decay(param, grad)
        buffer.mul_(group["momentum"]).add_(grad)
        update = grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        if shard.dtype == buffer.dtype:
            shard.add_(update, alpha=-rate)
        else:
            shard.copy_(shard.to(buffer.dtype).add_(update, alpha=-rate))
        if buffer is not stored:
            store_(stored.view(-1), buffer.view(-1), rounding_seed(optimizer.position, key))
