"""Base of the optimizers in this library's own arithmetic: what they compute in, and their
state.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.clip import Clip
from thinwire.core.decay import Regularizer
from thinwire.optim.base import CommonOptimizer
from thinwire.optim.groups import Exclusion
from thinwire.optim.saving import state_dtype
from thinwire.optim.two_phase import ParamGrad

__all__ = ["OwnOptimizer", "check_betas", "widened"]


class OwnOptimizer(CommonOptimizer):
    """Base that sorts the processed gradients by group and hands each group's to `_update_group`.

    Gradients arrive in the working type: float32, float64 for float64 parameters. State is kept in
    it too.
    """

    _takes_rows = False
    """Whether row-sparse gradients are allowed."""

    def __init__(
        self,
        params: object,
        lr: object,
        hyperparameters: Mapping[str, Any],
        *,
        grad_clip: Clip | None,
        regularizer: Regularizer | None,
        exclude_from_weight_decay: Exclusion,
    ) -> None:
        """Check the common arguments and make the groups.

        Args:
            params: See `Lamb`, as the other arguments that are not described here.
            lr: See `Lamb`.
            hyperparameters: Those of the method, `weight_decay`, `maximize` and `foreach`; a
                group may have values of its own.
            grad_clip: See `Lamb`.
            regularizer: See `Lamb`.
            exclude_from_weight_decay: See `Lamb`.
        """
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        super().__init__(groups, {"lr": rate, **hyperparameters})
        self._close()

    def _check_param(self, name: str, param: Tensor) -> None:
        if not param.is_floating_point():
            raise TypeError(
                f"{type(self).__name__} needs floating-point parameters, but {name} is "
                f"{param.dtype}; view a complex parameter as real, or give it to torch's own "
                "optimizers"
            )

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        for param, grad in pairs:
            self._check_layout(param, grad)
        members: dict[int, list[ParamGrad]] = {}
        for param, grad in self._processed([(p, g.to(state_dtype(p))) for p, g in pairs]):
            members.setdefault(self._common.places[param].group_index, []).append((param, grad))
        for i in sorted(members):
            self._update_group(self.param_groups[i], members[i], rates[i])
        return True

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        """Update the parameters of one group from gradients in the working type."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _update_group(group, pairs, rate)"
        )

    def _check_layout(self, param: Tensor, grad: Tensor) -> None:
        if grad.layout is torch.strided:
            return
        name = self._label(param)
        if not self._takes_rows:
            raise RuntimeError(
                f"{type(self).__name__} takes dense gradients only, but that of {name} is "
                f"{grad.layout}; use LazyAdam, Ftrl or ProximalAdagrad for it, or sparse=False in "
                "its layer"
            )
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            found = (
                f"sparse_dim {grad.sparse_dim()}"
                if grad.layout is torch.sparse_coo
                else str(grad.layout)
            )
            raise RuntimeError(
                f"{type(self).__name__} takes dense gradients and sparse COO ones with sparse_dim "
                f"1, but that of {name} has {found}"
            )

    def _counted(self, params: Sequence[Tensor]) -> list[int]:
        """Count one more update of each of `params` and return how many there are; creates the
        counters.
        """
        counts = [self._counter(param) for param in params]
        torch._foreach_add_(counts, 1)
        # one reading for all: a hundred small ones cost as much as the update of a million
        # parameters
        return torch.stack([count.cpu() for count in counts]).int().tolist() if counts else []

    def _counter(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "step" not in state:
            # on the CPU, where reading it is free; a tensor because torch's tools expect one
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        counter: Tensor = state["step"]
        return counter

    def _buffer(self, param: Tensor, key: str, fill: float = 0.0) -> Tensor:
        """The state tensor `key` of `param`, created with the value `fill`, in the working type."""
        state = self.state[param]
        if key not in state:
            state[key] = torch.full_like(param, fill, dtype=state_dtype(param), requires_grad=False)
        buffer: Tensor = state[key]
        if buffer.shape != param.shape:  # loops over addresses trust it
            raise RuntimeError(
                f"{key} of {self._label(param)} has shape "
                f"{tuple(buffer.shape)} and the parameter {tuple(param.shape)}: load the state of "
                "the same model, or make a new optimizer"
            )
        return buffer


@contextmanager
def widened(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in the working type; copies of narrower ones are rounded back into them at the
    end.
    """
    work = [param.to(state_dtype(param)) for param in params]
    yield work
    for param, copy in zip(params, work, strict=True):
        if copy is not param:
            param.copy_(copy)


def check_betas(values: Mapping[str, Any]) -> None:
    """Raise unless `betas` is a pair of numbers in [0, 1)."""
    betas = values["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers in [0, 1), got {betas!r}")
    for i, beta in enumerate(betas):
        check.real(f"betas[{i}]", beta, at_least=0, below=1)
