"""SGD with momentum over deep gradient compression: each rank sends its few largest accumulated entries."""

import datetime
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from thinwire import _validate as check
from thinwire._version import __version__
from thinwire.comm import (
    BucketTap,
    Group,
    Nodes,
    is_alone,
    next_identity,
    node_size_of,
    one_deadline,
    place_in,
    require_agreement,
    require_process_group,
    seconds_of,
    sources_of,
    tap_buckets,
    time_limit_s,
    while_busy,
)
from thinwire.core.arithmetic import CURES, arithmetic
from thinwire.core.checksum import bit_sums
from thinwire.core.clip import ClipByNorm, clipped
from thinwire.core.decay import Regularizer
from thinwire.core.feedback import Fold, commit_list_, in_chunks, propose_list
from thinwire.core.kernels.needs import Need, needs_of
from thinwire.core.kernels.warm import warm_up, warm_up_beside
from thinwire.core.merge import step_along_list_
from thinwire.core.message import WIRE_VERSION
from thinwire.core.origin import ORIGIN, Origin, checksum_of, without_origin
from thinwire.core.precision import named_state_dtype, narrowed, state_dtype, stored_dtype
from thinwire.core.rounding import rounding_seed, store_
from thinwire.core.select import count_sent
from thinwire.core.stats import numbers
from thinwire.core.value_code import VALUE_BITS
from thinwire.optim.base import CommonOptimizer
from thinwire.optim.two_phase import ParamGrad
from thinwire.schedules import Schedule, sparsity_at
from thinwire.sync.dgc_config import compressible
from thinwire.sync.digest import DIGEST_EVERY, RollingDigest
from thinwire.sync.exchange import GradientExchange, Verdict
from thinwire.sync.local_limit import limited
from thinwire.sync.node_state import make_common_
from thinwire.sync.own_state import OwnState
from thinwire.sync.round import Round, SparseGradient
from thinwire.sync.steady import Steady
from thinwire.sync.traffic import EXCHANGES

__all__ = ["Attached", "DGCMomentum"]

_OWN = ("momentum_buffer", "residual")
"""State that differs from rank to rank."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """The parameters in the order of the exchange; a parameter's place is its key."""

    params: list[Tensor]
    names: list[str]
    keys: dict[Tensor, int]


class DGCMomentum(CommonOptimizer):
    """SGD with momentum that exchanges gradients itself, about 2,000 times smaller.

    Each rank holds the gradient of its own mean loss in `p.grad`; `step` exchanges and updates. Per tensor of at least
    `min_numel` elements: u <- m u + g, v <- v + u, the k entries of largest |v| are sent in `value_bits` bits each,
    what was sent is taken off v and u is cleared there, and p <- p - lr * mean over the ranks. All other tensors, and
    all of them before `rampup_begin_step`, are averaged densely and follow torch's SGD.

    Args:
        params: As in torch; all ranks must give the same, in the same order, with equal values.
        lr: A number, a schedule or a list, also per group.
        momentum: m, >= 0.
        rampup_begin_step: Updates before compression begins, >= 0.
        rampup_step: Updates over which the levels of `sparsity` are spread, >= 1.
        sparsity: Fractions that are **not** sent, each in [0, 1); the last one stays.
        nesterov: Whether to look ahead; needs momentum.
        weight_decay: Added to each rank's own gradient before it is folded in, >= 0.
        local_grad_clip_norm: C > 0: a source's share g / N of a compressed tensor is limited to the norm C / sqrt(N). A
            source is a rank, or a node with the mean of its ranks.
        num_trainers: N of that limit, and of nothing else; the number of sources where it is None.
        min_numel: Smaller tensors are exchanged densely, >= 1.
        value_bits: What one sent value costs: 1, 2, 4, 8, 16 or 32. The rounding error stays in v.
        state_dtype: u and v of compressed tensors are stored as "float32" or "bfloat16" (a torch dtype is taken too),
            half the memory, rounded stochastically; None: float32, float64 for float64 parameters.
        node_size: Consecutive ranks that share a node, average densely among themselves and count as one source, >= 1;
            it must divide the ranks. 1 is off. None: torchrun's LOCAL_WORLD_SIZE where ranks fill two nodes or more.
        exchange: "gather" gives every source all messages, "split" the sums of shares, which does not grow with the
            sources; "auto" counts, and splits where that moves at most half of the bytes.
        process_group: The ranks that exchange; None for all of them. One process alone works too.
        digest_every: Updates within which a difference between the ranks' parameters, or in momentum that is averaged
            densely, is found, >= 1; 0 compares nothing.
        timeout: For how long a rank waits for others in one call, in seconds or as a timedelta; None: as long as the
            process group itself would. The same on all ranks.
        grad_clip: `ClipByNorm` only: its c is C for compressed tensors and a plain limit for those that stay dense.
        regularizer: `L1Decay` or `L2Decay`, treated as `weight_decay` is.
        exclude_from_weight_decay: Patterns over names, or a predicate (name, parameter) -> bool.
        maximize: Whether to go up instead of down.
        foreach: Accepted for the common signature; the exchange decides the order of work.

    **State** in `state[p]`: `momentum_buffer` u and, for compressed tensors, `residual` v, float32 (float64 for float64
    parameters) or `state_dtype`, local to the rank, or common to the ranks of a node; `position` in the state_dict.
    Every rank saves its own. What is loaded takes on the type that is asked for here: rounded to nearest, once, where
    that is narrower.
    **Communication** per step: 24 bytes a rank of agreement before and after, one all-gather of equally long messages,
    one all-reduce per dtype of dense tensors. A digest of what all ranks must hold alike rides in the agreement. The
    first step also compares settings and parameters over the ranks. With
    nodes these go between the first ranks of the nodes, after one all-reduce per dtype inside each; with "split" the
    all-gather becomes an exchange of parts and an all-gather of their sums.
    **Failure**: a gradient that is not finite, on any rank, drops the step on all of them; nothing changes, a warning
    names parameter, rank and step, and the tenth in a row is `thinwire.errors.NonFinite`. Ranks that do not hold the
    same any more are `thinwire.errors.Diverged` on all of them, within `digest_every` updates. Every other error of an
    exchange leaves parameters and state as they were before the step.

    Raises:
        TypeError, ValueError: A wrong argument, at construction.

    Source: Lin et al., 2018, arXiv 1712.01887. Differs: exact selection, positions by Elias-Fano, coded values.
    """

    exchanges_gradients = True
    """For those who average parameters instead, and must not do both."""
    _step_supports_amp_scaling = True
    _exchange: GradientExchange | None = None
    _attached: "Attached | None" = None
    _cached_listing: _Listing | None = None
    _buckets: Sequence[Sequence[Tensor]] = ()
    _inverse_scale = 1.0
    _dense_bytes = 0
    _agreed: list[dict[str, Any]] | None = None
    """Per group what says how many entries are sent, as all ranks last agreed on it."""
    _in_force: list[dict[str, Any]] | None = None
    """The same while buckets are launched, before the agreement of their step."""
    _nodes_compared = False
    """Whether the ranks of a node are known to hold the same state."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | Schedule | Sequence[float],
        momentum: float = 0.9,
        *,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        nesterov: bool = False,
        weight_decay: float = 0.0,
        local_grad_clip_norm: float | None = None,
        num_trainers: int | None = None,
        min_numel: int = 16384,
        value_bits: int = 1,
        state_dtype: str | torch.dtype | None = None,
        node_size: int | None = None,
        exchange: str = "auto",
        process_group: dist.ProcessGroup | None = None,
        digest_every: int = DIGEST_EVERY,
        timeout: float | datetime.timedelta | None = None,
        grad_clip: ClipByNorm | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: Any = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        if grad_clip is not None:
            check.instance(
                "grad_clip", grad_clip, ClipByNorm, advice="other norms do not commute with local accumulation"
            )
        if grad_clip is not None and local_grad_clip_norm is not None:
            raise ValueError(
                f"grad_clip={grad_clip} and local_grad_clip_norm={local_grad_clip_norm} limit the same gradient: "
                "give one of them"
            )
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        self.value_bits = check.integer("value_bits", value_bits)
        check.one_of("value_bits", self.value_bits, VALUE_BITS)
        self.state_dtype = named_state_dtype(state_dtype)
        self.num_trainers = None if num_trainers is None else check.integer("num_trainers", num_trainers, at_least=1)
        self.node_size = None if node_size is None else check.integer("node_size", node_size, at_least=1)
        check.instance("exchange", exchange, str)
        check.one_of("exchange", exchange, EXCHANGES)
        self.exchange = exchange
        self.digest_every = check.integer("digest_every", digest_every, at_least=0)
        self.timeout_s = seconds_of(timeout)
        require_process_group(process_group)
        self._process_group = process_group
        self._identity = f"optimizer {next_identity(process_group)}"
        self._fresh: dict[Tensor, dict[str, Tensor]] = {}
        self._samples: dict[int, Tensor] = {}
        defaults = {
            "lr": rate,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "rampup_begin_step": rampup_begin_step,
            "rampup_step": rampup_step,
            "sparsity": tuple(sparsity) if isinstance(sparsity, list) else sparsity,
            "local_grad_clip_norm": local_grad_clip_norm,
            "min_numel": min_numel,
            "maximize": maximize,
            "foreach": foreach,
        }
        super().__init__(groups, defaults)
        self._close()
        (warm_up if is_alone() else warm_up_beside)(self.needs)

    @property
    def needs(self) -> frozenset[Need]:
        """The compiled loops that its exchange calls."""
        params = [p for group in self.param_groups for p in group["params"] if compressible(p, group["min_numel"])]
        state = torch.bfloat16 if self.state_dtype == "bfloat16" else None
        return needs_of("sparse", params, state_dtype=state, value_bits=self.value_bits)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in the base class; the next step compares settings and parameters over the ranks anew."""
        self._cached_listing = None
        super().add_param_group(param_group)

    def attach(self, ddp: DistributedDataParallel) -> "Attached":
        """Move the exchange into the backward pass of `ddp`, bucket by bucket, so that it overlaps with it.

        From now on `p.grad` holds, after the backward pass, the rank's own gradient (not the mean), and `step` waits
        for what is on its way, checks it and updates; leave `p.grad` alone in between. Parameters and state end up
        bit-identical to `step` alone for compressed tensors. Under `ddp.no_sync()` gradients accumulate locally.
        A `torch.amp.GradScaler` reveals its scale only in `step`: with one, the exchange happens there.

        Args:
            ddp: A model whose parameters are exactly those of this optimizer.

        Returns:
            The handle whose `remove` moves the exchange back into `step`, with all state kept.

        Raises:
            TypeError: `ddp` is no DistributedDataParallel.
            ValueError: It is attached already, has other parameters or other ranks, or a hook of somebody else.

        Communication: the comparison of settings and parameters, if it has not been made yet.
        """
        check.instance("ddp", ddp, DistributedDataParallel)
        if self._attached is not None:
            raise ValueError("this optimizer is attached already: call remove() on its handle first")
        mine = {p for p in self._ordered_params() if p.requires_grad}
        theirs = {p for p in ddp.parameters() if p.requires_grad}
        if mine != theirs:
            raise ValueError(
                f"ddp must have exactly the trainable parameters of this optimizer: {len(theirs - mine)} of the "
                f"model's are not in the optimizer, {len(mine - theirs)} of the optimizer's are not in the model"
            )
        with one_deadline(time_limit_s(self._process_group, self.timeout_s)):
            group = self._joined().group
        tap = tap_buckets(ddp, group, self._launch_bucket)
        self._attached = Attached(self, tap)
        return self._attached

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange, as given; None for all of them."""
        return self._process_group

    def cut(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Which parameters travel together from now on, for whoever calls `launch`; the same on all ranks."""
        self._buckets = buckets
        if self._exchange is not None:
            self._exchange.buckets = self._bucket_keys()

    @property
    def steady(self) -> frozenset[Tensor] | None:
        """The parameters that `launch` may send, all of them; None while ranks have to agree first."""
        exchange, listing = self._exchange, self._listing
        if exchange is None or exchange.names != listing.names or exchange.steady.keys is None:
            return None
        return frozenset(listing.params[key] for key in exchange.steady.keys)

    @torch.no_grad()
    def launch(self, bucket: int, grads: Mapping[Tensor, Tensor]) -> None:
        """Send one bucket of the next step before all gradients are there; in the same order on all ranks.

        Args:
            bucket: Its number, from 0.
            grads: This rank's own gradients by parameter, dense, as `step` will find them.

        Raises:
            PeerLost, PeerStalled: See `thinwire.errors`.
        """
        assert self._exchange is not None, "steady was not None"
        self._compare_nodes(self._exchange)
        self._launched(bucket, self._signed(grads))

    @torch.no_grad()
    def settle(self, grads: Mapping[Tensor, Tensor], **told: Any) -> Verdict:
        """Wait for what was launched and agree what becomes of it, before `step`; see `GradientExchange.settle`."""
        assert self._exchange is not None, "steady was not None"
        keys = self._listing.keys
        return self._exchange.settle(self.position, {keys[p]: g for p, g in grads.items() if p in keys}, **told)

    def spoil(self, reason: str) -> None:
        """Tell all ranks, in the next agreement, that this one did not finish its update."""
        assert self._exchange is not None, "it has made an update"
        self._exchange.spoiled = reason

    @torch.no_grad()
    def require_equal(self) -> None:
        """Compare all that ranks must hold alike, and the memory of what is this rank's own; on all ranks.

        Nothing before the first step, or where `digest_every` is 0.

        Raises:
            Diverged: On every rank.
        """
        if self._exchange is not None:
            self._exchange.require_equal(self.position)

    def release(self) -> None:
        """Forget what was settled and not taken."""
        assert self._exchange is not None, "steady was not None"
        self._exchange.release()
        self._forget()

    def abandon(self, reason: str) -> None:
        """Leave a step half-way; nothing can be exchanged any more."""
        assert self._exchange is not None, "steady was not None"
        self._exchange.abandon(reason)
        self._forget()

    def stats(self) -> dict[str, float]:
        """This rank so far, flat and in numbers only; the names are those of `thinwire.core.stats.numbers`.

        With nodes `bytes_sent` has the dense traffic inside the node too; `bytes_between_nodes` is what left it.
        `sparsity` is that of the first group in the next update. Where a DistributedDataParallel model was found that
        averages besides, because `attach` was forgotten, what it sends counts too.
        """
        sources = None if self._exchange is None else self._exchange.sources
        besides = 0 if self._exchange is None else self._exchange.bytes_before
        return numbers(
            step=self.position,
            dropped_steps=0 if self._exchange is None else self._exchange.drops.total,
            sparsity=self._sparsity_of(self.param_groups[0]) or 0.0,
            bytes_sent=besides + (0 if sources is None else sources.bytes_sent),
            bytes_received=0 if sources is None else sources.bytes_received,
            bytes_between_nodes=sources.bytes_between_nodes if isinstance(sources, Nodes) else None,
            bytes_dense=self._dense_bytes,
            wait_s=0.0 if sources is None else sources.wait_s,
        )

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with `position`; of this rank, which `load_state_dict` compares.

        `state` has an entry `origin` beside the residual of one parameter: rank, ranks, position and a checksum of
        residuals and momentum, as an int64 tensor, which every way of saving keeps.
        """
        state_dict = self.plain_state_dict()
        state = state_dict["state"]
        first = next((key for key, entries in state.items() if "residual" in entries), None)
        if first is not None:
            origin = Origin(*place_in(self._process_group), self.position, _own_checksum(state))
            state_dict["state"] = {**state, first: {**state[first], ORIGIN: origin.packed()}}
        return state_dict

    def plain_state_dict(self) -> dict[str, Any]:
        """`state_dict` without the origin, for whoever keeps ranks apart by other means."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, with `position`; names decide whose state it is where named parameters were given.

        Warns:
            UserWarning: It is another rank's, its tensors come from several ranks, or it has lost its position.

        Raises:
            ValueError: The groups or shapes do not fit; nothing has changed.
        """
        state = state_dict["state"]
        origin = next((o for entries in state.values() if (o := Origin.read(entries.get(ORIGIN)))), None)
        bare = {**state_dict, "state": {key: without_origin(entries) for key, entries in state.items()}}
        if origin is not None and "position" not in bare:
            bare["position"] = origin.position
        super().load_state_dict(bare)
        problem = None
        if origin is not None:
            problem = origin.problem(*place_in(self._process_group), _own_checksum(state))
        elif "position" not in bare and any("residual" in entries for entries in state.values()):
            problem = (
                "the state has no position, so that the rampup of sparsity begins anew at update 0: save what "
                "state_dict() gives as a whole, or set state_dict['position'] to the number of updates made"
            )
        if problem is not None:
            warnings.warn(f"thinwire.optim.DGCMomentum: {problem}", UserWarning, stacklevel=2)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        momentum = check.real("momentum", values["momentum"], at_least=0)
        if check.boolean("nesterov", values["nesterov"]) and momentum == 0:
            raise ValueError("nesterov needs a momentum above 0, got momentum=0")
        check.integer("rampup_begin_step", values["rampup_begin_step"], at_least=0)
        check.integer("rampup_step", values["rampup_step"], at_least=1)
        check.integer("min_numel", values["min_numel"], at_least=1)
        if values["local_grad_clip_norm"] is not None:
            check.real("local_grad_clip_norm", values["local_grad_clip_norm"], above=0)
        levels = values["sparsity"]
        check.instance("sparsity", levels, (tuple, list), advice="write a single fraction as (0.999,)")
        if not levels:
            raise ValueError("sparsity must hold at least one fraction in [0, 1), got an empty sequence")
        for i, level in enumerate(levels):
            check.real(f"sparsity[{i}], the fraction that is not sent,", level, at_least=0, below=1)

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        with one_deadline(time_limit_s(self._process_group, self.timeout_s)):
            return self._exchanged(self._joined(), pairs, rates)

    def _exchanged(self, exchange: GradientExchange, pairs: list[ParamGrad], rates: list[float]) -> bool:
        overflow = self._read_scaler()
        if overflow is not None and exchange.in_flight and self._attached is not None:
            exchange.discard()  # proposals made before the scale was known are in the wrong unit
            self._attached.deferred = True
        try:
            keys = self._listing.keys
            grads = {keys[p]: self._unscaled(p, g) for p, g in pairs}
            unchanged = self._unchanged_since_backward(grads) if exchange.in_flight else None
            done = exchange.exchange(self.position, grads, overflow=overflow, unchanged=unchanged)
            self._agreed = self._ramps()
            if done is None:
                return False
            self._apply(pairs, rates, done)
            if exchange.own is not None:
                exchange.own.seal(self.position + 1)
        finally:
            self._forget()
        self._dense_bytes += sum(4 * p.numel() for p in self._ordered_params() if p.requires_grad)
        return True

    def _detached(self) -> None:
        """Called by the handle: forget it, and what it may have launched."""
        self._attached = None
        if self._exchange is not None:
            self._exchange.discard()
        self._forget()

    def _forget(self) -> None:
        """Let go of what belongs to one step."""
        self._fresh.clear()
        self._samples.clear()
        self._inverse_scale = 1.0

    @property
    def _listing(self) -> _Listing:
        if self._cached_listing is None:
            params = list(self._ordered_params())
            names = [self._facts(p).name or f"parameter {key}" for key, p in enumerate(params)]
            self._cached_listing = _Listing(params, names, {p: key for key, p in enumerate(params)})
        return self._cached_listing

    def _read_scaler(self) -> bool | None:
        """Whether a `GradScaler` found an overflow (None: no scaler); its scale, where gradients carry it, is kept."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        return None if found is None else bool(found)

    def _unchanged_since_backward(self, grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Per gradient that has been launched whether it is still the same, by the sum of its bits."""
        keys = [key for key in grads if key in self._samples]
        now = bit_sums([grads[key] for key in keys])
        return {key: words == self._samples[key] for key, words in zip(keys, now, strict=True)}

    def _unscaled(self, param: Tensor, grad: Tensor) -> Tensor:
        return grad if self._inverse_scale == 1.0 else grad.to(_wide(param)) * self._inverse_scale

    def _compressible(self, param: Tensor) -> bool:
        return compressible(param, self._facts(param).group["min_numel"])

    def _state_of(self, param: Tensor, *, residual: bool) -> dict[str, Tensor]:
        """The parameter's state; zeros that enter `self.state` only when the update is applied."""
        state: dict[str, Tensor] = self.state.get(param) or self._fresh.setdefault(param, {})
        for key in ("momentum_buffer", "residual") if residual else ("momentum_buffer",):
            if key not in state:
                state[key] = torch.zeros(param.shape, dtype=self._stored_dtype(param), device=param.device)
        return state

    def _stored_dtype(self, param: Tensor) -> torch.dtype:
        """In what the state of this parameter is stored, before compression begins too."""
        return stored_dtype(param, self.state_dtype) if self._compressible(param) else _wide(param)

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        # flat views of it are folded, so it is contiguous whatever the layout of the parameter
        return narrowed(value.to(param.device), self._stored_dtype(param)).contiguous()

    def _seed(self, key: int) -> int:
        return rounding_seed(self.position, key)

    def _contribution(self, param: Tensor, grad: Tensor) -> Tensor:
        """What this rank folds in, flat: its gradient after local clip, decay, regularizer and centralization."""
        facts = self._facts(param)
        limit = facts.group["local_grad_clip_norm"]
        if self.grad_clip is not None:
            assert isinstance(self.grad_clip, ClipByNorm)
            limit = self.grad_clip.c
        if limit is not None:
            assert self._exchange is not None
            grad = limited(grad, limit, self.num_trainers or self._exchange.sources.size, state_dtype(param))
        if facts.weight_decay or facts.regularizer is not None or facts.grad_centralization:
            grad = self._with_decay(param, grad.to(state_dtype(param)))
        return grad.reshape(-1)

    def _propose(self, grads: Mapping[int, Tensor]) -> dict[int, SparseGradient]:
        params = self._listing.params
        ks = {key: k for key in grads if (k := self._count_sent(params[key])) is not None}
        found: dict[int, SparseGradient] = {}
        for keys in in_chunks({key: params[key].numel() for key in ks}):
            folds = [self._fold(params[key], grads[key]) for key in keys]
            its_ks = [ks[key] for key in keys]
            for key, proposal in zip(keys, propose_list(folds, its_ks), strict=True):
                found[key] = SparseGradient(proposal, params[key].numel(), ks[key])
        return found

    def _count_sent(self, param: Tensor) -> int | None:
        """How many entries of the tensor are sent in this step; None where all of them are, densely."""
        facts = self._facts(param)
        told = facts.group if self._in_force is None else self._in_force[facts.group_index]
        sparsity = self._sparsity_of(told)
        dense = sparsity is None or not compressible(param, told["min_numel"])
        return None if dense or sparsity is None else count_sent(param.numel(), sparsity)

    def _sparsity_of(self, group: Mapping[str, Any]) -> float | None:
        """The fraction that compressed tensors of the group keep back in this update; None where they are dense."""
        if self.position < group["rampup_begin_step"]:
            return None
        ramp = (group["rampup_begin_step"], group["rampup_step"], group["sparsity"])
        return sparsity_at(self.position, *ramp)

    def _fold(self, param: Tensor, grad: Tensor) -> Fold:
        state, group = self._state_of(param, residual=True), self._facts(param).group
        u, v = state["momentum_buffer"].view(-1), state["residual"].view(-1)
        return Fold(self._contribution(param, grad), v, u, group["momentum"], group["nesterov"])

    def _launched(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        """Send as many entries as all ranks have agreed on: lengths must fit before the vote finds a difference."""
        assert self._exchange is not None
        self._in_force = self._agreed
        try:
            self._exchange.launch_bucket(self.position, bucket, grads)
        finally:
            self._in_force = None

    def _ramps(self) -> list[dict[str, Any]]:
        """Per group what says how many entries are sent."""
        keys = ("rampup_begin_step", "rampup_step", "sparsity", "min_numel")
        return [{key: group[key] for key in keys} for group in self.param_groups]

    def _launch_bucket(self, bucket: int, params: Sequence[Parameter], grads: Sequence[Tensor]) -> None:
        """Called in the backward pass of the attached model."""
        assert self._exchange is not None
        assert self._attached is not None
        if self._attached.deferred:
            return
        self._compare_nodes(self._exchange)
        with torch.no_grad():
            signed = self._signed(dict(zip(params, grads, strict=True)))
            self._launched(bucket, signed)
            self._samples.update(zip(signed, bit_sums(list(signed.values())), strict=True))

    def _signed(self, grads: Mapping[Any, Tensor]) -> dict[int, Tensor]:
        keys = self._listing.keys
        return {keys[p]: -g if self._facts(p).group["maximize"] else g for p, g in grads.items()}

    def _apply(self, pairs: Sequence[ParamGrad], rates: Sequence[float], done: Round) -> None:
        # what decides here must be common to all ranks: one of them may hold a row-sparse gradient, another a dense one
        keys = self._listing.keys
        grads = {keys[p]: grad for p, grad in pairs}
        for param, _ in pairs:
            key = keys[param]
            if not done.is_sparse(key):
                lasting = key in done.row_sparse or not self._compressible(param)
                rate = rates[self._facts(param).group_index]
                self._apply_dense(param, done.dense_mean(key), key, rate, clip=lasting)
        sparse = {key: self._listing.params[key].numel() for key in grads if done.is_sparse(key)}
        for chunk in in_chunks(sparse):
            self._apply_sparse({key: grads[key] for key in chunk}, rates, done)

    def _apply_sparse(self, grads: Mapping[int, Tensor], rates: Sequence[float], done: Round) -> None:
        params = [self._listing.params[key] for key in grads]
        folds = []
        for param, (key, grad) in zip(params, grads.items(), strict=True):
            self.state[param] = self._state_of(param, residual=True)
            folds.append(self._fold(param, done.gradient(key, self._unscaled(param, grad))))
        sent, seeds = [done.sent(key) for key in grads], [self._seed(key) for key in grads]
        own = None if self._exchange is None else self._exchange.own
        if own is None:
            commit_list_(folds, sent, seeds)
        else:
            names = [self._listing.names[key] for key in grads]
            states = {f"{k} of {n}": self.state[p][k] for n, p in zip(names, params, strict=True) for k in _OWN}
            expected = own.expected(states)
            seals = commit_list_(folds, sent, seeds, sealed=True)
            found = {f"residual of {n}": (s.residual_before, s.residual) for n, s in zip(names, seals, strict=True)}
            found |= {f"momentum_buffer of {n}": (s.buffer_before, s.buffer) for n, s in zip(names, seals, strict=True)}
            own.changed(self.position + 1, states, expected, found)
        for key, fold in zip(grads, folds, strict=True):
            done.add_kept_(key, fold.residual)
        step_along_list_(
            [param.detach() for param in params],
            [done.parts(key, _wide(param)) for key, param in zip(grads, params, strict=True)],
            [rates[self._facts(param).group_index] for param in params],
            done.sources,
            [_wide(param) for param in params],
        )

    def _apply_dense(self, param: Tensor, mean: Tensor, key: int, rate: float, *, clip: bool) -> None:
        state = self.state[param] = self._state_of(param, residual=self._compressible(param))
        group, stored = self._facts(param).group, state["momentum_buffer"]
        buffer = stored.to(_wide(param))
        grad = mean.to(buffer.dtype)
        if clip and self.grad_clip is not None:
            grad = clipped(self.grad_clip, [grad])[0]
        grad = self._with_decay(param, grad)
        buffer.mul_(group["momentum"]).add_(grad)
        update = grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        if param.dtype == buffer.dtype:
            param.detach().add_(update, alpha=-rate)
        else:
            param.detach().copy_(param.detach().to(buffer.dtype).add_(update, alpha=-rate))
        if buffer is not stored:
            store_(stored.view(-1), buffer.view(-1), self._seed(key))

    def _joined(self) -> GradientExchange:
        """The exchange with the other ranks, after the comparison that must precede it."""
        names, known = self._listing.names, self._exchange
        if known is None or known.names != names:
            group = Group(self._process_group, self.timeout_s) if known is None else known.group
            known = self._compared(group, names)
            self._exchange = known
        self._compare_nodes(known)
        return known

    def _compare_nodes(self, exchange: GradientExchange) -> None:
        """The ranks of a node propose the same only if they hold the same."""
        if not self._nodes_compared and isinstance(exchange.sources, Nodes):
            make_common_(self._state_by_name(), exchange.sources)
            self._nodes_compared = True

    def _compared(self, group: Group, names: Sequence[str]) -> GradientExchange:
        """The exchange under these names, once all ranks have said the same."""
        problem: ValueError | None = None
        width = 1
        try:
            width, _ = node_size_of(group.global_ranks, self.node_size)
        except ValueError as error:  # the others must hear of it first
            problem = error
        facts = self._common_facts(names, width if problem is None else str(problem))
        facts["timeout in seconds"] = group.timeout_s
        versions = {"thinwire": __version__, "torch": str(torch.__version__)}
        require_agreement(group, facts, what="comparing settings and parameters", cures=CURES, versions=versions)
        if problem is not None:
            raise problem
        while_busy(group, "compiling loops", lambda: float(warm_up(self.needs) > 0))
        if self._exchange is not None:
            self._agreed = self._ramps()
            self._exchange.names = list(names)
            self._exchange.buckets, self._exchange.steady = self._bucket_keys(), Steady()
            return self._exchange
        made = GradientExchange(
            group,
            names,
            value_bits=self.value_bits,
            propose=self._propose,
            sources=sources_of(group, width),
            exchange=self.exchange,
        )
        made.buckets = self._bucket_keys()
        made.optimizer = self
        self._watch(made)
        self._agreed = self._ramps()
        return made

    def _bucket_keys(self) -> list[list[int]]:
        keys = self._listing.keys
        return [[keys[p] for p in bucket if p in keys] for bucket in self._buckets]

    def serve(self, identity: str, digest_every: int) -> None:
        """Belong to an engine: what this one is called in agreements, and how often it is compared."""
        self._identity, self.digest_every = identity, digest_every
        if self._exchange is not None:
            self._watch(self._exchange)

    def _watch(self, exchange: GradientExchange) -> None:
        exchange.identity, exchange.digest, exchange.own = self._identity, None, None
        if self.digest_every:
            exchange.digest = RollingDigest(self._params_by_name, self._common_state, every=self.digest_every)
            exchange.digest.start_from(self.position)
            exchange.own = OwnState(self._own_state)

    def _params_by_name(self) -> dict[str, Tensor]:
        return {f"parameter {name}": p for name, p in zip(self._listing.names, self._listing.params, strict=True)}

    def _common_state(self) -> dict[str, Tensor]:
        """Momentum of tensors that are averaged densely all the time, which is the same on all ranks."""
        return {
            f"momentum_buffer of {name}": self.state[p]["momentum_buffer"]
            for name, p in zip(self._listing.names, self._listing.params, strict=True)
            if p in self.state and "momentum_buffer" in self.state[p] and not self._compressible(p)
        }

    def _own_state(self) -> dict[str, Tensor]:
        """Momentum and residuals of tensors that are, or will be, compressed: this rank's, or its node's."""
        return {
            f"{key} of {name}": entry
            for name, p in zip(self._listing.names, self._listing.params, strict=True)
            if p in self.state and self._compressible(p)
            for key, entry in self.state[p].items()
            if isinstance(entry, Tensor)
        }

    def _state_by_name(self) -> dict[str, Tensor]:
        """Momentum and residuals that there are, in the order of the exchange."""
        return {
            f"{name} {key}": entry
            for name, p in zip(self._listing.names, self._listing.params, strict=True)
            for key, entry in sorted(self.state.get(p, {}).items())
            if isinstance(entry, Tensor)
        }

    def _common_facts(self, names: Sequence[str], node: int | str) -> dict[str, Any]:
        """What all ranks must have in common, in the order in which differences are most telling."""
        params = self._ordered_params()
        plain = [{k: repr(v) for k, v in g.items() if k not in ("params", "param_names")} for g in self.param_groups]
        return {
            "wire version": WIRE_VERSION,
            "value_bits": self.value_bits,
            "state_dtype": self.state_dtype,
            "num_trainers": self.num_trainers,
            "node_size": self.node_size,
            "ranks of a node": node,
            "exchange": self.exchange,
            **arithmetic(next((p.device for p in params), torch.device("cpu"))),
            **self.shared_settings(),
            "digest_every": self.digest_every,
            "step": self.position,
            "group": plain,
            "parameter": [
                f"{name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)} requires_grad={p.requires_grad}"
                for name, p in zip(names, params, strict=True)
            ],
            "decay": [self._facts(p).weight_decay for p in params],
            "initial value (CRC-32) of": {name: _crc(p) for name, p in zip(names, params, strict=True)},
        }

    def __getstate__(self) -> dict[str, Any]:
        own = ("value_bits", "state_dtype", "num_trainers", "node_size", "exchange", "digest_every", "timeout_s")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process_group = self.__dict__.get("_process_group")
        self.digest_every = self.__dict__.get("digest_every", DIGEST_EVERY)
        self.timeout_s = self.__dict__.get("timeout_s")
        self._identity = "a copied optimizer"
        self._nodes_compared = False  # loaded state may differ inside a node
        self._fresh = self.__dict__.get("_fresh", {})
        self._samples = self.__dict__.get("_samples", {})


class Attached:
    """The handle of `DGCMomentum.attach`."""

    def __init__(self, optimizer: DGCMomentum, tap: BucketTap) -> None:
        self.deferred = False
        """Whether buckets wait for `step`, because a loss scaler is in use."""
        self._optimizer: DGCMomentum | None = optimizer
        self._tap = tap

    def stats(self) -> dict[str, float]:
        """Of the optimizer: see `DGCMomentum.stats`.

        Raises:
            RuntimeError: After `remove`.
        """
        if self._optimizer is None:
            raise RuntimeError("this handle was removed: ask optimizer.stats()")
        return self._optimizer.stats()

    def remove(self) -> None:
        """Move the exchange back into `step`, which then finds local gradients; may be called twice."""
        if self._optimizer is not None:
            self._tap.close()
            self._optimizer._detached()
            self._optimizer = None


_OWN = ("residual", "momentum_buffer")


def _own_checksum(state: Mapping[Any, Mapping[str, Any]]) -> int:
    """Of residuals and momentum, wherever they lie."""
    return checksum_of([entries[key] for entries in state.values() for key in _OWN if key in entries])


def _wide(param: Tensor) -> torch.dtype:
    """In what the update of this parameter is computed."""
    return param.dtype if param.is_complex() else state_dtype(param)


def _crc(param: Tensor) -> int:
    return zlib.crc32(param.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
