"""Base of the element-wise methods that take row-sparse gradients and then touch the rows present
only.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.own import OwnOptimizer, widened
from thinwire.optim.two_phase import ParamGrad

__all__ = ["RowwiseOptimizer"]


class RowwiseOptimizer(OwnOptimizer):
    """Base that runs `_apply` on whole tensors, or on copies of the rows present, which are then
    written back.

    A subclass defines `_buffers` and `_apply`.
    """

    _takes_rows = True

    def _buffers(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state tensors of `param`, of its shape and in the working type."""
        raise NotImplementedError(f"{type(self).__name__} must define _buffers(param, group)")

    def _apply(
        self,
        param: Tensor,
        grad: Tensor,
        buffers: dict[str, Tensor],
        group: dict[str, Any],
        rate: float,
        step: int,
    ) -> None:
        """Change `param` and `buffers` in place, element by element; all have one shape and
        type.
        """
        raise NotImplementedError(f"{type(self).__name__} must define _apply(...)")

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        for param, grad in pairs:
            buffers = self._buffers(param, group)
            step = self._counted([param])[0]
            if grad.layout is torch.strided:
                with widened([param]) as (work,):
                    self._apply(work, grad, buffers, group, rate, step)
            elif grad._nnz():
                self._apply_to_rows(param, grad, buffers, group, rate, step)

    def _apply_to_rows(
        self,
        param: Tensor,
        grad: Tensor,
        buffers: dict[str, Tensor],
        group: dict[str, Any],
        rate: float,
        step: int,
    ) -> None:
        rows = grad.indices()[0]
        values = grad.values()
        part = param[rows].to(values.dtype)
        parts = {key: buffer[rows] for key, buffer in buffers.items()}
        self._apply(part, values, parts, group, rate, step)
        param[rows] = part.to(param.dtype)
        for key, buffer in buffers.items():
            buffer[rows] = parts[key]
