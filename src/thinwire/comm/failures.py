"""Turning what a backend says about a broken exchange into one of our errors."""

import re
import time
from typing import TYPE_CHECKING

from thinwire.errors import PeerLost, PeerStalled, ThinwireError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["explain_failure", "silent_ranks"]

_KEY = "thinwire/failed"

_STALLED = re.compile(r"timed? ?out|timeout|watchdog", re.IGNORECASE)
_LOST = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|remote (worker|process)|socket|aborted",
    re.IGNORECASE,
)


def silent_ranks(store: "Store", rank: int, size: int, *, patience_s: float) -> list[int] | None:
    """The ranks that do not say, within `patience_s` seconds, that their exchange failed too.

    The backend knows addresses, not ranks. A rank that is dead or stopped cannot report, all others do.

    Args:
        store: Of the group; its host may be the dead rank.
        rank: This rank, which reports.
        size: Number of ranks in the group.
        patience_s: How long to wait for the reports of others.

    Returns:
        Ascending, or None where the store does not answer.
    """
    try:
        store.set(f"{_KEY}/{rank}", "1")
        deadline = time.monotonic() + patience_s
        while True:
            silent = [r for r in range(size) if not store.check([f"{_KEY}/{r}"])]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.02)
    except RuntimeError:  # the store went with its host; the error at hand matters more
        return None


def explain_failure(
    error: RuntimeError, *, what: str, rank: int, size: int, timeout_s: float, store: "Store | None"
) -> ThinwireError:
    """The error to raise on this rank for a collective that failed; keep `error` as its cause.

    Args:
        error: What the backend raised.
        what: The exchange in plain words, such as "gathering messages".
        rank: This rank.
        size: Number of ranks in the group.
        timeout_s: Time-out of the group, in seconds.
        store: Of the group, through which ranks that still live report; None where there is none.

    Returns:
        `PeerStalled` for a time-out, `PeerLost` for a closed connection, else `ThinwireError`.
    """
    text = str(error)
    stalled, lost = _STALLED.search(text), _LOST.search(text)
    where = f"rank {rank} of {size}, {what}"
    if not (stalled or lost):
        return ThinwireError(f"{where} failed: {text}")
    silent = silent_ranks(store, rank, size, patience_s=2.0 if stalled else 0.5) if store is not None else None
    who = f"rank {', '.join(map(str, silent))}" if silent else "another rank"
    if stalled:
        return PeerStalled(
            f"{where}: {who} did not take part within {timeout_s:g} s. See the logs of the others: one is "
            f"stopped, far slower, or does not call this step. Nothing of this exchange was applied. ({text})"
        )
    return PeerLost(
        f"{where}: {who} closed its connection, it died or left after an error of its own. Nothing of this "
        f"exchange was applied; restart from the last checkpoint. ({text})"
    )
