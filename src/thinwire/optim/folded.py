"""Momentum, decay and rate of an SGD that act on gradients before they are compressed."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import tag_of
from thinwire.compress.dense import DenseMeans
from thinwire.compress.dgc import limited
from thinwire.compress.entries import ArrivedEntries
from thinwire.compress.protocol import RESIDUAL, Arrived, Compression
from thinwire.compress.residuals import Leave, Received, Residuals
from thinwire.core.feedback import in_chunks, rounding_seed, step_along_list_, store_
from thinwire.core.gradients import Clip, ClipByNorm, centralized, clipped, decayed
from thinwire.core.sharded import shard_of
from thinwire.core.tensors import narrowed, state_dtype, widened
from thinwire.optim.common import CommonOptimizer


def why_no_local_clip(
    compression: Compression, clip: Clip | None, *, sharded: bool = False
) -> str | None:
    """Return why gradients cannot be clipped so before they are accumulated, if so."""
    field = tag_of(compression)
    limit = compression.local_grad_clip_norm
    if not isinstance(clip, ClipByNorm):
        return (
            f"{field} accumulates gradients: other norms do not commute with local accumulation. "
            "Use ClipByNorm, which limits each tensor, or omit grad_clip and set "
            f"local_grad_clip_norm of {field}"
        )
    if limit is not None:
        return f"{field}'s local_grad_clip_norm={limit} limits the same gradient: give only one"
    if sharded:
        return (
            f"{field} would clip each shard on its own under mesh=: use local_grad_clip_norm of "
            f"{field}, which takes norms over all shards"
        )
    return None


class FoldedSGD(Residuals):
    """Residuals beside the momentum of an SGD.

    What ranks send has their momentum in it, and what travels densely enters the momentum. Groups
    and state are read anew in every update. `of_all`: all parameters are updated here, not only
    those that are compressed.

    **State**, in the optimizer's: `momentum_buffer` u and, of what is compressed, `residual` v.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, Tensor],
        method: Callable[[str], Compression],
        clip: Clip | None,
        num_trainers: int | None = None,
        *,
        of_all: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.params = params
        self.method = method  # type: ignore[assignment,method-assign]
        self._num_trainers = num_trainers
        self._of_all = of_all
        self._limit = clip.c if isinstance(clip, ClipByNorm) else None
        self._keys = {name: key for key, name in enumerate(params)}
        self._index = {
            param: index
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }

    def position(self, step: int = 0) -> int:
        """See `Residuals`."""
        if isinstance(self.optimizer, CommonOptimizer):
            return self.optimizer.position
        return int(self.optimizer.param_groups[0].get("position", 0))

    def count_(self) -> None:
        """Count an update; torch's SGD has no counter, and one in its groups is saved with them."""
        if not isinstance(self.optimizer, CommonOptimizer):
            self.optimizer.param_groups[0]["position"] = self.position() + 1

    def kept(self, name: str, *, keep: bool = True) -> dict[str, Tensor]:
        """See `Residuals`."""
        param = shard_of(self.params[name])
        state = self._stored(name)
        compresses = self._sends(name)
        dtype = self.method(name).stored_dtype(param) if compresses else state_dtype(param)
        kinds = ["momentum_buffer", RESIDUAL] if compresses else ["momentum_buffer"]
        found = {kind: _fitted(state.get(kind), param, dtype) for kind in kinds}
        if keep and any(state.get(kind) is not entry for kind, entry in found.items()):
            self.optimizer.state[self.params[name]] = {**state, **found}
        return found

    def saved(self, name: str) -> dict[str, Tensor]:
        """See `Residuals`."""
        return self._stored(name) if self._of_all else self.kept(name)

    @property
    def begun(self) -> bool:
        """True if the optimizer has state of what was not sent."""
        return any(RESIDUAL in self._stored(name) for name in self.params)

    def _stored(self, name: str) -> dict[str, Tensor]:
        entries: dict[str, Tensor] = self.optimizer.state.get(self.params[name], {})
        return entries

    def own(self, name: str, grad: Tensor, sources: int) -> Tensor:
        """See `Residuals`."""
        limit = self._limit or self.method(name).local_grad_clip_norm
        if limit is not None:
            sources = self._num_trainers or sources
            grad = limited(grad, limit, sources, state_dtype(self.params[name]))
        return self._decayed(name, grad)

    def factors(self, name: str) -> tuple[float, bool]:
        """See `Residuals`."""
        group = self._group(name)
        return group["momentum"], group["nesterov"]

    def step_(self, arrived: Received, row_sparse: Collection[str], leave_: Leave) -> list[str]:
        """See `Residuals`."""
        updated = [name for name in arrived if self._of_all or self._sends(name)]
        sent: dict[str, ArrivedEntries] = {}
        for name in updated:
            if isinstance(got := arrived[name], ArrivedEntries):
                leave_(name)
                sent[name] = got
            else:
                lasting = name in row_sparse or not self._sends(name)
                self._enter_(name, got, clip=lasting)
        params = {name: shard_of(self.params[name]).detach() for name in sent}
        for names in in_chunks({name: param.numel() for name, param in params.items()}):
            step_along_list_(
                [params[name] for name in names],
                [sent[name].parts[name] for name in names],
                [float(self._group(name)["lr"]) for name in names],
                sent[names[0]].context.sources,
                [state_dtype(params[name]) for name in names],
            )
        return updated

    def _enter_(self, name: str, arrived: Arrived, *, clip: bool) -> None:
        """Make one step of SGD with momentum from a mean that travelled densely."""
        param = shard_of(self.params[name]).detach()
        m, nesterov = self.factors(name)
        assert isinstance(arrived, DenseMeans), "no entries"
        stored = self.kept(name)["momentum_buffer"]
        buffer = stored.to(state_dtype(param))
        grad = arrived.mean(name, param).to(buffer.dtype)
        if clip and self._limit is not None:
            grad = clipped(ClipByNorm(self._limit), [grad])[0]
        grad = self._decayed(name, grad)
        buffer.mul_(m).add_(grad)
        update = grad.add(buffer, alpha=m) if nesterov else buffer
        with widened([param]) as (work,):
            work.add_(update, alpha=-float(self._group(name)["lr"]))
        seed = rounding_seed(arrived.context.step, self._keys[name])
        store_(stored.view(-1), buffer.view(-1), seed)

    def _sends(self, name: str) -> bool:
        return self.method(name).compresses(shard_of(self.params[name]))

    def _group(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.param_groups[self._index[self.params[name]]]
        return found

    def _decayed(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient with sign, decay and regularizer."""
        optimizer = self.optimizer
        param = self.params[name]
        group = self._group(name)
        grad = -grad if group["maximize"] else grad
        decay = group["weight_decay"]
        regularizer = group.get("regularizer")
        if isinstance(optimizer, CommonOptimizer):  # some parameters are excluded
            decay = optimizer._facts(param).weight_decay
        if not (decay or regularizer or group.get("grad_centralization")):
            return grad
        wide = grad.to(state_dtype(param))
        wide = decayed(wide, shard_of(param), weight_decay=decay, regularizer=regularizer)
        return centralized(wide) if group.get("grad_centralization") else wide


def _fitted(entry: Tensor | None, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the state as it is folded: flat views of it, so contiguous."""
    if entry is None:
        return torch.zeros(param.shape, dtype=dtype, device=param.device)
    here = shard_of(entry)
    fits = here.dtype == dtype and here.is_contiguous()
    return here if fits else narrowed(here, dtype).contiguous()
