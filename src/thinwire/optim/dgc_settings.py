"""Settings of `DGCMomentum`, per optimizer and per group."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.compress.dgc import DGC, compressible
from thinwire.core.sharded import shard_of
from thinwire.core.tensors import narrowed, state_dtype, stored_dtype
from thinwire.optim.common import CommonOptimizer

__all__ = ["RAMP", "DGCSettings", "config_of", "wide_dtype"]

RAMP = ("rampup_begin_step", "rampup_step", "sparsity", "min_numel")
"""Keys of a group that set how many entries are sent."""


class DGCSettings(CommonOptimizer):
    """Interface of `DGCMomentum` that its exchange and its update use."""

    value_bits: int
    state_dtype: str | None
    num_trainers: int | None
    node_size: int | None
    exchange: str
    digest_every: int

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        momentum = check.real("momentum", values["momentum"], at_least=0)
        if check.boolean("nesterov", values["nesterov"]) and momentum == 0:
            raise ValueError("nesterov needs a momentum above 0, got momentum=0")
        check.integer("rampup_begin_step", values["rampup_begin_step"], at_least=0)
        check.integer("rampup_step", values["rampup_step"], at_least=1)
        check.integer("min_numel", values["min_numel"], at_least=1)
        if values["local_grad_clip_norm"] is not None:
            check.real("local_grad_clip_norm", values["local_grad_clip_norm"], above=0)
        levels = values["sparsity"]
        check.instance(
            "sparsity", levels, (tuple, list), advice="write a single fraction as (0.999,)"
        )
        if not levels:
            raise ValueError(
                "sparsity must hold at least one fraction in [0, 1), got an empty sequence"
            )
        for i, level in enumerate(levels):
            check.real(f"sparsity[{i}], the fraction that is not sent,", level, at_least=0, below=1)

    def compresses(self, param: Tensor) -> bool:
        """Return True if this parameter, or this rank's shard of it, is compressed after the ramp
        begins.
        """
        return compressible(shard_of(param), self._facts(param).group["min_numel"])

    @property
    def sparsity(self) -> float:
        """Return the fraction of a compressed tensor that the next update does not send."""
        if not any(map(self.compresses, self._ordered_params())):
            return 0.0
        return config_of(self.param_groups[0]).sparsity_in_force(self.position)

    def _stored_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype in which the state of this parameter is stored, before compression
        too.
        """
        return (
            stored_dtype(param, self.state_dtype) if self.compresses(param) else wide_dtype(param)
        )

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        # flat views of it are folded, so it is contiguous whatever the layout of the parameter
        here = shard_of(value).to(param.device)
        return narrowed(here, self._stored_dtype(param)).contiguous()


def config_of(
    group: Mapping[str, Any], limit: float | None = None, state_dtype: str | None = None
) -> DGC:
    """Return the compression config of a group."""
    begin, length, sparsity, min_numel = (group[key] for key in RAMP)
    return _config(begin, length, tuple(sparsity), min_numel, limit, state_dtype)


@functools.lru_cache(maxsize=256)
def _config(
    begin: int,
    length: int,
    sparsity: tuple[float, ...],
    min_numel: int,
    limit: float | None,
    state_dtype: str | None,
) -> DGC:
    return DGC(
        rampup_begin_step=begin,
        rampup_step=length,
        sparsity=sparsity,
        local_grad_clip_norm=limit,
        min_numel=min_numel,
        state_dtype=state_dtype,
    )


def wide_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which the update of this parameter is computed."""
    return param.dtype if param.is_complex() else state_dtype(param)
