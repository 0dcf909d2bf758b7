"""Who else holds an optimizer: the schedulers that drive it, and a `step` that somebody put in the
place of its own.
"""

import gc

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["HOOKS", "dependents", "schedulers_of"]

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where torch keeps the hooks of an optimizer."""


def dependents(optimizer: torch.optim.Optimizer) -> list[str]:
    """What stands in the way of another method in the same object, in words."""
    step = vars(optimizer).get("step")
    if step is None or hasattr(
        step, "_wrapped_by_lr_sched"
    ):  # a scheduler notes calls, which goes on
        return []
    return [
        "optimizer.step was replaced on the given object, and would be called no more: undo that"
    ]


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """The living schedulers of torch that drive `optimizer`, in no certain order.

    torch keeps no list of them, and not all leave a mark: they are found by what refers to the
    optimizer.
    """
    if not _living(optimizer):
        return []
    gc.collect()  # one that nobody can reach may still be waiting for this
    return _living(optimizer)


def _living(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    holders = gc.get_referrers(optimizer)
    # an object that was asked for its attributes keeps them in a dictionary, which then is the
    # holder
    holders += gc.get_referrers(*(holder for holder in holders if type(holder) is dict))
    # type() and not isinstance, which would ask proxies of others for their class
    found = {id(holder): holder for holder in holders if issubclass(type(holder), LRScheduler)}
    return [holder for holder in found.values() if getattr(holder, "optimizer", None) is optimizer]
