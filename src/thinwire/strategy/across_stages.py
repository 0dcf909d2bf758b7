"""What looks across tensors must look across the stages of a pipeline: the global norm, and gradients not finite."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm import Group
from thinwire.comm.grid import Grid
from thinwire.core.clip import ClipByGlobalNorm
from thinwire.core.norms import global_norm
from thinwire.optim.grouped import GroupedOptimizer
from thinwire.strategy.exchanges import Clipping, Exchange, Grads
from thinwire.sync.agreement import Drops, Report, agree_on_step
from thinwire.sync.exchange import all_finite

__all__ = ["DropTogether", "clip_over_stages"]


def clip_over_stages(optimizer: torch.optim.Optimizer, grid: Grid | None) -> Clipping:
    """The clipping that an optimizer cannot do, because it sees the tensors of one stage only; taken off it.

    Args:
        optimizer: Of one stage; loses its `ClipByGlobalNorm`, if it has one.
        grid: Which ranks hold the other stages; None without a pipeline.

    Returns:
        From gradients by name to new ones, scaled by c / max(norm over all stages, c); the same where nothing was set.

    Communication: 8 bytes a rank and update, if there is something to clip.
    """
    if grid is None or grid.stages == 1 or not isinstance(optimizer, GroupedOptimizer):
        return dict
    limit = optimizer.grad_clip
    if not isinstance(limit, ClipByGlobalNorm):
        return dict
    optimizer.release_grad_clip()
    stages = Group(grid.stage_group)

    def clipped(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = float(global_norm(list(grads.values()))) if grads else 0.0
        answers = stages.gather_bytes(struct.pack("<d", mine), what="the global norm over the stages")
        norm = sum(struct.unpack("<d", answer)[0] ** 2 for answer in answers) ** 0.5
        factor = limit.c / max(norm, limit.c)
        return grads if factor == 1.0 else {name: grad * factor for name, grad in grads.items()}

    return clipped


class DropTogether:
    """An exchange among the replicas of one stage, after all stages have agreed that their gradients are finite.

    Communication: 24 bytes a rank and update over all ranks.
    """

    local = False

    def __init__(self, inner: Exchange, everybody: Group, names: Sequence[str]) -> None:
        self._inner, self._everybody, self._names = inner, everybody, list(names)
        self._drops = Drops()

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent + self._everybody.bytes_sent

    @property
    def dropped_steps(self) -> int:
        return self._drops.total

    @property
    def k_steps(self) -> int:
        return self._inner.k_steps

    @property
    def pending(self) -> str:
        return self._inner.pending

    def update(self, step: int, grads: Grads) -> bool:
        bad = next((name for name, grad in grads.items() if not all_finite(grad)), None)
        report = Report(step, "all stages", non_finite=None if bad is None else self._names.index(bad))
        reports = agree_on_step(self._everybody, report, [])
        return not self._drops.needed(reports, self._names) and self._inner.update(step, grads)

    def observe(self, loss: Tensor) -> None:
        self._inner.observe(loss)

    def skip(self) -> None:
        self._inner.skip()

    def flush(self) -> None:
        self._inner.flush()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._inner.state_dict(), "dropped": self._drops.total, "in a row": self._drops.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state["inner"])
        self._drops.total, self._drops.in_a_row = state["dropped"], state["in a row"]

    def close(self) -> None:
        self._inner.close()
