"""Gradient clipping by an engine, over all tensors, shards and stages."""

import math
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Group, wrong_call_site
from thinwire.core.gradients import Clip, ClipByGlobalNorm, ClipByNorm, clipped, scaled
from thinwire.core.norms import global_norm, grad_norm, norms_over_shards
from thinwire.core.tensors import coalesced, values_of, with_own_storage, with_values
from thinwire.errors import StrategyError
from thinwire.optim.common import CommonOptimizer, common_settings
from thinwire.optim.folded import why_no_local_clip
from thinwire.strategy.replace import SelectedOptimizer


@dataclass(slots=True)
class Clipping:
    """Clipping of an engine."""

    clip: Clip | None = None
    shards: Group | None = None
    """The ranks that hold the shards of this replica; None where tensors are whole."""
    stages: Group | None = None
    """The ranks that hold the stages of this replica; None without a pipeline."""
    _last: Tensor | None = None
    """Global norm of the last update."""
    _clipped: Tensor | int = 0
    """Updates in which it was above the limit."""
    _updates: int = 0

    def counts(self, params: Iterable[Tensor]) -> dict[str, float]:
        """Return the norm of the last gradient, and the share of updates that were clipped."""
        if self._last is None:
            return {"grad_norm": grad_norm(params)}
        return {
            "grad_norm": float(self._last),
            "clipped_share": float(self._clipped) / self._updates,
        }

    def __call__(self, grads: dict[str, Tensor], norms: Sequence[float]) -> dict[str, Tensor]:
        """Return clipped gradients; they may be the same tensors, changed."""
        if self.clip is None:
            return dict(grads)
        if isinstance(self.clip, ClipByNorm) and self.shards is not None:
            limit = self.clip.c
            norm_of = norms_over_shards(grads, self.shards.gather_now)
            return {
                name: grad * (limit / norm_of[name]) if norm_of[name] > limit else grad
                for name, grad in grads.items()
            }
        summed = {name: coalesced(grad) for name, grad in grads.items()}
        if not isinstance(self.clip, ClipByGlobalNorm):
            return dict(zip(grads, clipped(self.clip, list(summed.values())), strict=True))
        norm = global_norm(list(summed.values())) if summed else torch.zeros((), device="cpu")
        others = self.shards or self.stages
        if others is not None:
            norms = norms or _norms_over(others, float(norm))
            total = math.hypot(*norms)
            norm = torch.tensor(total, dtype=torch.float64, device="cpu")
        # read later, so that a device is not waited for
        self._last = norm
        self._updates += 1
        self._clipped = self._clipped + (norm > self.clip.c)  # of any device
        # exactly 1 below the limit, so that the product changes no bit
        factor = self.clip.c / norm.clamp(min=self.clip.c)
        owned = with_own_storage(summed)
        for name, grad in summed.items():
            narrow = torch.promote_types(grad.dtype, torch.float32) != grad.dtype
            if narrow or name not in owned:
                summed[name] = with_values(grad, scaled(values_of(grad), factor))
            else:
                grad.mul_(factor.to(grad.device, grad.dtype))
        return summed


def require_one_clip(
    selected: SelectedOptimizer, grad_clip: Clip | None, *, sharded: bool = False
) -> None:
    """Raise `StrategyError` if the optimizer clips already, or a compression that keeps its
    momentum cannot have this clipping, as where tensors are `sharded`.
    """
    optimizer = selected.optimizer
    folding = selected.folding
    own = optimizer.grad_clip if isinstance(optimizer, CommonOptimizer) else None
    why = None
    if grad_clip is not None and own is not None:
        why = f"the optimizer already clips by {own}: use one of them"
    elif folding is not None and (grad_clip or own) is not None:
        why = why_no_local_clip(folding, grad_clip or own, sharded=sharded)
    if why is not None:
        raise StrategyError(f"prepare got grad_clip={grad_clip or own}, but {why}")


def require_clip_of_one(selected: Sequence[SelectedOptimizer], *, parts: bool) -> None:
    """Refuse several optimizers if one clips by norm and each rank has `parts` of a model."""
    # only the engine's single clipping sees the norms of all parts
    for optimizer in [one.optimizer for one in selected] if parts and len(selected) > 1 else ():
        own = optimizer.grad_clip if isinstance(optimizer, CommonOptimizer) else None
        if isinstance(own, ClipByGlobalNorm | ClipByNorm):
            raise StrategyError(
                f"{type(optimizer).__name__} is one of several optimizers and clips by {own}, but "
                "each rank holds a part of the model: remove its clipping and pass grad_clip= to "
                "prepare"
            )


def take_clip_(
    optimizer: torch.optim.Optimizer,
    grad_clip: Clip | None,
    undo: ExitStack,
    *,
    stages: Group | None = None,
    shards: Group | None = None,
) -> Clipping:
    """Remove from `optimizer` a clipping by norm that would see one stage or shard only."""
    over_parts = (ClipByGlobalNorm, ClipByNorm) if shards is not None else (ClipByGlobalNorm,)
    if isinstance(optimizer, CommonOptimizer) and (stages is not None or shards is not None):
        common = common_settings(optimizer)
        own = optimizer.grad_clip
        if isinstance(own, over_parts):
            undo.callback(setattr, common, "grad_clip", own)
            common.grad_clip = None
            grad_clip = own
    return Clipping(grad_clip, shards, stages)


def _norms_over(others: Group, norm: float) -> list[float]:
    action = "the global norm over stages or shards"
    answers = others.gather_bytes(struct.pack("<d", norm), action=action)
    for rank, answer in enumerate(answers):
        if len(answer) != 8:
            raise wrong_call_site(action, rank, answer)
    return [float(struct.unpack("<d", answer)[0]) for answer in answers]
