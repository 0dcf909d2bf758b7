"""Loops over parts of tensors on a few threads.

numba's own threads are not used: its layer must not be entered by two threads, and exchanges run on
a thread of their own beside the training.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.int64]
Item = tuple[int, int, int]
"""Index of the tensor, start and stop."""

SMALLEST = 1 << 16
"""Entries; below, starting a thread costs more than the loop."""
# for each thread: few hand-overs, and still no long wait for one that must share its core
_BUNDLES = 8


@cache
def _pool() -> ThreadPoolExecutor:
    """One executor per process. A forked child inherits the object, but not its threads."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="thinwire-kernel")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def run_all(works: Sequence[Callable[[], object]]) -> None:
    """Run all `works` on up to torch.get_num_threads() threads, each taking the next one left.

    An error is raised after all threads have finished.
    """
    left = deque(works)

    def take() -> None:
        while left:
            try:
                work = left.popleft()
            except IndexError:  # another thread took the last one
                return
            work()

    helpers = min(torch.get_num_threads(), len(works)) - 1
    futures = [_pool().submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        # helpers that have not started are not needed; the others must end before buffers go
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


def share_of(sizes: Array) -> int:
    """Return the number of entries worth a task for a thread, a multiple of SMALLEST."""
    threads = torch.get_num_threads()
    return max(1, int(sizes.sum()) // (threads * _BUNDLES) // SMALLEST) * SMALLEST


def parts_of(sizes: Array) -> list[Item]:
    """Return the tensors; those that one thread would hold up the others with in several parts."""
    share = share_of(sizes)
    most = max(2 * SMALLEST, 4 * share)
    if torch.get_num_threads() == 1 or sizes.max() <= most:
        return [(i, 0, size) for i, size in enumerate(sizes.tolist())]
    items: list[Item] = []
    for i, size in enumerate(sizes.tolist()):
        step = share if size > most else max(1, size)
        items += [(i, start, min(start + step, size)) for start in range(0, max(1, size), step)]
    return items


def run_items(
    items: Sequence[tuple[int, ...]], share: int, work: Callable[[Array], object]
) -> None:
    """Run `work` on bundles of neighbouring items, about `share` entries each, on a few threads.

    An item begins with the index of a tensor, start and stop.
    """
    if not items:
        return
    table = np.array(items, np.int64)
    ends = np.cumsum(table[:, 2] - table[:, 1])
    if torch.get_num_threads() == 1 or ends[-1] <= share:
        work(table)
        return
    cuts = np.flatnonzero(np.diff((ends - 1) // share)) + 1
    run_all([partial(work, bundle) for bundle in np.split(table, cuts)])
