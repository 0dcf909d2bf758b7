"""Telling the engines and optimizers of a process apart in a way that all ranks share."""

import weakref

import torch.distributed as dist

__all__ = ["is_alone", "next_identity", "place_in"]

_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


def is_alone() -> bool:
    """Whether this process has no process group, so that nobody waits for it."""
    return not (dist.is_available() and dist.is_initialized())


def next_identity(process_group: dist.ProcessGroup | None = None) -> int:
    """The number, from 1, of what is being made over these ranks, which must make the same things
    in the same order.

    Args:
        process_group: The ranks; None for all of them.

    Returns:
        0 where there is no process group yet: such a number is known to this process only, and
            nothing is compared.
    """
    if is_alone():
        return 0
    parent = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(parent, dist.ProcessGroup):
        return 0
    _made[parent] = _made.get(parent, 0) + 1
    return _made[parent]


def place_in(process_group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This rank's number among these ranks, and how many they are; (0, 1) where there is no process
    group yet.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return max(dist.get_rank(process_group), 0), max(dist.get_world_size(process_group), 1)
