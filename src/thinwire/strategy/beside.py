"""A save that is written beside training."""

import threading
from collections.abc import Callable
from pathlib import Path

from thinwire.comm import Group
from thinwire.comm.private import Private

__all__ = ["SaveBeside"]


class SaveBeside:
    """Writes one checkpoint at a time on a thread, over process groups of its own, so that it does
    not meet the exchanges of training.
    """

    def __init__(self) -> None:
        self._group: Group | None = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def begin(self, savers: Group, write: Callable[[Group], Path]) -> None:
        """Write on the thread, once the save before is over.

        Args:
            savers: The ranks that write, all of which call it.
            write: Called with a group of the same ranks.

        Communication: the first time, the making of the groups.
        """
        self.finish()
        if self._group is None:
            own = Group.alone(savers.timeout_s)
            if savers.size > 1:
                private = Private(savers.global_ranks, savers.timeout_s)
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
        """Wait for the save that is being written; its folder, or None where there is none.

        Raises:
            BaseException: What the save has raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        path, self._path, error, self._error = self._path, None, self._error, None
        if error is not None:
            raise error
        return path
