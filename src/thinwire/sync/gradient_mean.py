"""The mean gradient of all ranks, dense or compressed with error feedback, for optimizers that do not exchange."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire import _validate as check
from thinwire.comm import Group, Nodes, Sources, node_size_of, require_agreement, sources_of
from thinwire.core.feedback import Fold, commit_list_, in_chunks, propose_list
from thinwire.core.precision import narrowed, state_dtype
from thinwire.core.rounding import rounding_seed
from thinwire.core.storage import with_own_storage
from thinwire.sync.agreement import Drops
from thinwire.sync.dgc_config import DGC
from thinwire.sync.digest import RollingDigest
from thinwire.sync.exchange import GradientExchange, Verdict
from thinwire.sync.local_limit import locally_clipped
from thinwire.sync.node_state import make_common_
from thinwire.sync.own_state import OwnState
from thinwire.sync.round import Round, SparseGradient
from thinwire.sync.traffic import GATHER

__all__ = ["GradientMean", "locally_clipped"]


class GradientMean:
    """Brings every rank the mean of the ranks' gradients, by parameter name.

    Without `dgc` the mean is dense, sum / N in the gradient's dtype. With it, tensors that `DGC.compresses` travel from
    `rampup_begin_step` on as in `DGCMomentum`, without momentum: each rank folds its gradient, after the local clip,
    into a residual v <- v + g, sends the k largest entries of v and takes off v what the receivers decode. All other
    tensors, and row-sparse gradients, travel densely.

    `launch` sends a bucket before all gradients are there; after the last one `settle` says whether `reduce` will take
    what was launched.

    **State**: `residuals` by name, in `dgc.state_dtype`, local to the rank, or common to the ranks of a node; drop and
    byte counters.
    **Communication** per `reduce`: 24 bytes a rank of agreement before and after, one all-gather of equally long
    messages, one all-reduce per dtype of dense gradients; where buckets were launched, these for every bucket, and the
    agreement after only. On one rank the compression happens too.
    **Failure**: an error, or a dropped step, leaves residuals and gradients as they were, on every rank.

    Args:
        group: The ranks. Names, shapes, dtypes and `dgc` must have been compared over them.
        params: The trainable parameters by name, in the same order on all ranks.
        dgc: How to compress; None for the dense mean.
        num_trainers: N of the local clip, and of nothing else; where it is None the number of sources: ranks, or nodes.
        check_finite: Whether a gradient that is not finite drops the step. With `dgc` it always does, since it would
            spoil a residual for ever.

    Source: Lin et al., 2018, arXiv 1712.01887. Differs: no momentum correction, since the optimizer is another.
    """

    def __init__(
        self,
        group: Group,
        params: Mapping[str, Parameter],
        dgc: DGC | None = None,
        *,
        num_trainers: int | None = None,
        check_finite: bool = True,
    ) -> None:
        self._params = dict(params)
        self._names = list(self._params)
        self._keys = {name: key for key, name in enumerate(self._names)}
        self._dgc = dgc
        sources = group if dgc is None else _agreed_sources(group, dgc)
        trainers = sources.size if num_trainers is None else num_trainers
        self._trainers = check.integer("num_trainers", trainers, at_least=1)
        self.row_sparse: frozenset[str] = frozenset()
        """Whose gradients were row-sparse on every rank in the last `reduce`; the same on all of them."""
        self._nodes_compared = False
        self._bytes_sent = self._bytes_received = self._bytes_between_nodes = 0
        self._wait_s = 0.0
        self._step = 0
        self._exchange = GradientExchange(
            group,
            self._names,
            value_bits=32 if dgc is None else dgc.value_bits,
            propose=self._propose,
            check_dense=check_finite or dgc is not None,
            sources=sources,
            exchange=GATHER if dgc is None else dgc.exchange,
        )
        self.residuals = {} if dgc is None else {n: _zeros(dgc, p) for n, p in params.items() if dgc.compresses(p)}

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the rates and settings of an optimizer compared at every step, before it gets the mean."""
        self._exchange.optimizer = optimizer

    def watch(self, digest: RollingDigest | None, identity: str) -> None:
        """Have what all ranks must hold alike compared at every step, and which engine each of them steps."""
        self._exchange.digest, self._exchange.identity = digest, identity
        if digest is not None and self.residuals:
            self._exchange.own = OwnState(lambda: {f"residual of {name}": v for name, v in self.residuals.items()})

    @property
    def drops(self) -> Drops:
        """The steps that were dropped for gradients that are not finite."""
        return self._exchange.drops

    @property
    def bytes_sent(self) -> int:
        """What this rank gave to `reduce`, with headers and agreements; counted on one rank too."""
        return self._bytes_sent

    def counts(self, step: int) -> dict[str, float]:
        """Further numbers of `thinwire.core.stats`, ahead of update `step`."""
        counts = {
            "bytes_received": self._bytes_received,
            "wait_s": self._wait_s,
            "sparsity": 0.0 if self._dgc is None else self._dgc.sparsity_in_force(step),
        }
        if isinstance(self._exchange.sources, Nodes):
            counts["bytes_between_nodes"] = self._bytes_between_nodes
        return counts

    @torch.no_grad()
    def reduce(
        self, step: int, grads: Mapping[str, Tensor], *, overflow: bool | None = None, reuse: bool = False
    ) -> dict[str, Tensor] | None:
        """The mean gradients of this step, or None where all ranks drop it.

        All ranks must call it, with gradients for the same parameters; one that has none on any rank is left out.

        Args:
            step: Completed updates, from 0; the ramp of `dgc` follows it.
            grads: This rank's own gradients, unscaled, not divided by N; dense or row-sparse; read only, see `reuse`.
            overflow: Whether a loss scaler found an overflow on this rank, which drops the step on all; None without a
                scaler, and then dropped steps are warned of and limited here.
            reuse: Whether means of compressed tensors may be written into `grads`, once they are known, so that there
                is no second set of gradients.

        Returns:
            By name, bit-identical on all ranks and in the shape of the parameter: compressed means and those of half
            precision in float32 (float64 for float64 parameters), the others in the gradient's dtype.

        Raises:
            NonFinite: The tenth dropped step in a row without a loss scaler.
            Mismatch: Ranks are at different steps, or a parameter has a gradient on some of them only.
            ThinwireError: A rank gave a gradient of an unknown parameter or of another shape.
            PayloadCorrupt, PeerLost, PeerStalled: See `thinwire.errors`.
        """
        misuse = self._misuse(grads)
        own = {} if misuse else {key: grads[name] for key, name in enumerate(self._names) if name in grads}
        self._step = step
        with self._counted():
            self._compare_nodes()
            done = self._exchange.exchange(step, own, overflow=overflow, misuse=misuse)
        if done is None:
            return None
        self.row_sparse = frozenset(self._names[key] for key in done.rows_only)
        return self._means(own, done, reuse=reuse)

    def cut(self, buckets: Sequence[Sequence[str]]) -> None:
        """Which tensors travel together from now on, by name; the same on all ranks."""
        self._exchange.buckets = [[self._keys[name] for name in names] for names in buckets]

    @property
    def steady(self) -> frozenset[str] | None:
        """The tensors that `launch` may send, all of them; None while ranks have to agree first."""
        keys = self._exchange.steady.keys
        return None if keys is None else frozenset(self._names[key] for key in keys)

    @torch.no_grad()
    def launch(self, step: int, bucket: int, grads: Mapping[str, Tensor]) -> None:
        """Send one bucket of this step, dense gradients as in `reduce`; in the same order on all ranks.

        Raises:
            PeerLost, PeerStalled: See `thinwire.errors`.
        """
        self._step = step
        with self._counted():
            self._compare_nodes()
            self._exchange.launch_bucket(step, bucket, {self._keys[name]: grad for name, grad in grads.items()})

    @torch.no_grad()
    def settle(self, step: int, grads: Mapping[str, Tensor], **told: Any) -> Verdict:
        """Wait for the buckets of this step and agree what becomes of them; see `GradientExchange.settle`."""
        self._step = step
        with self._counted():
            return self._exchange.settle(step, {self._keys[n]: g for n, g in grads.items() if n in self._keys}, **told)

    def spoil(self, reason: str) -> None:
        """Tell all ranks, in the next agreement, that this one did not finish its update."""
        self._exchange.spoiled = reason

    def require_equal(self, step: int) -> None:
        """Compare all that ranks must hold alike; see `GradientExchange.require_equal`."""
        self._exchange.require_equal(step)

    def release(self) -> None:
        """Forget what was settled and not taken."""
        self._exchange.release()

    def abandon(self, reason: str) -> None:
        """Leave a step half-way; nothing can be exchanged any more."""
        self._exchange.abandon(reason)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        sources = self._exchange.sources
        sent, received, waited = sources.bytes_sent, sources.bytes_received, sources.wait_s
        crossed, besides = _crossed(sources), self._exchange.bytes_before
        try:
            yield
        finally:
            self._bytes_sent += sources.bytes_sent - sent + self._exchange.bytes_before - besides
            self._bytes_received += sources.bytes_received - received
            self._bytes_between_nodes += _crossed(sources) - crossed
            self._wait_s += sources.wait_s - waited

    def _compare_nodes(self) -> None:
        """The ranks of a node propose the same only if they hold the same."""
        if isinstance(self._exchange.sources, Nodes) and not self._nodes_compared:
            make_common_(self.residuals, self._exchange.sources)
            self._nodes_compared = True

    def state_dict(self) -> dict[str, Any]:
        """Residuals by name and the counters, of this rank; the tensors are the live ones, as in torch."""
        return {
            "residuals": dict(self.residuals),
            "dropped_steps": self.drops.total,
            "drops_in_a_row": self.drops.in_a_row,
            "bytes_sent": self._bytes_sent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave; values are copied. No communication.

        Residuals of a wider type are rounded to nearest, once; those of a narrower one stay exactly as they are.

        Raises:
            ValueError: The state belongs to other parameters or another config; nothing has changed.
            TypeError: A counter of the wrong kind.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"the state of a mean gradient has the keys {list(self.state_dict())}, got {list(state)}")
        counters = ("dropped_steps", "drops_in_a_row", "bytes_sent")
        total, in_a_row, bytes_sent = (check.integer(key, state[key], at_least=0) for key in counters)
        came = state["residuals"]
        for name in {**self.residuals, **came}:
            here, there = (tuple(t[name].shape) if name in t else "nothing" for t in (self.residuals, came))
            if here != there:
                raise ValueError(
                    f"state does not fit: residual {name} has shape {there} in it and {here} here. Load a state of the "
                    "same parameters and the same dgc"
                )
        for name, residual in self.residuals.items():
            residual.copy_(narrowed(came[name], residual.dtype))
        self._nodes_compared = False
        if bytes_sent:
            self._exchange.likeness.skip()
        self.drops.total, self.drops.in_a_row, self._bytes_sent = total, in_a_row, bytes_sent

    def _misuse(self, grads: Mapping[str, Tensor]) -> str | None:
        for name, grad in grads.items():
            if name not in self._params:
                return f"a gradient was given for {name!r}, which is none of the parameters to exchange"
            if grad.shape != self._params[name].shape:
                shapes = f"{tuple(grad.shape)}, and the parameter {tuple(self._params[name].shape)}"
                return f"the gradient of {name} has shape {shapes}"
        return None

    def _contribution(self, param: Parameter, grad: Tensor) -> Tensor:
        """What this rank folds in, flat; made anew for the commit, so that no step holds a second set of gradients."""
        assert self._dgc is not None
        return locally_clipped(self._dgc, self._step, self._trainers, param, grad).reshape(-1)

    def _propose(self, grads: Mapping[int, Tensor]) -> dict[int, SparseGradient]:
        sizes = {key: self._params[self._names[key]].numel() for key in grads if self._names[key] in self.residuals}
        ks = {key: k for key, size in sizes.items() if self._dgc and (k := self._dgc.count_at(self._step, size))}
        found: dict[int, SparseGradient] = {}
        for keys in in_chunks({key: sizes[key] for key in ks}):
            folds = [self._fold(key, grads[key]) for key in keys]
            for key, proposal in zip(keys, propose_list(folds, [ks[key] for key in keys]), strict=True):
                found[key] = SparseGradient(proposal, sizes[key], ks[key])
        return found

    def _fold(self, key: int, grad: Tensor) -> Fold:
        name = self._names[key]
        return Fold(self._contribution(self._params[name], grad), self.residuals[name].view(-1), None, 0.0, False)

    def _means(self, grads: Mapping[int, Tensor], done: Round, *, reuse: bool) -> dict[str, Tensor]:
        """The mean of all tensors; residuals of those that were compressed change."""
        for keys in in_chunks({key: grad.numel() for key, grad in grads.items() if done.is_sparse(key)}):
            folds = [self._fold(key, done.gradient(key, grads[key])) for key in keys]
            seeds = [rounding_seed(self._step, key) for key in keys]
            own, states = self._exchange.own, {f"residual of {n}": self.residuals[n] for n in map(self._name, keys)}
            expected = {} if own is None else own.expected(states)
            seals = commit_list_(folds, [done.sent(key) for key in keys], seeds, sealed=own is not None)
            if own is not None:
                sums = [(seal.residual_before, seal.residual) for seal in seals]
                own.changed(self._step + 1, states, expected, dict(zip(states, sums, strict=True)))
            for key, fold in zip(keys, folds, strict=True):
                done.add_kept_(key, fold.residual)
        if self._exchange.own is not None:
            self._exchange.own.seal(self._step + 1)
        mine = with_own_storage(grads) if reuse else set()
        return {self._names[key]: self._mean(key, grad, done, reuse=key in mine) for key, grad in grads.items()}

    def _name(self, key: int) -> str:
        return self._names[key]

    def _mean(self, key: int, grad: Tensor, done: Round, *, reuse: bool) -> Tensor:
        param = self._params[self._names[key]]
        if not done.is_sparse(key):
            mean = done.dense_mean(key)
            return mean.to(state_dtype(param)) if param.is_floating_point() else mean
        indices, values = done.sparse_mean(key, state_dtype(param))
        fits = reuse and grad.is_contiguous() and grad.dtype == values.dtype
        mean = grad.detach().zero_() if fits else torch.zeros(param.shape, dtype=values.dtype, device=values.device)
        mean.view(-1)[indices] = values
        return mean


def _crossed(sources: Sources) -> int:
    return sources.bytes_between_nodes if isinstance(sources, Nodes) else sources.bytes_sent


def _agreed_sources(group: Group, dgc: DGC) -> Sources:
    """Who counts as one source, once all ranks have said the same."""
    width, _ = node_size_of(group.global_ranks, dgc.node_size)
    if dgc.node_size is None:  # else it is a part of dgc
        require_agreement(group, {"ranks of a node": width}, what="comparing nodes")
    return sources_of(group, width)


def _zeros(dgc: DGC, param: Tensor) -> Tensor:
    return torch.zeros(param.shape, dtype=dgc.stored_dtype(param), device=param.device)
