"""Work with files that every rank does for itself and that counts only if it succeeded on all of
them.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from thinwire.checkpoint.files import last_progress
from thinwire.comm import Group, by_rank, while_busy
from thinwire.errors import CheckpointError

__all__ = ["by_rank", "clean_up", "on_all_ranks"]

_T = TypeVar("_T")
_PATIENCE_S = 1.0


def on_all_ranks(group: Group, what: str, act: Callable[[], _T]) -> list[_T]:
    """Run `act` on every rank and wait for all of them, as `while_busy` does; a failure is a
    `CheckpointError`.

    It may take as long as it goes on: no piece read or written for the time-out of the group is an
    error on all ranks.

    Args:
        group: The ranks.
        what: The work in plain words, for errors.
        act: Local, without communication; returns what JSON holds.

    Returns:
        The results in rank order, lists for tuples.

    Raises:
        CheckpointError: On every rank with the same text, when it failed on any, or made no
            progress; of the kind of its own that all ranks that failed agree on, if there is one.
        Mismatch: A rank is at other work than this.
        PeerLost, PeerStalled: A rank died or stopped.
    """
    return while_busy(
        group, what, act, limit_s=group.timeout_s, moved=last_progress, error=CheckpointError
    )


def clean_up(act: Callable[[], None]) -> None:
    """Clean up without being held by a disk that hangs: what takes longer than a second goes on
    alone.
    """
    thread = threading.Thread(target=act, name="thinwire-cleanup", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
