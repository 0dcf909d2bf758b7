"""Writes a checkpoint on a thread during training."""

import threading
from collections.abc import Callable
from pathlib import Path

from thinwire.comm import Group
from thinwire.comm.group import used_by_a_thread
from thinwire.comm.private import Private


class BackgroundSave:
    """Writes one checkpoint at a time on a thread, over process groups of its own."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def begin(self, savers: Group, write: Callable[[Group], Path]) -> None:
        """Wait for the previous save, then call `write` on the thread with a group of the savers.
        All of them call this.

        Communication: creation of the groups, the first time.
        """
        self.finish()
        if self._group is None:
            own = Group.alone(savers.timeout_s)
            if savers.size > 1:
                # the thread has its own groups: collectives of two threads on one group would mix
                private = Private(savers.global_ranks, savers.timeout_s)
                used_by_a_thread(private)
                own = Group.over_private(private, savers.timeout_s)
            self._group = own
        group = self._group

        def work() -> None:
            try:
                self._path = write(group)
            except BaseException as error:  # raised by `finish`
                self._error = error

        self._thread = threading.Thread(target=work, name="thinwire: a checkpoint")
        self._thread.start()

    def finish(self) -> Path | None:
        """Wait for the save in progress and return its folder; None if there is none.

        Raises:
            BaseException: The error of the save, raised once.
        """
        if self._thread is not None:
            # the join hands the thread's fields over: nothing else reads or writes them before it
            self._thread.join()
            self._thread = None
        path, self._path, error, self._error = self._path, None, self._error, None
        if error is not None:
            raise error
        return path
