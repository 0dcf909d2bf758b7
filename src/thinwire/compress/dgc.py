"""Deep gradient compression: a rank sends the few largest of what it has accumulated.

Algorithm 4 of the paper, top to bottom, per tensor of n entries and update t (from 0):

    s       the fraction that is kept back in update t          `DGC.unsent_share`  (3.3)
    k       n (1 - s), at least 1                               `layout.message.count_sent`
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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    Momentum,
    Sending,
)
from thinwire.compress.sparse_change import send_largest
from thinwire.core.feedback import (
    commit_list_,
    compile_loops,
    in_chunks,
    propose_list,
    rounding_seed,
    step_along_list_,
    store_,
)
from thinwire.core.gradients import ClipByNorm, clipped
from thinwire.core.norms import norms_over_shards
from thinwire.core.sharded import shard_of
from thinwire.core.tensors import named_dtype, narrowed, state_dtype, stored_dtype
from thinwire.kernels.rules import Fold
from thinwire.layout.message import VALUE_BITS, Layout, count_sent
from thinwire.layout.traffic import EXCHANGES
from thinwire.schedules import sparsity_at

_COMPRESSIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@check.by_name
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

    accumulates: ClassVar[bool] = True

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
        return param.dtype in _COMPRESSIBLE and param.numel() >= self.min_numel

    def stored_dtype(self, param: Tensor) -> torch.dtype:
        """Return the type in which the residual of this tensor is stored."""
        return stored_dtype(param, named_dtype("state_dtype", self.state_dtype))

    def unsent_share(self, step: int) -> float:
        """Return the fraction of a tensor that update `step`, from 0, does not send.

        >>> config = DGC(rampup_begin_step=10, rampup_step=2, sparsity=(0.75, 0.999))
        >>> [config.unsent_share(step) for step in (9, 10, 11, 12)]
        [0.0, 0.75, 0.999, 0.999]
        """
        if step < self.rampup_begin_step:
            return 0.0
        return sparsity_at(step, self.rampup_begin_step, self.rampup_step, self.sparsity)

    def loops(self, params: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: compile_loops(filter(self.compresses, params), self.state_dtype)

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
        self, params: Mapping[str, Tensor], momentum: Momentum | None = None
    ) -> "DGCCompressor":
        """Return the compressor; see `Compression`."""
        return DGCCompressor(params, lambda name: self, momentum)

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """Send the changes by the ramp, counted in local steps; see `ChangeCompression`."""
        # the mean is over all ranks, and the residual does not decay: everything is sent in time
        return send_largest(
            context,
            folded,
            kept,
            lambda numel: count_sent(numel, self.unsent_share(context.step - 1)),
            self.value_bits,
            self.exchange,
            over_senders=False,
        )


def limited(grad: Tensor, limit: float, sources: int, dtype: torch.dtype) -> Tensor:
    """Return one rank's gradient g <- g * min(1, C * sqrt(N) / ||g||), a new tensor of `dtype`.

    Its share g / N of the mean gets at most the norm C / sqrt(N). No host synchronization.

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
    """Return gradients that are `limited` where they are compressed, by norms over all shards."""
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


class DGCCompressor:
    """Deep gradient compression of the tensors that `DGC.compresses` selects.

    With momentum, u is kept beside v, and `commit_` makes the update: what ranks send has their
    momentum in it, and what travels densely enters u. `of_all`: of all other tensors, too.

    **State**: v and u, of this rank, or common to the ranks of a node, contiguous, in the shape of
    the parameter; with momentum it stands in the state of the optimizer.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        config: Callable[[str], DGC],
        momentum: Momentum | None = None,
        *,
        of_all: bool = False,
    ) -> None:
        self._params, self._config, self._momentum = params, config, momentum
        self._of_all, self._keys = of_all, {name: key for key, name in enumerate(params)}
        self._own: dict[str, dict[str, Tensor]] = {}

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        config, begun = self._config(name), self._at(step) >= self._config(name).rampup_begin_step
        return begun and not grad.is_sparse and config.compresses(self._params[name])

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        proposed: dict[str, Proposed] = {}
        for names in in_chunks({name: self._params[name].numel() for name in grads}):
            folds = [self._fold(context, name, grads[name]) for name in names]
            counts = [self._count(context.step, name) for name in names]
            for name, proposal, k in zip(names, propose_list(folds, counts), counts, strict=True):
                proposed[name] = Proposed(proposal, self._params[name].numel(), k)
        common = self._config(next(iter(grads)))
        return send_entries(
            context, proposed, value_bits=common.value_bits, exchange=common.exchange
        )

    def commit_(
        self,
        grads: Mapping[str, Tensor],
        arrived: Mapping[str, Arrived],
        row_sparse: Collection[str],
    ) -> Collection[str]:
        sent = {n: got for n, got in arrived.items() if isinstance(got, ArrivedEntries)}
        for names in in_chunks({name: self._params[name].numel() for name in sent}):
            context = sent[names[0]].context
            # the second fold: `send` kept no copy of the first, which would cost as much memory as
            # the gradients; so gradients and state must be unchanged since `send`
            folds = [
                self._fold(context, name, sent[name].node_means.get(name, grads[name]), keep=True)
                for name in names
            ]
            seeds = [rounding_seed(context.step, self._keys[name]) for name in names]
            commit_list_(folds, [sent[name].given[name] for name in names], seeds)
            for name, fold in zip(names, folds, strict=True):
                sent[name].add_kept_(name, fold.residual, self._keys[name])
        return () if self._momentum is None else self._update_(self._momentum, arrived, row_sparse)

    def _update_(
        self, momentum: Momentum, arrived: Mapping[str, Arrived], row_sparse: Collection[str]
    ) -> list[str]:
        """Update the parameters whose momentum is kept here; return their names."""
        kept = [name for name in arrived if self._of_all or self._compresses(name)]
        sent: dict[str, ArrivedEntries] = {}
        for name in kept:
            if isinstance(got := arrived[name], ArrivedEntries):
                sent[name] = got
            else:
                lasting = name in row_sparse or not self._compresses(name)
                self._enter_(name, got, momentum, clip=lasting)
        for names in in_chunks({name: self._params[name].numel() for name in sent}):
            params = [self._params[name].detach() for name in names]
            step_along_list_(
                params,
                [sent[name].parts[name] for name in names],
                [momentum.rate(name) for name in names],
                sent[names[0]].context.sources,
                [state_dtype(param) for param in params],
            )
        return kept

    def _enter_(self, name: str, arrived: Arrived, momentum: Momentum, *, clip: bool) -> None:
        """Make one step of SGD with momentum from a mean that travelled densely."""
        param, (m, nesterov) = self._params[name].detach(), momentum.factors(name)
        stored = self._state_of(name)["momentum_buffer"]
        buffer = stored.to(state_dtype(param))
        grad = arrived.mean(name, param).to(buffer.dtype)
        if clip and momentum.limit is not None:
            grad = clipped(ClipByNorm(momentum.limit), [grad])[0]
        grad = momentum.decayed(name, grad)
        buffer.mul_(m).add_(grad)
        update = grad.add(buffer, alpha=m) if nesterov else buffer
        if param.dtype == buffer.dtype:
            param.add_(update, alpha=-momentum.rate(name))
        else:
            param.copy_(param.to(buffer.dtype).add_(update, alpha=-momentum.rate(name)))
        if buffer is not stored:
            seed = rounding_seed(arrived.context.step, self._keys[name])
            store_(stored.view(-1), buffer.view(-1), seed)

    def state(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for name in filter(self._compresses, self._params):
            for kind, entry in (self._kept(name) if self._of_all else self._state_of(name)).items():
                found.setdefault(kind, {})[name] = entry
        return found

    def _kept(self, name: str) -> dict[str, Tensor]:
        return self._own.get(name, {}) if self._momentum is None else self._momentum.kept(name)

    def _state_of(self, name: str, *, keep: bool = True) -> dict[str, Tensor]:
        """Return u and v, in the types of the config; zeros, which `keep` makes state, at first."""
        param, compresses, state = self._params[name], self._compresses(name), self._kept(name)
        dtype = self._config(name).stored_dtype(param) if compresses else state_dtype(param)
        kinds = ["momentum_buffer"] if self._momentum is not None else []
        found = {
            kind: _fitted(state.get(kind), param, dtype)
            for kind in [*kinds, *(["residual"] if compresses else [])]
        }
        if keep and any(state.get(kind) is not entry for kind, entry in found.items()):
            keep_ = self._own.__setitem__ if self._momentum is None else self._momentum.keep_
            keep_(name, {**state, **found})
        return found

    def _compresses(self, name: str) -> bool:
        return self._config(name).compresses(self._params[name])

    def _at(self, step: int) -> int:
        return step if self._momentum is None else self._momentum.position

    def _count(self, step: int, name: str) -> int:
        sparsity = self._config(name).unsent_share(self._at(step))
        return count_sent(self._params[name].numel(), sparsity)

    def _fold(self, context: Context, name: str, grad: Tensor, *, keep: bool = False) -> Fold:
        param, momentum = self._params[name], self._momentum
        state, sources = self._state_of(name, keep=keep), context.sources
        limit = self._config(name).local_grad_clip_norm
        if momentum is not None:
            limit, sources = momentum.limit or limit, momentum.num_trainers or sources
        if limit is not None:
            grad = limited(grad, limit, sources, state_dtype(param))
        v = state["residual"].view(-1)
        if momentum is None:
            return Fold(grad.reshape(-1).contiguous(), v, None, 0.0, False)
        grad = momentum.decayed(name, grad)
        u = state["momentum_buffer"].view(-1)
        return Fold(grad.reshape(-1).contiguous(), v, u, *momentum.factors(name))


def _fitted(entry: Tensor | None, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the state as it is folded: flat views of it, so contiguous."""
    if entry is None:
        return torch.zeros(param.shape, dtype=dtype, device=param.device)
    here = shard_of(entry)
    fits = here.dtype == dtype and here.is_contiguous()
    return here if fits else narrowed(here, dtype).contiguous()
