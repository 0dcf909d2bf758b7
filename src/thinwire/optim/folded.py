"""Momentum, decay and rate of an SGD, for a compressor that accumulates with them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import field_of
from thinwire.compress.protocol import Compression
from thinwire.core.gradients import Clip, ClipByNorm, centralized, decayed
from thinwire.core.sharded import shard_of
from thinwire.core.tensors import state_dtype
from thinwire.optim.common import CommonOptimizer


def why_no_local_clip(
    compression: Compression, clip: Clip | None, *, sharded: bool = False
) -> str | None:
    """Return why gradients cannot be clipped so before they are accumulated, if so."""
    field, limit = field_of(compression), compression.local_grad_clip_norm
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


class FoldedSGD:
    """See `thinwire.compress.protocol.Momentum`. Groups and state are read anew in every update."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, Tensor],
        clip: Clip | None,
        num_trainers: int | None = None,
    ) -> None:
        self.optimizer, self.params, self.num_trainers = optimizer, params, num_trainers
        self.limit = clip.c if isinstance(clip, ClipByNorm) else None
        self._index = {
            param: index
            for index, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }

    def _group(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.param_groups[self._index[self.params[name]]]
        return found

    def factors(self, name: str) -> tuple[float, bool]:
        """See `Momentum`."""
        group = self._group(name)
        return group["momentum"], group["nesterov"]

    def decayed(self, name: str, grad: Tensor) -> Tensor:
        """See `Momentum`."""
        optimizer, param, group = self.optimizer, self.params[name], self._group(name)
        grad = -grad if group["maximize"] else grad
        decay, regularizer = group["weight_decay"], group.get("regularizer")
        if isinstance(optimizer, CommonOptimizer):  # some parameters are excluded
            decay = optimizer._facts(param).weight_decay
        if not (decay or regularizer or group.get("grad_centralization")):
            return grad
        wide = grad.to(state_dtype(param))
        wide = decayed(wide, shard_of(param), weight_decay=decay, regularizer=regularizer)
        return centralized(wide) if group.get("grad_centralization") else wide

    def rate(self, name: str) -> float:
        """See `Momentum`."""
        return float(self._group(name)["lr"])

    def kept(self, name: str) -> dict[str, Tensor]:
        """See `Momentum`."""
        entries: dict[str, Tensor] = self.optimizer.state.get(self.params[name], {})
        return entries

    def keep_(self, name: str, entries: dict[str, Tensor]) -> None:
        """See `Momentum`."""
        self.optimizer.state[self.params[name]] = entries

    @property
    def position(self) -> int:
        """See `Momentum`."""
        if isinstance(self.optimizer, CommonOptimizer):
            return self.optimizer.position
        return int(self.optimizer.param_groups[0].get("position", 0))

    def count_(self) -> None:
        """Count an update; torch's SGD has no counter, and one in its groups is saved with them."""
        if not isinstance(self.optimizer, CommonOptimizer):
            self.optimizer.param_groups[0]["position"] = self.position + 1
