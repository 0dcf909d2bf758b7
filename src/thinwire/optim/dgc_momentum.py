"""SGD with momentum over deep gradient compression."""

import datetime
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from thinwire import _validate as check
from thinwire.compress.dgc import DGC
from thinwire.core.feedback import compile_loops
from thinwire.core.gradients import ClipByNorm, Regularizer
from thinwire.core.provenance import PROVENANCE, Provenance, checksum_of, without_provenance
from thinwire.core.sharded import require_shards, shard_of, sharded_like
from thinwire.core.stats import numbers
from thinwire.exchange.digest import DIGEST_EVERY
from thinwire.exchange.round import Round
from thinwire.exchange.synchronizer import NO_TRAFFIC, Ranks
from thinwire.optim.attached import Attached
from thinwire.optim.dgc_settings import OF_DGC, DGCSettings, wide_dtype
from thinwire.optim.dgc_synchronizer import DGCSynchronizer, DGCUpdate
from thinwire.optim.pairs import ParamGrad
from thinwire.optim.saving import of_params
from thinwire.schedules import Schedule

_OWN = ("residual", "momentum_buffer")
"""Keys of the state that differs from rank to rank."""


class DGCMomentum(DGCSettings):
    """SGD with momentum that exchanges gradients itself, in messages about 2,000 times smaller.

    Example, on every rank::

        optimizer = DGCMomentum(model.parameters(), lr=0.1, momentum=0.9, sparsity=[0.999])
        for x, y in batches:
            loss_fn(model(x), y).backward()
            optimizer.step()  # exchanges and updates
            optimizer.zero_grad()

    Each rank holds the gradient of its own mean loss in `p.grad`; `step` exchanges and updates. Per
    tensor of at least `min_numel` elements::

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
        rampup_begin_step: Updates before compression begins, >= 0.
        rampup_step: Updates over which the levels of `sparsity` are spread, >= 1.
        sparsity: Fractions that are **not** sent, each in [0, 1); the last one stays.
        nesterov: True for Nesterov momentum; needs momentum.
        weight_decay: Added to each rank's own gradient before it is folded in, >= 0.
        local_grad_clip_norm: C > 0: a source's share g / N of a compressed tensor is limited to the
            norm C / sqrt(N). A source is a rank, or a node with the mean of its ranks.
        num_trainers: N of that limit only; None: the number of sources.
        min_numel: Smaller tensors are exchanged densely, >= 1.
        value_bits: Bits of one sent value: 1, 2, 4, 8, 16 or 32. The rounding error stays in v.
        state_dtype: u and v of compressed tensors are stored as "float32" or "bfloat16" (a torch
            dtype is taken too), half the memory, rounded stochastically; None: float32, float64 for
            float64 parameters.
        node_size: Consecutive ranks that share a node, average densely among themselves and count
            as one source, >= 1; it must divide the ranks. 1 is off. None: torchrun's
            LOCAL_WORLD_SIZE where ranks fill two nodes or more.
        exchange: "gather" sends every message to every source. "split" sends sums of shares, and
            its cost does not grow with the number of sources. "auto" splits where that moves at
            most half of the bytes.
        process_group: The ranks that exchange; None for all of them. One process alone works too.
        mesh: Of sites and shards, with the dimensions "replicate" and "shard", over all ranks: the
            model was sharded by `fully_shard(model, mesh=mesh["shard"])` before this was made. Each
            rank exchanges its own shards with those that hold the same ones; all vote together. A
            shard is what is compressed, and `min_numel` counts. Instead of `process_group`.
        digest_every: Updates within which a difference between the ranks' parameters, or in
            momentum that is averaged densely, is found, >= 1; 0 compares nothing.
        timeout: Longest wait for other ranks in one call, in seconds or as a timedelta; None: the
            time-out of the process group. The same on all ranks.
        grad_clip: `ClipByNorm` only: its c is C for compressed tensors and a plain limit for those
            that stay dense.
        regularizer: `L1Decay` or `L2Decay`, treated as `weight_decay` is.
        exclude_from_weight_decay: Patterns over names, or a predicate (name, parameter) -> bool.
        maximize: True to maximize the objective.
        foreach: Accepted for the common signature; the exchange decides the order of work.

    **State** in `state[p]`: `momentum_buffer` u and, for compressed tensors, `residual` v, float32
    (float64 for float64 parameters) or `state_dtype`, local to the rank, or common to the ranks of
    a node; `position` in the state_dict. Every rank saves its own. Loaded state is converted to the
    configured type, rounded to nearest if that is narrower.
    **Communication** per step: 24 bytes a rank of agreement before and after, one all-gather of
    equally long messages, one all-reduce per dtype of dense tensors. The agreement carries a digest
    of the values that must be equal on all ranks. The first step also compares settings and
    parameters over the ranks. With nodes these go between the first ranks of the nodes, after one
    all-reduce per dtype inside each; with "split" the all-gather becomes an exchange of parts and
    an all-gather of their sums.
    **Failure**: a gradient that is not finite, on any rank, drops the step on all of them. Nothing
    changes, and a warning names parameter, rank and step. The tenth in a row raises
    `thinwire.errors.NonFinite`. Ranks whose values differ raise `thinwire.errors.Diverged` on all
    ranks, within `digest_every` updates. Every other error of an exchange leaves parameters and
    state as they were before the step.

    Raises:
        TypeError, ValueError: A wrong argument, at construction.

    Source: Lin et al., 2018, arXiv 1712.01887. Differs: exact selection, positions by Elias-Fano,
    coded values.
    """

    exchanges_gradients = True
    """True: methods that average parameters instead must refuse this optimizer."""
    _step_supports_amp_scaling = True
    _synchronizer: DGCSynchronizer | None = None
    _arrived: Round | None = None
    """Exchange result handed in by the engine for the step that it calls."""
    _dense_bytes = 0
    _attached: Attached | None = None

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
                "same gradient: give only one"
            )
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        dgc = DGC(
            value_bits=value_bits, state_dtype=state_dtype, node_size=node_size, exchange=exchange
        )
        for key in OF_DGC:
            setattr(self, key, getattr(dgc, key))
        self.num_trainers = num_trainers
        if num_trainers is not None:
            self.num_trainers = check.integer("num_trainers", num_trainers, at_least=1)
        self.digest_every = check.integer("digest_every", digest_every, at_least=0)
        self._ranks = Ranks(process_group, timeout=timeout, mesh=mesh, node_size=node_size)
        self.timeout_s = self._ranks.timeout_s
        if mesh is not None and grad_clip is not None:
            raise ValueError(
                f"grad_clip={grad_clip} cannot be combined with mesh, because the norm of an "
                "arriving gradient would cover one shard only: use local_grad_clip_norm, whose "
                "norms cover all shards"
            )
        self._identity = self._ranks.identity("optimizer")
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
            require_shards(self.synchronizer.params, mesh["shard"])

    @property
    def synchronizer(self) -> DGCSynchronizer:
        """Exchange with the other ranks."""
        if self._synchronizer is None or self._synchronizer.optimizer is not self:
            self._synchronizer = DGCSynchronizer(self, self._ranks, self._identity)
            self._update_from = DGCUpdate(self, self._synchronizer)
        return self._synchronizer

    def compile_loops(self) -> None:
        """Compile what the exchange calls."""
        params = [shard_of(p) for p in self.synchronizer.params.values() if self.compresses(p)]
        compile_loops(params, torch.bfloat16 if self.state_dtype == "bfloat16" else None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in the base class. The next step compares settings and parameters."""
        super().add_param_group(param_group)
        if self._synchronizer is not None:
            self._synchronizer.relist()

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

        def removed() -> None:
            self._attached = None

        self._attached = Attached(self, self.synchronizer, ddp, stats=self.stats, removed=removed)
        return self._attached

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group passed to the constructor; None for all ranks."""
        return self._ranks.process_group

    def call_params(self, names: Mapping[Tensor, str]) -> None:
        """Name parameters, as in the base class; the exchange uses these names too."""
        super().call_params(names)
        self.synchronizer.relist()

    @contextmanager
    def updating_from(self, done: Round) -> Iterator[None]:
        """Run a `step` inside the block from `done`, the result of an engine's exchange."""
        self._arrived = done
        try:
            yield
        finally:
            self._arrived = None

    @torch.no_grad()
    def require_equal(self) -> None:
        """Raise if values that must be equal on all ranks differ; call it on all ranks.

        Does nothing before the first step, or if `digest_every` is 0.

        Raises:
            Diverged: On every rank.
        """
        if (exchange := self.synchronizer.last) is not None:
            exchange.require_equal(self.position)

    def stats(self) -> dict[str, float]:
        """Return flat numbers about this rank so far; names as in `thinwire.core.stats.numbers`.

        With nodes, `bytes_sent` includes the dense traffic inside the node, and
        `bytes_between_nodes` counts the bytes that left it. `sparsity` is that of the first group
        in the next update. If `attach` was forgotten and a DistributedDataParallel model averages
        as well, its traffic counts too.
        """
        exchange = self.synchronizer.last
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
        state_dict = self.plain_state_dict()
        state = state_dict["state"]
        first = next((k for k, entries in of_params(state).items() if "residual" in entries), None)
        if first is not None:
            own = self._own_rank_and_size()
            provenance = Provenance(*own, self.position, self._own_checksum(state)).packed()
            state_dict["state"] = {**state, first: {**state[first], PROVENANCE: provenance}}
        return state_dict

    def _own_rank_and_size(self) -> tuple[int, int]:
        """Return this rank's index among the ranks that exchange, and their number."""
        mesh = self._ranks.mesh
        if mesh is None:
            return self._ranks.rank_and_size
        return mesh.get_local_rank("replicate"), mesh["replicate"].size()

    def _own_checksum(self, state: Mapping[Any, Mapping[str, Any]]) -> int:
        """Return a checksum of residuals and momentum; 0 for shards, which share a provenance."""
        if self._ranks.mesh is not None:
            return 0
        return checksum_of(
            [entries.get(key) for entries in of_params(state).values() for key in _OWN]
        )

    def plain_state_dict(self) -> dict[str, Any]:
        """Return `state_dict` without provenance, for callers that keep ranks apart."""
        state_dict = super().state_dict()
        if self._ranks.mesh is None:
            return state_dict
        params = [p for group in self.param_groups for p in group["params"]]
        # other checkpoint formats would take plain tensors for values equal on all ranks
        state = {
            key: {
                name: sharded_like(value, params[key]) if name in _OWN else value
                for name, value in entries.items()
            }
            for key, entries in of_params(state_dict["state"]).items()
        }
        return {**state_dict, "state": {**state_dict["state"], **state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's dictionary with `position`. Named parameters are matched by name.

        Warns:
            UserWarning: The state is another rank's, mixes tensors of several ranks, or lacks its
                position.

        Raises:
            ValueError: The groups or shapes do not fit; nothing was changed.
        """
        state = state_dict["state"]
        every = of_params(state).values()
        provenance = next(
            (o for entries in every if (o := Provenance.read(entries.get(PROVENANCE)))), None
        )
        bare = {
            **state_dict,
            "state": {key: without_provenance(entries) for key, entries in state.items()},
        }
        if provenance is not None and "position" not in bare:
            bare["position"] = provenance.position
        super().load_state_dict(bare)
        problem = None
        if provenance is not None:
            problem = provenance.problem(*self._own_rank_and_size(), self._own_checksum(state))
        elif "position" not in bare and any("residual" in entries for entries in every):
            problem = (
                "the state has no position, so the sparsity ramp-up restarts at update 0: save "
                "all of state_dict(), or set state_dict['position'] to the number of updates made"
            )
        if problem is not None:
            warnings.warn(f"thinwire.optim.DGCMomentum: {problem}", UserWarning, stacklevel=2)

    def _run_update(self, rates: list[float]) -> bool:
        # without a sign change: the exchange takes plain gradients
        return self._update(self._pairs(), rates)

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        sync = self.synchronizer
        with self._ranks.deadline(), sync.fixed_rules():
            exchange, names, received = sync.joined(), sync.names, self._arrived
            try:
                if received is not None:
                    grads: Mapping[str, Tensor] = {names[p]: shard_of(g) for p, g in pairs}
                else:
                    overflow, factor = self._read_scaler()
                    given = {names[p]: _unscaled(p, shard_of(g), factor) for p, g in pairs}
                    given, unchanged = sync.limited(given), None
                    if self._attached is not None:
                        unchanged = self._attached.unchanged(given, scaled=overflow is not None)
                    outcome = exchange.exchange(
                        self.position, given, overflow=overflow, unchanged=unchanged
                    )
                    received, grads = outcome.received, outcome.grads
                sync.agreed()
                if received is None:
                    return False
                self._update_from(exchange, grads, rates, received)
            finally:
                exchange.forget()
        self._dense_bytes += sum(
            4 * shard_of(p).numel() for p in self._ordered_params() if p.requires_grad
        )
        return True

    def _read_scaler(self) -> tuple[bool | None, float]:
        """Return the overflow flag of a `GradScaler`, if any, and the unscaling factor."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return None if found is None else bool(found), 1.0 if scale is None else 1.0 / float(scale)

    def __getstate__(self) -> dict[str, Any]:
        own = (*OF_DGC, "num_trainers", "digest_every", "timeout_s")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_ranks" not in vars(self):  # a copy
            self._ranks, self._identity = Ranks(timeout=self.timeout_s), "a copied optimizer"
        exchange = self.synchronizer.last
        self._update_from.state_loaded()
        if exchange is not None:
            exchange.state_loaded()


def _unscaled(param: Tensor, grad: Tensor, factor: float) -> Tensor:
    return grad if factor == 1.0 else grad.to(wide_dtype(param)) * factor
