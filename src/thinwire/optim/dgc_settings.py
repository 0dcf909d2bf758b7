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

RAMP = ("rampup_begin_step", "rampup_step", "sparsity", "min_numel")
"""Keys of a group that set how many entries are sent."""
OF_DGC = ("value_bits", "state_dtype", "node_size", "exchange")
"""Settings of the whole optimizer that `DGC` has too."""


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
        DGC(**{key: values[key] for key in (*RAMP, "local_grad_clip_norm")})  # checks them

    def compresses(self, param: Tensor) -> bool:
        """Return True if this parameter, or this rank's shard of it, is ever compressed."""
        return compressible(shard_of(param), self._facts(param).group["min_numel"])

    @property
    def sparsity(self) -> float:
        """Return the fraction of a compressed tensor that the next update does not send."""
        if not any(map(self.compresses, self._ordered_params())):
            return 0.0
        return config_of(self.param_groups[0]).unsent_share(self.position)

    def _as_loaded(self, param: Tensor, value: Tensor) -> Tensor:
        compressed = self.compresses(param)
        dtype = stored_dtype(param, self.state_dtype) if compressed else wide_dtype(param)
        # flat views of it are folded, so it is contiguous whatever the layout of the parameter
        return narrowed(shard_of(value).to(param.device), dtype).contiguous()


_config = functools.lru_cache(maxsize=256)(DGC)


def config_of(
    group: Mapping[str, Any], limit: float | None = None, state_dtype: str | None = None
) -> DGC:
    """Return the compression config of a group."""
    ramp = {key: group[key] for key in RAMP} | {"sparsity": tuple(group["sparsity"])}
    return _config(**ramp, local_grad_clip_norm=limit, state_dtype=state_dtype)


def wide_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which the update of this parameter is computed."""
    return param.dtype if param.is_complex() else state_dtype(param)
