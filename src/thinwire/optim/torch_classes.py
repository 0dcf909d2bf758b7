"""Optimizers of torch with the common part: their arithmetic is torch's, bit for bit, when nothing
extra is set.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.core.clip import Clip
from thinwire.core.decay import Regularizer
from thinwire.optim.groups import Exclusion
from thinwire.optim.torch_adapter import TorchOptimizer

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "RMSprop"]


class SGD(TorchOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with the common part of this library; with none of it in use, the same
    bits.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        momentum: As in torch, >= 0.
        dampening: As in torch.
        weight_decay: Coupled, >= 0.
        nesterov: As in torch; needs momentum and no dampening.
        maximize: Go up instead of down.
        foreach: As in torch; changes speed only.
        differentiable: As in torch.
        fused: As in torch.
        grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`.
        regularizer: `L1Decay` or `L2Decay`, beside `weight_decay`; a group's own replaces it.
        exclude_from_weight_decay: Glob patterns over names, or a predicate (name, parameter) ->
            bool.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.

    Source: torch.optim.SGD. Differs from MindSpore's `Momentum`: the first buffer is the gradient
    itself.
    """

    _torch_class = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: Exclusion = None,
    ) -> None:
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        super().__init__(
            groups,
            rate,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._close()


class Adam(TorchOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with the common part of this library; with none of it in use, the same
    bits.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        betas: As in torch, in [0, 1).
        eps: As in torch: added to the root of the corrected second moment.
        weight_decay: Coupled, >= 0; decoupled with `decoupled_weight_decay`.
        amsgrad: As in torch.
        foreach: As in torch; changes speed only.
        maximize: Go up instead of down.
        capturable: As in torch.
        differentiable: As in torch.
        fused: As in torch.
        decoupled_weight_decay: As in torch.
        grad_clip: See `SGD`.
        regularizer: See `SGD`.
        exclude_from_weight_decay: See `SGD`.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.

    Source: Kingma and Ba, 2015, arXiv 1412.6980; torch.optim.Adam. Differs from MindSpore's, where
    eps is added to the root of the uncorrected moment.
    """

    _torch_class = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: Exclusion = None,
    ) -> None:
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        super().__init__(
            groups,
            rate,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._close()


class AdamW(TorchOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` with the common part of this library; with none of it in use, the same
    bits.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        betas: As in torch, in [0, 1).
        eps: As in torch.
        weight_decay: Decoupled, p shrinks by lr * weight_decay * p, >= 0.
        amsgrad: As in torch.
        maximize: Go up instead of down.
        foreach: As in torch; changes speed only.
        capturable: As in torch.
        differentiable: As in torch.
        fused: As in torch.
        grad_clip: See `SGD`.
        regularizer: See `SGD`; it goes through the gradient.
        exclude_from_weight_decay: See `SGD`.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.

    Source: Loshchilov and Hutter, 2019, arXiv 1711.05101; torch.optim.AdamW. Differs from
    MindSpore's `AdamWeightDecay`, which has no bias correction.
    """

    _torch_class = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: Exclusion = None,
    ) -> None:
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        super().__init__(
            groups,
            rate,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._close()


class RMSprop(TorchOptimizer, torch.optim.RMSprop):
    """`torch.optim.RMSprop` with the common part of this library; with none of it in use, the same
    bits.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        alpha: As in torch, in [0, 1).
        eps: As in torch: outside the root.
        weight_decay: Coupled, >= 0.
        momentum: As in torch, >= 0.
        centered: As in torch.
        capturable: As in torch.
        foreach: As in torch; changes speed only.
        maximize: Go up instead of down.
        differentiable: As in torch.
        grad_clip: See `SGD`.
        regularizer: See `SGD`.
        exclude_from_weight_decay: See `SGD`.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.

    Source: torch.optim.RMSprop. Differs from MindSpore's: eps outside the root, mean square from 0,
    lr outside the momentum.
    """

    _torch_class = torch.optim.RMSprop

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: Exclusion = None,
    ) -> None:
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        super().__init__(
            groups,
            rate,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
        )
        self._close()


class Adagrad(TorchOptimizer, torch.optim.Adagrad):
    """`torch.optim.Adagrad` with the common part of this library; with none of it in use, the same
    bits.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        lr_decay: As in torch, >= 0.
        weight_decay: Coupled, >= 0.
        initial_accumulator_value: As in torch, >= 0.
        eps: As in torch: outside the root.
        foreach: As in torch; changes speed only.
        maximize: Go up instead of down.
        differentiable: As in torch.
        fused: As in torch.
        grad_clip: See `SGD`.
        regularizer: See `SGD`.
        exclude_from_weight_decay: See `SGD`.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.

    Source: Duchi, Hazan and Singer, JMLR 2011; torch.optim.Adagrad. Differs from MindSpore's:
    accumulator from 0, and an eps.
    """

    _torch_class = torch.optim.Adagrad

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        grad_clip: Clip | None = None,
        regularizer: Regularizer | None = None,
        exclude_from_weight_decay: Exclusion = None,
    ) -> None:
        groups, rate = self._open(
            params,
            lr,
            grad_clip=grad_clip,
            regularizer=regularizer,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )
        super().__init__(
            groups,
            rate,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
        )
        self._close()
