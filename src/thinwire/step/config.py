"""Configs of gradient merge, recompute and autocast."""

from dataclasses import dataclass

import torch

from thinwire import _validate as check
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from thinwire.core.tensors import named_dtype


@check.by_name
@dataclass(frozen=True)
class AMP:
    """Runs the forward pass in a narrow type, by torch's autocast. Parameters and optimizer state
    keep their types.

    Example:
        >>> AMP(dtype="bfloat16", loss_scale=None).dtype
        'bfloat16'

    Attributes:
        dtype: "bfloat16" or "float16".
        loss_scale: `FixedLossScale` or `DynamicLossScale`; None: no scale and no overflow check.
            "float16" usually needs a loss scale.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: Micikevicius et al., 2018, arXiv 1710.03740.
    """

    dtype: str | torch.dtype = "bfloat16"
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        advice = 'write "bfloat16" or "float16"'
        check.instance("dtype", self.dtype, (str, torch.dtype), advice=advice)
        check.set_fields(self, named_dtype, "dtype", allowed=("bfloat16", "float16"))
        if self.loss_scale is not None:
            check.instance("loss_scale", self.loss_scale, (FixedLossScale, DynamicLossScale))


@check.by_name
@dataclass(frozen=True)
class Recompute:
    """Recomputes the activations of matched modules in the backward pass.

    The modules keep only their inputs.

    Example:
        >>> Recompute(["blocks.*"])
        Recompute(checkpoints=('blocks.*',))

    Attributes:
        checkpoints: Glob patterns over the names of `model.named_modules()`, at least one. If one
            match contains another, the outer module is recomputed.

    Raises:
        TypeError: `checkpoints` is no list or tuple of strings.
        ValueError: `checkpoints` is empty.

    Source: Chen et al., 2016, arXiv 1604.06174.
    """

    checkpoints: tuple[str, ...]

    def __post_init__(self) -> None:
        advice = 'write a single pattern as ("blocks.*",)'
        check.set_fields(self, check.words, "checkpoints", advice=advice)
        if not self.checkpoints:
            raise ValueError(
                "checkpoints is empty: name the modules to recompute, or leave recompute out"
            )


@check.by_name
@dataclass(frozen=True)
class GradientMerge:
    """Makes one update from the gradients of several backward passes. Only the last pass is
    followed by an exchange.

    Example:
        >>> GradientMerge(k_steps=4)
        GradientMerge(k_steps=4, avg=True)

    Attributes:
        k_steps: Microsteps (backward passes) per update, >= 1; 1 merges nothing.
        avg: True for the mean of the gradients, False for their sum.

    Raises:
        TypeError, ValueError: A wrong value.
    """

    k_steps: int
    avg: bool = True

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "k_steps", at_least=1)
        check.boolean("avg", self.avg)
