"""The trust ratio of layer-wise methods: how much of the learning rate a tensor gets, shared by
LARS and LAMB.
"""

import math

import torch
from torch import Tensor

from thinwire.kernels.rules import TrustRule

__all__ = ["TrustRule", "trust_ratio"]


def trust_ratio(param_norm: Tensor, update_norm: Tensor, rule: TrustRule) -> Tensor:
    """Ratio that gives the update a norm proportional to the parameter's.

    r = coefficient * ||p|| / (||u|| + weight_decay * ||p|| + eps), limited to [low, high]; r = 1,
    whatever the limits, where one of the norms is zero, so that a tensor of zeros can leave it.

    Args:
        param_norm: ||p||, any shape: one entry for each tensor.
        update_norm: ||u||, same shape, dtype and device.
        rule: The constants.

    Returns:
        Shape and dtype of the norms, on their device; no host synchronization.

    Source: You et al., arXiv 1708.03888, equation 6 (LARS: u is the gradient, with weight decay in
    the denominator); arXiv 1904.00962, algorithm 2 (LAMB: u contains the decay). Differs: LAMB's
    limit is a function phi of ||p|| alone in the paper, here it limits the quotient.
    """
    denominator = update_norm + rule.eps if rule.eps else update_norm
    if rule.weight_decay:
        denominator = torch.add(denominator, param_norm, alpha=rule.weight_decay)
    ratio = param_norm / denominator
    if rule.coefficient != 1:
        ratio = ratio * rule.coefficient
    if rule.low > 0 or rule.high < math.inf:
        ratio = ratio.clamp(rule.low, rule.high)
    return torch.where(torch.minimum(param_norm, update_norm) > 0, ratio, 1.0)
