"""The base of LARS and LAMB beside the trust ratio: lists of tensors in runs, and the ratios to be
read.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from thinwire.comm import is_alone
from thinwire.kernels.needs import Need, Work, needs_of
from thinwire.kernels.warm import warm_up, warm_up_beside
from thinwire.optim.own import OwnOptimizer
from thinwire.optim.two_phase import ParamGrad

__all__ = ["LayerwiseOptimizer", "Run"]


class Run(NamedTuple):
    """Tensors that one call can update together."""

    params: list[Tensor]
    grads: list[Tensor]
    weight_decay: float
    step: int
    """Number of this update for these parameters, from 1; 0 where the method does not count."""
    contiguous: bool
    """Whether list operations and fused kernels of torch take these tensors."""


class LayerwiseOptimizer(OwnOptimizer):
    """Base of the methods that scale the update of every tensor by a trust ratio of its own."""

    _ratios: dict[Tensor, Tensor] | None = None
    _loops: ClassVar[Work]
    """The compiled loops of the method."""

    @property
    def needs(self) -> frozenset[Need]:
        """The compiled loops that an update calls."""
        return needs_of(self._loops, (p for group in self.param_groups for p in group["params"]))

    def _close(self) -> None:
        super()._close()
        (warm_up if is_alone() else warm_up_beside)(self.needs)

    def trust_ratios(self) -> dict[str | Tensor, float]:
        """The trust ratio of every parameter in the last update, for logs; 1 where the method does
        not scale.

        Returns:
            By name, or by parameter where there are no names; empty before the first update. This
            call, not the update, waits for the device.
        """
        ratios = self._ratios or {}
        return {self._facts(param).name or param: float(ratio) for param, ratio in ratios.items()}

    def _update(self, pairs: list[ParamGrad], rates: list[float]) -> bool:
        if self._ratios is None:
            warm_up(self.needs)
        self._ratios = {}
        return super()._update(pairs, rates)

    def _remember(self, params: Sequence[Tensor], ratios: Sequence[Tensor]) -> None:
        assert self._ratios is not None, "ratios are remembered inside an update"
        self._ratios.update(zip(params, ratios, strict=True))

    def _runs(
        self, group: dict[str, Any], pairs: Sequence[ParamGrad], *, counted: bool = False
    ) -> Iterator[Run]:
        """The pairs in runs of one device, type, decay and count."""
        kinds: dict[tuple[Any, ...], Run] = {}
        steps = self._counted([param for param, _ in pairs]) if counted else [0] * len(pairs)
        for (param, grad), step in zip(pairs, steps, strict=True):
            if grad.shape != param.shape:  # loops over addresses trust it
                raise RuntimeError(
                    f"the gradient of {self._label(param)} has shape "
                    f"{tuple(grad.shape)} and the parameter {tuple(param.shape)}: run the backward "
                    "pass again"
                )
            decay = 0.0 if self._common.places[param].excluded else group["weight_decay"]
            fast = (
                (param.is_cpu or param.is_cuda) and param.is_contiguous() and grad.is_contiguous()
            )
            key = (param.device, param.dtype, type(param), decay, step, fast)
            run = kinds.setdefault(key, Run([], [], decay, step, fast))
            run.params.append(param)
            run.grads.append(grad)
        for run in kinds.values():
            if group["foreach"] is False:
                pairs_of_run = zip(run.params, run.grads, strict=True)
                yield from (
                    run._replace(params=[param], grads=[grad]) for param, grad in pairs_of_run
                )
            else:
                yield run
