"""Deep gradient compression: a rank sends the few largest of what it has accumulated.

Algorithm 4 of the paper, top to bottom, per tensor of n entries and update t (from 0):

    s       the fraction that is kept back in update t          `DGC.sparsity_in_force`  (3.3)
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
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.change_protocol import ErrorsOnly, Kept
from thinwire.compress.entries import ArrivedEntries, Proposed, send_entries
from thinwire.compress.protocol import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Arrived,
    Context,
    Limit,
    OtherRanks,
    Sending,
)
from thinwire.compress.sparse_change import entry_bytes, send_largest
from thinwire.compress.words import bits_text, dense_first, share_text
from thinwire.core.clip import ClipByNorm, clipped
from thinwire.core.feedback import Fold, commit_list_, in_chunks, propose_list, rounding_seed
from thinwire.core.norms import norms_over_shards
from thinwire.core.precision import named_dtype, state_dtype, stored_dtype
from thinwire.kernels.needs import Need, needs_of
from thinwire.layout.message import VALUE_BITS, Layout, Slot, count_sent
from thinwire.layout.traffic import EXCHANGES, first_split
from thinwire.schedules import sparsity_at

__all__ = [
    "DGC",
    "DGCCompressor",
    "RampedChange",
    "Rule",
    "compressible",
    "limited",
    "limited_over_shards",
    "locally_clipped",
]

_COMPRESSIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compressible(param: Tensor, min_numel: int) -> bool:
    """Whether the gradient of this tensor is ever compressed, with `min_numel` as the smallest size
    that is.
    """
    return param.dtype in _COMPRESSIBLE and param.numel() >= min_numel


@dataclass(frozen=True)
class DGC:
    """Each rank sends only the few largest accumulated entries of every gradient, about 2,000 times
    fewer bytes.

    Attributes:
        rampup_begin_step: Updates before compression begins, >= 0.
        rampup_step: Updates over which the levels of `sparsity` are spread, >= 1.
        sparsity: Fractions that are **not** sent, each in [0, 1); the last one stays.
        local_grad_clip_norm: C > 0: a source's share g / N of a compressed tensor is limited to the
            norm C / sqrt(N).
        min_numel: Smaller tensors are exchanged densely, >= 1.
        value_bits: What one sent value costs: 1, 2, 4, 8, 16 or 32. The rounding error is kept.
        state_dtype: "float32" or "bfloat16", in which momentum and residual of compressed tensors
            are stored; bfloat16 is rounded stochastically and takes half the memory. None: float32,
            float64 for float64 parameters.
        node_size: Consecutive ranks that share a node, average densely among themselves and count
            as one source, >= 1; it must divide the ranks. 1 is off. None: torchrun's
            LOCAL_WORLD_SIZE where ranks fill two nodes or more.
        exchange: "gather" gives every source all messages, "split" the sums of shares, which does
            not grow with the sources; "auto" counts, and splits where that moves at most half of
            the bytes.

    Raises:
        TypeError, ValueError: A wrong value.

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

    bucket_bytes: ClassVar[int] = BUCKET_BYTES
    first_bytes: ClassVar[int] = FIRST_BUCKET_BYTES
    field: ClassVar[str] = "dgc"
    """Of a strategy."""
    may_change: ClassVar[tuple[str, ...]] = (
        "rampup_begin_step",
        "rampup_step",
        "sparsity",
        "local_grad_clip_norm",
        "value_bits",
        "node_size",
        "exchange",
    )
    """Settings that another run may go on with, from a checkpoint of this one."""
    in_groups: ClassVar[tuple[str, ...]] = (
        "rampup_begin_step",
        "rampup_step",
        "sparsity",
        "local_grad_clip_norm",
    )
    why_no_shards: ClassVar[str] = ""
    """See `thinwire.compress.protocol.Compression`, and so is what comes before."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(
            self,
            "rampup_begin_step",
            check.integer("rampup_begin_step", self.rampup_begin_step, at_least=0),
        )
        set_(self, "rampup_step", check.integer("rampup_step", self.rampup_step, at_least=1))
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
        set_(self, "sparsity", tuple(levels))
        if self.local_grad_clip_norm is not None:
            limit = check.real("local_grad_clip_norm", self.local_grad_clip_norm, above=0)
            set_(self, "local_grad_clip_norm", limit)
        set_(self, "min_numel", check.integer("min_numel", self.min_numel, at_least=1))
        set_(self, "value_bits", check.integer("value_bits", self.value_bits))
        check.one_of("value_bits", self.value_bits, VALUE_BITS)
        set_(self, "state_dtype", named_dtype("state_dtype", self.state_dtype))
        if self.node_size is not None:
            set_(self, "node_size", check.integer("node_size", self.node_size, at_least=1))
        check.instance("exchange", self.exchange, str)
        check.one_of("exchange", self.exchange, EXCHANGES)

    def compresses(self, param: Tensor) -> bool:
        """Whether this tensor is ever compressed; all others are always exchanged densely."""
        return compressible(param, self.min_numel)

    def stored_dtype(self, param: Tensor) -> torch.dtype:
        """In what the residual of this tensor is stored."""
        return stored_dtype(param, named_dtype("state_dtype", self.state_dtype))

    def sparsity_in_force(self, step: int) -> float:
        """Fraction of a compressed tensor that update `step` (from 0) does not send; 0 before
        compression begins.
        """
        if step < self.rampup_begin_step:
            return 0.0
        return sparsity_at(step, self.rampup_begin_step, self.rampup_step, self.sparsity)

    def explanation(self) -> str:
        """What becomes of a gradient, in words."""
        stored = ", in bfloat16 by stochastic rounding" if self.state_dtype == "bfloat16" else ""
        return (
            f"{dense_first(self.rampup_begin_step)}gradients accumulate, and of each tensor the "
            f"largest {self.ramp()} are sent, {bits_text(self.value_bits)} an entry; the rest is "
            f"kept{stored}. Tensors below {self.min_numel} numbers are dense{self.limit('source')}"
        )

    def ramp(self) -> str:
        """Such as "25 % from update 201, 6.25 % from 461, 0.1 % from 721", updates counted
        from 1.
        """
        levels, length = self.sparsity, self.rampup_step
        first = [
            self.rampup_begin_step + 1 - (-i * length // len(levels)) for i in range(len(levels))
        ]
        if len(levels) == 1:
            return share_text(levels[0])
        ends = [*first[1:], None]
        shown = [
            (level, start)
            for level, start, end in zip(levels, first, ends, strict=True)
            if start != end
        ]
        return ", ".join(
            f"{share_text(level)} {'from update ' if i == 0 else 'from '}{at}"
            for i, (level, at) in enumerate(shown)
        )

    def limit(self, who: str) -> str:
        """The local clip of one of `who`, in words."""
        limit = self.local_grad_clip_norm
        if limit is None:
            return ""
        return f"; a {who}'s share of a compressed tensor is limited to {limit:g} / sqrt({who}s)"

    def advice(self, *, local: bool, replaced: bool, peers: str, here: str) -> Iterator[str]:
        """See `thinwire.compress.protocol.Compression`."""
        if local:
            if self.node_size not in (None, 1):
                yield (
                    f"dgc: node_size={self.node_size} is for gradients; say node_size in the local "
                    "updates for their averages"
                )
            return
        if not replaced:
            yield (
                "dgc: clipping, weight decay, momentum and Nesterov of an SGD come before the "
                "exchange (DGCMomentum); any other optimizer gets the sparse mean as its gradient"
            )
        if self.node_size is None:
            said = (
                "dgc: the ranks of a machine average densely and count as one source where "
                "torchrun's LOCAL_WORLD_SIZE ranks fill two machines or more; on one machine every "
                "rank is a source of its own (node_size=None)"
            )
        elif self.node_size == 1:
            said = (
                "dgc: every rank is a source of its own, on the same machine or not (node_size=1)"
            )
        else:
            said = (
                f"dgc: {self.node_size} consecutive {peers} share a node, average densely and "
                f"count as one source (node_size={self.node_size}), so {peers} must be a multiple "
                f"of {self.node_size}; N of a local clip is the number of nodes"
            )
        yield said + here
        yield {
            "gather": "dgc: every source gets the messages of all others, so bytes grow with "
            "sources (exchange='gather')",
            "split": (
                "dgc: every source adds up a share of the numbers and passes on the largest sums "
                "(exchange='split'): two rounds, and no more bytes for more sources; what is not "
                "passed on is kept"
            ),
            "auto": (
                "dgc: messages are gathered as long as sources are few, and added up by shares "
                "where that moves at most half of the bytes, from about 9 sources on "
                "(exchange='auto')"
            ),
        }[self.exchange]

    def why_dense(self, param: Tensor) -> str | None:
        """Why this tensor is never compressed, in words; None where it is."""
        if param.numel() < self.min_numel:
            return f"below min_numel={self.min_numel}"
        return None if self.compresses(param) else f"because of {param.dtype}"

    def message_text(self, params: Iterable[Tensor]) -> str:
        """What one source sends of these once the sparsity has reached its last level, in words."""
        slots = tuple(Slot(p.numel(), count_sent(p.numel(), self.sparsity[-1])) for p in params)
        layout = Layout(slots, self.value_bits)
        said = (
            f"a whole message has {sum(slot.k for slot in slots):,} entries in {layout.nbytes:,} "
            "bytes"
        )
        if self.exchange != "auto":
            return said
        begin = first_split(layout)
        return (
            f"{said}; sources gather "
            f"{'however many they are' if begin is None else f'below {begin}, else they split'}"
        )

    def needs(self, params: Iterable[Tensor]) -> frozenset[Need]:
        """The compiled loops that it calls."""
        state = torch.bfloat16 if self.state_dtype == "bfloat16" else None
        mine = [param for param in params if self.compresses(param)]
        return needs_of("sparse", mine, state_dtype=state, value_bits=self.value_bits)

    def compressor(
        self, params: Mapping[str, Tensor], *, num_trainers: int | None = None
    ) -> "DGCCompressor":
        """See `thinwire.compress.protocol.Compression`: without momentum correction.

        The state is there from the beginning.
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

    def for_changes(self) -> "RampedChange":
        """See `thinwire.compress.change_protocol.ForChanges`."""
        if self.state_dtype == "bfloat16":
            raise ValueError(
                "dgc.state_dtype is 'bfloat16', but what an averaging does not send is kept in "
                "the type of its anchor: leave state_dtype out"
            )
        return RampedChange(self)

    def limiting(
        self,
        params: Mapping[str, Tensor],
        *,
        sources: int,
        gather: Callable[[bytes, str], list[bytes]] | None = None,
    ) -> Limit | None:
        """See `thinwire.compress.protocol.Compression`."""
        if self.local_grad_clip_norm is None:
            return None

        def within(step: int, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
            if gather is not None:
                return limited_over_shards(
                    grads, params, lambda name: self, step=step, sources=sources, gather=gather
                )
            return {
                name: locally_clipped(self, step, sources, params[name], grad)
                for name, grad in grads.items()
            }

        return within

    def without_limit(self) -> "DGC":
        """See `thinwire.compress.protocol.Compression`."""
        return replace(self, local_grad_clip_norm=None)

    @property
    def settled_step(self) -> int:
        """See `thinwire.compress.protocol.Compression`."""
        levels = len(self.sparsity)
        return 1 + self.rampup_begin_step - (-self.rampup_step * (levels - 1) // levels)

    def count_at(self, step: int, numel: int) -> int | None:
        """Entries sent of `numel` in update `step` (from 0); None before compression begins."""
        if step < self.rampup_begin_step:
            return None
        return count_sent(
            numel, sparsity_at(step, self.rampup_begin_step, self.rampup_step, self.sparsity)
        )


def limited(grad: Tensor, limit: float, sources: int, dtype: torch.dtype) -> Tensor:
    """One rank's gradient such that its share of the mean, grad / N, has at most the norm C /
    sqrt(N).

    g <- g * min(1, C * sqrt(N) / ||g||).

    Args:
        grad: Any shape, dense, not divided by N; read only.
        limit: C > 0, in the gradient's unit.
        sources: N >= 1, those whose shares are summed.
        dtype: In what the norm and the result are computed.

    Returns:
        A new tensor of `dtype` in the same shape; no host synchronization.

    Source: section 3.2. Differs: the limit is put on the share, not on the undivided gradient.
    """
    return clipped(ClipByNorm(limit * math.sqrt(sources)), [grad.to(dtype)])[0]


def locally_clipped(dgc: DGC, step: int, sources: int, param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as `dgc` lets it into the accumulation of this rank: limited where it is
    compressed at `step`.

    Args:
        dgc: The config.
        step: Completed updates, from 0.
        sources: N of the limit, >= 1.
        param: The parameter, which decides whether the gradient is compressed.
        grad: Its gradient on this rank; read only.

    Returns:
        `limited` in float32 (float64 for float64 parameters), or `grad` itself: without
        `local_grad_clip_norm`, before `rampup_begin_step`, and for whatever is always exchanged
        densely.
    """
    if dgc.local_grad_clip_norm is None or grad.is_sparse:
        return grad
    if step < dgc.rampup_begin_step or not dgc.compresses(param):
        return grad
    return limited(grad, dgc.local_grad_clip_norm, sources, state_dtype(param))


def limited_over_shards(
    grads: Mapping[str, Tensor],
    shards: Mapping[str, Tensor],
    config: Callable[[str], DGC],
    *,
    step: int,
    sources: int,
    gather: Callable[[bytes, str], list[bytes]],
) -> dict[str, Tensor]:
    """Gradients of shards as `locally_clipped` lets them in, by norms over all shards of a tensor.

    Args:
        grads: This rank's parts by name, the same names on all shards; read only.
        shards: This rank's parts of the parameters.
        config: By name.
        step: Completed updates, from 0.
        sources: N of the limit.
        gather: See `norms_over_shards`.

    Communication: with a local clip 8 bytes a tensor and rank inside the site.
    """
    within = dict(grads)
    if all(config(name).local_grad_clip_norm is None for name in grads):
        return within
    norms = norms_over_shards(grads, gather)
    for name, grad in grads.items():
        dgc, shard = config(name), shards[name]
        limit = dgc.local_grad_clip_norm
        if limit is not None and step >= dgc.rampup_begin_step and dgc.compresses(shard):
            bound = limit * math.sqrt(sources)
            wide = grad.to(state_dtype(shard))
            within[name] = wide * (bound / norms[name]) if norms[name] > bound else wide
    return within


@dataclass(frozen=True)
class RampedChange(ErrorsOnly):
    """Changes that travel by the ramp of a DGC: its sparsity at the step, its `value_bits` and
    `min_numel`.

    The mean is over all ranks and what is kept does not decay, so everything is sent in time, as
    with its gradients.
    """

    config: DGC

    decay: ClassVar[float] = 1.0
    conserves: ClassVar[bool] = True
    steady_share: ClassVar[float] = 1.0

    def explained(self) -> str:
        """See `ChangeCompression`."""
        config, begin = self.config, dense_first(self.config.rampup_begin_step)
        return (
            f"{begin}of each tensor's change the largest {config.ramp()} are sent, "
            f"{bits_text(config.value_bits)} an entry; the rest is kept. Tensors below "
            f"{config.min_numel} numbers go whole"
        )

    def compresses(self, param: Tensor) -> bool:
        """See `DGC.compresses`."""
        return self.config.compresses(param)

    def takes(self, step: int, numel: int) -> bool:
        """Not before the ramp begins."""
        return self.config.count_at(step - 1, numel) is not None

    def send(self, context: Context, folded: Mapping[str, Tensor], kept: Kept) -> Sending:
        """See `ChangeCompression`: as `Sparse`."""
        bits, exchange = self.config.value_bits, self.config.exchange
        count = self._counting(context.step)
        return send_largest(context, folded, count, bits, exchange, over_senders=False)

    def sent_bytes(
        self, step: int, shapes: Sequence[torch.Size], sources: int = 2, source: int = 0
    ) -> int:
        """See `ChangeCompression`."""
        bits, exchange = self.config.value_bits, self.config.exchange
        count = self._counting(step)
        return entry_bytes(shapes, count, bits, exchange, sources=sources, source=source)

    def sparsity_at(self, step: int) -> float:
        """That of the update that follows `step`."""
        return self.config.sparsity_in_force(step)

    def needs(self, params: Sequence[Tensor]) -> frozenset[Need]:
        """See `ChangeCompression`."""
        return needs_of("changes", params, value_bits=self.config.value_bits)

    def _counting(self, step: int) -> Callable[[int], int]:
        def count(numel: int) -> int:
            found = self.config.count_at(step - 1, numel)
            assert found is not None, "only what is taken is sent"
            return found

        return count


class Rule(NamedTuple):
    """How one tensor is compressed."""

    config: DGC
    momentum: float | None = None
    """m; None without momentum correction, where another optimizer has a momentum of its own."""
    nesterov: bool = False


class DGCCompressor:
    """Deep gradient compression of the tensors that `DGC.compresses`, from `rampup_begin_step` on.

    Args:
        params: By name, in the same order on all ranks.
        rule: By name; the same on all ranks.
        state: By name `residual` v and, with momentum, `momentum_buffer` u: in the shape of the
            parameter, contiguous. Filled when it is first needed.
        value_bits: What one sent value costs.
        exchange: "gather", "split" or "auto".
        num_trainers: N of the local clip, and of nothing else; None: the sources.
        decayed: What becomes of a gradient after the local clip: weight decay and the like.

    **State**: v and u, of this rank, or common to the ranks of a node.
    """

    bucket_bytes, first_bytes = DGC.bucket_bytes, DGC.first_bytes
    other_ranks: Mapping[str, OtherRanks] = {
        "residual": "mean_zero",
        "momentum_buffer": "mean_zero",
    }

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
        self._fresh: dict[str, dict[str, Tensor]] = {}
        """Zeros that enter the state only when the update is applied."""

    def takes(self, step: int, name: str, grad: Tensor) -> bool:
        """See `Compressor`."""
        return not grad.is_sparse and self._count(step, name) is not None

    def send(self, context: Context, grads: Mapping[str, Tensor]) -> Sending:
        """See `Compressor`."""
        proposed: dict[str, Proposed] = {}
        for names in in_chunks({name: self._params[name].numel() for name in grads}):
            folds = [self._fold(context, name, grads[name]) for name in names]
            counts = [self._count(context.step, name) or 0 for name in names]
            for name, proposal, k in zip(names, propose_list(folds, counts), counts, strict=True):
                proposed[name] = Proposed(proposal, self._params[name].numel(), k)
        return send_entries(context, proposed, value_bits=self._value_bits, exchange=self._exchange)

    def commit_(self, grads: Mapping[str, Tensor], arrived: Arrived) -> None:
        """See `Compressor`."""
        assert isinstance(arrived, ArrivedEntries)
        keys = {name: key for key, name in enumerate(self._params)}
        mine = {name: self._params[name].numel() for name in arrived.names if name in grads}
        for names in in_chunks(mine):
            folds = []
            for name in names:
                self._state[name] = self.state_of(name)
                # the second fold: `send` kept no copy, so gradients and state must be as then
                grad = arrived.node_means.get(name, grads[name])
                folds.append(self._fold(arrived.context, name, grad))
            given = [arrived.given[name] for name in names]
            seeds = [rounding_seed(arrived.context.step, keys[name]) for name in names]
            commit_list_(folds, given, seeds)
            for name, fold in zip(names, folds, strict=True):
                arrived.add_kept_(name, fold.residual, keys[name])

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See `Compressor`."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, param in self._params.items():
            if name in self._state and self._rule(name).config.compresses(param):
                for kind, entry in self._state[name].items():
                    found.setdefault(kind, {})[name] = entry
        return found

    def forget(self) -> None:
        """See `Compressor`."""
        self._fresh.clear()

    def fill(self, names: Iterable[str]) -> None:
        """Give these tensors their state, zeros."""
        for name in names:
            self._state[name] = self.state_of(name)
        self.forget()

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The state of a tensor that is, or will be, compressed; zeros where it has none yet."""
        state = self._state.get(name) or self._fresh.setdefault(name, {})
        rule, param = self._rule(name), self._params[name]
        kinds = ("residual",) if rule.momentum is None else ("momentum_buffer", "residual")
        for kind in (kind for kind in kinds if kind not in state):
            dtype = rule.config.stored_dtype(param)
            state[kind] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        return state

    def _count(self, step: int, name: str) -> int | None:
        """Entries of the tensor that are sent; None where it travels densely."""
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
