"""The outer optimizer of local updates: the averaged change of the parameters is its gradient."""

from torch import Tensor

from thinwire.kernels.rules import OuterRule


def outer_step_(change: Tensor, buffer: Tensor | None, rule: OuterRule) -> Tensor:
    """Return the step of the outer optimizer, to be subtracted from the anchor.

    Changes `buffer` in place. b <- momentum * b + change; step = lr * (change + momentum * b) with
    Nesterov, else lr * b.

    Args:
        change: Anchor minus parameters, averaged over the ranks; any shape; read only.
        buffer: b, same shape and dtype. None without momentum, where b is always `change`.
        rule: The constants.

    Returns:
        A tensor like `change`, or `change` itself.

    >>> import torch
    >>> outer_step_(torch.tensor([2.0]), None, OuterRule(lr=0.5))
    tensor([1.])

    Source: Douillard et al., 2023, arXiv 2311.08105, algorithm 1.
    """
    step = change
    if buffer is not None:
        buffer.mul_(rule.momentum).add_(change)
        # not add(..., alpha): that rounds once or twice, depending on the processor
        step = change + rule.momentum * buffer if rule.nesterov else buffer
    return step if rule.lr == 1 else step * rule.lr
