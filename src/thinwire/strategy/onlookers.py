"""Who else holds an optimizer, and would be left with the wrong one if it were replaced."""

import gc

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["onlookers"]

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def onlookers(optimizer: torch.optim.Optimizer) -> list[str]:
    """What stands in the way of replacing `optimizer`, in words: schedulers, hooks, a wrapped `step`."""
    found = []
    schedulers = _schedulers(optimizer)
    if schedulers:
        found.append(
            f"{' and '.join(schedulers)} would go on to drive the rate of the given {type(optimizer).__name__}, which "
            "does not train any more: make the scheduler from engine.optimizer after prepare, or give a schedule of "
            "thinwire.schedules as lr to an optimizer of thinwire.optim"
        )
    hooks = sum(len(getattr(optimizer, name, ())) for name in _HOOKS)
    if hooks:
        found.append(f"{hooks} hooks on the given optimizer would not run any more: register them on engine.optimizer")
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # a scheduler that is gone does no harm
        found.append("optimizer.step was replaced on the given object, which would not be called any more: undo that")
    return found


def _schedulers(optimizer: torch.optim.Optimizer) -> list[str]:
    """The kinds of the living schedulers; torch keeps no list of them, and not all leave a mark."""
    if not _living(optimizer):
        return []
    gc.collect()  # one that nobody can reach may still be waiting for this
    return [type(scheduler).__name__ for scheduler in _living(optimizer)]


def _living(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    holders = gc.get_referrers(optimizer)
    # an object that was asked for its attributes keeps them in a dictionary, which then is the holder
    holders += gc.get_referrers(*(holder for holder in holders if type(holder) is dict))
    # type() and not isinstance, which would ask proxies of others for their class
    return [holder for holder in holders if issubclass(type(holder), LRScheduler)]
