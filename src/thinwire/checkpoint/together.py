"""Work that every rank does for itself and that counts only if it succeeded on all of them."""

from collections.abc import Callable
from typing import TypeVar

from thinwire.comm import Group, by_rank, while_busy
from thinwire.errors import CheckpointError

__all__ = ["by_rank", "together"]

_T = TypeVar("_T")


def together(group: Group, what: str, act: Callable[[], _T], *, limit_s: float | None = None) -> list[_T]:
    """Run `act` on every rank and wait for all of them, as `while_busy` does; a failure is a `CheckpointError`.

    Args:
        group: The ranks.
        what: The work in plain words, for errors.
        act: Local, without communication; returns what JSON holds.
        limit_s: How long, in seconds, it may take on any rank; None: as long as it takes.

    Returns:
        The results in rank order, lists for tuples.

    Raises:
        CheckpointError: On every rank with the same text, when it failed on any, or took longer than `limit_s`; of the
            kind of its own that all who failed agree on, if there is one.
        Mismatch: A rank is at other work than this.
        PeerLost, PeerStalled: A rank died or stopped.
    """
    return while_busy(group, what, act, limit_s=limit_s, error=CheckpointError)
