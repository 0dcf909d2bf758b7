"""The end of a script: what still has to be done then, and its status. Without torch."""

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

_hooks: dict[object, Callable[[bool], None]] = {}
_failures: dict[object, str] = {}
_status: list[object] = [None]
"""Last argument of `sys.exit`, which Python tells nobody else."""
_watched: list[int] = []
"""The process whose end is watched."""


def before_exit(owner: object, hook: Callable[[bool], None]) -> None:
    """Call `hook` once when the script ends: with True if it ends with status 0.

    Executors still work then, which the storages of fsspec need. After a fork the child calls none.
    """
    if _watched != [os.getpid()]:
        _watched[:] = [os.getpid()]
        _hooks.clear()
        leave = sys.exit

        def noted(status: Any = None, /) -> Any:
            if threading.current_thread() is threading.main_thread():
                _status[0] = status
            leave(status)

        sys.exit = noted
        # handlers of `atexit` run after executors have ended
        threading._register_atexit(_run_hooks, os.getpid())  # type: ignore[attr-defined]
    _hooks[owner] = hook


def forget_hook(owner: object) -> None:
    """Call the hook of this owner no more."""
    _hooks.pop(owner, None)


def fail_at_exit(owner: object, text: str | None) -> None:
    """Print this text when the script ends, and end it with status 1; None takes it back."""
    _failures.pop(owner, None)
    if text is not None:
        _failures[owner] = text


def _run_hooks(pid: int) -> None:
    if os.getpid() != pid:
        return
    failed = getattr(sys, "last_value", None) is not None or _status[0] not in (None, 0)
    # a child of multiprocessing has no status of its own yet
    ended_well = not failed and multiprocessing.parent_process() is None
    for owner, hook in list(_hooks.items()):
        try:
            hook(ended_well)
        except Exception as error:
            fail_at_exit(owner, f"{type(error).__name__}: {error}")
    _hooks.clear()
    if multiprocessing.parent_process() is not None:  # where no handler of `atexit` is called
        _fail()


@atexit.register
def _fail() -> None:
    """End the process with status 1 if something failed that nobody has waited for."""
    for text in _failures.values():
        print(text, file=sys.stderr)
    if _failures:
        # a handler has no other way to set the status; those registered earlier do not run
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)
