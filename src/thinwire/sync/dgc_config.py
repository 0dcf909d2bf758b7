"""The config of deep gradient compression, for whoever compresses without being `DGCMomentum`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.precision import named_state_dtype, stored_dtype
from thinwire.core.select import count_sent
from thinwire.core.value_code import VALUE_BITS
from thinwire.schedules import sparsity_at
from thinwire.sync.traffic import EXCHANGES

__all__ = ["DGC", "compressible"]

_COMPRESSIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compressible(param: Tensor, min_numel: int) -> bool:
    """Whether the gradient of this tensor is ever compressed, with `min_numel` as the smallest size that is."""
    return param.dtype in _COMPRESSIBLE and param.numel() >= min_numel


@dataclass(frozen=True)
class DGC:
    """Each rank sends only the few largest accumulated entries of every gradient, about 2,000 times fewer bytes.

    Attributes:
        rampup_begin_step: Updates before compression begins, >= 0.
        rampup_step: Updates over which the levels of `sparsity` are spread, >= 1.
        sparsity: Fractions that are **not** sent, each in [0, 1); the last one stays.
        local_grad_clip_norm: C > 0: a source's share g / N of a compressed tensor is limited to the norm C / sqrt(N).
        min_numel: Smaller tensors are exchanged densely, >= 1.
        value_bits: What one sent value costs: 1, 2, 4, 8, 16 or 32. The rounding error is kept.
        state_dtype: "float32" or "bfloat16", in which momentum and residual of compressed tensors are stored; bfloat16
            is rounded stochastically and takes half the memory. None: float32, float64 for float64 parameters.
        node_size: Consecutive ranks that share a node, average densely among themselves and count as one source, >= 1;
            it must divide the ranks. 1 is off. None: torchrun's LOCAL_WORLD_SIZE where ranks fill two nodes or more.
        exchange: "gather" gives every source all messages, "split" the sums of shares, which does not grow with the
            sources; "auto" counts, and splits where that moves at most half of the bytes.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: Lin et al., 2018, arXiv 1712.01887.
    """

    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: tuple[float, ...] = (0.999,)
    local_grad_clip_norm: float | None = None
    min_numel: int = 16384
    value_bits: int = 1
    state_dtype: str | torch.dtype | None = None
    node_size: int | None = None
    exchange: str = "auto"

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "rampup_begin_step", check.integer("rampup_begin_step", self.rampup_begin_step, at_least=0))
        set_(self, "rampup_step", check.integer("rampup_step", self.rampup_step, at_least=1))
        check.instance("sparsity", self.sparsity, (tuple, list), advice="write a single fraction as (0.999,)")
        if not self.sparsity:
            raise ValueError("sparsity must hold at least one fraction in [0, 1), got an empty sequence")
        levels = [
            check.real(f"sparsity[{i}], the fraction that is not sent,", level, at_least=0, below=1)
            for i, level in enumerate(self.sparsity)
        ]
        set_(self, "sparsity", tuple(levels))
        if self.local_grad_clip_norm is not None:
            limit = check.real("local_grad_clip_norm", self.local_grad_clip_norm, above=0)
            set_(self, "local_grad_clip_norm", limit)
        set_(self, "min_numel", check.integer("min_numel", self.min_numel, at_least=1))
        set_(self, "value_bits", check.integer("value_bits", self.value_bits))
        check.one_of("value_bits", self.value_bits, VALUE_BITS)
        set_(self, "state_dtype", named_state_dtype(self.state_dtype))
        if self.node_size is not None:
            set_(self, "node_size", check.integer("node_size", self.node_size, at_least=1))
        check.instance("exchange", self.exchange, str)
        check.one_of("exchange", self.exchange, EXCHANGES)

    def compresses(self, param: Tensor) -> bool:
        """Whether this tensor is ever compressed; all others are always exchanged densely."""
        return compressible(param, self.min_numel)

    def stored_dtype(self, param: Tensor) -> torch.dtype:
        """In what the residual of this tensor is stored."""
        return stored_dtype(param, named_state_dtype(self.state_dtype))

    def sparsity_in_force(self, step: int) -> float:
        """Fraction of a compressed tensor that update `step` (from 0) does not send; 0 before compression begins."""
        if step < self.rampup_begin_step:
            return 0.0
        return sparsity_at(step, self.rampup_begin_step, self.rampup_step, self.sparsity)

    def count_at(self, step: int, numel: int) -> int | None:
        """Entries sent of `numel` in update `step` (from 0); None before compression begins."""
        if step < self.rampup_begin_step:
            return None
        return count_sent(numel, sparsity_at(step, self.rampup_begin_step, self.rampup_step, self.sparsity))
