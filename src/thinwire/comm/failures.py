"""Turning what a backend says about a broken exchange into one of our errors."""

import re

from thinwire.errors import PeerLost, PeerStalled, ThinwireError

__all__ = ["explain_failure"]

_STALLED = re.compile(r"timed? ?out|timeout|watchdog", re.IGNORECASE)
_LOST = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|remote (worker|process)|socket|aborted",
    re.IGNORECASE,
)


def explain_failure(error: RuntimeError, *, what: str, rank: int, size: int, timeout_s: float) -> ThinwireError:
    """The error to raise on this rank for a collective that failed; keep `error` as its cause.

    Args:
        error: What the backend raised.
        what: The exchange in plain words, such as "gathering messages".
        rank: This rank.
        size: Number of ranks in the group.
        timeout_s: Time-out of the group, in seconds.

    Returns:
        `PeerStalled` for a time-out, `PeerLost` for a closed connection, else `ThinwireError`.
    """
    text = str(error)
    where = f"rank {rank} of {size}, {what}"
    if _STALLED.search(text):
        return PeerStalled(
            f"{where}: another rank did not take part within {timeout_s:g} s. See the logs of the others: one is "
            f"stopped, far slower, or does not call this step. Nothing of this exchange was applied. ({text})"
        )
    if _LOST.search(text):
        return PeerLost(
            f"{where}: another rank closed its connection, it died or left after an error of its own. Nothing of this "
            f"exchange was applied; restart from the last checkpoint. ({text})"
        )
    return ThinwireError(f"{where} failed: {text}")
