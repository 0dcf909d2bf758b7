"""The compression of a gradient exchange: what is folded, what is kept, what arrives."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.comm import Sources
from thinwire.compress.checksums import send_checked
from thinwire.compress.dense import DenseMeans, not_finite, send_dense
from thinwire.compress.dgc import limited
from thinwire.compress.entries import ArrivedEntries
from thinwire.compress.protocol import (
    RESIDUAL,
    Arrived,
    Compression,
    Computed,
    Context,
    Entries,
    Kept,
    Sending,
)
from thinwire.core.feedback import Proposal, commit_list_, in_chunks, propose_list, rounding_seed
from thinwire.core.tensors import state_dtype
from thinwire.exchange.nodes import make_common_, make_mean_
from thinwire.kernels.rules import Fold

Grads = Mapping[str, Tensor]
"""This rank's own gradients by name, unscaled and not divided by the number of ranks."""
Received = Mapping[str, Arrived]
Leave = Callable[[str], None]


class Residuals:
    """What is kept of a rank's gradients by name, and how a gradient enters it: v <- v + g.

    `thinwire.optim.folded.FoldedSGD` has the momentum of an SGD beside it.
    """

    def __init__(self, method: Compression, params: Mapping[str, Tensor]) -> None:
        self._method, self._params = method, params
        self._kept: dict[str, dict[str, Tensor]] = {}

    def method(self, name: str) -> Compression:
        """Return the compression of a tensor."""
        return self._method

    def position(self, step: int) -> int:
        """Return the number of updates, from 0, that ramps count."""
        return step

    def kept(self, name: str, *, keep: bool = True) -> dict[str, Tensor]:
        """Return the state of a tensor by kind, live; a new one, which `keep` stores, at first."""
        if name not in self._kept:
            param, method = self._params[name], self._method
            dtype = method.stored_dtype(param)
            zeros = torch.zeros(param.shape, dtype=dtype, device=param.device)
            self._kept[name] = {RESIDUAL: zeros, **method.begin(zeros)}
        return self._kept[name]

    def saved(self, name: str) -> dict[str, Tensor]:
        """Return the state of a tensor that is saved."""
        return self.kept(name)

    def own(self, name: str, grad: Tensor, sources: int) -> Tensor:
        """Return the gradient to fold in, limited and decayed."""
        limit = self._method.local_grad_clip_norm
        if limit is None:
            return grad
        return limited(grad, limit, sources, state_dtype(self._params[name]))

    def factors(self, name: str) -> tuple[float, bool]:
        """Return the momentum, and True for Nesterov's."""
        return 0.0, False

    def step_(self, arrived: Received, row_sparse: Collection[str], leave_: Leave) -> list[str]:
        """Update the parameters whose momentum is kept here; return their names.

        `leave_` changes what is kept of a tensor whose entries arrived, before the parameter moves.
        """
        return []


class Folded(Computed):
    """Gradients of a bucket, each with what was not sent before; computed when it is read."""

    def __init__(
        self,
        grads: Grads,
        accumulation: Residuals,
        method: Compression,
        context: Context,
        keys: Mapping[str, int],
        *,
        keep: bool,
    ) -> None:
        self._grads, self._accumulation, self._context = grads, accumulation, context
        self._keys, self._decay = keys, method.decay
        self.kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in method.kinds}
        """State of these tensors, by kind and name."""
        for name in grads:
            for kind, entry in accumulation.kept(name, keep=keep).items():
                self.kept[kind][name] = entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)

    def __getitem__(self, name: str) -> Tensor:
        residual = self.kept[RESIDUAL][name]
        return self.part(name, 0, residual.numel()).view(residual.shape)

    def part(self, name: str, start: int, end: int) -> Tensor:
        """See `Computed`."""
        own, residual = (term.view(-1)[start:end] for term in self._both(name))
        wide = state_dtype(residual)
        return own.to(wide).add(residual.to(wide), alpha=self._decay)

    def terms(self, name: str) -> Sequence[Tensor]:
        """See `Computed`."""
        own, residual = self._both(name)
        earlier = residual if self._decay == 1 else residual * self._decay
        return [own.to(residual.dtype).view(residual.shape), earlier]

    def _both(self, name: str) -> tuple[Tensor, Tensor]:
        own = self._accumulation.own(name, self._grads[name].detach(), self._context.sources)
        return own.reshape(-1), self.kept[RESIDUAL][name]

    def largest(self, counts: Mapping[str, int], kept: Kept) -> dict[str, Proposal]:
        """See `Computed`."""
        if self._decay != 1:
            return super().largest(counts, kept)
        found: dict[str, Proposal] = {}
        for names in in_chunks({name: kept[RESIDUAL][name].numel() for name in counts}):
            ks = [counts[name] for name in names]
            found |= zip(names, propose_list([*map(self._fold, names)], ks), strict=True)
        return found

    def leave_(self, name: str, sent: Entries, kept: Kept) -> None:
        """See `Computed`."""
        if self._decay != 1:
            super().leave_(name, sent, kept)
            return
        # the second fold: the first was not kept, since it would be as large as the gradients
        seed = rounding_seed(self._context.step, self.key(name))
        commit_list_([self._fold(name)], [sent], [seed])

    def key(self, name: str) -> int:
        """See `Computed`."""
        return self._keys[name]

    def _fold(self, name: str) -> Fold:
        own, residual = self._both(name)
        momentum = self.kept.get("momentum_buffer", {}).get(name)
        buffer = None if momentum is None else momentum.view(-1)
        factors = self._accumulation.factors(name)
        return Fold(own.contiguous(), residual.view(-1), buffer, *factors)


class Compressed:
    """The tensors of an exchange: those that a method compresses, and all others, sent densely."""

    def __init__(
        self,
        accumulation: Residuals | None,
        params: Mapping[str, Tensor],
        sources: Sources,
        *,
        check_dense: bool,
    ) -> None:
        self._accumulation, self._params, self._sources = accumulation, params, sources
        self._keys = {name: key for key, name in enumerate(params)}
        self._check_dense, self._nodes_compared = check_dense, False
        # tensors whose momentum may differ between ranks, since they were compressed or loaded
        self._apart: frozenset[str] = frozenset()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that only this rank, or its node, holds: live, by kind and name."""
        found: dict[str, dict[str, Tensor]] = {}
        if (at := self._accumulation) is None:
            return found
        for name, param in self._params.items():
            method = at.method(name)
            if method.compresses(param) and not param.is_complex():
                for kind, entry in at.saved(name).items():
                    if kind in method.kinds:
                        found.setdefault(kind, {})[name] = entry
        return found

    def state_loaded(self) -> None:
        """Record that state was loaded from outside, on all ranks; it may differ inside a node."""
        self._nodes_compared, self._apart = False, frozenset(self._params)

    def make_common(self) -> None:
        """Give the ranks of each node, which send the same message, the same state, once."""
        # elsewhere nothing is compared, and no state needs to exist before something is sent
        if self._sources.node_size > 1 and not self._nodes_compared:
            make_common_(self.state(), self._sources)
            self._nodes_compared = True

    def sendings(
        self, row_sparse: Collection[str], grads: Grads, context: Context, means: Grads
    ) -> list[Sending]:
        """Return the sendings of gradients, or of their means over a node.

        A gradient that is row-sparse on any rank travels densely.
        """
        at, taken, rest = self._accumulation, dict[Compression, dict[str, Tensor]](), {}
        if at is not None:
            context = replace(context, update=at.position(context.step))
        for name, grad in {**grads, **means}.items():
            able = name not in row_sparse and not grad.is_sparse and grad.is_floating_point()
            method = at.method(name) if at is not None and able else None
            begun = method is not None and context.update >= method.last_dense_step
            if method is not None and begun and method.compresses(self._params[name]):
                taken.setdefault(method, {})[name] = grad
            else:
                rest[name] = grad.to_dense() if grad.is_sparse else grad
        found = [self._sending(method, context, its) for method, its in taken.items()]
        if rest:
            found.append(send_dense(context, rest, check_finite=self._check_dense))
        return found

    def _sending(self, method: Compression, context: Context, grads: Grads) -> Sending:
        # zeros in place of numbers that no message can hold: all ranks will drop the step
        bad = [] if method.reports_finite else not_finite(grads)
        sent = {n: torch.zeros_like(grad) if n in bad else grad for n, grad in grads.items()}
        folded = self._folded(method, context, sent, keep=False)
        arrived = yield from send_checked(method, context, folded, folded.kept)
        arrived.finite = {**arrived.finite, **dict.fromkeys(bad, False)}
        return arrived

    def _folded(self, method: Compression, context: Context, grads: Grads, *, keep: bool) -> Folded:
        assert self._accumulation is not None, "something is compressed"
        return Folded(grads, self._accumulation, method, context, self._keys, keep=keep)

    @torch.no_grad()
    def commit_(
        self,
        grads: Grads,
        received: Received,
        row_sparse: Collection[str],
        owned: Collection[str],
    ) -> tuple[Collection[str], dict[str, Tensor]]:
        """Change the state after a vote; return the parameters that were updated, with momentum,
        and the means of all others, in the memory of gradients that are in `owned`.

        The gradients are unchanged since they were sent; `row_sparse` ones travelled densely.
        """
        at, updated = self._accumulation, set[str]()
        if at is not None:
            self._make_momentum_common_(received)

            def leave_(name: str) -> None:
                got = received[name]
                assert isinstance(got, ArrivedEntries), "momentum is kept beside entries only"
                folded = self._taken(name, grads, got)
                got.leave_(name, folded, folded.kept)

            updated.update(at.step_(received, row_sparse, leave_))
        means = {
            name: self._mean(name, grads, received, grad if name in owned else None)
            for name, grad in grads.items()
            if name not in updated
        }
        return updated, means

    @torch.no_grad()
    def means(self, grads: Grads, received: Received) -> dict[str, Tensor]:
        """Return all means before the vote; nothing changes."""
        return {name: self._mean(name, grads, received, copies=True) for name in grads}

    def _mean(
        self,
        name: str,
        grads: Grads,
        received: Received,
        into: Tensor | None = None,
        *,
        copies: bool = False,
    ) -> Tensor:
        got = received[name]
        if isinstance(got, DenseMeans):
            return got.mean(name, self._params[name])
        folded = self._taken(name, grads, got)
        for held in folded.kept.values() if copies else ():
            held.update({name: entry.clone() for name, entry in held.items()})
        return got.take_(name, folded, folded.kept, into)

    def _taken(self, name: str, grads: Grads, got: Arrived) -> Folded:
        assert self._accumulation is not None, "something is compressed"
        own = {name: got.node_means.get(name, grads[name])}
        return self._folded(self._accumulation.method(name), got.context, own, keep=True)

    def _make_momentum_common_(self, received: Received) -> None:
        """Give all ranks the mean of each momentum that a dense mean is about to enter."""
        dense = {name for name, got in received.items() if isinstance(got, DenseMeans)}
        if late := dense & self._apart:
            kept = self.state().get("momentum_buffer", {})
            held = [kept[name] for name in received if name in late & kept.keys()]
            make_mean_(held, self._sources.all_ranks, action="making momentum common")
        self._apart = self._apart.union(received) - dense
