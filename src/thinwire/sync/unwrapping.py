"""The optimizer inside what a training framework wraps around it."""

import torch

__all__ = ["bare_optimizer"]

_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose wrappers pass every step on to `.optimizer`; wrappers of others may do more than
that."""


def bare_optimizer(optimizer: object) -> object:
    """What Accelerate (and with it the Trainer of transformers) or Lightning has wrapped; else the
    very object.

    Raises:
        TypeError: A wrapper of somebody else that is a torch.optim.Optimizer by name only and takes
            no hooks.
    """
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer):
            break
        optimizer = inside
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}, which takes no step hooks, as a wrapper "
            "whose constructor does not call that of torch.optim.Optimizer: give the optimizer "
            "that it wraps"
        )
    return optimizer
