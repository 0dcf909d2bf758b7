"""What is kept of gradients that are compressed, and gradients with it as they are sent."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.dgc import limited
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
from thinwire.kernels.rules import Fold
from thinwire.layout.traffic import DENSE_BUCKETS
from thinwire.wire.bucket import Part, runs, side_by_side

Grads = Mapping[str, Tensor]
"""This rank's own gradients by name, unscaled and not divided by the number of ranks."""
Received = Mapping[str, Arrived]
Leave = Callable[[str], None]


class Dense(Compression):
    """Compresses nothing."""

    buckets: ClassVar[tuple[int, int]] = DENSE_BUCKETS

    def compresses(self, param: Tensor) -> bool:
        """See `Compression`."""
        return False

    def send(self, context: Context, folded: Computed, kept: Kept) -> Sending:
        """See `Compression`."""
        raise NotImplementedError("all tensors travel densely")


class Residuals:
    """What is kept of a rank's gradients by name, and how a gradient enters it: v <- v + g.

    `thinwire.optim.folded.FoldedSGD` has the momentum of an SGD beside it.
    """

    def __init__(self, method: Compression, params: Mapping[str, Tensor]) -> None:
        self._method = method
        self._params = params
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
            param = self._params[name]
            method = self._method
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
        self._grads = grads
        self._accumulation = accumulation
        self._context = context
        self._keys = keys
        self._decay = method.decay
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

    def runs(self) -> list[list[Part]]:
        """See `Computed`."""
        grads = self._grads
        kept = self.kept[RESIDUAL]
        kinds = {name: (grad.dtype, kept[name].dtype, grad.device) for name, grad in grads.items()}
        numels = {name: grad.numel() for name, grad in grads.items()}
        return runs(numels, next(iter(grads.values())).device, kinds)

    def read(self, part: Part) -> Tensor:
        """See `Computed`."""
        pairs = [(*self._both(name), start, end) for name, start, end in part]
        own = side_by_side([own[start:end] for own, _, start, end in pairs])
        residual = side_by_side([kept.view(-1)[start:end] for _, kept, start, end in pairs])
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
