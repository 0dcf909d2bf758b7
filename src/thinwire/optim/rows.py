"""Methods that update only the rows that a row-sparse gradient has."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.tensors import widened
from thinwire.optim.common import CommonOptimizer, CommonOwn
from thinwire.optim.groups import check_betas
from thinwire.optim.pairs import ParamGrad


class RowOptimizer(CommonOptimizer):
    """Base of methods that update by element, and only the rows of a row-sparse gradient."""

    _takes_complex = False
    _takes_rows = True
    _numbers: ClassVar[Sequence[str]]
    """Settings of a group that the method's formula takes, beside `lr`."""
    _starts: ClassVar[Mapping[str, str]]
    """State by name, each with the setting of a group that it begins with; without one, at 0."""
    _formula: ClassVar[Callable[..., None]]
    """Changes a parameter and its state in place, from gradient and number of the update."""

    def _update_group(self, group: dict[str, Any], pairs: Sequence[ParamGrad], rate: float) -> None:
        numbers = {key: group[key] for key in self._numbers}
        update_ = partial(type(self)._formula, lr=rate, **numbers)
        for param, grad in pairs:
            buffers = {
                key: self._buffer_of(param, key, group.get(start, 0.0))
                for key, start in self._starts.items()
            }
            step = self._counted([param])[0]
            if grad.layout is torch.strided:
                with widened([param]) as (work,):
                    update_(work, grad, step, **buffers)
            elif grad._nnz():
                rows = grad.indices()[0]
                values = grad.values()
                part = param[rows].to(values.dtype)
                parts = {key: buffer[rows] for key, buffer in buffers.items()}
                update_(part, values, step, **parts)
                param[rows] = part.to(param.dtype)
                for key, buffer in buffers.items():
                    buffer[rows] = parts[key]


def adam_(
    param: Tensor,
    grad: Tensor,
    step: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update `param`, `exp_avg` m and `exp_avg_sq` v in place, of one shape and type, by one step
    of Adam.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, p <- p - lr m^/(sqrt(v^) + eps) with m^ = m/(1
    - b1^t) and v^ = v/(1 - b2^t), where t is `step`, from 1.
    """
    beta1, beta2 = betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    param.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**step))


class LazyAdam(RowOptimizer):
    """Adam for large embeddings. Rows without a gradient keep parameter and moments bit for bit.

    >>> import torch
    >>> table = torch.nn.Embedding(1000, 8, sparse=True)
    >>> optimizer = LazyAdam(table.parameters(), lr=1e-3)
    >>> table(torch.tensor([3, 7])).sum().backward()
    >>> optimizer.step()  # rows 3 and 7 change

    With a dense gradient this is Adam in torch's form, m^/(sqrt(v^) + eps) with bias correction and
    coupled decay. With a row-sparse one (COO, sparse_dim 1; duplicates are summed first) only the
    rows present change; decay, regularizer and centralization act on these rows. t is one counter
    per parameter, not per row. It grows in every update in which the parameter has a gradient, even
    an empty one.

    **State** per parameter: `step` t, `exp_avg` and `exp_avg_sq`, float32 (float64 for float64
    parameters). **Communication**: none. **Failure**: an error in the arguments of an update comes
    before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        betas: Decay of the two moments, in [0, 1).
        eps: Added to the root of the corrected second moment, > 0.
        weight_decay: Coupled, >= 0.
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`; `maximize`
            to maximize the objective; `foreach` is accepted and has no effect.

    Raises:
        TypeError, ValueError: As in `SGD`; a complex parameter.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: Kingma and Ba, 2015, arXiv 1412.6980, algorithm 1. Differs: MindSpore's adds eps to the
    root of the uncorrected moment.
    """

    _numbers = ("betas", "eps")
    _starts: ClassVar[Mapping[str, str]] = {"exp_avg": "", "exp_avg_sq": ""}
    _formula = adam_

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._construct(params, lr, values, common)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check_betas(values)
        check.real("eps", values["eps"], above=0)


def ftrl_(
    param: Tensor,
    grad: Tensor,
    _step: int,
    accumulator: Tensor,
    linear: Tensor,
    *,
    lr: float,
    lr_power: float,
    l1: float,
    l2: float,
) -> None:
    """Update three tensors of one shape and type in place, by the formula of `Ftrl`."""
    before = accumulator.pow(-lr_power)
    accumulator.addcmul_(grad, grad)
    after = accumulator.pow(-lr_power)
    linear.add_(grad).addcmul_((after - before).div_(lr), param, value=-1)
    denominator = after.div_(lr).add_(2 * l2)
    moved = (linear.sign() * l1 - linear) / denominator
    moved = torch.where(denominator == 0, param, moved)  # g^2 is 0 where g is too small for it
    param.copy_(torch.where(linear.abs() <= l1, torch.zeros_like(param), moved))


class Ftrl(RowOptimizer):
    """Follow the regularized leader, per coordinate; for sparse linear parts of a model.

    >>> import torch
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([1.0, 1e-3])
    >>> Ftrl([p], lr=0.1, l1=0.5).step()
    >>> p[1].item()  # |z| <= l1
    0.0

    Per element, with q = lr_power, accumulator a (from initial_accumulator) and linear term z (from
    0)::

        a' = a + g^2
        s = (a'^-q - a^-q)/lr
        z <- z + g - s p
        a <- a'
        p = 0 if |z| <= l1, else (sign(z) l1 - z)/(a^-q/lr + 2 l2)

    An element whose gradient has always been 0 becomes 0 in its first dense update, since the
    solution does not depend on the initial p. Row-sparse gradients avoid this: they update only
    their rows.

    **State** per parameter: `step`, `accumulator` a and `linear` z, float32 (float64 for float64
    parameters). **Communication**: none. **Failure**: an error in the arguments of an update comes
    before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number > 0, a schedule, or a list with one number for each update.
        lr_power: Exponent of the accumulator, <= 0.
        l1: >= 0.
        l2: >= 0.
        initial_accumulator: >= 0.
        weight_decay: Coupled, >= 0.
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`; `maximize`
            to maximize the objective; `foreach` is accepted and has no effect.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; in an update, a rate of 0.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: McMahan et al., KDD 2013, algorithm 1. Differs from MindSpore's: schedules and group
    rates are accepted.
    """

    _numbers = ("lr_power", "l1", "l2")
    _starts: ClassVar[Mapping[str, str]] = {"accumulator": "initial_accumulator", "linear": ""}
    _formula = ftrl_

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        *,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator: float = 0.1,
        weight_decay: float = 0.0,
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {
            "lr_power": lr_power,
            "l1": l1,
            "l2": l2,
            "initial_accumulator": initial_accumulator,
            "weight_decay": weight_decay,
        }
        self._construct(params, lr, values, common)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        check.real("lr_power", values["lr_power"], at_most=0)
        for key in ("l1", "l2", "initial_accumulator"):
            check.real(key, values[key], at_least=0)

    def _check_rate(self, rate: float, where: str) -> None:
        if rate == 0:
            raise ValueError(
                f"{where} must be > 0 for Ftrl, which divides by it, got {rate}; begin the "
                "schedule above 0"
            )


def proximal_adagrad_(
    param: Tensor, grad: Tensor, _step: int, accumulator: Tensor, *, lr: float, l1: float, l2: float
) -> None:
    """Update two tensors of one shape and type in place, as `ProximalAdagrad`."""
    accumulator.addcmul_(grad, grad)
    rates = lr / accumulator.sqrt()
    moved = param - rates * grad
    shrunk = moved.sign() * (moved.abs() - rates * l1).clamp_(min=0) / (1 + rates * l2)
    param.copy_(torch.where(accumulator == 0, param, shrunk))


class ProximalAdagrad(RowOptimizer):
    """Adagrad with L1 and L2 penalties applied exactly after each step, which gives true zeros.

    >>> import torch
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 1e-4]))
    >>> p.grad = torch.zeros(2)
    >>> ProximalAdagrad([p], lr=0.1, l1=0.01).step()
    >>> p[1].item()
    0.0

    Per element, with accumulator a (from initial_accumulator)::

        a <- a + g^2
        e = lr/sqrt(a)
        w = p - e g
        p = sign(w) max(|w| - e l1, 0)/(1 + e l2)

    An element whose a is still 0 does not change.

    **State** per parameter: `step` and `accumulator` a, float32 (float64 for float64 parameters).
    **Communication**: none.
    **Failure**: an error in the arguments of an update comes before anything changes.

    Args:
        params: Parameters, named parameters or groups, with an `order_params` entry if wanted.
        lr: A number >= 0, a schedule, or a list with one number for each update.
        l1: >= 0.
        l2: >= 0.
        initial_accumulator: >= 0.
        weight_decay: Coupled, >= 0.
        common: `grad_clip`, `regularizer` and `exclude_from_weight_decay` as in `SGD`; `maximize`
            to maximize the objective; `foreach` is accepted and has no effect.

    Raises:
        TypeError: An argument of the wrong kind; a complex parameter.
        ValueError: An argument out of range; a pattern that matches nothing; names needed and not
            given.
        RuntimeError: In an update: a sparse gradient that is not row-sparse.

    Source: Duchi and Singer, JMLR 2009 (forward-backward splitting). Differs: MindSpore's
    documentation multiplies l1 and l2 by lr, its kernels by lr/sqrt(a); here it is the kernels'
    form.
    """

    _numbers = ("l1", "l2")
    _starts: ClassVar[Mapping[str, str]] = {"accumulator": "initial_accumulator"}
    _formula = proximal_adagrad_

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        *,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator: float = 0.1,
        weight_decay: float = 0.0,
        **common: Unpack[CommonOwn],
    ) -> None:
        values = {
            "l1": l1,
            "l2": l2,
            "initial_accumulator": initial_accumulator,
            "weight_decay": weight_decay,
        }
        self._construct(params, lr, values, common)

    def _check_hyperparameters(self, values: Mapping[str, Any]) -> None:
        for key in ("l1", "l2", "initial_accumulator"):
            check.real(key, values[key], at_least=0)
