"""Automatic mixed precision: a model whose forward pass runs under torch's autocast wherever it is
called.
"""

from typing import Any

import torch
from torch import nn

from thinwire import _validate as check
from thinwire.step.forwarding import ForwardLayer

__all__ = ["Autocast", "autocast_forward"]

_DTYPES = (torch.bfloat16, torch.float16)


class Autocast(ForwardLayer):
    """The handle of `autocast_forward`: the layer itself, whose `remove` takes it off."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def _around(self, *args: Any, **kwargs: Any) -> Any:
        # asked at every call: the model may have moved
        param = next(self.module.parameters(), None)
        with torch.autocast("cpu" if param is None else param.device.type, dtype=self.dtype):
            return self._inside(*args, **kwargs)


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> Autocast:
    """Let the forward pass of `model` run under autocast, in training and in evaluation, in any
    loop.

    Parameters, optimizer state and gradients keep their types. Outputs may have the narrow type;
    the loss belongs under autocast too, which computes it in float32.

    Args:
        model: Changed: gets a `forward` of its own, which is copied and pickled with it.
        dtype: `torch.bfloat16` or `torch.float16`.

    Returns:
        The handle whose `remove` restores the model's forward.

    Raises:
        TypeError: No module, or a scripted one.
        ValueError: Another dtype.

    Source: Micikevicius et al., 2018, arXiv 1710.03740; torch.autocast.
    """
    check.instance("model", model, nn.Module)
    check.one_of("dtype", dtype, _DTYPES)
    return Autocast(model, dtype)
