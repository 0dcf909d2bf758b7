"""SGD with momentum over deep gradient compression."""

import dataclasses
import datetime
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire._wording import warn_user
from thinwire.comm import Group, node_size_of, tap_buckets
from thinwire.comm.stats import numbers
from thinwire.compress.dgc import DGC, locally_clipped
from thinwire.compress.protocol import report_coverage
from thinwire.core.arithmetic import arithmetic
from thinwire.core.checksum import bit_sums
from thinwire.core.feedback import compile_loops
from thinwire.core.gradients import ClipByNorm
from thinwire.core.sharded import Shards, require_shards, shard_of, sharded_like
from thinwire.core.tensors import narrowed, state_dtype
from thinwire.exchange.agreement import StepDecision
from thinwire.exchange.digest import DIGEST_EVERY, digest_of
from thinwire.exchange.gradients import GradientExchange
from thinwire.exchange.provenance import PROVENANCE, Provenance, checksum_of, without_provenance
from thinwire.exchange.replica import Replica
from thinwire.exchange.synchronizer import NO_TRAFFIC, Ranks
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.folded import FoldedSGD, why_no_local_clip
from thinwire.optim.groups import check_nesterov
from thinwire.optim.saving import of_params
from thinwire.schedules import Schedule
from thinwire.wire.message import WIRE_VERSION

_RAMP = ("rampup_begin_step", "rampup_step", "sparsity", "min_numel", "local_grad_clip_norm")
"""Settings of a group that `DGC` has too."""
_INSTEAD_OF_JOIN = "train with DistributedStrategy(dgc=DGC(...)) inside `with engine.join():`"
_OWN = frozenset(("residual", "momentum_buffer"))
"""Keys of the state that differs from rank to rank."""


class DGCMomentum(CommonOptimizer):
    """SGD with momentum that exchanges gradients itself, in messages about 2,000 times smaller.

    Example, on every rank::

        optimizer = DGCMomentum(model.parameters(), lr=0.1, momentum=0.9, sparsity=[0.999])
        for x, y in batches:
            loss_fn(model(x), y).backward()
            optimizer.step()  # exchanges and updates
            optimizer.zero_grad()

    Each rank has the gradient of its own mean loss in `p.grad`. Per tensor of at least `min_numel`
    elements::

        u <- m u + g
        v <- v + u
        sent = the k entries of largest |v|, in `value_bits` bits each
        v <- v - sent;  u <- 0 where something was sent
        p <- p - lr * mean of sent over the ranks

    All other tensors, and all tensors before `rampup_begin_step`, are averaged densely and follow
    torch's SGD.

    Args:
        params: As in torch; all ranks must give the same, in the same order, with equal values.
        lr: A number, a schedule or a list, also per group.
        momentum: m, >= 0.
        rampup_begin_step, rampup_step, sparsity, local_grad_clip_norm, min_numel: As in `DGC`, also
            per group.
        value_bits, state_dtype, node_size, exchange: As in `DGC`.
        nesterov: True for Nesterov momentum; needs momentum.
        weight_decay: Added to each rank's own gradient before it is folded in, >= 0.
        num_trainers: N of `local_grad_clip_norm` only; None: the number of sources.
        process_group: The ranks that exchange; None for all of them. One process alone works too.
        mesh: Of sites and shards, with the dimensions "replicate" and "shard", over all ranks,
            instead of `process_group`. The model was sharded by `fully_shard(model,
            mesh=mesh["shard"])`. Shards are compressed, and `min_numel` counts in them.
        digest_every: Updates within which a difference between the ranks' parameters, or in
            momentum that is averaged densely, is found, >= 1; 0 compares nothing.
        timeout: Longest wait for other ranks in one call, in seconds or as a timedelta, the same on
            all ranks; None: the time-out of the process group.
        streams: Connections to each other rank for large messages, as in `prepare`.
        common: As in all optimizers. `grad_clip` takes `ClipByNorm` only: its c is C for compressed
            tensors and a plain limit for others. `regularizer` is treated as `weight_decay` is.
            `foreach` changes nothing.

    **State** in `state[p]`: `momentum_buffer` u and, for compressed tensors, `residual` v, float32
    (float64 for float64 parameters) or `state_dtype`, of this rank or common to its node;
    `position` in the state_dict. Every rank saves its own. Loaded state is converted to the
    configured type, rounded to nearest if that is narrower.
    **Communication** per step: 24 bytes a rank of agreement before and after, which carry a digest;
    one all-gather of equally long messages, or with "split" an exchange of parts and an all-gather
    of their sums; one all-reduce per dtype of dense tensors. With nodes these go between first
    ranks, after one all-reduce per dtype inside each node. The first step also compares settings
    and parameters.
    **Failure**: a gradient that is not finite, on any rank, drops the step on all of them, with a
    warning. The tenth in a row raises `thinwire.errors.NonFinite`. Ranks whose values differ raise
    `thinwire.errors.Diverged` on all ranks, within `digest_every` updates. Every other error of an
    exchange leaves parameters and state as they were before the step.

    Raises:
        TypeError, ValueError: A wrong argument, at construction.

    Source: Lin et al., 2018, arXiv 1712.01887. Differs: exact selection, positions by Elias-Fano,
    coded values.
    """

    exchanges_gradients = True
    """True: methods that average parameters instead must refuse this optimizer."""
    _step_supports_amp_scaling = True
    _dgc: DGC
    """Settings of the whole optimizer that `DGC` has too."""
    _dense_bytes = 0
    _attached: "Attached | None" = None
    _exchange: GradientExchange | None = None
    """Exchange with the other ranks; None before the first step."""
    _configs: Sequence[DGC] = ()
    """Compression of each group: outside of a step, that on which all ranks last agreed."""
    _named: dict[str, Tensor] | None = None
    _names: Mapping[Tensor, str]

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
        streams: int | None = None,
        **common: Unpack[CommonOwn],
    ) -> None:
        self._dgc = DGC(
            value_bits=value_bits, state_dtype=state_dtype, node_size=node_size, exchange=exchange
        )
        if (clip := common.get("grad_clip")) is not None:
            limits = dataclasses.replace(self._dgc, local_grad_clip_norm=local_grad_clip_norm)
            if (why := why_no_local_clip(limits, clip, sharded=mesh is not None)) is not None:
                kind = ValueError if isinstance(clip, ClipByNorm) else TypeError
                raise kind(f"grad_clip={clip} is not possible: {why}")
        self.num_trainers = num_trainers
        if num_trainers is not None:
            self.num_trainers = check.integer("num_trainers", num_trainers, at_least=1)
        self.digest_every = check.integer("digest_every", digest_every, at_least=0)
        self._ranks = Ranks(
            process_group, timeout=timeout, mesh=mesh, node_size=node_size, streams=streams
        )
        self.timeout_s = self._ranks.timeout_s
        values = {
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "rampup_begin_step": rampup_begin_step,
            "rampup_step": rampup_step,
            "sparsity": tuple(sparsity) if isinstance(sparsity, list) else sparsity,
            "local_grad_clip_norm": local_grad_clip_norm,
            "min_numel": min_numel,
        }
        self._construct(params, lr, values, common)
        self._identity = self._ranks.identity("optimizer")
        require_shards({} if mesh is None else self._params_by_name, self._ranks.shards)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check.real("momentum", values["momentum"], at_least=0)
        check_nesterov(values)
        DGC(**{key: values[key] for key in _RAMP})  # checks them

    @property
    def sparsity(self) -> float:
        """Return the fraction of a compressed tensor that the next update does not send."""
        if not any(map(self._compresses, self._common.order)):
            return 0.0
        return self._config_of(self.param_groups[0]).unsent_share(self.position)

    def compile_loops(self) -> None:
        """Compile what the exchange calls."""
        params = [shard_of(p) for p in self._common.order if self._compresses(p)]
        compile_loops(params, self._dgc.state_dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in the base class. The next step compares settings and parameters."""
        super().add_param_group(param_group)
        self._named = None

    def attach(self, ddp: DistributedDataParallel) -> "Attached":
        """Move the exchange into the backward pass of `ddp`, bucket by bucket, so that the two
        overlap.

        After the backward pass `p.grad` holds the rank's own gradient, not the mean. `step` waits
        for the exchange in flight, checks it and updates. Do not change `p.grad` in between.
        Parameters and state end up bit-identical to `step` alone for compressed tensors that are
        gathered; in a split exchange, owners follow the buckets. Under `ddp.no_sync()` gradients
        accumulate locally. A `torch.amp.GradScaler` reveals its scale only in `step`: with one, the
        exchange happens there.

        Args:
            ddp: A model whose parameters are exactly those of this optimizer.

        Returns:
            The handle whose `remove` moves the exchange back into `step`, with all state kept.

        Raises:
            TypeError: `ddp` is not a DistributedDataParallel.
            ValueError: It is attached already, has other parameters or other ranks, or another
                communication hook.

        Communication: the comparison of settings and parameters, if it has not been made yet.
        """
        if self._attached is not None:
            raise ValueError(
                "this optimizer is attached already: call remove() on its handle first"
            )
        self._attached = Attached(self, ddp)
        return self._attached

    def call_params(self, names: Mapping[Tensor, str]) -> None:
        """Name parameters, as in the base class; the exchange uses these names too."""
        super().call_params(names)
        self._named = None

    @torch.no_grad()
    def require_equal(self) -> None:
        """Raise if values that must be equal on all ranks differ; call it on all ranks.

        Does nothing before the first step, or if `digest_every` is 0.

        Raises:
            Diverged: On every rank.
        """
        if self._exchange is not None:
            self._exchange.require_equal(self.position)

    def stats(self) -> dict[str, float]:
        """Return flat numbers about this rank so far; names as in `thinwire.Engine.stats`.

        With nodes, `bytes_sent` includes the dense traffic inside the node, and
        `bytes_between_nodes` counts the bytes that left it. `sparsity` is that of the first group
        in the next update. If `attach` was forgotten and a DistributedDataParallel model averages
        as well, its traffic counts too.
        """
        exchange = self._exchange
        dropped = 0 if exchange is None else exchange.drops.total
        return numbers(
            step=self.position,
            dropped_steps=dropped,
            sparsity=self.sparsity,
            bytes_dense=self._dense_bytes,
            **({} if exchange is None else exchange.pace.goodput(self.position, dropped)),
            **(NO_TRAFFIC if exchange is None else exchange.traffic()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary, with `position` and the provenance that `load_state_dict`
        compares.

        `state` has an entry `provenance` beside the residual of one parameter: an int64 tensor of
        rank, number of ranks, position, and a checksum of residuals and momentum. Every way of
        saving keeps tensors.
        """
        state_dict = super().state_dict()
        state = of_params(state_dict["state"])
        if self._ranks.mesh is not None:
            # other checkpoint formats would take plain tensors for values equal on all ranks
            params = [p for group in self.param_groups for p in group["params"]]
            for key, entries in state.items():
                own = {
                    name: sharded_like(entries[name], params[key]) for name in _OWN & entries.keys()
                }
                state[key] = {**entries, **own}
        first = next((key for key, entries in state.items() if "residual" in entries), None)
        if first is not None:
            state[first] = {**state[first], PROVENANCE: self._provenance(state).packed()}
        return {**state_dict, "state": {**state_dict["state"], **state}}

    def _provenance(self, state: Mapping[Any, Mapping[str, Any]]) -> Provenance:
        """Return that of a state of this rank; shards share one, which has no checksum."""
        mesh = self._ranks.mesh
        if mesh is not None:
            site = mesh.get_local_rank("replicate")
            sites = mesh["replicate"].size()
            return Provenance(site, sites, self.position, 0)
        own = [entries.get(key) for entries in of_params(state).values() for key in _OWN]
        return Provenance(*self._ranks.rank_and_size, self.position, checksum_of(own))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's dictionary with `position`. Named parameters are matched by name.

        Warns:
            UserWarning: The state is another rank's, mixes tensors of several ranks, or lacks its
                position.

        Raises:
            ValueError: The groups or shapes do not fit; nothing was changed.
        """
        bare = without_provenance(state_dict)
        state = of_params(state_dict["state"])
        found = (Provenance.read(entries.get(PROVENANCE)) for entries in state.values())
        provenance = next(filter(None, found), None)
        problem = None
        if provenance is not None:
            bare.setdefault("position", provenance.position)
            own = self._provenance(state)
            problem = provenance.problem(own.rank, own.ranks, own.checksum)
        elif "position" not in bare and any("residual" in entries for entries in state.values()):
            problem = (
                "the state has no position, so the sparsity ramp-up restarts at update 0: save "
                "all of state_dict(), or set state_dict['position'] to the number of updates made"
            )
        super().load_state_dict(bare)
        if problem is not None:
            warn_user(f"thinwire.optim.DGCMomentum: {problem}")

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        compressed = self._compresses(param)
        dtype = self._dgc.stored_dtype(param) if compressed else state_dtype(param)
        # flat views of it are folded, so it is contiguous whatever the layout of the parameter
        return narrowed(shard_of(value).to(param.device), dtype).contiguous()

    def _compresses(self, param: Tensor) -> bool:
        """Return True if this parameter, or this rank's shard of it, is ever compressed."""
        return self._config_of(self._facts(param).group).compresses(shard_of(param))

    def _config_of(self, group: Mapping[str, Any], *, clips: bool = False) -> DGC:
        """Return the compression of a group; it `clips` whole tensors, and shards before."""
        values = {key: group[key] for key in _RAMP} | {"sparsity": tuple(group["sparsity"])}
        if self._ranks.mesh is not None and not clips:
            values["local_grad_clip_norm"] = None
        return _config(self._dgc, **values)

    @property
    def _params_by_name(self) -> dict[str, Tensor]:
        """Parameters in the order of the exchange; every name is unique."""
        if self._named is None:
            self._named = {}
            for key, p in enumerate(self._common.order):
                name = self._common.records[p].name or f"parameter {key}"
                self._named[name if name not in self._named else f"{name} (parameter {key})"] = p
            self._names = {p: name for name, p in self._named.items()}
        return self._named

    def _joined(self) -> GradientExchange:
        """Return the exchange, after a comparison of the settings over the ranks if needed."""
        params = self._params_by_name
        if self._exchange is None or [*self._exchange.params] != [*params]:
            require_shards(params, self._ranks.shards)
            self._ranks.compare(_facts_of(self, params), "comparing settings and parameters")
            self._exchange = self._restarted(params)
        self._exchange.compressed.make_common()
        return self._exchange

    def _configs_now(self) -> list[DGC]:
        return list(map(self._config_of, self.param_groups))

    def _restarted(self, params: Mapping[str, Tensor]) -> GradientExchange:
        """Return the exchange of these parameters, whose settings are equal on all ranks."""
        ranks = self._ranks
        shards = Shards(params)
        records = self._common.records
        ranks.compile(self.compile_loops)
        if ranks.rank_and_size[0] == 0:
            whole = {shard_of(p): p for p in params.values()}
            config = self._config_of(self.param_groups[0])
            report_coverage(config, whole, lambda shard: self._compresses(whole[shard]))
        accumulation = FoldedSGD(
            self,
            params,
            lambda name: self._configs[records[params[name]].group_index],
            self.grad_clip,
            self.num_trainers,
            of_all=True,
        )
        made = self._exchange
        if made is None:
            sources = ranks.sources(self._dgc.node_size, compared=True)
            made = GradientExchange(ranks.group, shards, accumulation, sources=sources)
        else:
            made.restart(shards, accumulation)
        if self.state:
            made.state_loaded()
        digest = digest_of(self, params, self.digest_every, since=self.position)
        made.watch(Replica(self, digest), self._identity)
        self._configs = self._configs_now()
        return made

    def _run_update(self, rates: list[float]) -> bool:
        with self._ranks.deadline():
            exchange = self._joined()
            agreed = self._configs
            if not exchange.in_flight:  # else messages were sent by what ranks agreed on before
                self._configs = self._configs_now()
            try:
                applied = self._exchanged(exchange)
                agreed = self._configs_now()
            finally:
                self._configs = agreed
                exchange.forget()
        if applied:
            params = [p for p in self._common.order if p.requires_grad]
            self._dense_bytes += sum(4 * shard_of(p).numel() for p in params)
        return applied

    def _exchanged(self, exchange: GradientExchange) -> bool:
        # a GradScaler tells its scale and its verdict by these
        scale = getattr(self, "grad_scale", None)
        found = getattr(self, "found_inf", None)
        overflow = None if found is None else bool(found)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        pairs = self._pairs()  # without a sign change: the exchange takes plain gradients
        given = {self._names[p]: shard_of(g) for p, g in pairs}
        if factor != 1.0:
            given = {name: grad.to(state_dtype(grad)) * factor for name, grad in given.items()}
        group = self._ranks.group
        params = self._params_by_name
        if group.shards is not None:  # one norm over all shards
            given = locally_clipped(
                given,
                Shards(params),
                lambda name: self._config_of(self._facts(params[name]).group, clips=True),
                step=self.position,
                sources=self.num_trainers or group.replica_count,
                gather=group.shards.gather_now,
            )
        unchanged = None
        if self._attached is not None:
            unchanged = self._attached._unchanged(given, scaled=found is not None)
        verdict = exchange.update(  # which updates every parameter
            self.position, given, None, overflow=overflow, unchanged=unchanged
        )
        applied = verdict is StepDecision.APPLY
        if applied:
            exchange.pace.round(1, time.perf_counter(), exchange.waited_s)
        return applied

    def __getstate__(self) -> dict[str, Any]:
        own = ("_dgc", "num_trainers", "digest_every", "timeout_s")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_ranks" not in vars(self):  # a copy
            self._ranks = Ranks(timeout=self.timeout_s)
            self._identity = "a copied optimizer"
        if self._exchange is not None:
            self._exchange.state_loaded()


@functools.lru_cache(maxsize=256)
def _config(whole: DGC, **of_group: Any) -> DGC:
    return dataclasses.replace(whole, **of_group)


def _facts_of(optimizer: DGCMomentum, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks, the most informative first."""
    ranks = optimizer._ranks
    group = optimizer._ranks.group
    dgc = optimizer._dgc
    node = dgc.node_size
    if node is None and ranks.mesh is None:
        node, _ = node_size_of(group.global_ranks, None)
    plain = [
        {k: repr(v) for k, v in g.items() if k not in ("params", "param_names")}
        for g in optimizer.param_groups
    ]
    first = next((p.device for p in params.values()), torch.device("cpu"))
    return {
        "wire version": WIRE_VERSION,
        **{k: v for k, v in dataclasses.asdict(dgc).items() if k not in _RAMP},
        "num_trainers": optimizer.num_trainers,
        "ranks of a node": node,
        **arithmetic(first),
        **optimizer.shared_settings(),
        "digest_every": optimizer.digest_every,
        "step": optimizer.position,
        "group": plain,
        "parameter": [
            f"{name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)} "
            f"requires_grad={p.requires_grad}"
            for name, p in params.items()
        ],
        "decay": [optimizer._facts(p).weight_decay for p in params.values()],
        "initial value (CRC-32) of": _initial_values(params, group.shards),
        **ranks.facts,
    }


def _initial_values(params: Mapping[str, Tensor], shards: Group | None) -> dict[str, Any]:
    """Return a checksum of each parameter; for a sharded one, of all its shards."""
    own = [checksum_of(shard_of(p)) for p in params.values()]
    if shards is None:
        return dict(zip(params, own, strict=True))
    packed = b"".join(crc.to_bytes(4, "little") for crc in own)
    answers = shards.gather_now(packed, "comparing shards")
    return {
        name: [int.from_bytes(answer[4 * i : 4 * i + 4], "little") for answer in answers]
        for i, name in enumerate(params)
    }


class Attached:
    """Handle returned by `DGCMomentum.attach`.

    Example::

        handle = optimizer.attach(DistributedDataParallel(model))
        train(...)
        handle.remove()  # step() exchanges again
    """

    def __init__(self, optimizer: DGCMomentum, ddp: DistributedDataParallel) -> None:
        """See `DGCMomentum.attach`."""
        check.instance("ddp", ddp, DistributedDataParallel)
        if optimizer._ranks.mesh is not None:
            raise ValueError(
                "attach(ddp) cannot be combined with mesh: a sharded model is not wrapped in "
                "DistributedDataParallel, and step() exchanges"
            )
        own = {p for p in optimizer._common.order if p.requires_grad}
        theirs: dict[Tensor, str] = {
            p: name for name, p in named_parameters(ddp.module) if p.requires_grad
        }
        if own != theirs.keys():
            missing = [name for p, name in theirs.items() if p not in own]
            raise ValueError(
                "ddp must have exactly the trainable parameters of this optimizer: "
                f"{len(missing)} of the model's are not in the optimizer"
                f"{', such as ' + missing[0] if missing else ''}, "
                f"{len(own - theirs.keys())} of the optimizer's are not in the model"
            )
        optimizer.call_params(theirs)
        self._optimizer: DGCMomentum | None = optimizer
        self._samples: dict[str, Tensor] = {}
        """Sum of the bits of each launched gradient, by name."""
        self._deferred = False
        """True if buckets wait for `step` because a loss scaler is in use."""
        with optimizer._ranks.deadline():
            self._exchange = optimizer._joined()
        group = self._exchange.group
        self._tap = tap_buckets(ddp, group, self._launch, instead=_INSTEAD_OF_JOIN)

    def stats(self) -> dict[str, float]:
        """Return the statistics of the optimizer; see `DGCMomentum.stats`.

        Raises:
            RuntimeError: After `remove`.
        """
        if self._optimizer is None:
            raise RuntimeError("this handle was removed: call optimizer.stats() instead")
        return self._optimizer.stats()

    def remove(self) -> None:
        """Move the exchange back into `step`, which reads local gradients. May be called twice."""
        if self._optimizer is not None:
            self._tap.close()
            self._optimizer._attached = None
            self._optimizer = None
            self._exchange.discard()

    def _unchanged(self, grads: Mapping[str, Tensor], *, scaled: bool) -> dict[str, Tensor] | None:
        """Return for each launched gradient a tensor that is true if it has not changed since; None
        if nothing was launched.

        `scaled`: True if a loss scaler is in use.
        """
        samples = self._samples
        self._samples = {}
        if scaled and self._exchange.in_flight:
            self._exchange.discard()  # launched with scaled gradients: drop it
            self._deferred = True
        if not self._exchange.in_flight:
            return None
        names = [name for name in grads if name in samples]
        now = bit_sums([grads[name] for name in names])
        return {name: words == samples[name] for name, words in zip(names, now, strict=True)}

    def _launch(self, bucket: int, params: Sequence[Parameter], grads: Sequence[Tensor]) -> None:
        """Launch the exchange of one bucket; called in the backward pass."""
        optimizer = self._optimizer
        if self._deferred or optimizer is None:
            return
        with torch.no_grad():
            names = optimizer._names
            by_name = {names[p]: grad for p, grad in zip(params, grads, strict=True)}
            self._exchange.launch(optimizer.position, bucket, by_name)
            self._samples.update(zip(by_name, bit_sums(list(by_name.values())), strict=True))
