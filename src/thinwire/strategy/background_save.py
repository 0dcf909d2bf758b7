"""Writes a checkpoint on a thread during training."""

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from thinwire.comm import Group

_unraised: dict[threading.Thread, str] = {}
"""Tracebacks of failed saves that no call has raised, by thread."""


class BackgroundSave:
    """Writes one checkpoint at a time on a thread, over a process group of its own."""

    # Python waits for the thread when the script ends; executors end before

    def __init__(self) -> None:
        self._group: Group | None = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def begin(self, savers: Group, write: Callable[[Group], Path]) -> None:
        """Call `write` on the thread with a group of the savers, which the first call makes."""
        # collectives of two threads on one group would mix
        group = self._group = self._group or savers.detached()

        def work() -> None:
            try:
                self._path = write(group)
            except BaseException as error:  # raised by `finish`
                self._error = error
                _unraised[threading.current_thread()] = traceback.format_exc()

        self._thread = threading.Thread(target=work, name="thinwire: a checkpoint")
        self._thread.start()

    def finish(self) -> Path | None:
        """Wait for the save in progress and return its folder; None if there is none."""
        if self._thread is not None:
            # the join hands the thread's fields over: nothing else reads or writes them before it
            self._thread.join()
            _unraised.pop(self._thread, None)
            self._thread = None
        path, self._path, error, self._error = self._path, None, self._error, None
        if error is not None:
            raise error
        return path

    def close(self) -> None:
        """Wait as `finish` does, and free the process group."""
        try:
            self.finish()
        finally:
            self._group = None


@atexit.register
def _fail_if_unraised() -> None:
    """End the process with status 1 if a save failed that nothing has waited for."""
    for text in _unraised.values():
        print(f"{text}\nthinwire: this checkpoint was not written", file=sys.stderr)
    if _unraised:
        # a handler has no other way to set the status; those registered earlier do not run
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)
