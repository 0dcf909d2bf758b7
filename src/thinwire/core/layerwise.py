"""Updates of LAMB and LARS, of a tensor and of a list of them."""

import torch
from torch import Tensor

from thinwire.core.norms import norms, trust_ratio, whole_norms
from thinwire.core.tensors import TensorList, cache_sized
from thinwire.kernels import compiled_steps
from thinwire.kernels.rules import LambRule, LarsRule


def lamb_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rule: LambRule
) -> Tensor:
    """Update one tensor by LAMB; changes `param`, `exp_avg` and `exp_avg_sq`.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, r = m^/(sqrt(v^) + eps) + wd p with m^ = m/(1
    - b1^t) and v^ = v/(1 - b2^t), p <- p - lr T r with T = ||p||/||r||.

    Args:
        param: Any shape and layout.
        grad: Same shape and type, read only.
        exp_avg: m.
        exp_avg_sq: v.
        rule: The constants.

    Returns:
        T, shape (); no host synchronization.
    """
    # one operation at a time: torch's fused ones round once or twice, depending on the processor
    exp_avg.mul_(rule.beta1).add_(grad * (1 - rule.beta1))
    exp_avg_sq.mul_(rule.beta2).add_(grad.square() * (1 - rule.beta2))
    mean, square = exp_avg * rule.corrections[0], exp_avg_sq * rule.corrections[1]
    direction = mean / (square.sqrt() + rule.eps) + rule.weight_decay * param
    param_norm, direction_norm = norms([param, direction])
    ratio = trust_ratio(param_norm, direction_norm, rule.trust)
    param.sub_(rule.lr * ratio * direction)
    return ratio


def lamb_list_(
    params: TensorList,
    grads: TensorList,
    exp_avgs: TensorList,
    exp_avg_sqs: TensorList,
    rule: LambRule,
) -> tuple[Tensor, ...]:
    """Update a list of tensors by LAMB; changes `params`, `exp_avgs` and `exp_avg_sqs`.

    The result equals `lamb_` up to rounding, with fewer passes over the memory. Compiled if
    `compiled_steps` returns a body, else by torch's list operations. All tensors are contiguous, of
    one type and device, on a CPU or CUDA.

    Returns:
        T of each, shape (); no host synchronization.
    """
    steps = compiled_steps(params, grads, exp_avgs, exp_avg_sqs)
    if steps is not None:
        ratios_of_all: Tensor = steps.lamb_(params, grads, exp_avgs, exp_avg_sqs, rule)
        return ratios_of_all.unbind()
    ratios: list[Tensor] = []
    for part in cache_sized(grads):
        own = params[part]
        # torch's fused Adam computes the direction r, from wd p and with the rate -1
        directions = torch._foreach_mul(own, rule.weight_decay)
        step = torch.full((), rule.step, dtype=torch.float32, device=own[0].device)
        torch._fused_adam_(
            directions,
            grads[part],
            exp_avgs[part],
            exp_avg_sqs[part],
            [],
            [step] * len(own),
            lr=-1.0,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=0.0,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )
        norms_of_part = whole_norms(own), whole_norms(directions)
        found = trust_ratio(*norms_of_part, rule.trust).unbind()
        torch._foreach_addcmul_(own, directions, found, -rule.lr)
        ratios += found
    return tuple(ratios)


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
