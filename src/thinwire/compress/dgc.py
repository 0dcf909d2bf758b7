"""Deep gradient compression: a rank sends the few largest of what it has accumulated.

Algorithm 4 of the paper, top to bottom, per tensor of n entries and update t (from 0):

    s       the fraction that is kept back in update t          `DGC.unsent_share`  (3.3)
    k       n (1 - s), at least 1                               `DGC.count_at`
    g       the rank's own gradient, limited to its share       `locally_clipped`        (3.2)
    u, v    u <- m u + g,  v <- v + u                           `core.feedback.propose_list`  (3.1)
    S       the k entries of largest |v|                        the same
    sent    v[S], in a few bits each                            `compress.entries`
    v[S] <- v[S] - sent,  u[S] <- 0                             `core.feedback.commit_list_`  (3.1)

Nothing but the message leaves a rank, and u and v change only once all ranks have voted; until
then the fold is computed and forgotten, and made again for the commit, so that no update holds a
second set of gradients.

Source: Lin et al., 2018, arXiv 1712.01887. Differs: exact selection, positions by Elias-Fano,
values in `value_bits` with the rounding error kept in v, the limit on a source's share; updates of
the ramp are counted in integers, where Paddle's operators/dgc_op.h counts in float32, which stops
at 2^24.
"""

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.entries import ArrivedEntries, Proposed, send_entries
from thinwire.compress.protocol import (
    Arrived,
    ChangeCompression,
    Compression,
    Context,
    Kept,
    Sending,
)
from thinwire.compress.sparse_change import send_largest
from thinwire.core.feedback import commit_list_, in_chunks, propose_list, rounding_seed
from thinwire.core.gradients import ClipByNorm, clipped
from thinwire.core.norms import norms_over_shards
from thinwire.core.tensors import named_dtype, state_dtype, stored_dtype
from thinwire.kernels.rules import Fold
from thinwire.layout.message import VALUE_BITS, Layout, count_sent
from thinwire.layout.traffic import EXCHANGES
from thinwire.schedules import sparsity_at

_COMPRESSIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compressible(param: Tensor, min_numel: int) -> bool:
    """Return True if gradients of this tensor are ever compressed; smaller tensors are not."""
    return param.dtype in _COMPRESSIBLE and param.numel() >= min_numel


@dataclass(frozen=True)
class DGC(Compression, ChangeCompression):
    """Each rank sends only the largest accumulated entries of every gradient.

    That is about 2,000 times fewer bytes with the usual settings.

    Attributes:
        rampup_begin_step: Updates before compression begins, >= 0.
        rampup_step: Updates over which the levels of `sparsity` are spread, >= 1.
        sparsity: Fractions that are **not** sent, each in [0, 1); the last is final.
        local_grad_clip_norm: C > 0: a source's share g / N of a compressed tensor is limited to the
            norm C / sqrt(N).
        min_numel: Smaller tensors are exchanged densely, >= 1.
        value_bits: Bits per sent value: 1, 2, 4, 8, 16 or 32. The rounding error is kept.
        state_dtype: "float32" or "bfloat16": the type in which momentum and residual of compressed
            tensors are stored. bfloat16 is rounded stochastically and takes half the memory. None:
            float32, or float64 for float64 parameters.
        node_size: Consecutive ranks per node, >= 1; it must divide the number of ranks. Ranks of a
            node average densely among themselves and count as one source. 1 is off. None:
            torchrun's LOCAL_WORLD_SIZE if ranks fill two nodes or more.
        exchange: "gather" sends all messages to every source. "split" sends sums of shares, whose
            size does not grow with the sources. "auto" counts bytes and splits if that moves at
            most half of them.

    Raises:
        TypeError, ValueError: A wrong value.

    Example::

        dgc = tw.DGC(rampup_begin_step=500, rampup_step=100, sparsity=(0.99, 0.999))
        strategy = tw.DistributedStrategy(dgc=dgc)

    Source: Lin et al., 2018, arXiv 1712.01887.
    """

    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: tuple[float, ...] = (0.999,)
    local_grad_clip_norm: float | None = None
    min_numel: int = 16384
    value_bits: int = 1
    state_dtype: str | torch.dtype | None = None
    node_size: int | None = None
    exchange: str = "auto"

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "rampup_begin_step", at_least=0)
        check.set_fields(self, check.integer, "rampup_step", "min_numel", at_least=1)
        if self.node_size is not None:
            check.set_fields(self, check.integer, "node_size", at_least=1)
        check.instance(
            "sparsity", self.sparsity, (tuple, list), advice="write a single fraction as (0.999,)"
        )
        if not self.sparsity:
            raise ValueError(
                "sparsity must hold at least one fraction in [0, 1), got an empty sequence"
            )
        levels = [
            check.real(f"sparsity[{i}], the fraction that is not sent,", level, at_least=0, below=1)
            for i, level in enumerate(self.sparsity)
        ]
        object.__setattr__(self, "sparsity", tuple(levels))
        if self.local_grad_clip_norm is not None:
            check.set_fields(self, check.real, "local_grad_clip_norm", above=0)
        check.set_fields(self, check.integer, "value_bits")
        check.one_of("value_bits", self.value_bits, VALUE_BITS)
        object.__setattr__(self, "state_dtype", named_dtype("state_dtype", self.state_dtype))
        check.instance("exchange", self.exchange, str)
        check.one_of("exchange", self.exchange, EXCHANGES)

    def compresses(self, param: Tensor) -> bool:
        """Return True if this tensor is ever compressed; others always travel densely."""
        return compressible(param, self.min_numel)

    def stored_dtype(self, param: Tensor) -> torch.dtype:
        """Return the type in which the residual of this tensor is stored."""
        return stored_dtype(param, named_dtype("state_dtype", self.state_dtype))

    def unsent_share(self, step: int) -> float:
        """Return the fraction of a tensor that update `step` (from 0) does not send.

        0 before compression begins.

        >>> config = DGC(rampup_begin_step=10, rampup_step=2, sparsity=(0.75, 0.999))
        >>> [config.unsent_share(step) for step in (9, 10, 11, 12)]
        [0.0, 0.75, 0.999, 0.999]
        """
        if step < self.rampup_begin_step:
            return 0.0
        return sparsity_at(step, self.rampup_begin_step, self.rampup_step, self.sparsity)

    @property
    def last_dense_step(self) -> int:
        """Return `rampup_begin_step`."""
        return self.rampup_begin_step

    @property
    def settled_step(self) -> int:
        """Return the update that the last level of `sparsity` begins with."""
        levels = len(self.sparsity)
        return 1 + self.rampup_begin_step - (-self.rampup_step * (levels - 1) // levels)

    def layout(self, step: int, numels: Sequence[int]) -> Layout:
        """See `Config`; the ramp counts from 0."""
        return Layout.of(numels, self.unsent_share(step - 1), self.value_bits)

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> "DGCCompressor":
        """Return the compressor without momentum correction; see `Compression`.

        The state exists from the beginning.
        """
        rule = Rule(self)
        made = DGCCompressor(
            params,
            lambda name: rule,
            state={},
            value_bits=self.value_bits,
            exchange=self.exchange,
            num_trainers=num_trainers,
        )
        made.fill(name for name, param in params.items() if self.compresses(param))
        return made

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """Send the changes by the ramp, counted in local steps; see `ChangeCompression`.

        The mean is over all ranks, and the residual does not decay, so that everything is sent in
        time.
        """

        def count(numel: int) -> int:
            found = self.count_at(context.step - 1, numel)
            assert found is not None, "only what is taken is sent"
            return found

        return send_largest(
            context, folded, count, self.value_bits, self.exchange, over_senders=False
        )

    def count_at(self, step: int, numel: int) -> int | None:
        """Return the number of entries sent of `numel` in update `step`, from 0.

        None before compression begins.
        """
        if step < self.rampup_begin_step:
            return None
        return count_sent(numel, self.unsent_share(step))


def limited(grad: Tensor, limit: float, sources: int, dtype: torch.dtype) -> Tensor:
    """Return one rank's gradient, scaled so that its share of the mean is limited.

    The share grad / N gets at most the norm C / sqrt(N): g <- g * min(1, C * sqrt(N) / ||g||). The
    result is a new tensor of `dtype`; no host synchronization.

    Args:
        grad: Any shape, dense, not divided by N; read only.
        limit: C > 0, in the gradient's unit.
        sources: N >= 1, the number of shares that are summed.
        dtype: Type in which the norm and the result are computed.

    >>> limited(torch.tensor([3.0, 4.0]), 1.0, 1, torch.float32)
    tensor([0.6000, 0.8000])

    Source: section 3.2. Differs: the limit applies to the share, not to the undivided gradient.
    """
    return clipped(ClipByNorm(limit * math.sqrt(sources)), [grad.to(dtype)])[0]


def locally_clipped(
    grads: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    config: Callable[[str], DGC],
    *,
    step: int,
    sources: int,
    gather: Callable[[bytes, str], list[bytes]] | None = None,
) -> dict[str, Tensor]:
    """Return the gradients to accumulate on this rank: `limited` where they are compressed.

    Args:
        grads: This rank's gradients, or its parts of them, by name; read only.
        params: The parameters, or this rank's shards, which decide what is compressed.
        config: By name.
        step: Completed updates, from 0.
        sources: N of the limit, >= 1.
        gather: Over the shards of a tensor, whose joint norm counts; see `norms_over_shards`. None
            if tensors are whole.

    Returns:
        By name `limited` in float32 (float64 for float64 parameters), or the gradient itself:
        without `local_grad_clip_norm`, before `rampup_begin_step`, and for tensors that are always
        exchanged densely. Shards below the limit get the same type.

    Communication: with a local clip 8 bytes per tensor and shard.
    """
    within = dict(grads)
    if all(config(name).local_grad_clip_norm is None for name in grads):
        return within
    norms = None if gather is None else norms_over_shards(grads, gather)
    for name, grad in grads.items():
        dgc, param = config(name), params[name]
        limit = dgc.local_grad_clip_norm
        if limit is None or step < dgc.rampup_begin_step or not dgc.compresses(param):
            continue
        if norms is not None:
            bound, wide = limit * math.sqrt(sources), grad.to(state_dtype(param))
            within[name] = wide * (bound / norms[name]) if norms[name] > bound else wide
        elif not grad.is_sparse:
            within[name] = limited(grad, limit, sources, state_dtype(param))
    return within


class Rule(NamedTuple):
    """Settings for the compression of one tensor."""

    config: DGC
    momentum: float | None = None
    """m. None without momentum correction, if another optimizer has its own momentum."""
    nesterov: bool = False


class DGCCompressor:
    """Deep gradient compression of the tensors that `DGC.compresses` selects.

    It begins with update `rampup_begin_step`.

    Args:
        params: By name, in the same order on all ranks.
        rule: By name; the same on all ranks.
        state: By name `residual` v and, with momentum, `momentum_buffer` u: in the shape of the
            parameter, contiguous. Filled when it is first needed.
        value_bits: Bits per sent value.
        exchange: "gather", "split" or "auto".
        num_trainers: N of the local clip only; None: the number of sources.
        decayed: Transforms a gradient after the local clip, such as by weight decay.

    **State**: v and u, of this rank, or common to the ranks of a node.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        rule: Callable[[str], Rule],
        *,
        state: MutableMapping[str, dict[str, Tensor]],
        value_bits: int,
        exchange: str,
        num_trainers: int | None = None,
        decayed: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self._params, self._rule, self._state = params, rule, state
        self._value_bits, self._exchange = value_bits, exchange
        self._num_trainers, self._decayed = num_trainers, decayed

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        return not grad.is_sparse and self._count(step, name) is not None

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        proposed: dict[str, Proposed] = {}
        for names in in_chunks({name: self._params[name].numel() for name in grads}):
            folds = [self._fold(context, name, grads[name]) for name in names]
            counts = [self._count(context.step, name) or 0 for name in names]
            for name, proposal, k in zip(names, propose_list(folds, counts), counts, strict=True):
                proposed[name] = Proposed(proposal, self._params[name].numel(), k)
        return send_entries(context, proposed, value_bits=self._value_bits, exchange=self._exchange)

    def commit_(self, grads: Mapping[str, Tensor], arrived: Arrived) -> None:
        assert isinstance(arrived, ArrivedEntries)
        keys = {name: key for key, name in enumerate(self._params)}
        sizes = {name: self._params[name].numel() for name in arrived.names if name in grads}
        for names in in_chunks(sizes):
            folds = []
            for name in names:
                self._state[name] = self.state_of(name)
                # the second fold: `send` kept no copy of the first, which would cost as much memory
                # as the gradients; so gradients and state must be unchanged since `send`
                grad = arrived.node_means.get(name, grads[name])
                folds.append(self._fold(arrived.context, name, grad))
            given = [arrived.given[name] for name in names]
            seeds = [rounding_seed(arrived.context.step, keys[name]) for name in names]
            commit_list_(folds, given, seeds)
            for name, fold in zip(names, folds, strict=True):
                arrived.add_kept_(name, fold.residual, keys[name])

    def state(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for name, param in self._params.items():
            if name in self._state and self._rule(name).config.compresses(param):
                for kind, entry in self._state[name].items():
                    found.setdefault(kind, {})[name] = entry
        return found

    def fill(self, names: Iterable[str]) -> None:
        """Create the state of these tensors, filled with zeros."""
        for name in names:
            self._state[name] = self.state_of(name)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Return the state of a tensor that is, or will be, compressed.

        Zeros if it has none yet; they enter the state only when the update is applied.
        """
        state = self._state.get(name) or {}
        rule, param = self._rule(name), self._params[name]
        kinds = ("residual",) if rule.momentum is None else ("momentum_buffer", "residual")
        for kind in (kind for kind in kinds if kind not in state):
            dtype = rule.config.stored_dtype(param)
            state[kind] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        return state

    def _count(self, step: int, name: str) -> int | None:
        config, param = self._rule(name).config, self._params[name]
        return config.count_at(step, param.numel()) if config.compresses(param) else None

    def _fold(self, context: Context, name: str, grad: Tensor) -> Fold:
        rule, param, state = self._rule(name), self._params[name], self.state_of(name)
        if rule.config.local_grad_clip_norm is not None:
            sources = self._num_trainers or context.sources
            grad = limited(grad, rule.config.local_grad_clip_norm, sources, state_dtype(param))
        if self._decayed is not None:
            grad = self._decayed(name, grad)
        u = state["momentum_buffer"].view(-1) if rule.momentum is not None else None
        v = state["residual"].view(-1)
        return Fold(grad.reshape(-1).contiguous(), v, u, rule.momentum or 0.0, rule.nesterov)
