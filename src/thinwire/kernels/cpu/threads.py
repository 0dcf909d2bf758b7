"""Loops over parts of a range on a few threads.

numba's own threading layers must not be entered by two threads, so they are not used.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T")

SMALLEST_PART = 1 << 16  # entries; below, starting a thread costs more than the loop
# per thread: few tasks, and still no long wait for a thread that must share its core
_SPANS = 4
_ALIGNMENT = (
    64  # entries; fields of any width then fill whole bytes, and no two threads share a cache line
)


class _Pool:
    """One executor per process. A forked child inherits the object, but not its threads."""

    def __init__(self) -> None:
        self.executor: ThreadPoolExecutor | None = None
        self.lock = threading.Lock()

    def get(self) -> ThreadPoolExecutor:
        with self.lock:
            if self.executor is None:
                self.executor = ThreadPoolExecutor(
                    os.cpu_count() or 1, thread_name_prefix="thinwire-kernel"
                )
            return self.executor


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.__init__)  # type: ignore[misc]


def in_parts(length: int, work: Callable[[int, int], T]) -> list[T]:
    """Return the results of `work(start, stop)` over contiguous parts, in order.

    Up to torch.get_num_threads() threads work. All parts but the last begin and end at multiples of
    64.

    >>> in_parts(10, lambda start, stop: stop - start)
    [10]
    """
    parts = _parts_of(length)
    edges = [length * i // parts // _ALIGNMENT * _ALIGNMENT for i in range(parts)] + [length]
    results: dict[int, T] = {}

    def one(start: int, stop: int) -> None:
        results[start] = work(start, stop)

    run_all([partial(one, a, b) for a, b in pairwise(edges)])
    return [results[start] for start in edges[:-1]]


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
    futures = [_pool.get().submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        # helpers that have not started are not needed; the others must end before buffers go
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


def in_spans(
    weights: Sequence[int] | NDArray[np.int64], work: Callable[[int, int], object]
) -> None:
    """Run `work(first, last)` over spans of items of about equal weight, on a few threads."""
    total = np.cumsum(weights)
    spans = min(_parts_of(int(total[-1])), len(total))
    cuts = np.searchsorted(total, total[-1] * np.arange(1, spans) / spans).tolist()
    edges = [0, *cuts, len(total)]
    run_all([partial(work, a, b) for a, b in pairwise(edges) if b > a])


def _parts_of(entries: int) -> int:
    threads = torch.get_num_threads()
    return max(1, min(_SPANS * threads if threads > 1 else 1, entries // SMALLEST_PART))
