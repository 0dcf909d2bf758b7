"""Compilation ahead of time: loops are compiled, or read from disk, before the first step."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection

import torch

from thinwire.kernels import body_name
from thinwire.kernels.rules import Need

_log = logging.getLogger("thinwire")
_lock = threading.Lock()
_met: set[Need] = set()


def warm_up(needs: Collection[Need]) -> float:
    """Compile the needed loops, once per machine.

    Later processes read them from disk, and a second call does nothing. Of several processes on a
    machine each compiles loops that no other one is compiling, and reads the rest. Progress is one
    line on a terminal, and in the log of `thinwire`. Nothing happens where nothing is compiled:
    without numba, on other devices, with THINWIRE_KERNELS=reference.

    Args:
        needs: See `needs_of`.

    Returns:
        Duration in seconds.
    """
    begun = time.perf_counter()
    if not needs or body_name(torch.device("cpu")) != "numba":
        return 0.0
    with _lock:
        missing = [need for need in needs if need not in _met]
        if missing:
            _compile(missing)
            _met.update(missing)
    return time.perf_counter() - begun


def warm_up_beside(needs: Collection[Need]) -> None:
    """Begin `warm_up` on a thread; the next call of `warm_up` waits for it."""

    def work() -> None:
        with contextlib.suppress(Exception):  # the error recurs in the call that waits
            warm_up(needs)

    if not _met.issuperset(needs):
        threading.Thread(target=work, name="thinwire-compiler").start()


def _compile(needs: Collection[Need]) -> None:
    from thinwire.kernels.cpu.calls import calls_for
    from thinwire.kernels.cpu.jit_cache import compilations, holding_no_lock

    calls = [call for need in sorted(needs, key=repr) for call in calls_for(need)]
    begun, before, progress = time.perf_counter(), compilations.count, _Progress()
    compilations.begins = progress.begin
    try:
        # processes start at different loops, so that they rarely need the same one at once
        first = len(calls) * (os.getpid() % 8) // 8
        left: list[Callable[[], object]] = []
        for call in calls[first:] + calls[:first]:
            with holding_no_lock(waiting=False):
                try:
                    call()
                except BlockingIOError:
                    left.append(call)
        with holding_no_lock(waiting=True):
            for call in left:
                call()
    finally:
        compilations.begins = None
        progress.end(compilations.count - before, time.perf_counter() - begun)


class _Progress:
    """Progress: one line on a terminal while loops are compiled, and two in the log."""

    def __init__(self) -> None:
        self._begun = False
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._terminal = first and sys.stderr is not None and sys.stderr.isatty()

    def begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        _log.info("compiling the loops of this training, once per machine")
        if self._terminal:
            print(
                "thinwire: compiling loops, once per machine ...",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def end(self, count: int, seconds: float) -> None:
        if not self._begun:
            return
        _log.info("compiled %d loops in %.1f s, once per machine", count, seconds)
        if self._terminal:
            print(f" done in {seconds:.1f} s", file=sys.stderr, flush=True)
