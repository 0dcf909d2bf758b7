"""LARS's update of a tensor, and of a list of them."""

import torch
from torch import Tensor

from thinwire.core.norms import norms, trust_ratio, whole_norms
from thinwire.core.tensors import TensorList, cache_sized
from thinwire.kernels import compiled_steps
from thinwire.kernels.rules import LarsRule


def lars_(param: Tensor, grad: Tensor, velocity: Tensor | None, rule: LarsRule) -> Tensor:
    """Update one tensor by LARS; changes `param` and `velocity`.

    L = lr * trust ratio, d = L (g + wd p), b <- momentum b + d, p <- p - b, with Nesterov p <- p -
    (d + momentum b).

    Args:
        param: Any shape and layout.
        grad: Same shape and type, read only.
        velocity: b; None without momentum.
        rule: The constants.

    Returns:
        The trust ratio, shape (); no host synchronization.
    """
    ratio = torch.ones((), dtype=param.dtype, device=param.device)
    if rule.trust.weight_decay:
        param_norm, grad_norm = norms([param, grad])
        ratio = trust_ratio(param_norm, grad_norm, rule.trust)
    step = rule.lr * ratio * (grad + rule.trust.weight_decay * param)
    if velocity is None:
        param.sub_(step)
        return ratio
    velocity.mul_(rule.momentum).add_(step)
    param.sub_(step + rule.momentum * velocity if rule.nesterov else velocity)
    return ratio


def lars_list_(
    params: TensorList, grads: TensorList, velocities: TensorList | None, rule: LarsRule
) -> tuple[Tensor, ...]:
    """Update a list of tensors by LARS; changes `params` and `velocities`.

    The result equals `lars_` up to rounding, with fewer passes over the memory and no more of it.
    Compiled if `compiled_steps` returns a body, else by torch's list operations. All tensors are
    contiguous, of one type and device.

    Returns:
        The trust ratio of each, shape (); no host synchronization.
    """
    steps = compiled_steps(params, grads, velocities or ())
    if steps is not None:
        ratios_of_all: Tensor = steps.lars_(params, grads, velocities, rule)
        return ratios_of_all.unbind()
    ratios: list[Tensor] = []
    for part in cache_sized(grads):
        ratios += _with_lists_(params[part], grads[part], velocities and velocities[part], rule)
    return tuple(ratios)


def _with_lists_(
    params: TensorList, grads: TensorList, velocities: TensorList | None, rule: LarsRule
) -> tuple[Tensor, ...]:
    decay = rule.trust.weight_decay
    if decay:
        ratios = trust_ratio(whole_norms(params), whole_norms(grads), rule.trust)
    else:
        ratios = torch.ones(len(params), dtype=params[0].dtype, device=params[0].device)
    rates = ratios * rule.lr
    scales = rates.unbind()
    if velocities is not None:
        torch._foreach_mul_(velocities, rule.momentum)
        torch._foreach_addcmul_(velocities, grads, scales, 1.0)
        if decay:
            torch._foreach_addcmul_(velocities, params, scales, decay)
        if not rule.nesterov:
            torch._foreach_sub_(params, velocities)
            return ratios.unbind()
    if decay:
        torch._foreach_mul_(params, (1 - rates * decay).unbind())
    torch._foreach_addcmul_(params, grads, scales, -1.0)
    if velocities is not None:
        torch._foreach_add_(params, velocities, alpha=-rule.momentum)
    return ratios.unbind()
