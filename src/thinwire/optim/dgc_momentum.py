"""SGD with momentum over deep gradient compression: each rank sends its few largest accumulated
entries.
"""

import contextlib
import datetime
import functools
import warnings
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire._version import __version__
from thinwire.comm import (
    BucketTap,
    Group,
    Replicas,
    Sites,
    Sources,
    is_alone,
    next_identity,
    node_size_of,
    one_deadline,
    place_in,
    require_agreement,
    require_mesh,
    require_process_group,
    seconds_of,
    sources_of,
    tap_buckets,
    time_limit_s,
    while_busy,
)
from thinwire.compress.coverage import tell_coverage
from thinwire.compress.dgc import (
    DGC,
    DGCCompressor,
    Rule,
    compressible,
    locally_clipped,
)
from thinwire.compress.entries import ArrivedEntries
from thinwire.compress.protocol import Compression
from thinwire.core.arithmetic import CURES, arithmetic
from thinwire.core.checksum import bit_sums
from thinwire.core.clip import Clip, ClipByNorm, clipped
from thinwire.core.decay import Regularizer
from thinwire.core.feedback import in_chunks, rounding_seed, step_along_list_, store_
from thinwire.core.origin import ORIGIN, Origin, checksum_of, without_origin
from thinwire.core.precision import named_dtype, narrowed, state_dtype, stored_dtype
from thinwire.core.sharded import Shards, require_shards, shard_of, sharded_like
from thinwire.core.stats import numbers
from thinwire.exchange.agreement import Among
from thinwire.exchange.digest import DIGEST_EVERY, RollingDigest
from thinwire.exchange.gradients import GradientExchange, Outcome
from thinwire.exchange.hyperparameters import SameHyperparameters
from thinwire.exchange.round import Round
from thinwire.kernels.needs import Need, needs_of
from thinwire.kernels.warm import warm_up, warm_up_beside
from thinwire.layout.message import VALUE_BITS
from thinwire.layout.traffic import EXCHANGES
from thinwire.optim.base import ExchangingOptimizer
from thinwire.optim.pairs import ParamGrad
from thinwire.optim.saving import of_params
from thinwire.schedules import Schedule
from thinwire.wire.message import WIRE_VERSION

__all__ = ["Attached", "DGCMomentum"]

_OWN = ("residual", "momentum_buffer")
"""State that differs from rank to rank."""
_INSTEAD_OF_JOIN = "train with DistributedStrategy(dgc=DGC(...)) inside `with engine.join():`"


@dataclass(frozen=True, slots=True)
class _Listing:
    """The parameters in the order of the exchange, by names of which each is there once."""

    params: dict[str, Tensor]
    names: dict[Tensor, str]


class DGCMomentum(ExchangingOptimizer):
    """SGD with momentum that exchanges gradients itself, about 2,000 times smaller.

    Each rank holds the gradient of its own mean loss in `p.grad`; `step` exchanges and updates. Per
    tensor of at least `min_numel` elements::

        u <- m u + g
        v <- v + u
        sent = the k entries of largest |v|, in `value_bits` bits each
        v <- v - sent;  u <- 0 where something was sent
        p <- p - lr * mean of sent over the ranks

    All other tensors, and all of them before `rampup_begin_step`, are averaged densely and follow
    torch's SGD.

    Args:
        params: As in torch; all ranks must give the same, in the same order, with equal values.
        lr: A number, a schedule or a list, also per group.
        momentum: m, >= 0.
        rampup_begin_step: Updates before compression begins, >= 0.
        rampup_step: Updates over which the levels of `sparsity` are spread, >= 1.
        sparsity: Fractions that are **not** sent, each in [0, 1); the last one stays.
        nesterov: Whether to look ahead; needs momentum.
        weight_decay: Added to each rank's own gradient before it is folded in, >= 0.
        local_grad_clip_norm: C > 0: a source's share g / N of a compressed tensor is limited to the
            norm C / sqrt(N). A source is a rank, or a node with the mean of its ranks.
        num_trainers: N of that limit, and of nothing else; the number of sources where it is None.
        min_numel: Smaller tensors are exchanged densely, >= 1.
        value_bits: What one sent value costs: 1, 2, 4, 8, 16 or 32. The rounding error stays in v.
        state_dtype: u and v of compressed tensors are stored as "float32" or "bfloat16" (a torch
            dtype is taken too), half the memory, rounded stochastically; None: float32, float64 for
            float64 parameters.
        node_size: Consecutive ranks that share a node, average densely among themselves and count
            as one source, >= 1; it must divide the ranks. 1 is off. None: torchrun's
            LOCAL_WORLD_SIZE where ranks fill two nodes or more.
        exchange: "gather" gives every source all messages, "split" the sums of shares, which does
            not grow with the sources; "auto" counts, and splits where that moves at most half of
            the bytes.
        process_group: The ranks that exchange; None for all of them. One process alone works too.
        mesh: Of sites and shards, with the dimensions "replicate" and "shard", over all ranks: the
            model was sharded by `fully_shard(model, mesh=mesh["shard"])` before this was made. Each
            rank exchanges its own shards with those that hold the same ones; all vote together. A
            shard is what is compressed, and `min_numel` counts. Instead of `process_group`.
        digest_every: Updates within which a difference between the ranks' parameters, or in
            momentum that is averaged densely, is found, >= 1; 0 compares nothing.
        timeout: For how long a rank waits for others in one call, in seconds or as a timedelta;
            None: as long as the process group itself would. The same on all ranks.
        grad_clip: `ClipByNorm` only: its c is C for compressed tensors and a plain limit for those
            that stay dense.
        regularizer: `L1Decay` or `L2Decay`, treated as `weight_decay` is.
        exclude_from_weight_decay: Patterns over names, or a predicate (name, parameter) -> bool.
        maximize: Whether to go up instead of down.
        foreach: Accepted for the common signature; the exchange decides the order of work.

    **State** in `state[p]`: `momentum_buffer` u and, for compressed tensors, `residual` v, float32
    (float64 for float64 parameters) or `state_dtype`, local to the rank, or common to the ranks of
    a node; `position` in the state_dict. Every rank saves its own. What is loaded takes on the type
    that is asked for here: rounded to nearest, once, where that is narrower.
    **Communication** per step: 24 bytes a rank of agreement before and after, one all-gather of
    equally long messages, one all-reduce per dtype of dense tensors. A digest of what all ranks
    must hold alike rides in the agreement. The first step also compares settings and parameters
    over the ranks. With nodes these go between the first ranks of the nodes, after one all-reduce
    per dtype inside each; with "split" the all-gather becomes an exchange of parts and an
    all-gather of their sums.
    **Failure**: a gradient that is not finite, on any rank, drops the step on all of them; nothing
    changes, a warning names parameter, rank and step, and the tenth in a row is
    `thinwire.errors.NonFinite`. Ranks that do not hold the same any more are
    `thinwire.errors.Diverged` on all of them, within `digest_every` updates. Every other error of
    an exchange leaves parameters and state as they were before the step.

    Raises:
        TypeError, ValueError: A wrong argument, at construction.

    Source: Lin et al., 2018, arXiv 1712.01887. Differs: exact selection, positions by Elias-Fano,
    coded values.
    """

    method = DGC
    _step_supports_amp_scaling = True
    _exchange: GradientExchange | None = None
    _attached: "Attached | None" = None
    _sites: Sites | None = None
    _group: Group | None = None
    _among = Among()
    _cached_listing: _Listing | None = None
    _compressor: DGCCompressor | None = None
    _apart: frozenset[str] | None = frozenset()
    """Tensors of which ranks hold momentum of their own since they were compressed; None: not
    known, after a load."""
    _buckets: Sequence[Sequence[str]] = ()
    _names_of_engine: Mapping[Tensor, str] = {}
    _done: Round | None = None
    """What an engine has exchanged for the step that it asks for."""
    _inverse_scale = 1.0
    _dense_bytes = 0
    _agreed: list[dict[str, Any]] | None = None
    """Per group what says how many entries are sent, as all ranks last agreed on it."""
    _in_force: list[dict[str, Any]] | None = None
    """The same while buckets are launched, before the agreement of their step."""
    _rules: dict[int, Rule] | None = None
    """By group, while an update or a launch lasts: groups do not change then."""

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
        mesh: DeviceMesh | None = None,
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
                "grad_clip",
                grad_clip,
                ClipByNorm,
                advice="other norms do not commute with local accumulation",
            )
        if grad_clip is not None and local_grad_clip_norm is not None:
            raise ValueError(
                f"grad_clip={grad_clip} and local_grad_clip_norm={local_grad_clip_norm} limit the "
                "same gradient: give one of them"
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
        self.state_dtype = named_dtype("state_dtype", state_dtype)
        self.num_trainers = (
            None
            if num_trainers is None
            else check.integer("num_trainers", num_trainers, at_least=1)
        )
        self.node_size = (
            None if node_size is None else check.integer("node_size", node_size, at_least=1)
        )
        check.instance("exchange", exchange, str)
        check.one_of("exchange", exchange, EXCHANGES)
        self.exchange = exchange
        self.digest_every = check.integer("digest_every", digest_every, at_least=0)
        self.timeout_s = seconds_of(timeout)
        require_process_group(process_group)
        if mesh is not None:
            size = None if node_size == 1 else node_size
            require_mesh(mesh, process_group=process_group, node_size=size)
            if grad_clip is not None:
                raise ValueError(
                    f"grad_clip={grad_clip} and mesh were both given, and a norm of what arrives "
                    "would be one of a shard: use local_grad_clip_norm, whose norms are over all "
                    "shards"
                )
        self._process_group, self._mesh = process_group, mesh
        self._identity = f"optimizer {next_identity(process_group)}"
        self._samples: dict[str, Tensor] = {}
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
        if mesh is not None:
            require_shards(self._listing.params, mesh["shard"])
        (warm_up if is_alone() else warm_up_beside)(self.needs)

    @property
    def needs(self) -> frozenset[Need]:
        """The compiled loops that its exchange calls."""
        params = [shard_of(p) for p in self._listing.params.values() if self.compresses(p)]
        state = torch.bfloat16 if self.state_dtype == "bfloat16" else None
        return needs_of("sparse", params, state_dtype=state, value_bits=self.value_bits)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in the base class; the next step compares settings and parameters over
        the ranks anew.
        """
        self._cached_listing = None
        super().add_param_group(param_group)

    def attach(self, ddp: DistributedDataParallel) -> "Attached":
        """Move the exchange into the backward pass of `ddp`, bucket by bucket, so that it overlaps
        with it.

        From now on `p.grad` holds, after the backward pass, the rank's own gradient (not the mean),
        and `step` waits for what is on its way, checks it and updates; leave `p.grad` alone in
        between. Parameters and state end up bit-identical to `step` alone for compressed tensors
        that are gathered; in a split exchange, owners follow the buckets. Under `ddp.no_sync()`
        gradients accumulate locally. A `torch.amp.GradScaler` reveals its scale only in `step`:
        with one, the exchange happens there.

        Args:
            ddp: A model whose parameters are exactly those of this optimizer.

        Returns:
            The handle whose `remove` moves the exchange back into `step`, with all state kept.

        Raises:
            TypeError: `ddp` is no DistributedDataParallel.
            ValueError: It is attached already, has other parameters or other ranks, or a hook of
                somebody else.

        Communication: the comparison of settings and parameters, if it has not been made yet.
        """
        check.instance("ddp", ddp, DistributedDataParallel)
        if self._mesh is not None:
            raise ValueError(
                "attach(ddp) and mesh do not go together: a sharded model is not wrapped in "
                "DistributedDataParallel, and step() exchanges"
            )
        if self._attached is not None:
            raise ValueError(
                "this optimizer is attached already: call remove() on its handle first"
            )
        mine = {p for p in self._ordered_params() if p.requires_grad}
        theirs: dict[Tensor, str] = {
            p: name for name, p in named_parameters(ddp.module) if p.requires_grad
        }
        if mine != theirs.keys():
            missing = [name for p, name in theirs.items() if p not in mine]
            raise ValueError(
                "ddp must have exactly the trainable parameters of this optimizer: "
                f"{len(missing)} of the model's are not in the optimizer"
                f"{', such as ' + missing[0] if missing else ''}, "
                f"{len(mine - theirs.keys())} of the optimizer's are not in the model"
            )
        self.call_params(theirs)
        with self.one_deadline():
            group = self.joined().group
        tap = tap_buckets(ddp, group, self._launch_bucket, instead=_INSTEAD_OF_JOIN)
        self._attached = Attached(self, tap)
        return self._attached

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange, as given; None for all of them."""
        return self._process_group

    @classmethod
    def problem_of_clip(cls, clip: Clip, config: Compression) -> str | None:
        """See `ExchangingOptimizer`."""
        assert isinstance(config, DGC)
        limit = config.local_grad_clip_norm
        if not isinstance(clip, ClipByNorm):
            return (
                f"dgc takes over ClipByNorm only, and the optimizer clips by {clip}: other norms "
                "do not commute with local accumulation. Use ClipByNorm, or dgc's "
                "local_grad_clip_norm"
            )
        if limit is not None:
            return (
                f"the optimizer's grad_clip={clip} and dgc's local_grad_clip_norm={limit} limit "
                "the same gradient: give one of them"
            )
        return None

    def why_no_clip(self, clip: Clip, *, sharded: bool) -> str | None:
        """See `ExchangingOptimizer`."""
        if not isinstance(clip, ClipByNorm):
            return (
                "DGCMomentum accumulates gradients: other norms do not commute with local "
                "accumulation. Give ClipByNorm, which limits each tensor, or leave grad_clip out "
                "and set local_grad_clip_norm of dgc"
            )
        limits = [group["local_grad_clip_norm"] for group in self.param_groups]
        limit = next((limit for limit in limits if limit is not None), None)
        if limit is not None:
            return f"dgc's local_grad_clip_norm={limit} limits the same gradient: give one of them"
        if sharded:
            return (
                "DGCMomentum would clip shard by shard under mesh=: use local_grad_clip_norm of "
                "dgc, whose norms are over all shards"
            )
        return None

    def call_params(self, names: Mapping[Tensor, str]) -> None:
        """See `CommonOptimizer.call_params`; the exchange uses these names too."""
        super().call_params(names)
        self._cached_listing = None

    def set_buckets(self, buckets: Sequence[Sequence[str]]) -> None:
        """Which parameters travel together from now on, for an engine; the same on all ranks."""
        self._buckets = buckets
        if self._exchange is not None:
            self._exchange.buckets = buckets

    @property
    def exchange_in_use(self) -> GradientExchange | None:
        """With the other ranks; None before the first step."""
        known = self._exchange
        return known if known is not None and known.names == list(self._listing.params) else None

    def one_deadline(self) -> contextlib.AbstractContextManager[None]:
        """Let all that is waited for inside count against the one time-out of this optimizer."""
        return one_deadline(time_limit_s(self._process_group, self.timeout_s))

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Around what is sent before ranks agree: as many entries as they have agreed on last.

        Lengths must fit before the vote finds a difference.
        """
        self._in_force, self._rules = self._agreed, {}
        try:
            yield
        finally:
            self._in_force = self._rules = None

    @contextlib.contextmanager
    def updating_from(self, done: Round) -> Iterator[None]:
        """Around a `step` that exchanges nothing, since an engine has done so.

        Args:
            done: What came for the gradients that `step` will find.
        """
        self._done = done
        try:
            yield
        finally:
            self._done = None

    @torch.no_grad()
    def require_equal(self) -> None:
        """Compare all that ranks must hold alike; on all ranks.

        Nothing before the first step, or where `digest_every` is 0.

        Raises:
            Diverged: On every rank.
        """
        if self._exchange is not None:
            self._exchange.require_equal(self.position)

    def stats(self) -> dict[str, float]:
        """This rank so far, flat and in numbers only; the names are those of
        `thinwire.core.stats.numbers`.

        With nodes `bytes_sent` has the dense traffic inside the node too; `bytes_between_nodes` is
        what left it. `sparsity` is that of the first group in the next update. Where a
        DistributedDataParallel model was found that averages besides, because `attach` was
        forgotten, what it sends counts too.
        """
        exchange = self._exchange
        counts = {} if exchange is None else exchange.counts()
        between = counts.get("bytes_between_nodes")
        return numbers(
            step=self.position,
            dropped_steps=0 if exchange is None else exchange.drops.total,
            sparsity=_config_of(self.param_groups[0]).sparsity_in_force(self.position)
            if any(map(self.compresses, self._listing.params.values()))
            else 0.0,
            bytes_sent=0 if exchange is None else exchange.bytes_given,
            bytes_received=int(counts.get("bytes_received", 0)),
            bytes_between_nodes=None if between is None else int(between),
            bytes_dense=self._dense_bytes,
            wait_s=0.0 if exchange is None else exchange.wait_s,
            rate_bit_s=counts.get("rate_bit_s", 0.0),
            waiting_share=0.0 if exchange is None else exchange.pace.waiting_share,
        )

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with `position`; of this rank, which `load_state_dict` compares.

        `state` has an entry `origin` beside the residual of one parameter: rank, ranks, position
        and a checksum of residuals and momentum, as an int64 tensor, which every way of saving
        keeps.
        """
        state_dict = self.plain_state_dict()
        state = state_dict["state"]
        first = next((k for k, each in of_params(state).items() if "residual" in each), None)
        if first is not None:
            origin = Origin(*self._own_place(), self.position, self._own_checksum(state))
            state_dict["state"] = {**state, first: {**state[first], ORIGIN: origin.packed()}}
        return state_dict

    def _own_place(self) -> tuple[int, int]:
        """This rank's number among those that exchange, and how many they are; of shards, the
        site's.
        """
        mesh = self._mesh
        if mesh is None:
            return place_in(self._process_group)
        return mesh.get_local_rank("replicate"), mesh["replicate"].size()

    def _own_checksum(self, state: Mapping[Any, Mapping[str, Any]]) -> int:
        """Of residuals and momentum, wherever they lie; 0 of shards, whose ranks share one origin
        with torch's ways of saving.
        """
        if self._mesh is not None:
            return 0
        return checksum_of(
            [each[key] for each in of_params(state).values() for key in _OWN if key in each]
        )

    def plain_state_dict(self) -> dict[str, Any]:
        """`state_dict` without the origin, for callers that keep ranks apart by other means."""
        state_dict = super().state_dict()
        if self._mesh is None:
            return state_dict
        params = [p for group in self.param_groups for p in group["params"]]
        # what looks like whole tensors would be taken for the same on all ranks by other savers
        state = {
            key: {
                name: sharded_like(value, params[key]) if name in _OWN else value
                for name, value in entries.items()
            }
            for key, entries in of_params(state_dict["state"]).items()
        }
        return {**state_dict, "state": {**state_dict["state"], **state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, with `position`; names decide whose state it is where named parameters were
        given.

        Warns:
            UserWarning: It is another rank's, its tensors come from several ranks, or it has lost
            its position.

        Raises:
            ValueError: The groups or shapes do not fit; nothing has changed.
        """
        state = state_dict["state"]
        every = of_params(state).values()
        origin = next((o for entries in every if (o := Origin.read(entries.get(ORIGIN)))), None)
        bare = {
            **state_dict,
            "state": {key: without_origin(entries) for key, entries in state.items()},
        }
        if origin is not None and "position" not in bare:
            bare["position"] = origin.position
        super().load_state_dict(bare)
        self._apart = None
        problem = None
        if origin is not None:
            problem = origin.problem(*self._own_place(), self._own_checksum(state))
        elif "position" not in bare and any("residual" in each for each in every):
            problem = (
                "the state has no position, so that the rampup of sparsity begins anew at update "
                "0: save what state_dict() gives as a whole, or set state_dict['position'] to the "
                "number of updates made"
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
        check.instance(
            "sparsity", levels, (tuple, list), advice="write a single fraction as (0.999,)"
        )
        if not levels:
            raise ValueError(
                "sparsity must hold at least one fraction in [0, 1), got an empty sequence"
            )
        for i, level in enumerate(levels):
            check.real(f"sparsity[{i}], the fraction that is not sent,", level, at_least=0, below=1)

    def _collected(self) -> list[ParamGrad]:
        """As in the base class, but signs change where gradients are used: what is exchanged are
        gradients.
        """
        pairs = self._given
        if pairs is None:
            return [
                (p, p.grad)
                for p in self._ordered_params()
                if p.grad is not None and p.requires_grad
            ]
        return pairs

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        names = self._listing.names
        with self.one_deadline():
            exchange = self.joined()
            self._rules = {}
            try:
                done = self._done
                if done is None:
                    overflow = self._read_scaler()
                    given = {names[p]: self._unscaled(p, shard_of(g)) for p, g in pairs}
                    outcome = self._exchanged(exchange, self.limited(given), overflow)
                    done, grads = outcome.came, outcome.grads
                else:
                    grads = {names[p]: shard_of(g) for p, g in pairs}
                self.agreed()
                if done is None:
                    return False
                self._apply(exchange, grads, rates, done)
            finally:
                exchange.forget()
                self._samples.clear()
                self._rules, self._inverse_scale = None, 1.0
        self._dense_bytes += sum(
            4 * shard_of(p).numel() for p in self._ordered_params() if p.requires_grad
        )
        return True

    def _exchanged(
        self, exchange: GradientExchange, grads: Mapping[str, Tensor], overflow: bool | None
    ) -> Outcome:
        if overflow is not None and exchange.in_flight and self._attached is not None:
            exchange.discard()  # proposals made before the scale was known are in the wrong unit
            self._attached.deferred = True
        unchanged = self._unchanged_since_backward(grads) if exchange.in_flight else None
        return exchange.exchange(self.position, grads, overflow=overflow, unchanged=unchanged)

    def limited(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of shards within the local clip, whose norm is one over all shards; all others
        as they are, since the compression sees the whole tensor.

        Communication: with a local clip 8 bytes a tensor and rank inside the site.
        """
        if self._sites is None:
            return dict(grads)
        groups = self._facts
        return locally_clipped(
            grads,
            self._shards,
            lambda name: _config_of(
                group := groups(self._listing.params[name]).group, group["local_grad_clip_norm"]
            ),
            step=self.position,
            sources=self.num_trainers or self._sites.replicas.size,
            gather=self._sites.shards.gather_now,
        )

    def agreed(self) -> None:
        """All ranks have just agreed on the settings of this update."""
        self._agreed = self._ramps()

    def _detached(self) -> None:
        """Called by the handle: forget it, and what it may have launched."""
        self._attached = None
        if self._exchange is not None:
            self._exchange.discard()
        self._samples.clear()

    @property
    def _shards(self) -> Shards:
        """This rank's part of each parameter, by the names of the exchange."""
        return Shards(self._listing.params)

    @property
    def _listing(self) -> _Listing:
        if self._cached_listing is None:
            params: dict[str, Tensor] = {}
            for key, p in enumerate(self._ordered_params()):
                name = self._names_of_engine.get(p) or self._facts(p).name or f"parameter {key}"
                params[name if name not in params else f"{name} (parameter {key})"] = p
            self._cached_listing = _Listing(params, {p: name for name, p in params.items()})
        return self._cached_listing

    def _read_scaler(self) -> bool | None:
        """Whether a `GradScaler` found an overflow (None: no scaler); its scale, where gradients
        carry it, is kept.
        """
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        return None if found is None else bool(found)

    def _unchanged_since_backward(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per gradient that has been launched whether it is still the same, by the sum of
        its bits.
        """
        names = [name for name in grads if name in self._samples]
        now = bit_sums([grads[name] for name in names])
        return {name: words == self._samples[name] for name, words in zip(names, now, strict=True)}

    def _unscaled(self, param: Tensor, grad: Tensor) -> Tensor:
        return grad if self._inverse_scale == 1.0 else grad.to(_wide(param)) * self._inverse_scale

    def compresses(self, param: Tensor) -> bool:
        """Whether this parameter, or this rank's part of it, is compressed once that begins."""
        return compressible(shard_of(param), self._facts(param).group["min_numel"])

    def _stored_dtype(self, param: Tensor) -> torch.dtype:
        """In what the state of this parameter is stored, before compression begins too."""
        return stored_dtype(param, self.state_dtype) if self.compresses(param) else _wide(param)

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        # flat views of it are folded, so it is contiguous whatever the layout of the parameter
        here = shard_of(value).to(param.device)
        return narrowed(here, self._stored_dtype(param)).contiguous()

    def _rule(self, name: str) -> Rule:
        """How a tensor is compressed, by its group as it is now, or was when ranks last agreed."""
        index = self._common.places[self._listing.params[name]].group_index
        if self._rules is None:
            return self._rule_of(index)
        if index not in self._rules:
            self._rules[index] = self._rule_of(index)
        return self._rules[index]

    def _rule_of(self, index: int) -> Rule:
        group = self.param_groups[index]
        if self._in_force is not None:
            group = {**group, **self._in_force[index]}
        limit = group["local_grad_clip_norm"] if self._mesh is None else None  # see `limited`
        if self.grad_clip is not None:
            assert isinstance(self.grad_clip, ClipByNorm)
            limit = self.grad_clip.c
        config = _config_of(group, limit, self.state_dtype)
        return Rule(config, group["momentum"], group["nesterov"])

    def _decayed(self, name: str, grad: Tensor) -> Tensor:
        """A gradient with its sign, decay, regularizer and centralization."""
        param = self._listing.params[name]
        facts = self._facts(param)
        if facts.group["maximize"]:
            grad = -grad
        if facts.weight_decay or facts.regularizer is not None or facts.grad_centralization:
            return self._with_decay(param, grad.to(state_dtype(param)))
        return grad

    def _ramps(self) -> list[dict[str, Any]]:
        """Per group what says how many entries are sent."""
        return [{key: group[key] for key in _RAMP} for group in self.param_groups]

    def _launch_bucket(
        self, bucket: int, params: Sequence[Parameter], grads: Sequence[Tensor]
    ) -> None:
        """Called in the backward pass of the attached model."""
        assert self._exchange is not None
        assert self._attached is not None
        if self._attached.deferred:
            return
        with torch.no_grad(), self.launching():
            names = self._listing.names
            by_name = {names[p]: grad for p, grad in zip(params, grads, strict=True)}
            self._exchange.launch(self.position, bucket, by_name)
            self._samples.update(zip(by_name, bit_sums(list(by_name.values())), strict=True))

    def _apply(
        self,
        exchange: GradientExchange,
        grads: Mapping[str, Tensor],
        rates: Sequence[float],
        done: Round,
    ) -> None:
        # what decides here must be common to all ranks: one of them may hold a row-sparse gradient,
        # another a dense one
        sparse = {
            n: self._shards[n].numel() for n in grads if isinstance(done.arrived[n], ArrivedEntries)
        }
        self._make_momentum_common(exchange, [n for n in grads if n not in sparse])
        self._apart = None if self._apart is None else self._apart | sparse.keys()
        exchange.commit_(done, grads)
        places = {name: place for place, name in enumerate(self._listing.params)}
        for name in grads:
            param, arrived = self._listing.params[name], done.arrived[name]
            if not isinstance(arrived, ArrivedEntries):
                lasting = name in done.row_sparse or not self.compresses(param)
                rate = rates[self._facts(param).group_index]
                mean = arrived.mean(name, shard_of(param))
                self._apply_dense(name, mean, places[name], rate, clip=lasting)
        for names in in_chunks(sparse):
            self._step_along(names, rates, done)

    def _make_momentum_common(self, exchange: GradientExchange, dense: Sequence[str]) -> None:
        """Before a dense update of what was compressed before: each rank has accumulated momentum
        of its own, and all go on from the mean, as another number of ranks would.

        Communication: only then; 24 bytes where all are equal, else what differs, and an agreement.
        """
        group = exchange.group.replicas or exchange.group
        held: dict[str, Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        for name in [n for n in dense if self._apart is None or n in self._apart]:
            param = self._listing.params[name]
            assert self._compressor is not None
            state = self.state[param]
            if self.compresses(param):
                state = self._compressor.state_of(name)
            if self._facts(param).group["momentum"] and "momentum_buffer" in state:
                held[name], states[name] = state["momentum_buffer"], state
        if not held or group.size == 1:
            return
        what = "making momentum common"
        sums = torch.stack(bit_sums(list(held.values()))).cpu().numpy().tobytes()
        rows = group.gather_bytes(sums, what=what)
        differ = [
            name
            for at, name in enumerate(held)
            if len({row[8 * at : 8 * at + 8] for row in rows}) > 1
        ]
        wide = {name: held[name].to(_wide(self._listing.params[name])) for name in differ}
        totals = [group.all_reduce_(each.clone(), what=what) for each in wide.values()]
        means = [total.wait().div_(group.size) for total in totals]
        if differ:
            group.gather_bytes(b"", what=what)  # nothing has moved where one of them failed
        for name, mean in zip(differ, means, strict=True):
            held[name].copy_(mean)
            self.state[self._listing.params[name]] = states[name]
        known = frozenset(self._listing.params) if self._apart is None else self._apart
        self._apart = known - set(dense)

    def _step_along(self, names: Sequence[str], rates: Sequence[float], done: Round) -> None:
        """P <- p - lr * mean, at the entries that anybody sent."""
        params = [self._listing.params[name] for name in names]
        entries = [done.arrived[n].entries(n, _wide(p)) for n, p in zip(names, params, strict=True)]
        step_along_list_(
            [shard_of(param).detach() for param in params],
            [each for each in entries if each is not None],
            [rates[self._facts(param).group_index] for param in params],
            done.arrived[names[0]].context.sources,
            [_wide(param) for param in params],
        )

    def _apply_dense(self, name: str, mean: Tensor, key: int, rate: float, *, clip: bool) -> None:
        param = self._listing.params[name]
        shard = shard_of(param).detach()
        assert self._compressor is not None
        if self.compresses(param):
            self.state[param] = self._compressor.state_of(name)
        elif "momentum_buffer" not in self.state[param]:
            buffer = torch.zeros(shard.shape, dtype=_wide(param), device=param.device)
            self.state[param]["momentum_buffer"] = buffer
        state = self.state[param]
        group, stored = self._facts(param).group, state["momentum_buffer"]
        buffer = stored.to(_wide(param))
        grad = mean.to(buffer.dtype)
        if group["maximize"]:
            grad = -grad
        if clip and self.grad_clip is not None:
            grad = clipped(self.grad_clip, [grad])[0]
        grad = self._with_decay(param, grad)
        buffer.mul_(group["momentum"]).add_(grad)
        update = grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        if shard.dtype == buffer.dtype:
            shard.add_(update, alpha=-rate)
        else:
            shard.copy_(shard.to(buffer.dtype).add_(update, alpha=-rate))
        if buffer is not stored:
            store_(stored.view(-1), buffer.view(-1), rounding_seed(self.position, key))

    def joined(self) -> GradientExchange:
        """The exchange with the other ranks, after the comparison that must precede it."""
        names, known = list(self._listing.params), self._exchange
        if known is None or known.names != names:
            require_shards(
                self._listing.params, None if self._mesh is None else self._mesh["shard"]
            )
            known = self._compared(self._ranks, names)
            self._exchange = known
        known.make_common()
        return known

    @property
    def _ranks(self) -> Group:
        """Those that exchange, or all of all sites; made once."""
        if self._group is None and self._mesh is None:
            self._group = Group(self._process_group, self.timeout_s)
        elif self._group is None and self._mesh is not None:
            self._sites = Sites.of(self._mesh, self.timeout_s)
            self._group = self._sites.job
        assert self._group is not None, "made just now"
        return self._group

    def _sources(self, group: Group, width: int) -> Sources:
        """Who exchanges, made once."""
        if self._exchange is not None:
            return self._exchange.sources
        return sources_of(group, width) if self._sites is None else Replicas(self._sites)

    def _compared(self, group: Group, names: Sequence[str]) -> GradientExchange:
        """The exchange under these names, once all ranks have said the same."""
        problem: ValueError | None = None
        width = 1
        try:
            if self._mesh is None:
                width, _ = node_size_of(group.global_ranks, self.node_size)
        except ValueError as error:  # the others must hear of it first
            problem = error
        facts = self._common_facts(names, width if problem is None else str(problem))
        facts["timeout in seconds"] = group.timeout_s
        versions = {"thinwire": __version__, "torch": str(torch.__version__)}
        require_agreement(
            group, facts, what="comparing settings and parameters", cures=CURES, versions=versions
        )
        if problem is not None:
            raise problem
        while_busy(group, "compiling loops", lambda: float(warm_up(self.needs) > 0))
        sources, shards = self._sources(group, width), self._shards
        self._compressor = DGCCompressor(
            shards,
            self._rule,
            state=_StateByName(self, self._listing.params),
            value_bits=self.value_bits,
            exchange=self.exchange,
            num_trainers=self.num_trainers,
            decayed=self._decayed,
        )
        if not self._names_of_engine:  # an engine has told it in `prepare`
            self._tell_coverage()
        if self._exchange is None:
            among, compressors = self._among, [self._compressor]
            made = GradientExchange(group, shards, compressors, sources=sources, among=among)
            made.add_check(SameHyperparameters(self))
            made.launching = self.launching
        else:
            made = self._exchange
            made.restart(shards, [self._compressor])
        made.buckets = self._buckets
        self._watch(made)
        self.agreed()
        return made

    def serve(
        self,
        identity: str,
        digest_every: int,
        names: Mapping[Tensor, str],
        among: Among,
    ) -> None:
        """See `ExchangingOptimizer`."""
        self._identity, self.digest_every = identity, digest_every
        self._names_of_engine, self._cached_listing = names, None
        self._among = among
        self._exchange = self._group = None  # counts begin anew
        self._tell_coverage()

    def _tell_coverage(self) -> None:
        if place_in(self._process_group)[0] == 0:
            whole = {shard_of(p): p for p in self._listing.params.values()}
            config = _config_of(self.param_groups[0])
            tell_coverage(config, whole, lambda shard: self.compresses(whole[shard]))

    def _watch(self, exchange: GradientExchange) -> None:
        digest = None
        if self.digest_every:
            digest = RollingDigest(
                self._params_by_name, self._common_state, every=self.digest_every
            )
            digest.start_from(self.position)
        exchange.watch(digest, self._identity)

    def _params_by_name(self) -> dict[str, Tensor]:
        return {f"parameter {name}": p for name, p in self._shards.items()}

    def _common_state(self) -> dict[str, Tensor]:
        """Momentum of tensors that are averaged densely all the time, which is the same on all
        ranks.
        """
        return {
            f"momentum_buffer of {name}": self.state[p]["momentum_buffer"]
            for name, p in self._listing.params.items()
            if p in self.state and "momentum_buffer" in self.state[p] and not self.compresses(p)
        }

    def _common_facts(self, names: Sequence[str], node: int | str) -> dict[str, Any]:
        """What all ranks must have in common, in the order in which differences are most
        telling.
        """
        params = self._ordered_params()
        plain = [
            {k: repr(v) for k, v in g.items() if k not in ("params", "param_names")}
            for g in self.param_groups
        ]
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
                f"{name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)} "
                f"requires_grad={p.requires_grad}"
                for name, p in zip(names, params, strict=True)
            ],
            "decay": [self._facts(p).weight_decay for p in params],
            "initial value (CRC-32) of": self._initial_values(names),
        }

    def _initial_values(self, names: Sequence[str]) -> dict[str, Any]:
        """A checksum of each parameter; of one that is sharded, of all its shards."""
        mine = [_crc(p) for p in self._shards.values()]
        if self._sites is None:
            return dict(zip(names, mine, strict=True))
        packed = b"".join(crc.to_bytes(4, "little") for crc in mine)
        answers = self._sites.shards.gather_now(packed, "comparing shards")
        return {
            name: [int.from_bytes(answer[4 * i : 4 * i + 4], "little") for answer in answers]
            for i, name in enumerate(names)
        }

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "value_bits",
            "state_dtype",
            "num_trainers",
            "node_size",
            "exchange",
            "digest_every",
            "timeout_s",
        )
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._process_group = self.__dict__.get("_process_group")
        self._mesh = self.__dict__.get("_mesh")
        self._identity = "a copied optimizer"
        self._apart = None
        if self._exchange is not None:
            self._exchange.state_loaded()
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
        """Move the exchange back into `step`, which then finds local gradients; may be called
        twice.
        """
        if self._optimizer is not None:
            self._tap.close()
            self._optimizer._detached()
            self._optimizer = None


class _StateByName(MutableMapping[str, dict[str, Tensor]]):
    """An optimizer's state under the names of the exchange."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]) -> None:
        # the optimizer, and not its state, in whose place loading puts another one
        self._optimizer, self._params = optimizer, params

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if self._params[name] not in self._optimizer.state:
            raise KeyError(name)
        found: dict[str, Tensor] = self._optimizer.state[self._params[name]]
        return found

    def __setitem__(self, name: str, entries: dict[str, Tensor]) -> None:
        self._optimizer.state[self._params[name]] = entries

    def __delitem__(self, name: str) -> None:
        del self._optimizer.state[self._params[name]]

    def __iter__(self) -> Iterator[str]:
        return (name for name, param in self._params.items() if param in self._optimizer.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_RAMP = ("rampup_begin_step", "rampup_step", "sparsity", "min_numel")


def _config_of(
    group: Mapping[str, Any], limit: float | None = None, state_dtype: str | None = None
) -> DGC:
    """What a group says about compression."""
    return _config(
        *(group[key] for key in _RAMP[:2]),
        tuple(group["sparsity"]),
        group["min_numel"],
        limit,
        state_dtype,
    )


@functools.lru_cache(maxsize=256)
def _config(
    begin: int,
    length: int,
    sparsity: tuple[float, ...],
    min_numel: int,
    limit: float | None,
    state_dtype: str | None,
) -> DGC:
    return DGC(
        rampup_begin_step=begin,
        rampup_step=length,
        sparsity=sparsity,
        local_grad_clip_norm=limit,
        min_numel=min_numel,
        state_dtype=state_dtype,
    )


def _wide(param: Tensor) -> torch.dtype:
    """In what the update of this parameter is computed."""
    return param.dtype if param.is_complex() else state_dtype(param)


def _crc(param: Tensor) -> int:
    flat = param.detach().cpu().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
